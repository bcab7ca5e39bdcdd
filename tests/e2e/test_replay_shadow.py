"""Does /metrics tell how far answers behind a bounded replay were from exact replay?"""

from __future__ import annotations

import random
import urllib.request

from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families
from reference_engine import Question
from served_cluster import ServedCluster, eventually

from ripresa.cluster.cli import cli
from ripresa.protos import ripresa_pb2 as pb

LENGTH, SHARED = 900, 400
NUM_TOKENS = 64
"""More than other tests' answers that may be scored in the second after everything was flushed."""


def shadow_series(cluster: ServedCluster) -> dict[tuple[str, str], float]:
    """By name below `ripresa_replay_shadow_` and the value of its label."""
    url = f"http://{cluster.cluster.http_address}/metrics"
    with urllib.request.urlopen(url, timeout=60) as response:
        families = text_string_to_metric_families(response.read().decode())
    prefix = "ripresa_replay_shadow_"
    return {
        (sample.name.removeprefix(prefix), "".join(sample.labels.values())): sample.value
        for family in families
        for sample in family.samples
        if sample.name.startswith(prefix) and "le" not in sample.labels
    }


def test_answers_behind_a_replay_are_scored_again(without_encoders: ServedCluster) -> None:
    cluster = without_encoders
    tokens = random.Random("shadow").choices(range(10, 4000), k=2 * LENGTH)
    first, second = tokens[:LENGTH], tokens[:SHARED] + tokens[LENGTH : LENGTH + SHARED]
    where = ("--address", cluster.cluster.admin_address)
    flushed = CliRunner().invoke(cli, ["admin", "flush", "--all", *where])
    assert flushed.exit_code == 0, flushed.output
    before = shadow_series(cluster)
    for token_ids, kind in ((first, pb.PLAN_KIND_COLD), (second, pb.PLAN_KIND_BOUNDED)):
        question = Question(tuple(token_ids), max_tokens=NUM_TOKENS, reads_cache=True)
        answer = cluster.ask(question)
        assert len(answer.tokens) == NUM_TOKENS
        assert answer.completed is not None
        assert answer.completed.cache.kind == kind

    def grown() -> dict[tuple[str, str], float]:
        after = shadow_series(cluster)
        grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
        assert grown["tokens_total", "scored"] >= NUM_TOKENS
        return grown

    found = eventually(grown, within_s=300.0)
    num_scored = found["tokens_total", "scored"]
    for series in ("kl_count", "top1_agreement_count"):
        assert found[series, "exact"] == found[series, "repeat"] == num_scored
    # Numerics are deterministic: what was served comes out again, bit for bit.
    assert found["kl_sum", "repeat"] == 0
    assert found["top1_agreement_sum", "repeat"] == num_scored
    assert found["kl_sum", "exact"] > 0
    assert found["rows_total", ""] > 2 * len(second)
    cluster.assert_idle()
