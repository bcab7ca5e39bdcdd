"""Where does the next execution of a request run? From hints and loads to a plan, and back.

hashes ─▶ directory ─▶ planner ─▶ Placement ─▶ workers ─▶ what they found ─▶ receipts, log
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from ripresa.cluster.routing.execution import Execution
from ripresa.cluster.routing.pending_work import PendingWork
from ripresa.cluster.routing.plan_log import PlanLog, PlannedExecution, PlannedRequest
from ripresa.cluster.routing.planner import (
    Leader,
    NoWorker,
    RouteQuery,
    SessionHome,
    nobody_among,
    plan_route,
)
from ripresa.cluster.routing.prefix_hints import Hints, PrefixHints
from ripresa.cluster.routing.route_plan import Candidate, RoutePlan
from ripresa.cluster.routing.session_homes import SessionHomes
from ripresa.cluster.routing.worker_load import PlannerSettings, WorkerLoad, worker_loads
from ripresa.workers.address import WorkerAddress, WorkerKind
from ripresa.workers.cache.block_hash import BlockHasher, worker_context
from ripresa.workers.errors import Unavailable
from ripresa.workers.prefix_sources import PrefixOutcome
from ripresa.workers.report import SessionMove, WorkerReport
from ripresa.workers.request import Finished

MAX_HASHED_ON_LOOP = 8192
"""Tokens that are hashed on the event loop; more of them would delay other streams."""


class WorkerView(Protocol):
    """What this gateway knows about workers."""

    def workers(self) -> tuple[WorkerReport, ...]:
        """The newest reports, without those that were found dead since."""

    def age_s(self, worker_id: str) -> float:
        """Seconds for which the worker's newest report has been known."""

    def was_decoder(self, worker_id: str) -> bool:
        """Whether a decode worker of this id is listed, or ever was."""

    async def refresh(self) -> None:
        """Ask again, after what was known led nowhere."""

    async def gone(self, worker_id: str) -> None:
        """Returns once the worker's reports have stopped: it died or hangs."""

    async def changed(self) -> None:
        """Returns once a worker has reported again, came or went."""

    def lost(self, worker_id: str) -> None:
        """A call found this worker gone; it is not listed again for a while."""

    async def session_move(self, tenant_salt: bytes, session_id: str) -> SessionMove | None:
        """Where a worker that left has given a session's state; None if nobody knows of it."""


@dataclass(slots=True)
class Placement:
    """Where one execution runs, and by which hints.

    Attributes:
        window: W, tokens in a block.
        computing: the route whose worker computes the encoder rows; another encoder may take over.
        outcome: what that worker brought and held; None until it said so.
        hit_error: blocks that were planned to be held and were not; negative if more were.
        num_computed: prompt tokens whose rows are known to be computed.
    """

    plan: RoutePlan
    window: int
    hints: Hints
    log: PlannedExecution
    computing: Candidate
    outcome: PrefixOutcome | None = None
    hit_error: int | None = None
    num_computed: int = 0

    @property
    def decoder(self) -> str:
        return self.plan.decoder

    @property
    def encoder(self) -> str | None:
        return self.plan.encoder

    @property
    def hit_error_tokens(self) -> int | None:
        """`hit_error` in tokens."""
        return None if self.hit_error is None else self.hit_error * self.window


class RouteFinder:
    """Plans for one gateway's requests, and keeps what later plans need.

    Args:
        view: which workers there are.
        hints: what the prefix directory knows.
        settings: how routes are compared.
        report_timeout_s: longest wait for another report of workers that refused a request.

    Attributes:
        pending: what was sent to workers.
        log: the newest plans.
        window: W, tokens in a block.
    """

    def __init__(
        self,
        view: WorkerView,
        hints: PrefixHints,
        settings: PlannerSettings,
        report_timeout_s: float,
    ) -> None:
        self._view = view
        self._report_timeout_s = report_timeout_s
        self._hints = hints
        self._settings = settings
        self.pending = PendingWork()
        self.log = PlanLog(settings.log_plans)
        self.window = hints.geometry.window
        self._homes = SessionHomes(self.window)

    async def place(
        self,
        execution: Execution,
        avoid: set[str],
        log: PlannedRequest,
        gone: str | None,
        *,
        follows: bool,
    ) -> Placement:
        """Plan the next execution by what the directory and the workers say.

        Args:
            avoid: workers that failed the request or refused it. Where no other decode worker
                could take it, those are taken off it that report again in time.

        Raises:
            RipresaError: see `plan_route`.
        """
        prompt = execution.prompt
        if not self._view.workers():
            await self._view.refresh()
        if avoid:
            await self._forgive(execution, avoid)
        await self._hash(execution)
        geometry = self._hints.geometry
        below_cap = execution.num_tokens - geometry.window - geometry.rewind
        follows = follows and execution.recipe is None
        num_reusable = max(0, below_cap) // geometry.window if follows else 0
        hints = await self._hints.ask(
            execution.hashes, execution.claim, prompt.cache, num_reusable, gone
        )
        mode = prompt.cache.mode
        query = RouteQuery(
            self._hints.geometry,
            execution.num_tokens,
            hints.hashes,
            mode,
            self._hints.interval(mode),
            prompt.tail,
            hints.lookup,
            hints.leader,
            await self._home(execution),
            execution.recipe,
            avoid,
            max_total_tokens=execution.max_total_tokens,
        )
        try:
            plan = await self._plan(query)
        except BaseException:
            if hints.leads:
                self._hints.release(hints.hashes, execution.claim)
            raise
        leader = plan.chosen.sources.leader
        entry = PlannedExecution(plan, hints.why, None if leader is None else leader.request_id)
        log.executions.append(entry)
        return Placement(plan, self.window, hints, entry, plan.chosen)

    async def num_held_tokens(self, token_ids: Sequence[int], tenant_salt: bytes) -> int:
        """Leading tokens of a prompt whose blocks some worker holds."""
        hasher = BlockHasher(worker_context(self._layout_digest(), self.window, tenant_salt))
        hashes = await asyncio.to_thread(hasher.extend, token_ids)
        return await self._hints.num_held(hashes) * self.window

    def decoders(self, execution: Execution) -> set[str]:
        """Decode workers that are there and could ever hold the request."""
        return set(self._decoders(execution))

    def nobody(self, num_tokens: int = 0) -> NoWorker | None:
        """Why no decode worker takes so long a request, whatever room it has now.

        Returns:
            None if one may, and also if all are there but too small.
        """
        decoders = [load for load in self._loads() if not load.is_encoder]
        able = [load for load in decoders if load.holds(num_tokens)]
        if any(not load.is_leaving for load in able) or (decoders and not able):
            return None
        return nobody_among(able)

    def take_over(self, execution: Execution, route: Placement, avoid: set[str]) -> None:
        """Let another encoder go on, from what the decode worker has received too.

        Raises:
            Unavailable: there is none.
        """
        decoder = WorkerAddress(route.decoder, WorkerKind.DECODE)
        num_blocks = execution.num_tokens // self.window
        mode = execution.prompt.cache.mode
        query = RouteQuery(
            self._hints.geometry,
            execution.num_tokens,
            route.hints.hashes,
            mode,
            self._hints.interval(mode),
            execution.prompt.tail,
            route.hints.lookup,
            Leader(execution.prompt.request_id, decoder, 0, num_blocks),
            recipe=execution.recipe,
            avoid=avoid,
            decoder=route.decoder,
        )
        route.computing = self._plan_now(query).chosen
        route.log.encoders.append(route.computing.computing)

    def admitted(self, execution: Execution, route: Placement, outcome: PrefixOutcome) -> None:
        """The computing worker says what it found: note it, and correct the directory."""
        route.outcome = route.log.outcome = outcome
        if route.hints.lookup is None or execution.recipe is None:
            return
        route.hit_error = self._hints.admitted(
            route.hints.hashes, route.computing, execution.recipe, outcome
        )

    def remember(self, execution: Execution, decoder: str, finished: Finished) -> None:
        prompt = execution.prompt
        if prompt.session_id is None or not execution.is_hashed:
            return
        execution.hash(b"", self.window)
        # The last sampled token has no row.
        num_processed = len(prompt.token_ids) + finished.num_generated_tokens - 1
        restarts = () if execution.recipe is None else execution.recipe.restarts
        home = SessionHome(decoder, num_processed, restarts)
        self._homes.put(prompt.tenant_salt, prompt.session_id, home, execution.hashes)

    def give_up(self, execution: Execution, route: Placement) -> None:
        """Nobody computes what the request claimed: its worker may never have heard of it."""
        if route.hints.leads:
            self._hints.release(route.hints.hashes, execution.claim)

    def lost(self, worker_id: str) -> None:
        """A call found this worker gone."""
        self._view.lost(worker_id)
        self._hints.lost(worker_id)

    async def _forgive(self, execution: Execution, avoid: set[str]) -> None:
        """If only decode workers that failed or refused are left, wait for the next report of one
        of them or of a new one: whoever sends it may try."""
        before = self._decoders(execution)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._report_timeout_s):
                while (now := self._decoders(execution)) and avoid.issuperset(now):
                    avoid -= {name for name, report in now.items() if before.get(name) != report}
                    if avoid.issuperset(now):
                        await self._view.changed()

    def _decoders(self, execution: Execution) -> dict[str, WorkerReport]:
        """The newest reports of decode workers that stay and could ever hold the request."""
        num_tokens = execution.max_total_tokens
        fit = {load.worker_id for load in self._loads() if load.holds(num_tokens)}
        return {
            report.worker_id: report
            for report in self._view.workers()
            if report.kind is WorkerKind.DECODE
            and report.worker_id in fit
            and not report.is_leaving
        }

    def _loads(self) -> tuple[WorkerLoad, ...]:
        return worker_loads(
            self._view.workers(),
            self.pending.rows,
            self.pending.requests,
            self._settings,
            self._view.age_s,
        )

    async def _plan(self, query: RouteQuery) -> RoutePlan:
        try:
            return self._plan_now(query)
        except Unavailable:
            await self._view.refresh()
            return self._plan_now(query)

    def _plan_now(self, query: RouteQuery) -> RoutePlan:
        return plan_route(query, self._loads(), self._settings)

    def _layout_digest(self) -> bytes:
        return next((w.layout_digest for w in self._view.workers()), b"")

    async def _hash(self, execution: Execution) -> None:
        """Name the request's blocks as its workers do."""
        if not execution.prompt.cache.reads and not execution.prompt.cache.writes:
            return
        digest = self._layout_digest()
        if execution.is_hashed or execution.num_tokens <= MAX_HASHED_ON_LOOP:
            execution.hash(digest, self.window)
        else:
            await asyncio.to_thread(execution.hash, digest, self.window)

    async def _home(self, execution: Execution) -> SessionHome | None:
        """Where the prompt's session can go on from its state, if it may."""
        prompt = execution.prompt
        if prompt.session_id is None or not prompt.cache.resumes or not prompt.cache.reads:
            return None
        home = self._homes.find(prompt.tenant_salt, prompt.session_id, execution.hashes)
        if home is None or any(
            worker.worker_id == home.worker_id and not worker.is_leaving
            for worker in self._view.workers()
        ):
            return home
        move = await self._view.session_move(prompt.tenant_salt, prompt.session_id)
        if move is None or move.num_tokens != home.num_tokens:
            return home
        return replace(home, worker_id=move.worker_id)
