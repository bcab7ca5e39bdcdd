"""Does every tenant get his tokens per minute, and not more in the long run?"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from routed_turns import ask

from ripresa.cluster.gateway.admission import Admission
from ripresa.cluster.gateway.api_keys import Tenant, Tenants
from ripresa.cluster.gateway.call import Call
from ripresa.cluster.gateway.quotas import Quotas, TokenBucket
from ripresa.cluster.gateway.status import RequestError
from ripresa.cluster.observability.metrics import (
    TENANT_REFUSALS,
    TENANT_RUNNING,
    TENANT_TOKENS,
    GatewayMetrics,
)
from ripresa.workers.errors import ErrorCode, InvalidArgument


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


USES = st.lists(st.tuples(st.floats(0, 100), st.integers(0, 500)), max_size=40)


@given(st.integers(1, 1000), USES)
def test_what_is_admitted_keeps_to_the_mean(capacity: int, uses: list[tuple[float, int]]) -> None:
    """Whoever takes whenever there is a token has a full account, the time's share, one take."""
    bucket, now, used = TokenBucket(capacity, 0.0), 0.0, 0
    for wait, num_tokens in uses:
        now += wait
        assert bucket.level(now) <= capacity
        if bucket.level(now) < 1:
            continue
        bucket.take(num_tokens, now)
        used += num_tokens
        assert used <= capacity + now * capacity / 60 + num_tokens + 1e-6


@given(st.integers(1, 1000), USES)
def test_after_the_told_wait_there_is_a_token(capacity: int, uses: list[tuple[float, int]]) -> None:
    bucket, now = TokenBucket(capacity, 0.0), 0.0
    for wait, num_tokens in uses:
        now += wait
        bucket.take(num_tokens, now)
    later = now + bucket.wait_s(now)
    assert bucket.level(later) >= 1 - 1e-6


@given(st.integers(1, 1000), st.integers(1, 1000), st.integers(0, 5000))
def test_another_quota_keeps_the_debt(capacity: int, other: int, used: int) -> None:
    bucket = TokenBucket(capacity, 0.0)
    bucket.take(used, 0.0)
    bucket.resize(other, 0.0)
    assert bucket.level(0.0) == min(other, capacity - used)


def quotas(**limits: object) -> tuple[Quotas, GatewayMetrics, Clock]:
    metrics, clock = GatewayMetrics(), Clock()
    tenants = Tenants({"a": Tenant(("sha256:",), **limits), "b": Tenant(("sha256:",))})  # type: ignore[arg-type]
    return Quotas(tenants, metrics, clock), metrics, clock


def test_cached_tokens_are_given_back() -> None:
    accounts, metrics, clock = quotas(tokens_per_minute=60)
    meter = accounts.admit("a", "m", 2, 1000)
    with pytest.raises(RequestError) as refused:
        accounts.admit("a", "m", 1, 1)
    assert refused.value.code is ErrorCode.RESOURCE_EXHAUSTED
    assert (refused.value.reason, refused.value.quota_subject) == ("TENANT_QUOTA", "tenant:a")
    assert refused.value.retry_after_s == 941
    meter.planned(990)  # the first choice computes ten tokens
    meter.planned(1000)  # the second finds all of them
    meter.generated(20)
    meter.close()
    other = accounts.admit("a", "m", 1, 30)  # exactly the rest
    with pytest.raises(RequestError):
        accounts.admit("a", "m", 1, 1)
    other.close()  # it failed before anything was planned
    accounts.admit("a", "m", 1, 1).close()
    clock.now += 30
    used = metrics.counter(TENANT_TOKENS)
    told = {k: used.labels("a", k)._value.get() for k in ("computed", "cached", "generated")}
    assert told == {"computed": 10, "cached": 1990, "generated": 20}
    assert metrics.counter(TENANT_REFUSALS).labels("a", "tokens")._value.get() == 2


def test_running_choices_count_until_they_end() -> None:
    accounts, metrics, _ = quotas(max_running=3)
    first, second = accounts.admit("a", "m", 2, 5), accounts.admit("a", "m", 1, 5)
    with pytest.raises(RequestError, match="3 may"):
        accounts.admit("a", "m", 1, 5)
    accounts.admit("b", "m", 9, 5).close()
    assert metrics.gauge(TENANT_RUNNING).labels("a")._value.get() == 3
    first.close()
    accounts.admit("a", "m", 2, 5).close()
    second.close()
    assert metrics.gauge(TENANT_RUNNING).labels("a")._value.get() == 0


def test_more_choices_than_may_ever_run_are_no_matter_of_time() -> None:
    accounts, metrics, _ = quotas(max_running=2)
    with pytest.raises(InvalidArgument, match="at most 2") as refused:
        accounts.admit("a", "m", 3, 5)
    assert (refused.value.field, refused.value.retry_after_s) == ("sampling.n", None)
    assert metrics.counter(TENANT_REFUSALS).labels("a", "running")._value.get() == 1
    admission = Admission("m", 2, None)
    with pytest.raises(InvalidArgument, match=r"gateway\.max_running") as refused:
        admission.admit([ask((1, 2), "r")] * 3, Call("r", choices_field="n"))
    assert (refused.value.field, refused.value.retry_after_s) == ("n", None)
    assert admission.num_running == 0


def test_limits_change_while_requests_run() -> None:
    accounts, metrics, _ = quotas(max_running=1, tokens_per_minute=10)
    meter = accounts.admit("a", "m", 1, 5)
    accounts.limit(Tenants({"b": Tenant(("sha256:",), models=("m",))}))
    with pytest.raises(RequestError) as gone:
        accounts.admit("a", "m", 1, 5)
    assert gone.value.code is ErrorCode.PERMISSION_DENIED
    with pytest.raises(RequestError) as forbidden:
        accounts.admit("b", "other", 1, 5)
    assert (forbidden.value.code, forbidden.value.reason) == (
        ErrorCode.PERMISSION_DENIED,
        "TENANT_FORBIDDEN",
    )
    accounts.limit(Tenants({"a": Tenant(("sha256:",), max_running=1)}))
    with pytest.raises(RequestError, match="under way"):
        accounts.admit("a", "m", 1, 5)
    meter.close()
    accounts.admit("a", "m", 1, 5).close()
    assert metrics.gauge(TENANT_RUNNING).labels("a")._value.get() == 0
