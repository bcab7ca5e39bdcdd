"""Does state that goes through Ray's object store give the same answers as a lane?"""

from __future__ import annotations

from reference_engine import Question, ReferenceEngine
from served_cluster import ServedCluster


def test_answers_are_the_reference_engines(
    through_ray: ServedCluster, reference: ReferenceEngine
) -> None:
    for length in (300, 129):
        question = Question(tuple(range(500, 500 + length)), max_tokens=6)
        answer = through_ray.ask(question)
        assert answer.tokens == reference.answer(question)
    metrics = through_ray.metrics()
    assert metrics["ripresa_transfer_bytes_total"] > 0
    through_ray.assert_idle()
