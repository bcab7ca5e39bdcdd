"""What is an E4M3 number? A sign, 4 exponent bits (bias 7), 3 mantissa bits; at most 448.

There is no infinity; 0x7F and 0xFF are NaN. The smallest subnormal is 2^-9.
"""

from __future__ import annotations

from functools import cache

import torch

from ripresa.kernels.codecs.lookup import look_up

MAX = 448.0

_EXPONENT = 0x7F800000
_SMALLEST_NORMAL = 2.0**-6
# Adding and subtracting 1.5 * 2^23 * step rounds to a multiple of step, ties to even: the last bit
# of the sum is worth one step. A number with leading bit 2^e has step 2^(e - 3).
_MAGIC = 1.5 * 2.0**20


def encode(x: torch.Tensor) -> torch.Tensor:
    """[...] float32 to [...] uint8, to nearest with ties to even, saturating at +-448."""
    return x.clamp(-MAX, MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def decode(codes: torch.Tensor) -> torch.Tensor:
    """[...] uint8 codes to [...] float32, exactly."""
    return look_up(_values(codes.device), codes)


def round_to_grid(x: torch.Tensor) -> torch.Tensor:
    """`decode(encode(x))` without the codes, for |x| < 464: [...] float32 to a new [...] float32.

    NaN stays NaN.
    """
    leading = (x.view(torch.int32) & _EXPONENT).view(torch.float32)
    magic = leading.clamp_(min=_SMALLEST_NORMAL).mul_(_MAGIC)
    return (x + magic).sub_(magic).copysign_(x)


@cache
def _values(device: torch.device) -> torch.Tensor:
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    return codes.view(torch.float8_e4m3fn).to(torch.float32)
