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
    from ripresa.kernels.window_attention.reference import window_attention as window_attention

Impl = Literal["auto", "torch", "triton"]


class _Row(NamedTuple):
    """Where an operation lives, as "module:function" below `ripresa.kernels`.

    A Triton module also defines `supports_<function>` with the operation's signature: whether the
    kernel handles these arguments.
    """

    torch: str
    triton: str | None = None


_OPS: dict[str, _Row] = {
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
