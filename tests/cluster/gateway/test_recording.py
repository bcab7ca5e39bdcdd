"""Does a recording hold what was really asked, done and answered?"""

from __future__ import annotations

import pytest
from gateway_thread import GatewayThread
from hypothesis import given
from hypothesis import strategies as st

from ripresa.cluster.client import Answer, Client
from ripresa.cluster.gateway.recording import recipe_of, recording_of
from ripresa.cluster.gateway.stream_facts import provenance
from ripresa.workers.errors import RipresaError
from ripresa.workers.replay import PlanKind, Recipe, ReplayMode, TailVariant
from ripresa.workers.request import FinishReason

POSITIONS = st.integers(0, 2**32 - 1)
RECIPES = st.builds(
    Recipe,
    kind=st.sampled_from(PlanKind),
    start=POSITIONS,
    swa_floor=POSITIONS,
    write_floor=POSITIONS,
    restarts=st.lists(POSITIONS, max_size=5).map(tuple),
    decoder_start=POSITIONS,
    tail=st.sampled_from(TailVariant),
    seed=st.integers(0, 2**64 - 1),
    rules_version=st.text(max_size=5),
    anchor_interval=st.none() | st.integers(1, 2**32 - 1),
    source_floor=st.none() | POSITIONS,
)


@given(RECIPES, st.sampled_from(ReplayMode))
def test_a_provenance_tells_the_whole_recipe(recipe: Recipe, mode: ReplayMode) -> None:
    if recipe.write_floor < recipe.start:
        return
    assert recipe_of(provenance(recipe, mode), recipe.seed) == recipe


def test_what_was_asked_is_recorded_as_it_was_used(gateway: GatewayThread) -> None:
    with Client(gateway.address) as client:
        stream = client.generate(
            [0, 40, 9], return_token_ids=True, max_tokens=2, seed=3, top_k=4, stop_token_ids=[7]
        )
        recording = recording_of(stream.request, stream.answer())
    (seen,) = gateway.router.seen
    assert recording.token_ids == seen.token_ids == (0, 40, 9)
    assert recording.sampling == seen.sampling
    assert recording.recipe.seed == 3
    assert recording.mode is ReplayMode.BOUNDED
    assert len(recording.output_ids) == 2
    assert (recording.reason, recording.stop_token_id) == (FinishReason.LENGTH, None)


def test_a_text_half_an_answer_or_several_are_not_recorded(gateway: GatewayThread) -> None:
    with Client(gateway.address) as client:
        text = client.generate("hi", max_tokens=1)
        with pytest.raises(RipresaError, match="tokenize the text first"):
            recording_of(text.request, text.answer())
        with pytest.raises(RipresaError, match="incomplete"):
            recording_of(text.request, Answer())
        pair = client.generate([40], max_tokens=1, n=2)
        with pytest.raises(RipresaError, match="n = 1"):
            recording_of(pair.request, pair.answer())
