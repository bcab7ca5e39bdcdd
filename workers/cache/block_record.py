"""What is known of a published block beside its bytes, and who hears of it?"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from ripresa.workers.cache.block_hash import BlockIdentity
from ripresa.workers.cache.cache_events import Origin
from ripresa.workers.replay import RULES_VERSION


class Producer(StrEnum):
    """Which kind of step wrote a block's last row."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class BlockRecord:
    """Where a block's values come from; provenance and purging read it.

    Attributes:
        identity: hash and lineage.
        producer: prefill or decode.
        weights: revision of the weights.
        origin: where the block stands among all prompts.
        rules_version: version of the replay rules.
    """

    identity: BlockIdentity
    producer: Producer
    weights: str
    origin: Origin
    rules_version: str = RULES_VERSION


class PublishOutcome(StrEnum):
    """What became of an offered block.

    PENDING: a rank has not acknowledged yet. PUBLISHED: others find it. DUPLICATE: another block
    of the same identity was first; this one stays its request's own. VOID: the request released
    the block before the last acknowledgement.
    """

    PENDING = "pending"
    PUBLISHED = "published"
    DUPLICATE = "duplicate"
    VOID = "void"


@dataclass(frozen=True, slots=True)
class PublishedBlock:
    """A block that its request has just published.

    Attributes:
        number: in its prompt.
        block: its id in the pool.
    """

    number: int
    block: int
    record: BlockRecord


class UnusedBlock(NamedTuple):
    """A published block that nobody uses.

    Attributes:
        age_s: seconds since its last use.
    """

    record: BlockRecord
    age_s: float


@dataclass(frozen=True, slots=True)
class BlockPublished:
    """Others can find the block from now on, and this worker keeps it."""

    record: BlockRecord


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Nobody finds the block any more.

    Attributes:
        is_evicted: it made room; otherwise it was withdrawn.
    """

    record: BlockRecord
    is_evicted: bool


CacheEvent = BlockPublished | BlockRemoved
