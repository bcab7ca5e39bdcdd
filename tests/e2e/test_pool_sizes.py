"""Does a request go where it fits, and is it told which pool is too small for it?"""

from __future__ import annotations

import grpc
import pytest
from reference_engine import Question, ReferenceEngine
from served_cluster import ServedCluster, generate_request

ENCODER_TOKENS, DECODER_TOKENS = 4 * 128, 8 * 128


@pytest.mark.parametrize(("length", "split"), [(ENCODER_TOKENS, True), (ENCODER_TOKENS + 1, False)])
def test_a_prompt_too_long_for_encoders_is_computed_where_it_fits(
    through_ray: ServedCluster, reference: ReferenceEngine, length: int, split: bool
) -> None:
    question = Question(tuple(range(500, 500 + length)), max_tokens=6)
    request_id = f"{length}-tokens"
    answer = through_ray.ask(generate_request(question, request_id))
    assert answer.tokens == reference.answer(question)
    told = "\n".join(through_ray.explained(request_id))
    assert ("on an encoder" in told) is split
    too_small = f"its KV pool holds {ENCODER_TOKENS} tokens and the request may take {length}"
    assert (too_small in told) is not split


@pytest.mark.parametrize(
    ("length", "max_tokens", "field"),
    [(DECODER_TOKENS + 1, 1, "token_ids"), (DECODER_TOKENS - 1, 2, "sampling.max_tokens")],
)
def test_what_fits_no_pool_is_refused_by_its_field(
    through_ray: ServedCluster, length: int, max_tokens: int, field: str
) -> None:
    question = Question(tuple(range(500, 500 + length)), max_tokens=max_tokens)
    answer = through_ray.ask(question)
    assert answer.code is grpc.StatusCode.INVALID_ARGUMENT
    assert answer.field == field
    assert "decoders.num_blocks" in answer.details
    through_ray.assert_idle()
