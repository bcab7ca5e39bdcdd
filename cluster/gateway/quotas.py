"""How much of what he may has a tenant used? Requests under way, and tokens per minute.

A prompt is charged whole when it is admitted; what turns out to be cached is given back as soon as
its plan is known, so that the bill is computed and generated tokens. The account may fall below
zero, by answers that run and by prompts larger than a minute's tokens; then nothing is admitted
until time has filled it again. So every request can be served, and the mean keeps to the quota.
Each gateway counts what passes through it.
"""

from __future__ import annotations

from collections.abc import Callable

from ripresa.cluster.gateway.api_keys import Tenant, Tenants
from ripresa.cluster.gateway.status import RequestError
from ripresa.cluster.observability.metrics import (
    TENANT_REFUSALS,
    TENANT_RUNNING,
    TENANT_TOKENS,
    BilledTokens,
    GatewayMetrics,
    TenantRefusal,
)
from ripresa.workers.errors import ErrorCode, InvalidArgument

SECONDS = 60.0
"""A full account holds the tokens of so long a time."""


class TokenBucket:
    """Tokens that may be used now; filled steadily, up to `capacity`.

    Args:
        capacity: tokens of a minute.
        now: monotonic seconds.
    """

    def __init__(self, capacity: int, now: float) -> None:
        self.capacity = capacity
        self._level = float(capacity)
        self._filled_at = now

    def level(self, now: float) -> float:
        """Tokens left at `now`; negative is a debt."""
        gained = (now - self._filled_at) * self.capacity / SECONDS
        self._level = min(self.capacity, self._level + gained)
        self._filled_at = now
        return self._level

    def take(self, num_tokens: int, now: float) -> None:
        """Charge tokens; a negative number gives some back."""
        self._level = min(self.capacity, self.level(now) - num_tokens)

    def wait_s(self, now: float) -> float:
        """Seconds until there is a token again."""
        return max(0.0, (1.0 - self.level(now)) * SECONDS / self.capacity)

    def resize(self, capacity: int, now: float) -> None:
        """Another quota from now on; a debt stays."""
        self._level = min(capacity, self.level(now))
        self.capacity = capacity


class Meter:
    """What one admitted request of a tenant uses. End it with `close`.

    Args:
        num_choices: they count as running until `close`.
        num_prompt_tokens: charged now.
    """

    def __init__(self, account: _Account, num_choices: int, num_prompt_tokens: int) -> None:
        self._account = account
        self._num_choices = num_choices
        self._num_prompt_tokens = num_prompt_tokens
        self._is_planned = False
        account.run(num_choices)
        account.charge(num_prompt_tokens)

    def planned(self, num_cached: int) -> None:
        """A choice is planned: so many of its prompt's tokens are not computed again."""
        computed = self._num_prompt_tokens - num_cached
        charged = 0 if self._is_planned else self._num_prompt_tokens
        self._is_planned = True
        self._account.charge(computed - charged)
        self._account.count(BilledTokens.COMPUTED, computed)
        self._account.count(BilledTokens.CACHED, num_cached)

    def generated(self, num_tokens: int) -> None:
        self._account.charge(num_tokens)
        self._account.count(BilledTokens.GENERATED, num_tokens)

    def close(self) -> None:
        """The request is over; a prompt that was never planned costs nothing."""
        if not self._is_planned:
            self._account.charge(-self._num_prompt_tokens)
        self._account.run(-self._num_choices)


class _Account:
    """One tenant's use."""

    def __init__(
        self, name: str, limits: Tenant, metrics: GatewayMetrics, clock: Callable[[], float]
    ) -> None:
        self.name = name
        self.limits = limits
        self.num_running = 0
        self._metrics = metrics
        self._clock = clock
        self.bucket: TokenBucket | None = None
        self.limit(limits)
        self.run(0)
        for kind in BilledTokens:
            self.count(kind, 0)
        for reason in TenantRefusal:
            metrics.counter(TENANT_REFUSALS).labels(name, reason)

    def limit(self, limits: Tenant) -> None:
        """Other limits from now on."""
        self.limits = limits
        quota, now = limits.tokens_per_minute, self._clock()
        if quota is None:
            self.bucket = None
        elif self.bucket is None:
            self.bucket = TokenBucket(quota, now)
        else:
            self.bucket.resize(quota, now)

    def run(self, num_choices: int) -> None:
        self.num_running += num_choices
        self._metrics.gauge(TENANT_RUNNING).labels(self.name).set(self.num_running)

    def charge(self, num_tokens: int) -> None:
        if self.bucket is not None:
            self.bucket.take(num_tokens, self._clock())

    def count(self, kind: BilledTokens, num_tokens: int) -> None:
        self._metrics.counter(TENANT_TOKENS).labels(self.name, kind).inc(num_tokens)

    def _refused(self, reason: TenantRefusal) -> None:
        self._metrics.counter(TENANT_REFUSALS).labels(self.name, reason).inc()

    def admit(self, model: str, num_choices: int, num_prompt_tokens: int, field: str) -> Meter:
        limits, now = self.limits, self._clock()
        if limits.models and model not in limits.models:
            self._refused(TenantRefusal.MODEL)
            raise RequestError(
                ErrorCode.PERMISSION_DENIED,
                "TENANT_FORBIDDEN",
                f"tenant {self.name} may not use model {model}",
            )
        if limits.max_running is not None and self.num_running + num_choices > limits.max_running:
            self._refused(TenantRefusal.RUNNING)
            if num_choices > limits.max_running:
                raise InvalidArgument(
                    field,
                    f"asks for {num_choices} choices, and at most {limits.max_running} of tenant "
                    f"{self.name} may be under way at once (max_running); ask for fewer",
                )
            raise self._exhausted(
                f"{self.num_running} answers of tenant {self.name} are under way and "
                f"{limits.max_running} may (max_running; each choice counts); try again when one "
                "is over",
                1.0,
            )
        if self.bucket is not None and self.bucket.level(now) < 1:
            self._refused(TenantRefusal.TOKENS)
            raise self._exhausted(
                f"tenant {self.name} has used its {self.bucket.capacity} tokens per minute "
                "(tokens_per_minute; computed and generated tokens count); try again later",
                max(1.0, self.bucket.wait_s(now)),
            )
        return Meter(self, num_choices, num_prompt_tokens)

    def _exhausted(self, message: str, retry_after_s: float) -> RequestError:
        return RequestError(
            ErrorCode.RESOURCE_EXHAUSTED,
            "TENANT_QUOTA",
            message,
            retry_after_s=retry_after_s,
            quota_subject=f"tenant:{self.name}",
        )


class Quotas:
    """The accounts of all tenants, in one gateway.

    Args:
        clock: monotonic seconds.
    """

    def __init__(
        self, tenants: Tenants, metrics: GatewayMetrics, clock: Callable[[], float]
    ) -> None:
        self._metrics = metrics
        self._clock = clock
        self._accounts: dict[str, _Account] = {}
        self.limit(tenants)

    def limit(self, tenants: Tenants) -> None:
        """These are the tenants and their limits from now on; what runs, runs on."""
        self._tenants = tenants
        for name, limits in tenants.by_name.items():
            account = self._accounts.get(name)
            if account is None:
                self._accounts[name] = _Account(name, limits, self._metrics, self._clock)
            else:
                account.limit(limits)

    def admit(
        self,
        tenant: str,
        model: str,
        num_choices: int,
        num_prompt_tokens: int,
        field: str = "sampling.n",
    ) -> Meter:
        """Begin a request of a tenant.

        Args:
            field: where the request asks for so many choices.

        Raises:
            RequestError: PERMISSION_DENIED (not his model, or he is no tenant any more), or
                RESOURCE_EXHAUSTED (a quota).
            InvalidArgument: more choices than he may ever have at once.
        """
        return self._account(tenant).admit(model, num_choices, num_prompt_tokens, field)

    def resume(self, tenant: str, num_choices: int) -> Meter:
        """Go on with a request that was admitted elsewhere, where its prompt was charged.

        Raises:
            RequestError: PERMISSION_DENIED (he is no tenant any more).
        """
        return Meter(self._account(tenant), num_choices, num_prompt_tokens=0)

    def _account(self, tenant: str) -> _Account:
        if tenant not in self._tenants.by_name:
            raise RequestError(
                ErrorCode.PERMISSION_DENIED,
                "TENANT_FORBIDDEN",
                f"{tenant} is no tenant of this server any more",
            )
        return self._accounts[tenant]
