"""What is an E2M1 number? Four bits: a sign and one of 0, .5, 1, 1.5, 2, 3, 4, 6.

Rounding is to nearest, ties to the even code: .25, 1.25, 2.5 and 5 go down, .75, 1.75 and 3.5 up.
Two codes share a byte, the one of the even channel in the low nibble.
"""

from __future__ import annotations

from functools import cache

import torch

from ripresa.kernels.codecs.lookup import look_up

MAX = 6.0
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

_EXPONENT = 0x7F800000
# As in E4M3, but a number with leading bit 2^e has step 2^(e - 1), at least 1/2.
_MAGIC = 1.5 * 2.0**22
# A magnitude plus its magic number 1.5 * 2^23 * step has the count of steps in its low 3 bits, and
# from bit 22 on 2 * (exponent of the sum) + 1, which is 299 for the smallest step. Each larger
# step begins two codes later.
_CODE_OFFSET = 299


def encode(x: torch.Tensor) -> torch.Tensor:
    """[...] float32 to [...] uint8, one code a byte, saturating at +-6.

    NaN has no code, and what it gives here is no code either.
    """
    bits = x.view(torch.int32)
    magnitude = _saturated_magnitude(x)
    magic = _magic(magnitude)
    total = magic.add_(magnitude).view(torch.int32)
    codes = (total >> 22).add_(total & 7).sub_(_CODE_OFFSET)
    return codes.bitwise_or_((bits >> 28) & 8).to(torch.uint8)


def decode(codes: torch.Tensor) -> torch.Tensor:
    """[...] uint8, one code in the low four bits of a byte, to [...] float32."""
    return look_up(_values(codes.device), codes)


def round_to_grid(x: torch.Tensor) -> torch.Tensor:
    """`decode(encode(x))` without the codes: [...] float32 to a new [...] float32."""
    magnitude = _saturated_magnitude(x)
    magic = _magic(magnitude)
    return magnitude.add_(magic).sub_(magic).copysign_(x)


def encode_packed(x: torch.Tensor) -> torch.Tensor:
    """[..., D] float32, D even, to [..., D / 2] uint8."""
    pairs = encode(x).view(torch.int16)  # little endian: the even channel is the low byte
    return ((pairs >> 4) | pairs).to(torch.uint8)


def decode_packed(packed: torch.Tensor) -> torch.Tensor:
    """[..., D / 2] uint8 to [..., D] float32."""
    pairs = look_up(_pairs(packed.device), packed)
    return pairs.view(torch.float32)


def _saturated_magnitude(x: torch.Tensor) -> torch.Tensor:
    return x.abs().clamp_(max=MAX)


def _magic(magnitude: torch.Tensor) -> torch.Tensor:
    leading = (magnitude.view(torch.int32) & _EXPONENT).view(torch.float32)
    return leading.clamp_(min=1.0).mul_(_MAGIC)


@cache
def _values(device: torch.device) -> torch.Tensor:
    magnitudes = torch.tensor(MAGNITUDES, dtype=torch.float32, device=device)
    return torch.cat((magnitudes, -magnitudes)).repeat(16)


@cache
def _pairs(device: torch.device) -> torch.Tensor:
    """The two floats of each byte, held as one float64: one look-up fetches both."""
    byte = torch.arange(256, dtype=torch.uint8)
    values = _values(torch.device("cpu"))
    pairs = torch.stack((values[byte.long() & 15], values[byte.long() >> 4]), -1)
    return pairs.view(torch.float64).squeeze(-1).to(device)
