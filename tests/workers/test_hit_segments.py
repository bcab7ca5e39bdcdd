"""Is every skipped token of a prompt said to come from one tier, and from the right one?"""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ripresa.workers.prefix_sources import HitSegment, HitTier, PrefixOutcome

WINDOW = 8
BLOCK_TIERS = (HitTier.DEVICE, HitTier.PEER, HitTier.DISK)


def ranges(tiers: list[HitTier], tier: HitTier) -> tuple[tuple[int, int], ...]:
    return tuple((number, number + 1) for number, each in enumerate(tiers) if each is tier)


@given(
    st.lists(st.sampled_from(BLOCK_TIERS), max_size=12),
    st.integers(0, 12 * WINDOW),
    st.booleans(),
    st.booleans(),
)
def test_segments_part_the_skipped_tokens(
    tiers: list[HitTier], start: int, is_resumed: bool, has_image: bool
) -> None:
    outcome = PrefixOutcome(
        from_peers=ranges(tiers, HitTier.PEER),
        from_disk=ranges(tiers, HitTier.DISK),
        has_image=has_image,
    )
    segments = outcome.segments(start, WINDOW, is_resumed=is_resumed)
    told = [tier for tier, first, stop in segments for _ in range(first, stop)]
    blocks = [*tiers, *[HitTier.DEVICE] * 12]
    expected = [blocks[position // WINDOW] for position in range(start)]
    if is_resumed:
        num_parked = start % WINDOW
        parked = HitTier.PEER if has_image else HitTier.HOST
        expected[start - num_parked :] = [parked] * num_parked
    assert told == expected
    assert all(one.stop == other.first for one, other in pairwise(segments))


def test_nothing_skipped_is_no_segment() -> None:
    outcome = PrefixOutcome(from_disk=((0, 3),))
    assert outcome.segments(0, WINDOW, is_resumed=False) == ()
    assert outcome.segments(WINDOW, WINDOW, is_resumed=False) == (
        HitSegment(HitTier.DISK, 0, WINDOW),
    )
