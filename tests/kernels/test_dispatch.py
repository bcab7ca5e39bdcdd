"""Does the dispatcher choose by device and shape alone, and import no more than it must?"""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
import torch

from ripresa.kernels import dispatch as ops


def test_every_operation_resolves() -> None:
    for name in ops.operations():
        assert callable(getattr(ops, name)), name


def test_type_checkers_see_every_operation() -> None:
    source = inspect.getsource(ops)
    for name in ops.operations():
        assert f" as {name}\n" in source, f"{name} needs its import under TYPE_CHECKING"


def test_an_unknown_operation_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_operation"):
        _ = ops.no_such_operation  # type: ignore[attr-defined]


def test_an_operation_without_a_kernel_is_its_reference() -> None:
    from ripresa.kernels.rms_norm import reference

    assert ops.rms_norm is reference.rms_norm
    assert ops.implementation(ops.rms_norm, "torch") is reference.rms_norm
    with pytest.raises(ValueError, match="rms_norm has no Triton kernel"):
        ops.implementation(ops.rms_norm, "triton")


def test_an_unknown_implementation_is_refused() -> None:
    with pytest.raises(ValueError, match="auto, torch or triton"):
        ops.implementation(ops.rms_norm, "cuda")  # type: ignore[arg-type]


def test_both_implementations_have_one_signature() -> None:
    op = ops.window_attention
    signatures = [
        inspect.signature(ops.implementation(op, "torch")),
        inspect.signature(ops.implementation(op, "triton")),
        inspect.signature(op.supports),  # type: ignore[attr-defined]
    ]
    parameters = [list(signature.parameters.values()) for signature in signatures]
    assert parameters[0] == parameters[1] == parameters[2]


class DeviceTensor:
    """Stands for a tensor on some device: all that the choice looks at."""

    def __init__(self, is_cuda: bool) -> None:
        self.is_cuda = is_cuda


class RecordingOp(ops.Op[[object], str]):
    """An operation whose implementations say their names."""

    def __init__(self, supported: bool) -> None:
        super().__init__("recording", lambda x: "torch", "nowhere:recording")
        self.__dict__["triton"] = lambda x: "triton"
        self.__dict__["supports"] = lambda x: supported


@pytest.mark.parametrize(
    ("is_cuda", "supported", "chosen"),
    [
        (False, True, "torch"),
        (False, False, "torch"),
        (True, True, "triton"),
        (True, False, "torch"),
    ],
)
def test_auto_takes_the_kernel_only_for_supported_tensors_on_the_device(
    is_cuda: bool, supported: bool, chosen: str
) -> None:
    op = RecordingOp(supported)
    assert op(DeviceTensor(is_cuda)) == chosen
    assert ops.implementation(op, "auto")(DeviceTensor(is_cuda)) == chosen
    assert ops.implementation(op, "torch")(DeviceTensor(is_cuda)) == "torch"
    assert ops.implementation(op, "triton")(DeviceTensor(is_cuda)) == "triton"


def test_a_kernel_that_fails_is_not_replaced() -> None:
    op = RecordingOp(supported=True)

    def fail(x: object) -> str:
        raise RuntimeError("the kernel failed")

    op.__dict__["triton"] = fail
    with pytest.raises(RuntimeError, match="the kernel failed"):
        op(DeviceTensor(is_cuda=True))


def test_the_reference_runs_on_cpu_tensors() -> None:
    q = torch.randn(3, 2, 16, generator=torch.Generator().manual_seed(0))
    kv, sink = torch.randn(3, 16, generator=torch.Generator().manual_seed(1)), torch.zeros(2)
    lo, hi = torch.tensor([0, 0, 1]), torch.tensor([1, 2, 3])
    chosen = ops.window_attention(q, kv, lo, hi, sink, 0.25, 2)
    reference = ops.implementation(ops.window_attention, "torch")
    assert torch.equal(chosen, reference(q, kv, lo, hi, sink, 0.25, 2))


def test_neither_triton_nor_an_unused_operation_is_imported() -> None:
    program = """
import sys
from ripresa.kernels import dispatch
assert not [m for m in sys.modules if m.startswith(("triton", "ripresa.kernels."))
            and m != "ripresa.kernels.dispatch"]
dispatch.window_attention
assert "ripresa.kernels.window_attention.reference" in sys.modules
assert "ripresa.kernels.window_attention.triton" not in sys.modules
assert "ripresa.kernels.moe.reference" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)
