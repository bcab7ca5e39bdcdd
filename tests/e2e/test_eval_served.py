"""Does the replay evaluation hear of a real cluster what its modes promise?"""

from __future__ import annotations

import random

from noise_checkpoint import noise_checkpoint
from served_cluster import ServedCluster

from ripresa.cluster.client import Client
from ripresa.cluster.evaluation.cases import Answer, Case
from ripresa.cluster.evaluation.served import ARMS, ask
from ripresa.workers.model_runner import model_digest
from ripresa.workers.models.deepseek_v41.config import ModelConfig

TOKENS = tuple(random.Random(6).choices(range(100, 4000), k=840))
STARTS = (300, 560, 820)
CASE = Case(0, TOKENS, None, None, tuple(Answer("T2 read near", s, s + 4) for s in STARTS))


def test_every_mode_hits_what_it_left(without_encoders: ServedCluster) -> None:
    folder = noise_checkpoint()
    digest = model_digest(folder, ModelConfig.from_file(folder / "config.json"))
    with Client(without_encoders.address) as client:
        matches, hits = ask(client, CASE, digest)
    assert len(matches) == len(hits) == len(ARMS) * len(STARTS)
    for arm in ARMS:
        mine = [hit for hit in hits if hit.arm == arm.name]
        assert [hit.num_tokens for hit in mine] == list(STARTS)
        assert mine[0].kind == "cold"
        assert all(hit.kind not in ("cold", "resume") for hit in mine[1:])
        assert all(hit.num_skipped > 0 for hit in mine[2:]), mine
