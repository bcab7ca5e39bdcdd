"""What is an E8M0 scale? A byte e for the power of two 2^(e - 127); 255 is NaN."""

from __future__ import annotations

from functools import cache

import torch

from ripresa.kernels.codecs.lookup import look_up

_MANTISSA = 0x7FFFFF
_EXPONENT = 0x7F800000


def round_up(bound: torch.Tensor) -> torch.Tensor:
    """The smallest power of two >= `bound`, exact at powers of two.

    Args:
        bound: [...] float32, at least 2^-126.

    Returns:
        [...] float32; infinity for NaN and above 2^127.
    """
    bits = bound.view(torch.int32).clamp(max=_EXPONENT)
    # Any mantissa bit carries into the exponent.
    return bits.add_(_MANTISSA).bitwise_and_(_EXPONENT).view(torch.float32)


def encode(power: torch.Tensor) -> torch.Tensor:
    """[...] float32 powers of two from 2^-126 to [...] uint8; infinity gives 255."""
    return (power.view(torch.int32) >> 23).to(torch.uint8)


def decode(codes: torch.Tensor) -> torch.Tensor:
    """[...] uint8 codes to [...] float32."""
    return look_up(_values(codes.device), codes)


@cache
def _values(device: torch.device) -> torch.Tensor:
    powers = torch.ldexp(torch.ones(255, dtype=torch.float64), torch.arange(-127, 128))
    return torch.cat((powers, powers.new_tensor([torch.nan]))).to(device, torch.float32)
