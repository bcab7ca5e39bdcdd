"""Does a repeated prompt compute less, say so, and stream the same?"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from reference_engine import Question, ReferenceEngine
from served_cluster import Answer, ServedCluster, generate_request

from ripresa.protos import ripresa_pb2 as pb
from ripresa.workers.address import WorkerAddress, WorkerKind
from ripresa.workers.prefix_sources import BlockSource, ImageSource, PrefixSources
from ripresa.workers.replay import PlanKind
from ripresa.workers.request import (
    EngineEvent,
    GenerationRequest,
    Reserved,
    SamplingParams,
    Tokens,
)

WINDOW, REWIND = 128, 6
LENGTH = 700
REUSED = (LENGTH - WINDOW - REWIND) // WINDOW * WINDOW


def question(seed: int) -> Question:
    """A prompt that no other test sends."""
    tokens = random.Random(f"prefix hits {seed}").choices(range(10, 4000), k=LENGTH)
    return Question(tuple(tokens), max_tokens=8, reads_cache=True)


def check_accounting(answer: Answer) -> int:
    """skipped + recomputed + new = prompt, told twice; the tokens skipped."""
    assert answer.started is not None
    assert answer.completed is not None
    cache, usage = answer.completed.cache, answer.completed.usage
    assert answer.started.cache == cache
    assert answer.started.cached_tokens == usage.cached_tokens == cache.boundary_token
    assert cache.boundary_token + cache.recomputed_tokens == cache.write_floor_token
    assert usage.prompt_tokens == LENGTH
    assert cache.bounded_generations == len(cache.restarts)
    assert cache.rules_version == "1"
    assert cache.replay_mode == pb.REPLAY_MODE_BOUNDED
    return usage.cached_tokens


def encoder_rows(cluster: ServedCluster) -> int:
    return sum(worker.stats.num_encoder_rows for worker in cluster.workers().values())


def test_a_repeated_prompt_goes_on_from_a_window(
    without_encoders: ServedCluster, reference: ReferenceEngine
) -> None:
    asked = question(1)
    first = without_encoders.ask(asked)
    assert check_accounting(first) == 0
    before = encoder_rows(without_encoders)
    second = without_encoders.ask(asked)
    after = encoder_rows(without_encoders)
    assert check_accounting(second) == REUSED
    assert second.completed is not None
    assert second.completed.cache.kind == pb.PLAN_KIND_WINDOW
    assert not second.completed.cache.restarts
    assert first.tokens == second.tokens == reference.answer(Question(asked.token_ids, 8))
    # Seven of the eight tokens have a row.
    assert after - before == LENGTH - REUSED + 7


def test_encoders_reuse_what_they_computed(
    split: ServedCluster, reference: ReferenceEngine
) -> None:
    asked = question(2)
    answers = [split.ask(asked) for _ in range(3)]
    skipped = [check_accounting(answer) for answer in answers]
    # Two encoders: of three prefills at least two meet on one.
    assert skipped[0] == 0
    assert REUSED in skipped
    for answer in answers:
        assert answer.tokens == reference.answer(Question(asked.token_ids, 8))


@pytest.mark.parametrize("option", ["disable_read", "disable_write", "cache_salt"])
def test_options_keep_prompts_apart(without_encoders: ServedCluster, option: str) -> None:
    request = generate_request(question(10 + len(option)))
    if option == "cache_salt":
        salts = ("a", "b")
    else:
        setattr(request.options.cache_policy, option, True)
        salts = ("", "")
    for salt in salts:
        request.options.cache_salt = salt
        assert check_accounting(without_encoders.ask(request)) == 0


def test_a_session_goes_on_where_it_paused(split: ServedCluster) -> None:
    asked = question(3)
    request = generate_request(asked)
    request.options.session_id = "a session"
    first = split.ask(request)
    assert check_accounting(first) == 0
    processed = LENGTH + len(first.tokens) - 1
    request.token_ids.ids.extend((*first.tokens, 77, 78, 79))
    resumed = split.ask(request)
    # On the same worker, or on another one that took the state from it.
    assert resumed.completed is not None
    assert resumed.completed.cache.kind == pb.PLAN_KIND_RESUME
    assert resumed.completed.usage.cached_tokens == processed
    request.options.cache_policy.disable_resume = True
    stateless = split.ask(request)
    assert stateless.completed is not None
    assert stateless.completed.cache.kind != pb.PLAN_KIND_RESUME


def test_a_session_s_state_moves_between_processes(
    split: ServedCluster, reference: ReferenceEngine
) -> None:
    """The route is given here; when the planner takes it is tested with it."""
    old, new = split.workers(WorkerKind.DECODE)
    handle = split.cluster.handle("DecodeWorker").options(stream=True)

    def run(request: GenerationRequest, worker_id: str) -> list[EngineEvent]:
        return list(handle.generate.remote(request, True, "a test", worker_id=worker_id))

    request = GenerationRequest(
        request_id="first turn",
        generation=0,
        token_ids=question(4).token_ids,
        num_prompt_tokens=LENGTH,
        recipe=None,
        sampling=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
        session_id="a session that moves",
    )
    run(request, old)
    asked = Question((*request.token_ids, 77, 78, 79), max_tokens=8)
    home = WorkerAddress(old, WorkerKind.DECODE)
    sources = PrefixSources(
        (BlockSource(home, (), 0, LENGTH // WINDOW),), image=ImageSource(home, LENGTH)
    )
    events = run(
        replace(
            request,
            request_id="second turn",
            token_ids=asked.token_ids,
            num_prompt_tokens=len(asked.token_ids),
            sampling=asked.sampling,
            sources=sources,
        ),
        new,
    )
    reserved = next(event for event in events if isinstance(event, Reserved))
    assert reserved.recipe is not None
    assert (reserved.recipe.kind, reserved.recipe.start) == (PlanKind.RESUME, LENGTH)
    assert reserved.prefix.has_image
    tokens = tuple(t for e in events if isinstance(e, Tokens) for t in e.token_ids)
    assert tokens == reference.follow(asked, reserved.recipe)


def test_nothing_is_left(without_encoders: ServedCluster) -> None:
    without_encoders.assert_idle()
