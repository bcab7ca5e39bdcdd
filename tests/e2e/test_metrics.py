"""Do health, reflection and /metrics tell what the cluster does?"""

from __future__ import annotations

import urllib.request

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from reference_engine import Question
from served_cluster import ServedCluster, eventually

from ripresa.protos import ripresa_pb2 as pb


@pytest.mark.parametrize("service", ["", "ripresa.v1.Inference"])
def test_health(split: ServedCluster, service: str) -> None:
    stub = health_pb2_grpc.HealthStub(split.channel)
    answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=60)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_reflection(split: ServedCluster) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(split.channel)
    ask = reflection_pb2.ServerReflectionRequest(list_services="")
    (answer,) = stub.ServerReflectionInfo(iter([ask]), timeout=60)
    names = {service.name for service in answer.list_services_response.service}
    assert {"ripresa.v1.Inference", "grpc.health.v1.Health"} <= names


def test_list_models(split: ServedCluster) -> None:
    (model,) = split.stub.ListModels(pb.ListModelsRequest(), timeout=60).models
    assert model.id == "deepseek-v4.1-demo"
    assert (model.max_model_len, model.vocab_size) == (8192, 4096)


def test_http(split: ServedCluster) -> None:
    for path in ("health", "ready", "version"):
        url = f"http://{split.cluster.http_address}/{path}"
        with urllib.request.urlopen(url, timeout=60) as response:
            assert response.status == 200


def test_metrics_of_one_request(split: ServedCluster, agent_tokens: tuple[int, ...]) -> None:
    split.assert_idle()
    before = split.metrics()
    answer = split.ask(Question(agent_tokens[:500], max_tokens=6))
    assert len(answer.tokens) == 6
    after = split.metrics()
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    assert grown["ripresa_prompt_tokens_total"] == 500
    assert grown["ripresa_generation_tokens_total"] == 6
    assert grown["ripresa_time_to_first_token_seconds_count"] == 1
    assert 0 < grown["ripresa_time_to_first_token_seconds_sum"] < answer.seconds
    assert grown["ripresa_inter_token_latency_seconds_count"] == 5
    assert grown["ripresa_request_success_total"] == 1
    assert grown["ripresa_request_failure_total"] == 0
    assert grown["ripresa_encoder_rows_total"] == 500
    assert grown["ripresa_decoder_rows_total"] == 128 + 5
    # The encoder output of 128 rows alone: four streams of 256 numbers each.
    assert grown["ripresa_transfer_bytes_total"] > 128 * 4 * 256 * 4
    assert after["ripresa_num_requests_running"] == 0
    assert after["ripresa_num_requests_waiting"] == 0


def test_a_running_request_shows(split: ServedCluster, agent_tokens: tuple[int, ...]) -> None:
    stream = split.open(Question(agent_tokens[:10], max_tokens=3000))
    stream.read(1)

    def check() -> None:
        assert split.metrics()["ripresa_num_requests_running"] == 1

    eventually(check)
    before = split.metrics()["ripresa_request_failure_total"]
    stream.cancel()
    assert stream.end().code is grpc.StatusCode.CANCELLED
    split.assert_idle()
    assert split.metrics()["ripresa_request_failure_total"] == before + 1
