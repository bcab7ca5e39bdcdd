"""How does the window attention run on a GPU? One program a query and tile of heads.

The arithmetic is the reference's (`reference.py`): one softmax over a query's window rows, its pool
rows and the sink. The softmax is online and starts from the sink, so its running maximum is finite
before the first key: a masked tile cannot produce inf - inf and a query without keys gives 0.
Because one program owns a query's whole softmax, a row's result depends on nothing else in the
batch.
"""

# Kernel parameters are traced, not typed.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ripresa.kernels.window_attention.reference import WindowTiles

LOG2E = 1.4426950408889634

# exp2 of a difference of two finite numbers is never NaN: sinks of -inf and +inf (no sink, nothing
# but sink) are brought to this limit, far beyond any score.
KERNEL_CONSTANTS = {"LOG2E": LOG2E, "SINK_LIMIT": 1e30}

_DTYPES = (torch.bfloat16, torch.float32)
_MAX_HEAD_DIM = 512


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """How the work is cut; a pure function of the geometry, so that no launch tunes anything.

    Attributes:
        block_h: heads a program; 64 makes the products wgmma on sm_90.
        block_n: keys a step.
        block_d: channels, the power of two that holds head_dim.
    """

    block_h: int
    block_n: int
    block_d: int
    num_warps: int
    num_stages: int


def launch_config(num_heads: int, head_dim: int, dtype: torch.dtype) -> LaunchConfig:
    """The launch configuration for a geometry.

    The compile tests hold these choices to no spilled registers on sm_90.
    """
    block_d = max(16, triton.next_power_of_2(head_dim))
    if dtype is torch.float32:
        return LaunchConfig(16, 32 if block_d <= 64 else 16, block_d, 4, 1)
    block_h = 64 if num_heads >= 64 else 16
    return LaunchConfig(block_h, 32, block_d, 8 if block_h == 64 and block_d > 128 else 4, 2)


@triton.jit
def _attend(q, keys, valid, top, total, acc, scale, F32DOT: tl.constexpr):
    """Take a tile of keys into the running softmax (top, total, acc)."""
    if F32DOT:
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee")
    else:
        scores = tl.dot(q, tl.trans(keys))
    scores = tl.where(valid[None, :], scores * scale, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    shrink = tl.exp2(top - new_top)
    weights = tl.exp2(scores - new_top[:, None])
    total = total * shrink + tl.sum(weights, 1)
    acc = acc * shrink[:, None]
    if F32DOT:
        acc = tl.dot(weights, keys, acc, input_precision="ieee")
    else:
        acc = tl.dot(weights.to(keys.dtype), keys, acc)
    return new_top, total, acc


@triton.jit
def window_attention_kernel(
    q_ptr,
    kv_ptr,
    lo_ptr,
    hi_ptr,
    sink_ptr,
    pool_ptr,
    slots_ptr,
    out_ptr,
    scale,
    num_slots,
    pool_rows,
    q_stride_t,
    q_stride_h,
    kv_stride_n,
    pool_stride_n,
    slots_stride_t,
    slots_stride_k,
    SINK_LIMIT: tl.constexpr,
    LOG2E: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_POOL: tl.constexpr,
    F32DOT: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)
    channel = tl.arange(0, BLOCK_D)
    key = tl.arange(0, BLOCK_N)
    head_mask = head < NUM_HEADS
    channel_mask = channel < HEAD_DIM
    q_mask = head_mask[:, None] & channel_mask[None, :]

    q_offset = t * q_stride_t + head[:, None] * q_stride_h + channel[None, :]
    q = tl.load(q_ptr + q_offset, mask=q_mask, other=0.0)
    if F32DOT:
        q = q.to(tl.float32)
    sink = tl.load(sink_ptr + head, mask=head_mask, other=0.0)
    top = tl.minimum(tl.maximum(sink, -SINK_LIMIT), SINK_LIMIT) * LOG2E
    total = tl.full([BLOCK_H], 1.0, tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)

    lo = tl.load(lo_ptr + t)
    count = (tl.load(hi_ptr + t) - lo).to(tl.int32)
    for start in range(0, count, BLOCK_N):
        row = lo + start + key
        valid = start + key < count
        keys = tl.load(
            kv_ptr + row[:, None] * kv_stride_n + channel[None, :],
            mask=valid[:, None] & channel_mask[None, :],
            other=0.0,
        )
        if F32DOT:
            keys = keys.to(tl.float32)
        top, total, acc = _attend(q, keys, valid, top, total, acc, scale, F32DOT)

    if HAS_POOL:
        for start in range(0, num_slots, BLOCK_N):
            index = start + key
            slot = tl.load(
                slots_ptr + t * slots_stride_t + index.to(tl.int64) * slots_stride_k,
                mask=index < num_slots,
                other=-1,
            ).to(tl.int64)
            valid = (slot >= 0) & (slot < pool_rows)
            keys = tl.load(
                pool_ptr + tl.where(valid, slot, 0)[:, None] * pool_stride_n + channel[None, :],
                mask=valid[:, None] & channel_mask[None, :],
                other=0.0,
            )
            if F32DOT:
                keys = keys.to(tl.float32)
            top, total, acc = _attend(q, keys, valid, top, total, acc, scale, F32DOT)

    out = acc * (1.0 / total)[:, None]
    out_offset = head.to(tl.int32)[:, None] * HEAD_DIM + channel[None, :]
    tl.store(
        out_ptr + t * (NUM_HEADS * HEAD_DIM) + out_offset,
        out.to(out_ptr.dtype.element_ty),
        mask=q_mask,
    )


def supports_window_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    lo: torch.Tensor,
    hi: torch.Tensor,
    sink: torch.Tensor,
    scale: float,
    window: int,
    pool: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    tiles: WindowTiles | None = None,
) -> bool:
    """Whether the kernel handles these arguments: dtypes bfloat16 or float32, alike in q, kv and
    pool, channels adjacent, head_dim at most 512."""
    rows = [q, kv] if pool is None else [q, kv, pool]
    return (
        q.dtype in _DTYPES
        and q.shape[-1] <= _MAX_HEAD_DIM
        and all(x.dtype is q.dtype and x.stride(-1) == 1 for x in rows)
    )


def window_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    lo: torch.Tensor,
    hi: torch.Tensor,
    sink: torch.Tensor,
    scale: float,
    window: int,
    pool: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    tiles: WindowTiles | None = None,
) -> torch.Tensor:
    """The reference's contract on the device, accumulating in float32.

    bfloat16 inputs round the softmax weights to bfloat16 before the second product. Slots outside
    the pool count as none. The window only bounds `hi - lo`: the loop runs over the rows there
    are, so replayed and early rows do less work. `tiles` group queries on the CPU and are ignored.

    Raises ValueError where `supports_window_attention` says no, or pool and slots do not come
    together.
    """
    if not supports_window_attention(q, kv, lo, hi, sink, scale, window, pool, slots):
        raise ValueError(
            "window_attention: the Triton kernel takes bfloat16 or float32 (the same in q, kv and "
            f"pool), adjacent channels and head_dim <= {_MAX_HEAD_DIM}; got q {q.dtype} "
            f"{tuple(q.shape)} with strides {q.stride()}: use the torch implementation"
        )
    if (pool is None) != (slots is None):
        raise ValueError("window_attention: give pool and slots together or neither")
    num_tokens, num_heads, head_dim = q.shape
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=q.dtype, device=q.device)
    if num_tokens == 0:
        return out
    config = launch_config(num_heads, head_dim, q.dtype)
    # The interpreter's bfloat16 arithmetic is not bfloat16; its float32 is.
    f32dot = q.dtype is torch.float32 or triton.knobs.runtime.interpret
    window_attention_kernel[(num_tokens, triton.cdiv(num_heads, config.block_h))](
        q,
        kv,
        lo.contiguous(),
        hi.contiguous(),
        sink.contiguous(),
        pool,
        slots,
        out,
        scale * LOG2E,
        0 if slots is None else slots.shape[1],
        0 if pool is None else pool.shape[0],
        q.stride(0),
        q.stride(1),
        kv.stride(0),
        0 if pool is None else pool.stride(0),
        0 if slots is None else slots.stride(0),
        0 if slots is None else slots.stride(1),
        **KERNEL_CONSTANTS,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        HAS_POOL=pool is not None,
        F32DOT=f32dot,
        BLOCK_H=config.block_h,
        BLOCK_N=config.block_n,
        BLOCK_D=config.block_d,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out
