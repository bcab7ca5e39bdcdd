"""How is one block written as a file, and is a file what it claims to be?

magic (8) │ length of the header (4) │ header, JSON │ payload │ xxh3_128 of all before it (16)

The checksum covers every byte, the header names everything the block's values depend on: a file is
either exactly the block that was asked for, or worthless.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

import xxhash

from ripresa.workers.cache.block_hash import BlockIdentity
from ripresa.workers.cache.block_record import BlockRecord, Producer
from ripresa.workers.cache.block_store import StoredBlock
from ripresa.workers.cache.cache_events import Origin
from ripresa.workers.replay import RULES_VERSION

FILE_FORMAT = 1
MAX_HEADER_BYTES = 1 << 16
"""A lineage of some thousand restarts; a longer one is not kept."""

_MAGIC = b"RIPRESA\x01"
_LENGTH_BYTES = 4
_CHECKSUM_BYTES = 16
_OVERHEAD = len(_MAGIC) + _LENGTH_BYTES + _CHECKSUM_BYTES
MAX_START_BYTES = len(_MAGIC) + _LENGTH_BYTES + MAX_HEADER_BYTES


class BadBlock(Exception):
    """A file that is not the block it should be; the message says why."""


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """What all blocks of one store have in common.

    Attributes:
        layout_digest: names model, weights, KV format and geometry.
        weights: revision of the weights, as block records have it.
        block_bytes: payload of every block.
        rules_version: of the replay rules.
    """

    layout_digest: bytes
    weights: str
    block_bytes: int
    rules_version: str = RULES_VERSION

    @property
    def name(self) -> str:
        """32 hex digits; differs wherever a file could mean something else."""
        fields = (FILE_FORMAT, self.layout_digest.hex(), self.weights, self.rules_version)
        return blake2b(json.dumps(fields).encode(), digest_size=16).hexdigest()

    @property
    def max_file_bytes(self) -> int:
        return self.block_bytes + MAX_HEADER_BYTES + _OVERHEAD


def file_name(identity: BlockIdentity) -> str:
    """The name of a block's file: its hash, and a digest of its lineage."""
    return f"{identity.hash.hex()}-{_lineage_digest(identity.restarts)}.kv"


@lru_cache(maxsize=1024)
def _lineage_digest(restarts: tuple[int, ...]) -> str:
    lineage = ",".join(map(str, restarts)).encode()
    return blake2b(lineage, digest_size=8).hexdigest()


def encode(block: StoredBlock, form: BlockFormat) -> bytes:
    """The whole file.

    Raises:
        ValueError: the block is not of this format.
    """
    record = block.record
    if len(block.payload) != form.block_bytes:
        raise ValueError(f"a block has {len(block.payload)} bytes, not {form.block_bytes}")
    if (record.weights, record.rules_version) != (form.weights, form.rules_version):
        raise ValueError("a block is of other weights or rules than its store")
    header = json.dumps(_header(record, form)).encode()
    if len(header) > MAX_HEADER_BYTES:
        raise ValueError(f"a lineage of {len(record.identity.restarts)} restarts is too long")
    length = len(header).to_bytes(_LENGTH_BYTES, "little")
    content = b"".join((_MAGIC, length, header, block.payload))
    return content + xxhash.xxh3_128_digest(content)


def decode(content: bytes, identity: BlockIdentity, form: BlockFormat) -> StoredBlock:
    """The block of this identity.

    Raises:
        BadBlock: one byte is wrong, or it is another block.
    """
    view = memoryview(content)
    if len(view) < form.block_bytes + _OVERHEAD:
        raise BadBlock(f"it has {len(view)} bytes and cannot hold a block")
    body, checksum = view[:-_CHECKSUM_BYTES], view[-_CHECKSUM_BYTES:]
    if xxhash.xxh3_128_digest(body) != checksum:
        raise BadBlock("its checksum does not fit")
    if body[: len(_MAGIC)] != _MAGIC:
        raise BadBlock("it is no block file")
    start = len(_MAGIC) + _LENGTH_BYTES
    stop = start + int.from_bytes(body[len(_MAGIC) : start], "little")
    if len(body) - stop != form.block_bytes:
        raise BadBlock("its parts do not have the sizes they should have")
    record = _record(bytes(body[start:stop]), form)
    if record.identity != identity:
        raise BadBlock("it is another block than its name says")
    return StoredBlock(record, bytes(body[stop:]))


def tenant_of(start: bytes) -> str:
    """Whose block a file is, by its first `MAX_START_BYTES` bytes; nothing else is verified.

    Raises:
        BadBlock: they do not say so.
    """
    begin = len(_MAGIC) + _LENGTH_BYTES
    stop = begin + int.from_bytes(start[len(_MAGIC) : begin], "little")
    try:
        tenant = json.loads(start[begin:stop])["origin"][0]
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise BadBlock(f"its header cannot be read: {error}") from error
    if not isinstance(tenant, str):
        raise BadBlock("its header names no tenant")
    return tenant


def _header(record: BlockRecord, form: BlockFormat) -> dict[str, object]:
    return {
        "hash": record.identity.hash.hex(),
        "restarts": list(record.identity.restarts),
        "origin": [
            record.origin.tenant,
            record.origin.first.hex(),
            None if record.origin.parent is None else record.origin.parent.hex(),
        ],
        "producer": record.producer.value,
        "layout": form.layout_digest.hex(),
        "weights": record.weights,
        "rules_version": record.rules_version,
    }


def _record(header: bytes, form: BlockFormat) -> BlockRecord:
    try:
        fields = json.loads(header)
        tenant, first, parent = fields["origin"]
        record = BlockRecord(
            identity=BlockIdentity(bytes.fromhex(fields["hash"]), tuple(fields["restarts"])),
            producer=Producer(fields["producer"]),
            weights=fields["weights"],
            origin=Origin(tenant, bytes.fromhex(first), parent and bytes.fromhex(parent)),
            rules_version=fields["rules_version"],
        )
        is_own = fields == _header(record, form)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadBlock(f"its header cannot be read: {error}") from error
    own = (form.weights, form.rules_version)
    if not is_own or (record.weights, record.rules_version) != own:
        raise BadBlock("it is of another model, other weights or other rules")
    return record
