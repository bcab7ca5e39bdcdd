"""Is a stream of the split cluster the in-process engine's, and do counters prove the split?"""

from __future__ import annotations

import openai
import pytest
from reference_engine import Question, ReferenceEngine
from served_cluster import ServedCluster, eventually, generate_request

from ripresa.protos import ripresa_pb2 as pb
from ripresa.workers.address import WorkerKind
from ripresa.workers.replay import TailVariant
from ripresa.workers.report import WorkerReport

WINDOW = 128
GREEDY = {"temperature": 0.0}
SEEDED = {"temperature": 0.9, "top_k": 200, "top_p": 0.95, "seed": 2**40 + 17}


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_real_prompt_as_text(
    split: ServedCluster,
    reference: ReferenceEngine,
    agent_prompt: str,
    agent_tokens: tuple[int, ...],
    sampling: dict[str, float],
) -> None:
    question = Question(agent_tokens, max_tokens=24, **sampling)  # type: ignore[arg-type]
    request = generate_request(question)
    request.text = agent_prompt
    answer = split.ask(request)
    assert answer.tokens == reference.answer(question)
    assert answer.started is not None
    assert answer.started.prompt_tokens == len(agent_tokens)
    assert answer.started.seed == question.seed
    assert answer.completed is not None
    assert answer.completed.usage.completion_tokens == 24


def test_text_and_its_token_ids_are_one_prompt(
    split: ServedCluster, agent_tokens: tuple[int, ...]
) -> None:
    tokens = agent_tokens[:200]
    text = split.stub.Detokenize(pb.DetokenizeRequest(token_ids=tokens)).text
    assert tuple(split.stub.Tokenize(pb.TokenizeRequest(text=text)).token_ids) == tokens


def test_many_choices_by_http_and_nobody_is_taken_for_lost(split: ServedCluster) -> None:
    """Choices run at once within one of Serve's own requests."""
    before = set(split.listed())
    base_url = f"http://{split.cluster.http_address}/v1"
    with openai.OpenAI(base_url=base_url, api_key="-", max_retries=0, timeout=100) as client:
        (model,) = client.models.list().data
        for _ in range(3):
            answer = client.completions.create(
                model=model.id, prompt="Once upon a time", n=8, max_tokens=4, temperature=1.0
            )
            assert [choice.index for choice in answer.choices] == list(range(8))
    split.assert_idle()

    def check() -> None:
        assert set(split.listed()) == before

    # A heartbeat may come late; a worker that was given up would have a successor.
    eventually(check)


@pytest.mark.parametrize("tail", [TailVariant.FLOORED, TailVariant.LAYER_EXACT, TailVariant.FULL])
@pytest.mark.parametrize("length", [1, WINDOW, 3 * WINDOW + 45])
def test_tail_variants(
    split: ServedCluster,
    reference: ReferenceEngine,
    agent_tokens: tuple[int, ...],
    tail: TailVariant,
    length: int,
) -> None:
    question = Question(agent_tokens[:length], max_tokens=6, tail=tail)
    answer = split.ask(question)
    assert answer.tokens == reference.answer(question)
    assert answer.completed is not None
    recipe = answer.completed.cache
    expected = 0 if tail is TailVariant.FULL else max(0, length - WINDOW)
    assert recipe.decoder_start_token == expected


@pytest.mark.parametrize("length", [100, 1000])
def test_counters_prove_the_split(
    split: ServedCluster, agent_tokens: tuple[int, ...], length: int
) -> None:
    before = split.workers()
    answer = split.ask(Question(agent_tokens[:length], max_tokens=5))
    assert len(answer.tokens) == 5

    def moved(now: dict[str, WorkerReport], kind: WorkerKind) -> int:
        return sum(
            worker.stats.counters.transfer_bytes - before[worker_id].stats.counters.transfer_bytes
            for worker_id, worker in now.items()
            if worker.kind is kind
        )

    def when_counted() -> dict[str, WorkerReport]:
        """An encoder counts what it sent when the decode worker, which streams, has said so."""
        now = split.workers()
        assert now.keys() == before.keys()
        assert moved(now, WorkerKind.ENCODER) == moved(now, WorkerKind.DECODE) > 0
        return now

    after = eventually(when_counted)
    encoder_rows = decoder_prefill_rows = 0
    for worker_id, worker in after.items():
        old, new = before[worker_id].stats, worker.stats
        rows = new.num_encoder_rows - old.num_encoder_rows
        if worker.kind is WorkerKind.ENCODER:
            assert new.num_decoder_rows == 0
            encoder_rows += rows
        else:
            decode_rows = 4 if worker_id == answer.started.worker_id else 0  # type: ignore[union-attr]
            assert rows == decode_rows
            decoder_prefill_rows += new.num_decoder_rows - old.num_decoder_rows - decode_rows
    assert encoder_rows == length
    assert decoder_prefill_rows == min(WINDOW, length)


def test_an_encoder_holds_less_than_the_whole_model(split: ServedCluster) -> None:
    encoders = split.workers(WorkerKind.ENCODER).values()
    decoders = split.workers(WorkerKind.DECODE).values()
    (encoder,) = {worker.num_parameters for worker in encoders}
    (decoder,) = {worker.num_parameters for worker in decoders}
    assert 0 < encoder <= 0.6 * decoder


def test_nothing_is_left(split: ServedCluster) -> None:
    split.assert_idle()
