"""Can a directory full of lies make a worker use what it does not hold? Its own check decides.

Whatever reports say, an answer is a list of claims about named incarnations. The worker that is
asked looks into its own pools; what it then uses must be right, and what is left over is computed.
"""

from __future__ import annotations

from itertools import pairwise

import hypothesis.strategies as st
from directory_sides import SETTINGS, W, chain, lineage_at
from hypothesis import given

from ripresa.cluster.directory.events import (
    Follow,
    HeldKind,
    Holding,
    Lead,
    Prefix,
    Receipt,
    Report,
    Run,
    SendAll,
    Tier,
)
from ripresa.cluster.directory.index import PrefixIndex
from ripresa.workers.cache.block_hash import BlockIdentity

PROMPTS = (chain("a", 5), chain("b", 5, shared=2))
HASHES = tuple(sorted({block for prompt in PROMPTS for block in prompt}))
LIVING = {"u": 3, "v": 5}

run = st.builds(
    Run,
    st.booleans(),
    st.sampled_from(HeldKind),
    st.sampled_from(Tier),
    st.sampled_from(("t", "other")),
    st.sampled_from(((), (W,), (2 * W,), (W, 3 * W), (3,), (99 * W,), (2 * W, W), (0,))),
    st.sampled_from((None, *HASHES)),
    st.lists(st.sampled_from(HASHES), max_size=6).map(tuple),
)
lie = st.tuples(
    st.sampled_from(("u", "v", "nobody")),
    st.integers(1, 6),
    st.lists(run, max_size=5).map(tuple),
    st.booleans(),
)


class Pool:
    """What an incarnation really holds; it checks before it uses."""

    def __init__(self, worker: str, blocks: frozenset[BlockIdentity]) -> None:
        self.worker = worker
        self.incarnation = LIVING[worker]
        self.blocks = blocks

    def usable(self, prefix: Prefix, prompt: tuple[bytes, ...]) -> int:
        """Blocks of a hinted prefix that are really here; any other incarnation's are not."""
        if prefix.holder.incarnation != self.incarnation:
            return 0
        for block in range(prefix.num_blocks):
            identity = BlockIdentity(prompt[block], lineage_at(prefix.restarts, block))
            if identity not in self.blocks:
                return block
        return prefix.num_blocks


def tell(index: PrefixIndex, worker: str, incarnation: int, runs: tuple[Run, ...]) -> None:
    """Follow the protocol as well as a liar can."""
    report = Report(worker, incarnation, None, 0, runs)
    reply = index.report(report, 0)
    if isinstance(reply, SendAll):
        index.report(Report(worker, incarnation, reply.epoch, 0, runs), 0)


identities = st.builds(
    BlockIdentity, st.sampled_from(HASHES), st.sampled_from(((), (W,), (2 * W,)))
)


@given(
    lies=st.lists(lie, max_size=12),
    truths=st.fixed_dictionaries({name: st.frozensets(identities) for name in LIVING}),
    prompt=st.sampled_from(PROMPTS),
)
def test_a_check_by_the_worker_catches_every_lie(
    lies: list[tuple[str, int, tuple[Run, ...], bool]],
    truths: dict[str, frozenset[BlockIdentity]],
    prompt: tuple[bytes, ...],
) -> None:
    index = PrefixIndex(SETTINGS, "d")
    pools = {name: Pool(name, blocks) for name, blocks in truths.items()}
    newest: dict[str, int] = {}
    for worker, incarnation, runs, is_lost in lies:
        tell(index, worker, incarnation, runs)
        newest[worker] = max(newest.get(worker, 0), incarnation)
        if is_lost:
            index.lost(worker, incarnation)
            newest[worker] = max(newest[worker], incarnation + 1)
    found, flight = index.lookup_or_claim(prompt, "r", 0)
    for prefix in found.prefixes:
        assert 0 < prefix.num_blocks <= len(prompt)
        # Whatever was said later of older incarnations did not count.
        assert prefix.holder.incarnation == newest[prefix.holder.worker]
        pool = pools.get(prefix.holder.worker)
        real = pool.usable(prefix, prompt) if pool is not None else 0
        used = [
            BlockIdentity(prompt[block], lineage_at(prefix.restarts, block))
            for block in range(real)
        ]
        assert pool is None or pool.blocks.issuperset(used)
        # One lineage that only grows, so that what is used is one chain.
        assert all(b.restarts[: len(a.restarts)] == a.restarts for a, b in pairwise(used))
        index.receipt(
            Receipt(
                prefix.holder.worker,
                prefix.holder.incarnation,
                prompt,
                prefix.restarts,
                prefix.num_blocks,
                real,
            ),
            0,
        )
    assert flight is None or 0 <= flight.first < flight.stop <= len(prompt)
    assert isinstance(flight, Lead | Follow | None)
    if flight is not None:
        assert flight.first == max((c.num_blocks for c in found.chains), default=0)
    index.check_integrity()
    # A receipt for each hint, and nobody promises again what was not there.
    for prefix in index.lookup(prompt, 0).prefixes:
        pool = pools.get(prefix.holder.worker)
        real = pool.usable(prefix, prompt) if pool is not None else 0
        assert real == prefix.num_blocks


def test_a_stale_window_is_named_with_its_incarnation() -> None:
    index = PrefixIndex(SETTINGS, "d")
    prompt = PROMPTS[0]
    blocks = Run(True, HeldKind.BLOCK, Tier.DEVICE, "t", (), None, prompt)
    stale = Run(True, HeldKind.WINDOW, Tier.HOST, "t", (), None, prompt[1:2])
    tell(index, "u", 2, (blocks, stale))
    (window,) = index.lookup(prompt, 0).windows(2)
    assert window == Holding(HeldKind.WINDOW, (), Tier.HOST, "u", 2)
    index.receipt(Receipt("u", 2, prompt, (), 5, 5, missing_windows=(2,)), 0)
    assert index.lookup(prompt, 0).windows(2) == ()
