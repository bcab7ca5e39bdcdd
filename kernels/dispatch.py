"""Which implementation of an operation runs: the plain PyTorch reference or a Triton kernel?

    from ripresa.kernels import dispatch as ops
    o = ops.window_attention(q, kv, lo, hi, sink, scale, window, None, None)            # auto
    o = ops.implementation(ops.window_attention, "torch")(q, kv, lo, hi, ...)           # chosen

An operation is a function of tensors. Its first argument, passed by position, decides for `auto`:
Triton if that tensor is on a CUDA device and the kernel says that it supports the arguments, the
reference otherwise. The choice is made from the arguments alone, never by trying and catching, so
a kernel that fails is seen to fail.

Adding an operation is a line in `_OPS` (and its twin under TYPE_CHECKING, from which type checkers
read the signature). Modules are imported when an operation is first named, kernels when one first
runs; after that an operation is an ordinary module attribute, and one without a kernel is the
reference function itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, ParamSpec, TypeVar

if TYPE_CHECKING:
    from ripresa.kernels.codecs.grids import Float32Grid as Float32Grid
    from ripresa.kernels.codecs.grids import Grid as Grid
    from ripresa.kernels.codecs.grids import entry_grid as entry_grid
    from ripresa.kernels.codecs.grids import index_grid as index_grid
    from ripresa.kernels.codecs.grids import round_linear_input as round_linear_input
    from ripresa.kernels.codecs.grids import window_grid as window_grid
    from ripresa.kernels.codecs.weights import dequantise_f8 as dequantise_f8
    from ripresa.kernels.codecs.weights import dequantise_f8_rows as dequantise_f8_rows
    from ripresa.kernels.codecs.weights import dequantise_fp4 as dequantise_fp4
    from ripresa.kernels.codecs.weights import quantise_f8 as quantise_f8
    from ripresa.kernels.codecs.weights import quantise_f8_rows as quantise_f8_rows
    from ripresa.kernels.codecs.weights import quantise_fp4 as quantise_fp4
    from ripresa.kernels.compressor.reference import compress_pairs as compress_pairs
    from ripresa.kernels.engram.reference import engram_inject as engram_inject
    from ripresa.kernels.hyper_connections.reference import hc_collapse as hc_collapse
    from ripresa.kernels.hyper_connections.reference import hc_expand as hc_expand
    from ripresa.kernels.hyper_connections.reference import hc_mix as hc_mix
    from ripresa.kernels.indexer.reference import select_candidates as select_candidates
    from ripresa.kernels.indexer.reference import select_entries as select_entries
    from ripresa.kernels.linear.reference import grouped_linear as grouped_linear
    from ripresa.kernels.linear.reference import linear as linear
    from ripresa.kernels.moe.reference import moe_experts as moe_experts
    from ripresa.kernels.moe.reference import moe_route as moe_route
    from ripresa.kernels.moe.reference import swiglu_expert as swiglu_expert
    from ripresa.kernels.rms_norm.reference import rms_norm as rms_norm
    from ripresa.kernels.rope.reference import rope_ as rope_
    from ripresa.kernels.rope.reference import rope_frequencies as rope_frequencies
    from ripresa.kernels.rope.reference import rope_phases as rope_phases
    from ripresa.kernels.window_attention.reference import WindowTiles as WindowTiles
    from ripresa.kernels.window_attention.reference import window_attention as window_attention
    from ripresa.kernels.window_attention.reference import window_tiles as window_tiles

Impl = Literal["auto", "torch", "triton"]


class _Row(NamedTuple):
    """Where an operation lives, as "module:function" below `ripresa.kernels`.

    A Triton module also defines `supports_<function>` with the operation's signature: whether the
    kernel handles these arguments.
    """

    torch: str
    triton: str | None = None


_OPS: dict[str, _Row] = {
    "Float32Grid": _Row("codecs.grids:Float32Grid"),
    "Grid": _Row("codecs.grids:Grid"),
    "dequantise_f8": _Row("codecs.weights:dequantise_f8"),
    "dequantise_f8_rows": _Row("codecs.weights:dequantise_f8_rows"),
    "dequantise_fp4": _Row("codecs.weights:dequantise_fp4"),
    "entry_grid": _Row("codecs.grids:entry_grid"),
    "index_grid": _Row("codecs.grids:index_grid"),
    "quantise_f8": _Row("codecs.weights:quantise_f8"),
    "quantise_f8_rows": _Row("codecs.weights:quantise_f8_rows"),
    "quantise_fp4": _Row("codecs.weights:quantise_fp4"),
    "round_linear_input": _Row("codecs.grids:round_linear_input"),
    "window_grid": _Row("codecs.grids:window_grid"),
    "compress_pairs": _Row("compressor.reference:compress_pairs"),
    "engram_inject": _Row("engram.reference:engram_inject"),
    "grouped_linear": _Row("linear.reference:grouped_linear"),
    "hc_collapse": _Row("hyper_connections.reference:hc_collapse"),
    "hc_expand": _Row("hyper_connections.reference:hc_expand"),
    "hc_mix": _Row("hyper_connections.reference:hc_mix"),
    "linear": _Row("linear.reference:linear"),
    "moe_experts": _Row("moe.reference:moe_experts"),
    "moe_route": _Row("moe.reference:moe_route"),
    "rms_norm": _Row("rms_norm.reference:rms_norm"),
    "rope_": _Row("rope.reference:rope_"),
    "rope_frequencies": _Row("rope.reference:rope_frequencies"),
    "rope_phases": _Row("rope.reference:rope_phases"),
    "select_candidates": _Row("indexer.reference:select_candidates"),
    "select_entries": _Row("indexer.reference:select_entries"),
    "swiglu_expert": _Row("moe.reference:swiglu_expert"),
    "window_tiles": _Row("window_attention.reference:window_tiles"),
    "window_attention": _Row(
        "window_attention.reference:window_attention", "window_attention.triton:window_attention"
    ),
}

P = ParamSpec("P")
R = TypeVar("R")


class Op(Generic[P, R]):
    """An operation with two implementations; calling it is `auto`."""

    def __init__(self, name: str, torch: Callable[P, R], triton: str) -> None:
        self.name = name
        self.torch = torch
        self._triton = triton
        self.__doc__ = torch.__doc__

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        first: Any = args[0]
        if first.is_cuda and self.supports(*args, **kwargs):
            return self.triton(*args, **kwargs)
        return self.torch(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<op {self.name}: torch, triton>"

    @cached_property
    def triton(self) -> Callable[P, R]:
        """The Triton implementation."""
        implementation: Callable[P, R] = _load(self._triton)
        return implementation

    @cached_property
    def supports(self) -> Callable[P, bool]:
        """Whether the Triton implementation handles these arguments."""
        predicate: Callable[P, bool] = _load(self._triton.replace(":", ":supports_"))
        return predicate


def implementation(op: Callable[P, R], impl: Impl) -> Callable[P, R]:
    """One implementation of `op`, to call in its place.

    "auto" is the operation itself. Raises ValueError for an unknown name, and for "triton" where
    the operation has no kernel.
    """
    if impl not in ("auto", "torch", "triton"):
        raise ValueError(f"unknown implementation {impl!r}: choose auto, torch or triton")
    if isinstance(op, Op):
        return op if impl == "auto" else op.torch if impl == "torch" else op.triton
    if impl == "triton":
        name = getattr(op, "__name__", repr(op))
        raise ValueError(f"{name} has no Triton kernel: choose auto or torch")
    return op


def operations() -> tuple[str, ...]:
    """The name of every operation."""
    return tuple(_OPS)


def _load(path: str) -> Any:
    module, _, function = path.partition(":")
    return getattr(import_module(f"ripresa.kernels.{module}"), function)


if not TYPE_CHECKING:  # so that a misspelt operation is a type error

    def __getattr__(name: str) -> Any:
        row = _OPS.get(name)
        if row is None:
            raise AttributeError(f"module {__name__!r} has no operation {name!r}")
        op = _load(row.torch)
        if row.triton is not None:
            op = Op(name, op, row.triton)
        globals()[name] = op
        return op
