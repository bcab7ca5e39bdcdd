"""Does the Triton window attention compile for sm_90 into what was intended, without a GPU?

A clean return from the compiler proves little: a kernel that does not fit can become a lone trap.
So these tests read registers, spilled bytes, shared memory and the kind of matrix instruction.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ripresa.kernels.window_attention.triton import (
    KERNEL_CONSTANTS,
    launch_config,
    window_attention_kernel,
)

BINARIES = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
SHARED_MEMORY_LIMIT = 232448  # bytes a block may have on sm_90
ALIGNED = [["tt.divisibility", 16]]


@dataclass(frozen=True)
class Report:
    """What one specialisation became; bytes are per thread for spills, per block for memory."""

    registers: int
    spill_stores_bytes: int
    spill_loads_bytes: int
    shared_bytes: int
    wgmma: int
    mma: int
    traps: bool


def compile_report(
    folder: Path,
    heads: int,
    dim: int,
    dtype: torch.dtype,
    *,
    slots: str | None,
    aligned: bool,
) -> Report:
    """Compile what the wrapper would launch.

    `aligned` is the specialisation for pointers and strides that are multiples of 16.
    """
    config = launch_config(heads, dim, dtype)
    element = "bf16" if dtype is torch.bfloat16 else "fp32"
    types = {
        "q_ptr": f"*{element}",
        "kv_ptr": f"*{element}",
        "lo_ptr": "*i64",
        "hi_ptr": "*i64",
        "sink_ptr": "*fp32",
        "pool_ptr": f"*{element}",
        "slots_ptr": f"*{slots}",
        "out_ptr": f"*{element}",
        "scale": "fp32",
    }
    constants: dict[str, object] = {
        **KERNEL_CONSTANTS,
        "slots_stride_k": 1,
        "NUM_HEADS": heads,
        "HEAD_DIM": dim,
        "HAS_POOL": slots is not None,
        "F32DOT": dtype is torch.float32,
        "BLOCK_H": config.block_h,
        "BLOCK_N": config.block_n,
        "BLOCK_D": config.block_d,
    }
    if slots is None:
        constants |= {"pool_ptr": None, "slots_ptr": None}
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32")
        for name in window_attention_kernel.arg_names
    }
    attributes = {
        (place,): ALIGNED
        for place, (name, kind) in enumerate(signature.items())
        if aligned and (kind.startswith("*") or (kind == "i32" and "stride" in name))
    }
    compiled = triton.compile(
        ASTSource(
            fn=window_attention_kernel,
            signature=signature,
            constexprs=constants,
            attrs=attributes,
        ),
        target=GPUTarget("cuda", 90, 32),
        options={
            "num_warps": config.num_warps,
            "num_stages": config.num_stages,
            "enable_fp_fusion": True,
        },
    )
    ptx = compiled.asm["ptx"]
    log = assemble(folder, ptx)
    return Report(
        registers=number(r"Used (\d+) registers", log),
        spill_stores_bytes=number(r"(\d+) bytes spill stores", log),
        spill_loads_bytes=number(r"(\d+) bytes spill loads", log),
        shared_bytes=int(compiled.metadata.shared),
        wgmma=ptx.count("wgmma.mma_async"),
        mma=ptx.count("mma.sync"),
        traps=re.search(r"^\s*trap;", ptx, re.MULTILINE) is not None,
    )


def assemble(folder: Path, ptx: str) -> str:
    """What ptxas says of a program. The bundled assemblers differ in the PTX versions they take."""
    source = folder / "kernel.ptx"
    source.write_text(ptx)
    complaints = []
    for name in ("ptxas", "ptxas-blackwell"):
        command = [str(BINARIES / name), "-v", "--gpu-name=sm_90a", str(source)]
        command += ["-o", str(folder / "kernel.cubin")]
        run: subprocess.CompletedProcess[str] = subprocess.run(
            command, capture_output=True, text=True, check=False
        )
        if run.returncode == 0:
            return run.stderr + run.stdout
        complaints.append(f"{name}: {run.stderr}")
    raise AssertionError("\n".join(complaints))


def number(pattern: str, log: str) -> int:
    found = re.search(pattern, log)
    assert found is not None, f"{pattern!r} is not in the assembler's log:\n{log}"
    return int(found.group(1))


def assert_sound(report: Report, spill_limit_bytes: int = 0) -> None:
    assert report.spill_stores_bytes <= spill_limit_bytes
    assert report.spill_loads_bytes <= spill_limit_bytes
    assert report.shared_bytes <= SHARED_MEMORY_LIMIT
    assert report.registers <= 255
    assert not report.traps


@pytest.mark.parametrize("slots", [None, "i32", "i64"])
def test_released_geometry(tmp_path: Path, slots: str | None) -> None:
    """64 heads of 512 channels: the products must be wgmma, and nothing may spill."""
    report = compile_report(tmp_path, 64, 512, torch.bfloat16, slots=slots, aligned=True)
    assert_sound(report)
    assert report.wgmma > 0
    assert report.mma == 0


# Loads of single elements need more addresses than registers are left for. Rows that do not start
# at a multiple of 16 bytes are views that the engine does not make.
UNALIGNED_SPILL_LIMIT_BYTES = 128


@pytest.mark.parametrize("slots", [None, "i32", "i64"])
def test_released_geometry_unaligned(tmp_path: Path, slots: str | None) -> None:
    report = compile_report(tmp_path, 64, 512, torch.bfloat16, slots=slots, aligned=False)
    assert_sound(report, UNALIGNED_SPILL_LIMIT_BYTES)
    assert report.wgmma > 0


@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "unaligned"])
@pytest.mark.parametrize(("heads", "dim"), [(8, 64), (32, 512)])
def test_fewer_heads(tmp_path: Path, heads: int, dim: int, aligned: bool) -> None:
    report = compile_report(tmp_path, heads, dim, torch.bfloat16, slots="i32", aligned=aligned)
    assert_sound(report)
    assert report.mma > 0


@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "unaligned"])
@pytest.mark.parametrize(("heads", "dim"), [(8, 64), (64, 512)])
def test_float32(tmp_path: Path, heads: int, dim: int, aligned: bool) -> None:
    """The debugging path multiplies in full float32, without matrix instructions."""
    report = compile_report(tmp_path, heads, dim, torch.float32, slots="i32", aligned=aligned)
    assert_sound(report)
    assert report.wgmma == report.mma == 0


@pytest.mark.slow
@pytest.mark.parametrize("heads", [1, 16, 64, 128])
@pytest.mark.parametrize("dim", [32, 48, 128, 256, 512])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_supported_geometry(tmp_path: Path, heads: int, dim: int, dtype: torch.dtype) -> None:
    assert_sound(compile_report(tmp_path, heads, dim, dtype, slots="i32", aligned=True))
