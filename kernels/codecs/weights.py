"""How do stored weights become numbers? Released F8 and FP4 tensors, read and written.

Value = stored value x scale (model specification, section 2). Scales are E8M0. Tensors of one-byte
types are taken by their bytes, so float8_e4m3fn, float8_e8m0fnu, int8 and uint8 all do.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ripresa.kernels.codecs import e2m1, e4m3, e8m0

TILE = 32

# Values decoded at a time; bounds the memory beside the result.
_CHUNK = 1 << 20

# All-zero tiles need some scale; the smallest of the window grid's will do.
_FLOOR = 1e-4


def dequantise_f8(
    weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """A weight with one scale a 32 x 32 tile.

    Args:
        weight: [out, in], E4M3 codes.
        scale: [ceil(out / 32), ceil(in / 32)], E8M0 codes.
        dtype: float32 or bfloat16; a product in their range is exact in both.

    Returns:
        [out, in] of `dtype`. Raises ValueError if the shapes do not fit.
    """
    codes, scale_codes = _bytes(weight), _bytes(scale)
    num_out, num_in = codes.shape
    _require_shape(scale_codes, (-(-num_out // TILE), -(-num_in // TILE)), "32 x 32 tiles", codes)
    out = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    for rows in _row_chunks(num_out, num_in):
        factor = e8m0.decode(scale_codes[rows.start // TILE : -(-rows.stop // TILE)])
        factor = factor.repeat_interleave(TILE, 1)[:, :num_in].repeat_interleave(TILE, 0)
        out[rows] = e4m3.decode(codes[rows]).mul_(factor[: rows.stop - rows.start])
    return out


def quantise_f8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[out, in] float32 to codes (float8_e4m3fn) and scales (float8_e8m0fnu) for `dequantise_f8`.

    A tile's scale is the smallest power of two that keeps it within +-448.
    """
    num_out, num_in = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -num_in % TILE, 0, -num_out % TILE))
    tiles = padded.view(padded.shape[0] // TILE, TILE, padded.shape[1] // TILE, TILE)
    power = _power_for(tiles.abs().amax((1, 3)), e4m3.MAX)
    codes = e4m3.encode(tiles / power[:, None, :, None]).view(padded.shape)
    return codes[:num_out, :num_in].contiguous().view(torch.float8_e4m3fn), _as_e8m0(power)


def dequantise_f8_rows(
    rows: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Rows with one scale per 32 columns, as Engram tables are stored.

    Args:
        rows: [..., D], E4M3 codes.
        scale: [..., D / 32], E8M0 codes.
        dtype: float32 or bfloat16; a product in their range is exact in both.

    Returns:
        [..., D] of `dtype`. Raises ValueError if the shapes do not fit.
    """
    codes, scale_codes = _bytes(rows), _bytes(scale)
    _require_shape(scale_codes, (*codes.shape[:-1], codes.shape[-1] / TILE), "groups of 32", codes)
    return _scaled(e4m3.decode(codes), scale_codes).to(dtype)


def quantise_f8_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., D] float32 to the codes and scales of `dequantise_f8_rows`; D is a multiple of 32."""
    groups = rows.reshape(*rows.shape[:-1], rows.shape[-1] // TILE, TILE)
    power = _power_for(groups.abs().amax(-1), e4m3.MAX)
    codes = e4m3.encode(groups / power[..., None]).view(rows.shape)
    return codes.view(torch.float8_e4m3fn), _as_e8m0(power)


def dequantise_fp4(
    weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """A packed FP4 weight with one scale per 32 columns of a row.

    Args:
        weight: [out, in / 2], two E2M1 codes a byte, the even column in the low nibble.
        scale: [out, in / 32], E8M0 codes.
        dtype: float32 or bfloat16; a product in their range is exact in both.

    Returns:
        [out, in] of `dtype`. Raises ValueError if the shapes do not fit.
    """
    packed, scale_codes = _bytes(weight), _bytes(scale)
    num_out, num_in = packed.shape[0], 2 * packed.shape[1]
    _require_shape(scale_codes, (num_out, num_in / TILE), "groups of 32", packed)
    out = torch.empty((num_out, num_in), dtype=dtype, device=packed.device)
    for rows in _row_chunks(num_out, num_in):
        out[rows] = _scaled(e2m1.decode_packed(packed[rows]), scale_codes[rows])
    return out


def quantise_fp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[out, in] float32, in a multiple of 32, to the int8 bytes and scales of `dequantise_fp4`.

    A group's scale is the smallest power of two that keeps it within +-6.
    """
    num_out, num_in = weight.shape
    groups = weight.reshape(num_out, num_in // TILE, TILE)
    power = _power_for(groups.abs().amax(-1), e2m1.MAX)
    packed = e2m1.encode_packed((groups / power[..., None]).view(num_out, num_in))
    return packed.view(torch.int8), _as_e8m0(power)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.element_size() != 1:
        raise ValueError(f"a quantised weight has one-byte elements, not {tensor.dtype}")
    return tensor.view(torch.uint8)


def _require_shape(
    scale: torch.Tensor, shape: tuple[float, ...], cut: str, weight: torch.Tensor
) -> None:
    if tuple(scale.shape) != shape:
        raise ValueError(
            f"scales of shape {tuple(scale.shape)} do not fit {cut} of a weight stored as "
            f"{tuple(weight.shape)}"
        )


def _row_chunks(num_rows: int, row_length: int) -> Iterator[slice]:
    """Slices of whole tiles of rows, about `_CHUNK` values each."""
    step = max(1, _CHUNK // max(1, row_length * TILE)) * TILE
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


def _scaled(values: torch.Tensor, scale_codes: torch.Tensor) -> torch.Tensor:
    factor = e8m0.decode(scale_codes)
    values.view(*factor.shape, TILE).mul_(factor[..., None])
    return values


def _power_for(bound: torch.Tensor, maximum: float) -> torch.Tensor:
    """The smallest power of two that brings `bound` to at most `maximum`."""
    power = e8m0.round_up(bound.clamp(min=_FLOOR) / maximum)
    # The quotient may have been rounded down onto a power of two.
    return torch.where(bound > power * maximum, power * 2, power)


def _as_e8m0(power: torch.Tensor) -> torch.Tensor:
    return e8m0.encode(power).view(torch.float8_e8m0fnu)
