"""Did every payload byte arrive? Checksums of one section and of a whole transfer."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
import xxhash

from ripresa.workers.errors import ErrorCode, RipresaError

CHECKSUM_BYTES = 8


def host_bytes(payload: torch.Tensor) -> memoryview:
    """The bytes of a uint8 tensor; a tensor on a device is copied to the host first."""
    return payload.detach().cpu().numpy().data


def payload_checksum(payload: torch.Tensor) -> int:
    """xxh3_64 of a payload (uint8 [num_bytes], contiguous)."""
    return xxhash.xxh3_64_intdigest(host_bytes(payload))


class RunningChecksum:
    """`payload_checksum` of a payload that arrives in pieces."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_64()

    def update(self, piece: torch.Tensor) -> None:
        self._state.update(host_bytes(piece))

    def value(self) -> int:
        return self._state.intdigest()

    def to_bytes(self) -> torch.Tensor:
        """The value as uint8 [CHECKSUM_BYTES], little-endian, on the host."""
        return torch.frombuffer(
            bytearray(self.value().to_bytes(CHECKSUM_BYTES, "little")), dtype=torch.uint8
        )


def transfer_checksum(section_checksums: Sequence[int]) -> int:
    """xxh3_64 of the sections' checksums, each as 8 bytes little-endian, in order."""
    return xxhash.xxh3_64_intdigest(struct.pack(f"<{len(section_checksums)}Q", *section_checksums))


def corrupt(what: str) -> RipresaError:
    """The error of a checksum that does not fit; a new transfer may succeed at once."""
    return RipresaError(
        ErrorCode.DATA_LOSS, f"{what} arrived corrupt; send it again", retry_after_s=0.0
    )
