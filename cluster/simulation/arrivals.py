"""Which prompts come, in which order, and which blocks do they share?

conversation A   ──●────●──────●───▶        starts are recorded, or spread by a seed
conversation B        ──●──●───────●─▶
prompts          ──●────●●─●───●───●─▶      each a path in one tree of blocks
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b

from ripresa.cluster.simulation.trace import Conversation, TraceRequest
from ripresa.workers.cache.block_hash import HASH_BYTES
from ripresa.workers.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request as a worker sees it.

    Attributes:
        at_s: seconds since the first conversation could begin.
        conversation: its number.
        num_tokens: length.
        num_output: tokens of the answer.
        blocks: numbers of its full blocks of W tokens, in order; equal numbers are equal prefixes.
        thread: which of its conversation's lists of requests it belongs to.
        calls_after_s: see `TraceRequest`.
    """

    at_s: float
    conversation: int
    num_tokens: int
    num_output: int
    blocks: tuple[int, ...]
    thread: int = 0
    calls_after_s: float | None = None


class BlockTree:
    """Numbers for blocks by their content and all that comes before them.

    Attributes:
        hashes: of every block, by number; as unique as a worker's own.
    """

    def __init__(self) -> None:
        self._children: dict[Hashable, int] = {}
        self.hashes: list[bytes] = []

    def child(self, parent: int | None, content: Hashable) -> int:
        """The number of a block, new or known, behind block `parent`."""
        key = (parent, content)
        number = self._children.get(key)
        if number is None:
            number = self._children[key] = len(self.hashes)
            self.hashes.append(blake2b(number.to_bytes(8), digest_size=HASH_BYTES).digest())
        return number


class Workload:
    """The prompts of a trace in order of arrival; it can be gone through again and again.

    Args:
        conversations: what was recorded.
        window: W, tokens in a block; a multiple of what an id stands for, or a part of it.
        spread_s: conversations without a recorded start begin within so many seconds.
        seed: of their starts.
    """

    def __init__(
        self, conversations: Iterable[Conversation], window: int, spread_s: float, seed: int
    ) -> None:
        self.window = window
        self.tree = BlockTree()
        self._starts: list[tuple[float, Conversation]] = []
        starts = random.Random(seed)
        for conversation in conversations:
            granularity = conversation.granularity
            if window % granularity and granularity % window:
                raise InvalidArgument(
                    "--window",
                    f"blocks of {window} tokens do not fit the trace's ids of {granularity}",
                )
            start = conversation.starts_at_s
            self._starts.append(
                (starts.uniform(0, spread_s) if start is None else start, conversation)
            )
        self._calls = sorted(self._all_calls())

    def __len__(self) -> int:
        return len(self._calls)

    @property
    def num_conversations(self) -> int:
        return len(self._starts)

    def _all_calls(self) -> Iterator[tuple[float, int, int, int]]:
        for number, (start, conversation) in enumerate(self._starts):
            for index, requests in enumerate(conversation.lists):
                for call, request in enumerate(requests):
                    yield start + request.offset_s, number, index, call

    def __iter__(self) -> Iterator[Prompt]:
        known: dict[tuple[int, int], _List] = {}
        for at_s, number, index, call in self._calls:
            conversation = self._starts[number][1]
            so_far = known.get((number, index))
            if so_far is None:
                so_far = known[number, index] = _List(conversation, self.window, self.tree)
            requests = conversation.lists[index]
            blocks = so_far.next(requests[call])
            if call == len(requests) - 1:
                del known[number, index]
            request = requests[call]
            yield Prompt(
                at_s,
                number,
                request.num_tokens,
                request.num_output,
                blocks,
                index,
                request.calls_after_s,
            )


class _List:
    """The newest prompt of one list, from which the next one differs little."""

    def __init__(self, conversation: Conversation, window: int, tree: BlockTree) -> None:
        self._scope = conversation.scope
        self._per_id = max(1, conversation.granularity // window)
        self._per_block = max(1, window // conversation.granularity)
        self._window = window
        self._tree = tree
        self._ids: list[Hashable] = []
        self._blocks: list[int] = []

    def next(self, request: TraceRequest) -> tuple[int, ...]:
        keep = request.keep
        del self._ids[keep:]
        self._ids += request.new
        del self._blocks[keep * self._per_id // self._per_block :]
        covered = len(self._ids) * self._per_id // self._per_block
        num_blocks = min(request.num_tokens // self._window, covered)
        parent = self._blocks[-1] if self._blocks else None
        for block in range(len(self._blocks), num_blocks):
            parent = self._tree.child(parent, (self._scope, self._content(block)))
            self._blocks.append(parent)
        return tuple(self._blocks[:num_blocks])

    def _content(self, block: int) -> Hashable:
        if self._per_id > 1:
            return self._ids[block // self._per_id], block % self._per_id
        first = block * self._per_block
        return tuple(self._ids[first : first + self._per_block])
