"""Which name does a block of tokens have, so that equal names mean equal cached values?

    root ──▶ hash(block 0) ──▶ hash(block 1) ──▶ ...       each over its parent and its token ids
     └ model, weights, KV format and geometry, rules version, tenant salt

Two blocks with one hash hold the same tokens after the same prefix, for one tenant and one model.
What their rows attended is the lineage; identity is both together (replay rules, section 5).
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, fields
from hashlib import blake2b
from typing import NamedTuple

from ripresa.workers.errors import InvalidArgument
from ripresa.workers.replay import RULES_VERSION

HASH_BYTES = 16
_TOKEN_BYTES = 4


class BlockIdentity(NamedTuple):
    """Equal identities: interchangeable block KV.

    Attributes:
        hash: 16 bytes over the tokens up to the block's end and everything they depend on.
        restarts: lineage; boundaries below the block's end, ascending, behind which rows were
            computed with cut encoder windows.
    """

    hash: bytes
    restarts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HashContext:
    """Everything but tokens that cached values depend on, or that separates tenants.

    Attributes:
        model: name and revision of the model's code and configuration.
        weights: revision or digest of the weights.
        kv_format: how cached rows are stored.
        geometry: digest of the cached tensors' shapes.
        window: W, tokens in a block.
        tenant_salt: secret of the tenant, derived on the server.
        rules_version: of the replay rules.
    """

    model: str
    weights: str
    kv_format: str
    geometry: bytes
    window: int
    tenant_salt: bytes
    rules_version: str = RULES_VERSION

    def root(self) -> bytes:
        """Parent of the first block. Fields are length-prefixed: no two contexts run together."""
        digest = blake2b(digest_size=HASH_BYTES, person=b"ripresa.block")
        for field in fields(self):
            value = getattr(self, field.name)
            part = value if isinstance(value, bytes) else str(value).encode()
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
        return digest.digest()


def worker_context(layout_digest: bytes, window: int, tenant_salt: bytes) -> HashContext:
    """The context of all workers of a model and of the gateways before them.

    Args:
        layout_digest: of the workers' KV layout, which names model, weights, format and geometry.
    """
    return HashContext(
        model="",
        weights=layout_digest.hex(),
        kv_format="",
        geometry=layout_digest,
        window=window,
        tenant_salt=tenant_salt,
    )


class BlockHasher:
    """Hashes one token stream block by block, as it grows."""

    def __init__(self, context: HashContext) -> None:
        if context.window < 1:
            raise ValueError(f"a block holds at least one token, got {context.window}")
        self._block_bytes = _TOKEN_BYTES * context.window
        self._parent = context.root()
        self._rest = b""
        self._num_blocks = 0

    @property
    def num_blocks(self) -> int:
        """Full blocks hashed so far."""
        return self._num_blocks

    @property
    def num_tokens(self) -> int:
        return (self._num_blocks * self._block_bytes + len(self._rest)) // _TOKEN_BYTES

    def extend(self, token_ids: Sequence[int]) -> tuple[bytes, ...]:
        """Append tokens; the hashes of the blocks that they complete, in order.

        Raises:
            InvalidArgument: a token id is no unsigned 32-bit number; nothing was appended.
        """
        pending = memoryview(self._rest + _to_bytes(token_ids))
        size = self._block_bytes
        parent = self._parent
        hashes = []
        for start in range(0, len(pending) - size + 1, size):
            parent = blake2b(
                pending[start : start + size], digest_size=HASH_BYTES, key=parent
            ).digest()
            hashes.append(parent)
        self._parent = parent
        self._rest = bytes(pending[len(hashes) * size :])
        self._num_blocks += len(hashes)
        return tuple(hashes)


def hash_blocks(context: HashContext, token_ids: Sequence[int]) -> tuple[bytes, ...]:
    """Hashes of the full blocks of a prompt; the partial one at its end has none."""
    return BlockHasher(context).extend(token_ids)


def _to_bytes(token_ids: Sequence[int]) -> bytes:
    """Unsigned 32-bit little-endian, the same on every machine."""
    try:
        words = array("I", token_ids)
    except (OverflowError, TypeError) as error:
        raise InvalidArgument(
            "token_ids", f"every token id must be a whole number from 0 to 2**32 - 1: {error}"
        ) from error
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()
