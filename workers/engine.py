"""How do requests, the scheduler and the model runner meet: one step after the other?

    event loop   admit ─ schedule ─┐             ┌─ complete ─ tell listeners ─ schedule ─▶
    step thread                    └─ execute ───┘

The loop sleeps while nothing is to be computed. Everything but `execute` and exports happens on
the event loop, so the books need no lock; pages of a request that ends while the step thread uses
them are freed when that use is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import ParamSpec, TypeVar

import torch

from ripresa.workers.address import WorkerKind
from ripresa.workers.block_moves import BlockGiving
from ripresa.workers.cache.block_cache import BlockCache
from ripresa.workers.cache.block_hash import BlockIdentity
from ripresa.workers.cache.block_pool import BlockPool, SlotPool
from ripresa.workers.cache.block_record import BlockPublished, CacheEvent, PublishedBlock
from ripresa.workers.cache.block_table import PageLoan, PagePool
from ripresa.workers.cache.cache_events import (
    CacheListener,
    CopyAdvice,
    FindKeepers,
    HeldKind,
    Room,
    Tier,
    Unheard,
    tenant_digest,
)
from ripresa.workers.cache.parked_states import ParkedSession
from ripresa.workers.config import EngineConfig
from ripresa.workers.constrained_steps import ConstrainedSteps, FoundLater
from ripresa.workers.disk_tier import BLOCKS_A_COPY, DiskTier, open_disk_tier
from ripresa.workers.errors import (
    ConfigError,
    ErrorCode,
    LeaderGone,
    ResourceExhausted,
    RipresaError,
    Unavailable,
    WorkerLeaving,
    reason_of,
)
from ripresa.workers.job import Job, Listener, OnLogits
from ripresa.workers.models.base import ModelRunner, StepOutput
from ripresa.workers.prefetch import Prefetch
from ripresa.workers.prefix_cache import PrefixCache, RequestPrefix
from ripresa.workers.prefix_exchange import PrefixExchange
from ripresa.workers.prefix_pulls import PeerAccess
from ripresa.workers.prefix_sources import PrefixOutcome
from ripresa.workers.prefix_supply import PrefixHold
from ripresa.workers.replay import Recipe
from ripresa.workers.request import (
    EngineStats,
    GenerationRequest,
    LeaseCounters,
    WorkCounters,
)
from ripresa.workers.scheduling.admission import check_recipe
from ripresa.workers.scheduling.scheduler import Progress, Scheduler, SchedulerLimits, WorkerRole
from ripresa.workers.scheduling.step_plan import StepPlan
from ripresa.workers.scheduling.step_rates import StepRates
from ripresa.workers.sequence import Sequence, SequenceStatus
from ripresa.workers.shadow_samples import ServedSamples
from ripresa.workers.tail_budget import TailBudget

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SpareTime:
    """The time in which an engine has nothing to do, for the steps of another one beside it.

    Attributes:
        thread: the lender's step thread: steps of both never run at once.
        is_left: whether the lender has no request at the moment.
    """

    thread: ThreadPoolExecutor
    is_left: Callable[[], bool]


class EngineCore:
    """The part that encoder and decode engines share: admission, the step loop, the end.

    Args:
        role: which rows this worker computes.
        runner: the model; `execute` and exports run in one dedicated thread, imports and
            `release_slot` on the event loop, for slots that no running step contains.
        config: the engine's settings.
        clock: seconds since the epoch, as request deadlines are.
        listener: hears of what the cache holds, and of claims that this worker computes for.
        peers: the way to other workers' caches; None for a worker that reaches none.
        find_keepers: asks who should keep what this worker has to evict; None if nobody knows.
        samples: takes the distributions of served tokens that are to be scored again; None if
            none are.
        spare: another engine's, for one that runs steps in it alone.

    A step that raises fails its requests with INTERNAL. The engine lives on, unless the runner
    raises `Unavailable`: then it can run no further step, and everything fails with that error.
    """

    def __init__(
        self,
        role: WorkerRole,
        runner: ModelRunner,
        config: EngineConfig,
        clock: Callable[[], float],
        listener: CacheListener | None = None,
        peers: PeerAccess | None = None,
        find_keepers: FindKeepers | None = None,
        samples: ServedSamples | None = None,
        spare: SpareTime | None = None,
    ) -> None:
        if config.max_num_seqs > runner.num_slots:
            raise ConfigError(
                "engine.max_num_seqs",
                f"{config.max_num_seqs} exceeds the model runner's {runner.num_slots} slots; "
                "build both from one setting",
            )
        self._runner = runner
        self._clock = clock
        self._listener: CacheListener = listener or Unheard()
        self._giving: BlockGiving | None = None
        blocks = BlockCache(
            BlockPool(runner.num_blocks),
            runner.window,
            on_event=self._tell_listener,
            max_pinned=int(config.leases.max_share * runner.num_blocks),
        )
        self._prefixes = PrefixCache(
            blocks,
            runner.geometry,
            runner.layout_digest,
            config.windows,
            config.parked,
            config.leases,
            runner.num_blocks,
            clock,
            self._listener,
            config.anchor_interval,
        )
        self._disk = open_disk_tier(config.disk, runner)
        self._keeping: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        # Whoever gives pages back, parked requests may go on.
        self._pages = PagePool(
            blocks,
            runner.num_blocks,
            SlotPool(config.max_num_seqs),
            runner.window,
            self._on_release,
            self._wake.set,
        )
        limits = SchedulerLimits(
            geometry=runner.geometry,
            max_batched_tokens=config.max_batched_tokens,
            max_model_len=runner.max_model_len,
            eos_token_id=runner.eos_token_id,
            reserved_output_tokens=config.reserved_output_tokens,
        )
        self.exchange = PrefixExchange(
            self._prefixes,
            self._pages,
            runner,
            config.transfer,
            clock,
            live=self,
            peers=peers,
            places=() if self._disk is None else (self._disk,),
            moves=config.moves,
            find_keepers=find_keepers,
            stored=None if self._disk is None else self._disk.holds,
            store=lambda blocks, age_s: self._store(blocks, clock() - age_s),
        )
        self._giving = self.exchange.giving
        self._prefetch: Prefetch | None = None
        if self._disk is not None and config.leases.prefetch_max_bytes:
            self._prefetch = Prefetch(
                self._prefixes.leases,
                blocks,
                self._pages,
                runner,
                self.exchange.keeping,
                self.exchange.supply,
                self._disk,
                config.leases,
                clock,
                done=self._wake.set,
            )
        self._role = role
        self._constraints = ConstrainedSteps(runner)
        self._tails = TailBudget(
            config.transfer.max_tail_bytes, runner.rows_bytes(1), runner.geometry
        )
        period = config.transfer.hand_over_window_blocks * runner.window
        self._window_period = period if role is WorkerRole.ENCODER else None
        self._scheduler = Scheduler(role, self._pages, limits)
        self._samples = samples
        self._spare = spare
        self._thread = spare.thread if spare is not None else _step_thread(role)
        self._on_idle: Callable[[], None] = lambda: None
        self._by_slot: dict[int, Job] = {}
        self._by_id: dict[str, Job] = {}
        self._task: asyncio.Task[None] | None = None
        self._refusal: str | None = "the engine was not started"
        self._is_leaving = False
        self._rates = StepRates()
        self._num_encoder_rows = 0
        self._num_row_layers = 0
        self._num_cut_short_tokens = 0
        self._num_decoder_rows = 0
        self._transfer_bytes = 0

    async def start(self) -> None:
        """Begin to run steps. Raises RipresaError (FAILED_PRECONDITION) the second time."""
        if self._task is not None:
            raise RipresaError(ErrorCode.FAILED_PRECONDITION, "an engine starts only once")
        self._refusal = None
        self._task = asyncio.create_task(self._run(), name="engine-steps")
        if self._giving is not None:
            self._giving.start()

    async def stop(self) -> None:
        """Fail every request with UNAVAILABLE, wait for the running step, free everything."""
        self._break("the worker is stopping; retry on another one", WorkerLeaving)
        if self._task is not None:
            await self._task
        for job in tuple(self._by_id.values()):
            await job.released.wait()
        if self._prefetch is not None:
            await self._prefetch.close()
        await self.exchange.close(Unavailable("the worker is stopping; retry on another one"))
        if self._keeping:
            await asyncio.wait(self._keeping)
        if self._spare is None:
            await asyncio.to_thread(self._thread.shutdown)
        await asyncio.to_thread(self._constraints.close)
        if self._disk is not None:
            await self._disk.close()

    async def admit(
        self,
        request: GenerationRequest,
        listener: Listener,
        *,
        is_inbound: bool = False,
        on_logits: OnLogits | None = None,
    ) -> Job:
        """Compile its constraint, bring and adopt what is cached, reserve the other pages.

        Nothing is computed before `begin`.

        Args:
            on_logits: hears what the request's decoder rows foretell.

        Raises:
            RipresaError: INVALID_ARGUMENT, RESOURCE_EXHAUSTED, UNAVAILABLE (not running),
                DEADLINE_EXCEEDED, CANCELLED, or ALREADY_EXISTS if the same id runs here and this
                is no newer execution of it. What it replaces is failed, and its pages are free
                when this goes on.
        """
        await self._make_way(request)
        constraint = request.sampling.constraint if self._role is WorkerRole.DECODE else None
        matcher = await self._constraints.open(constraint)
        prefix = self._prefixes.open(request)
        async with self._bringing(request, prefix) as hold:
            await self._make_way(request, hold)
            _check_leader(request, hold.outcome)
            is_handed_over = is_inbound or self._role is WorkerRole.ENCODER
            tail_bytes = self._tails.take(request) if is_handed_over else 0
            try:
                try:
                    sequence = self._add(request, prefix, is_inbound)
                except ResourceExhausted:
                    # What was brought in vain may hold the pages that are missing.
                    hold.let_go()
                    sequence = self._add(request, prefix, is_inbound)
            except BaseException:
                self._tails.give_back(tail_bytes)
                raise
        job = Job(sequence, prefix, listener, hold.outcome, tail_bytes, matcher, on_logits)
        self._by_slot[job.sequence.pages.slot] = job
        self._by_id[request.request_id] = job
        if request.claim is not None and not is_inbound and prefix.hashes:
            self._listener.lead(request.claim, prefix.hashes)
        return job

    @asynccontextmanager
    async def _bringing(
        self, request: GenerationRequest, prefix: RequestPrefix
    ) -> AsyncIterator[PrefixHold]:
        """See `PrefixSupply.bring`."""
        num_blocks = self._scheduler.num_needed_blocks(request)
        try:
            async with self.exchange.supply.bring(request, prefix, num_blocks) as hold:
                yield hold
        finally:
            self._ended()

    async def _make_way(self, request: GenerationRequest, hold: PrefixHold | None = None) -> None:
        """Return when the request may be admitted; raises as `admit` does."""
        while True:
            if hold is not None and hold.error is not None:
                raise hold.error
            if self._refusal is not None:
                raise Unavailable(self._refusal)
            if self._is_leaving:
                raise WorkerLeaving("the worker is leaving; another one can serve the request")
            self._scheduler.check(request)
            if request.deadline is not None and self._clock() >= request.deadline:
                raise _deadline_exceeded()
            old: Job | PrefixHold | None = self._by_id.get(request.request_id)
            if old is None:
                old = self.exchange.supply.holding(request.request_id)
            if old is hold or old is None:
                return
            if isinstance(old, Job) and old.is_over:
                await old.released.wait()
                continue
            if not request.replaces(old.request):
                raise RipresaError(
                    ErrorCode.ALREADY_EXISTS,
                    f"request {request.request_id} runs here already; use a new id",
                    field="request_id",
                )
            replaced = RipresaError(ErrorCode.CANCELLED, "replaced by a newer execution")
            if isinstance(old, Job):
                self.fail(old, replaced)
                await old.released.wait()
            else:
                old.abort(replaced)
                await old.ended.wait()

    def _add(self, request: GenerationRequest, prefix: RequestPrefix, is_inbound: bool) -> Sequence:
        """Plan from what is held now, and reserve the pages."""
        if is_inbound:
            chain = prefix.expected_chain()
            sequence = self._scheduler.add(request, None, chain)
            if request.recipe is not None:
                sequence.fix(request.recipe)
        else:
            plan = prefix.plan()
            chain = plan.chain
            sequence = self._scheduler.add(request, plan)
            if plan.window is not None:
                window = self._prefixes.windows.take(plan.window)
                self._runner.import_window(sequence.pages.slot, plan.passes[0].start, window)
            if plan.parked is not None:
                pages = sequence.pages
                num_tokens = len(plan.parked.token_ids)
                self._runner.import_image(pages.slot, pages.blocks, num_tokens, plan.parked.payload)
        prefix.begun()
        if self._disk is not None:
            self._disk.used(chain, prefix.opened_at)
        return sequence

    def begin(self, job: Job) -> None:
        """The request may compute from the next step on."""
        self._scheduler.begin(job.sequence)
        self._publish(job)
        self._wake.set()

    def arrived(self, job: Job, num_blocks: int) -> None:
        """The leading `num_blocks` blocks of a waiting request are verified and stored."""
        job.sequence.committed = num_blocks * self._runner.window
        self._publish(job)

    def window_arrived(self, job: Job, num_blocks: int, payload: torch.Tensor) -> None:
        """The window at the end of a waiting request's first `num_blocks` blocks has arrived."""
        job.prefix.keep_handed_over(job.sequence, num_blocks * self._runner.window, payload)

    def fix(self, job: Job, recipe: Recipe) -> int:
        """Follow the recipe that the sender of a waiting request's state has fixed.

        Returns how many leading blocks need not be sent: held in its lineage, or arrived before.

        Raises:
            RipresaError: INVALID_ARGUMENT (no such recipe exists), FAILED_PRECONDITION (it is not
                this request's), UNAVAILABLE (an earlier sender has fixed another one),
                RESOURCE_EXHAUSTED (blocks of another lineage cannot be replaced).
        """
        request = job.request
        check_recipe(recipe, request.num_prompt_tokens, self._runner.geometry)
        fixed = (request.tail, request.sampling.seed)
        is_own = (
            (recipe.tail, recipe.seed) == fixed
            if request.recipe is None
            else recipe == request.recipe
        )
        if not is_own:
            raise RipresaError(
                ErrorCode.FAILED_PRECONDITION,
                "the recipe differs from the reserved request's; send what was asked for",
            )
        if job.sequence.is_fixed and recipe != job.sequence.recipe:
            raise Unavailable("an earlier execution fixed another recipe; follow that one")
        chain = job.prefix.chain(recipe)
        self._pages.exchange(job.sequence.pages, chain)
        job.sequence.fix(recipe)
        job.notify()
        return max(len(chain), job.sequence.committed // self._runner.window)

    def wait_at_most(self, job: Job, timeout_s: float | None) -> None:
        """Fail the request if it has not begun `timeout_s` from now; None takes the limit away."""
        job.patience_until = None if timeout_s is None else self._clock() + timeout_s
        self._wake.set()

    def retire(self, job: Job) -> None:
        """The request is over: no further row; pages are freed after their last use. Idempotent."""
        self._finish_claim(job)
        was_parked = job.sequence.status is SequenceStatus.PARKED
        self._scheduler.remove(job.sequence)
        job.prefix.forget_preempted()
        self._release_tail(job)
        if self._samples is not None:
            self._samples.over(job.sequence)
        if was_parked:
            self._forget(job)
            # The next parked request may need less than this one waited for.
            self._wake.set()
        job.notify()

    def fail(self, job: Job, error: RipresaError) -> None:
        """Tell the listener once and retire the request. Nothing if it is over already."""
        if job.is_over:
            return
        job.error = error
        self.retire(job)
        job.listener.on_failed(error)

    def find(self, request_id: str) -> Job | None:
        """The request that runs here under this id."""
        job = self._by_id.get(request_id)
        return None if job is None or job.is_over else job

    def abort(self, request_id: str) -> bool:
        """End a request with CANCELLED; False if it does not run here."""
        error = RipresaError(ErrorCode.CANCELLED, "the request was aborted")
        job = self.find(request_id)
        if job is not None:
            self.fail(job, error)
            return True
        hold = self.exchange.supply.holding(request_id)
        if hold is not None:
            hold.abort(error)
        return hold is not None

    def lease(self, request_id: str, tools: Collection[str]) -> bool:
        """A finished turn called `tools`: keep what it left until they can be expected to answer.

        False if its session goes on already, or nothing of it is known.
        """
        is_known = self._prefixes.leases.grant(request_id, tools, self._clock())
        self._wake.set()
        return is_known

    def end_session(self, tenant_salt: bytes, session_id: str) -> None:
        """The session is closed: its state is dropped, its blocks go first. Idempotent."""
        self._prefixes.leases.end_session(tenant_salt, session_id)

    # -- leaving and joining; see `Leaving` ------------------------------------------------

    @property
    def num_requests(self) -> int:
        return len(self._by_id) + self.exchange.supply.num_holds

    @property
    def num_bytes_served(self) -> int:
        moves = self.exchange.move_counters
        return self.exchange.counters.sent_bytes + moves.sent_bytes

    @property
    def window(self) -> int:
        return self._runner.window

    def leave(self) -> None:
        self._is_leaving = True

    def stay(self) -> None:
        self._is_leaving = False

    async def emptied(self) -> None:
        while self._by_id or self.exchange.supply.num_holds:
            for job in tuple(self._by_id.values()):
                await job.released.wait()
            await self.exchange.supply.ended()

    def fail_all(self, error: RipresaError) -> None:
        for job in tuple(self._by_id.values()):
            self.fail(job, error)
        self.exchange.supply.abort_all(error)

    async def give_blocks(self) -> None:
        if self._giving is None:
            return
        everything = self._runner.num_blocks
        # Rooms fill, and the directory hears of it, as blocks arrive: what was refused asks again.
        while await self._giving.give(self._prefixes.blocks.at_risk(everything)):
            continue

    def sessions(self) -> list[ParkedSession[torch.Tensor]]:
        return self._prefixes.parked.sessions(self._clock())

    async def adopt(self, request: GenerationRequest) -> bool:
        """Bring what a turn of a session would go on from, without running it.

        Whether the session can go on here.

        Raises:
            Unavailable: this worker stops or leaves itself.
        """
        await self._make_way(request)
        prefix = self._prefixes.open(request)
        async with self._bringing(request, prefix):
            return prefix.plan().parked is not None

    async def leader(self, name: str) -> Job | None:
        """The request of this id or claim, once it is admitted; None if it does not run here."""
        while True:
            job = self.find(name)
            if job is None:
                jobs = self._by_id.values()
                job = next((j for j in jobs if j.request.claim == name and not j.is_over), None)
            if job is not None:
                return job
            hold = self.exchange.supply.find(name)
            if hold is None:
                return None
            await hold.ended.wait()

    async def read_blocks(
        self, chain: tuple[BlockIdentity, ...], *, is_use: bool = True
    ) -> torch.Tensor:
        """Published blocks as uint8, read in the step thread.

        They stay until that is done, even if the caller is cancelled meanwhile.

        Args:
            is_use: False if they should stay as old as they are.

        Raises RipresaError: NOT_FOUND; one of them is gone.
        """
        loan = self._pages.borrow(chain, is_use=is_use)
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(self._thread, self._runner.export_blocks, loan.blocks)
        future.add_done_callback(lambda _: loan.end())
        return await asyncio.shield(future)

    async def in_step_thread(
        self, job: Job, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run a function that uses the job's pages between steps, in the step thread.

        The pages stay until it is done, even if the caller is cancelled meanwhile.

        Raises whatever the function raises, or the job's error if it failed before.
        """
        if job.error is not None:
            raise job.error
        pages = job.sequence.pages
        pages.hold()
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(self._thread, lambda: function(*args, **kwargs))
        future.add_done_callback(lambda _: pages.drop())
        return await asyncio.shield(future)

    def count_transfer(self, num_bytes: int) -> None:
        """Add bytes that a transfer moved to the engine's totals."""
        self._transfer_bytes += num_bytes

    async def flush(self, tenant: str | None) -> int:
        """Forget a tenant's cached state (`tenant_digest`; None for everybody's).

        Running requests keep what they use. Tokens of the blocks that went, each copy counts.

        Raises:
            RipresaError: UNAVAILABLE; the disk cannot be reached. Memory is flushed all the same.
        """
        prefixes = self._prefixes

        def is_of(tenant_salt: bytes) -> bool:
            return tenant is None or tenant_digest(tenant_salt) == tenant

        number = prefixes.blocks.withdraw(
            lambda record: tenant is None or record.origin.tenant == tenant
        )
        if tenant is None:
            prefixes.windows.clear()
        else:
            prefixes.windows.drop_tenant(tenant)
        if self._samples is not None:
            self._samples.flush(is_of)
        # Nothing of theirs is to be read back before it has gone from the disk as well.
        prefixes.leases.end_turns(is_of)
        for session in prefixes.parked.sessions(-math.inf):
            if is_of(session.tenant_salt):
                prefixes.leases.end_session(session.tenant_salt, session.session_id)
        await self.flush_disk()
        if self._disk is not None:
            number += await self._disk.forget(tenant)
        return number * self._runner.window

    async def flush_disk(self) -> None:
        """Wait until every block published so far is on disk, or dropped."""
        while self._keeping:
            await asyncio.wait(self._keeping)
        if self._disk is not None:
            await self._disk.flush()

    def advise(self, advice: CopyAdvice) -> None:
        """Let blocks that other workers keep make room before all others."""
        blocks = self._prefixes.blocks
        if advice.is_new:
            blocks.forget_copies()
        for identity in advice.copied:
            blocks.mark_copy(identity, is_copy=True)
        for identity in advice.kept:
            blocks.mark_copy(identity, is_copy=False)

    def room(self) -> Room | None:
        """What this worker would lose by keeping blocks that others have to evict.

        None while it leaves: it keeps none.
        """
        if self._is_leaving:
            return None
        return Room(WorkerKind(self._role), self._prefixes.blocks.room_age_s)

    def stats(self) -> EngineStats:
        rows = self._scheduler.counters
        return EngineStats(
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            num_blocks=self._pages.num_blocks,
            num_free_blocks=self._pages.num_available_blocks,
            num_steps=self._scheduler.num_steps,
            counters=WorkCounters(
                encoder_rows=rows.encoder_rows,
                decoder_prefill_rows=rows.decoder_prefill_rows,
                decoder_rows=rows.decoder_rows,
                transfer_bytes=self._transfer_bytes,
            ),
            num_encoder_rows=self._num_encoder_rows,
            num_row_layers=self._num_row_layers,
            num_cut_short_tokens=self._num_cut_short_tokens,
            num_decoder_rows=self._num_decoder_rows,
            num_queued_rows=self._scheduler.num_queued_rows,
            num_decoding=self._scheduler.num_decoding,
            num_parked=self._scheduler.num_parked,
            num_preemptions=self._scheduler.num_preemptions,
            pulls=self.exchange.counters,
            moves=self.exchange.move_counters,
            rates=self._rates.rates,
            disk=None if self._disk is None else self._disk.stats(),
            num_sessions=len(self.sessions()),
            leases=LeaseCounters(
                outcomes=tuple((str(k), n) for k, n in self._prefixes.leases.outcomes.items()),
                num_pinned_blocks=self._prefixes.blocks.num_pinned,
                prefetched=tuple(
                    (str(k), n) for k, n in self._prefixes.leases.expected.outcomes.items()
                ),
            ),
        )

    def check_integrity(self) -> None:
        """Raise RipresaError (INTERNAL) unless pools, queues and requests agree."""
        self._scheduler.check_integrity()
        self._prefixes.windows.check_integrity()
        self._prefixes.leases.check_integrity()
        if self._tails.held_bytes != sum(job.tail_bytes for job in self._by_id.values()):
            raise RipresaError(ErrorCode.INTERNAL, "bytes are set aside for tails of no request")
        self.exchange.check_integrity()
        if self._samples is not None:
            self._samples.check_integrity()
        num_current = 0
        for slot, job in self._by_slot.items():
            if not self._is_current(slot, job):
                # Pages that the request gave up, while something still reads them.
                continue
            num_current += 1
            if job.released.is_set():
                raise RipresaError(ErrorCode.INTERNAL, f"slot {slot} belongs to no live request")
            if self._by_id.get(job.request.request_id) is not job:
                raise RipresaError(ErrorCode.INTERNAL, f"slot {slot}'s request is not registered")
            if job.is_over and job.sequence.pages.num_holds == 0:
                raise RipresaError(ErrorCode.INTERNAL, f"slot {slot}'s pages were not freed")
        taken = self._pages.num_slots - self._pages.num_free_slots
        num_jobs = num_current + self._scheduler.num_parked
        if len(self._by_slot) != taken or len(self._by_id) != num_jobs:
            raise RipresaError(
                ErrorCode.INTERNAL,
                f"{taken} slots are taken, {len(self._by_slot)} are known; {num_jobs} requests "
                f"run with {len(self._by_id)} ids",
            )

    async def _run(self) -> None:
        try:
            while self._refusal is None:
                self._fail_overdue()
                self._prefixes.leases.lapse(self._clock())
                if self._prefetch is not None:
                    self._prefetch.advance()
                self._make_room()
                self._resume_parked()
                plan = self._scheduler.schedule() if self._may_step else None
                if plan is None:
                    await self._sleep()
                else:
                    await self._step(self._with_outputs(plan))
        except Exception as error:
            logger.exception("the engine's step loop ended by an error")
            self._break(f"the engine failed ({reason_of(error)}); restart the worker")

    @property
    def _may_step(self) -> bool:
        return self._spare is None or self._spare.is_left()

    def lend(self, on_idle: Callable[[], None]) -> SpareTime:
        """What this engine leaves of its step thread, for one other engine.

        Args:
            on_idle: called whenever no request is left.
        """
        self._on_idle = on_idle
        return SpareTime(self._thread, lambda: self.num_requests == 0)

    def wake(self) -> None:
        """Look again whether something can be computed."""
        self._wake.set()

    def _ended(self) -> None:
        """A request, or what was brought for one, is no longer here."""
        if self.num_requests == 0:
            self._on_idle()

    def _release_tail(self, job: Job) -> None:
        self._tails.give_back(job.tail_bytes)
        job.tail_bytes = 0

    def _make_room(self) -> None:
        """Let the last requests park until all others have the pages of their next row."""
        while (sequence := self._scheduler.make_room()) is not None:
            job, pages = self._by_id[sequence.request.request_id], sequence.pages
            payload = self._runner.export_image(pages.slot, pages.blocks, sequence.committed)
            own = pages.blocks[pages.num_adopted : sequence.committed // self._runner.window]
            blocks = self._runner.export_blocks(own).cpu()
            job.prefix.preempt(sequence, payload, blocks)
            self._scheduler.park(sequence)

    def _resume_parked(self) -> None:
        """Let parked requests go on, by priority and arrival, as far as there are pages."""
        while (sequence := self._scheduler.next_parked) is not None:
            job = self._by_id[sequence.request.request_id]
            plan = job.prefix.resumption(sequence)
            state = plan.parked
            try:
                self._scheduler.resume(sequence, plan.chain, None if state is not None else plan)
            except ResourceExhausted:
                return
            pages = sequence.pages
            self._by_slot[pages.slot] = job
            if state is not None:
                num_tokens = len(state.token_ids)
                self._runner.import_image(pages.slot, pages.blocks, num_tokens, state.payload)
                own = pages.blocks[state.first_block : num_tokens // self._runner.window]
                if state.blocks is not None and own:
                    self._runner.import_blocks(own, state.blocks)
            elif plan.window is not None:
                window = self._prefixes.windows.take(plan.window)
                self._runner.import_window(pages.slot, plan.passes[0].start, window)
            job.prefix.forget_preempted()

    def _with_outputs(self, plan: StepPlan) -> StepPlan:
        """The plan with the windows that its rows should leave behind, and the logits."""
        steps = []
        for step in plan.sequences:
            job = self._by_slot[step.slot]
            rows = (step.encoder_start, step.encoder_stop)
            cut = job.prefix.windows_to_cut(job.sequence, *rows, self._window_period)
            tells = job.on_logits is not None and step.num_decoder_rows > 0
            keeps = (
                self._samples is not None
                and step.sampling is not None
                and self._samples.wants(job.sequence)
            )
            if cut or tells or keeps:
                step = replace(
                    step, cut_windows=cut, return_logits=tells, return_sampled_logits=keeps
                )
            steps.append(step)
        return StepPlan(plan.step, tuple(steps))

    async def _sleep(self) -> None:
        """Until something can be computed or read ahead, a request is due or a lease lapses."""
        self._wake.clear()
        due = [job.due for job in self._by_id.values() if job.due is not None and not job.is_over]
        next_start = None if self._prefetch is None else self._prefetch.next_start
        due += [at for at in (self._prefixes.leases.next_lapse, next_start) if at is not None]
        timeout_s = max(0.0, min(due) - self._clock()) if due else None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._wake.wait()

    async def _step(self, plan: StepPlan) -> None:
        loop = asyncio.get_running_loop()
        try:
            inbound = {
                step.slot: self._by_slot[step.slot].listener.inbound_rows(
                    step.decoder_start, step.decoder_stop
                )
                for step in plan.sequences
                if step.inbound
            }
            masks = self._begin_masks(plan)
            began = loop.time()
            output = await loop.run_in_executor(
                self._thread, self._runner.execute, plan, inbound, masks
            )
            seconds = loop.time() - began
            errors = output.errors if masks is None else output.errors | masks.errors
            for slot, error in errors.items():
                if error.code is ErrorCode.INTERNAL:
                    logger.warning("step %d: slot %d cannot go on: %s", plan.step, slot, error)
                self.fail(self._by_slot[slot], error)
            progress = self._scheduler.complete(output.sampled)
        except Exception as error:
            logger.exception("step %d failed", plan.step)
            self._fail_step(plan, error)
            return
        self._rates.add(
            output.num_row_layers // self._runner.geometry.num_encoder_layers
            + output.num_decoder_rows,
            seconds,
            is_prefill=any(
                step.sampling is None or step.num_decoder_rows != 1 for step in plan.sequences
            ),
        )
        self._num_encoder_rows += output.num_encoder_rows
        self._num_row_layers += output.num_row_layers
        self._num_decoder_rows += output.num_decoder_rows
        for entry in progress:
            self._tell(entry, output)

    def _begin_masks(self, plan: StepPlan) -> FoundLater | None:
        """Begin to find what constraints allow the tokens that the step chooses."""
        rows = []
        for step in plan.sequences:
            job = self._by_slot[step.slot]
            if step.sampling is not None and job.matcher is not None:
                rows.append((step.slot, job.matcher, job.sequence))
        return self._constraints.begin(rows) if rows else None

    def _tell(self, progress: Progress, output: StepOutput) -> None:
        slot = progress.step.slot
        if slot in output.logprobs:
            progress = replace(progress, logprobs=output.logprobs[slot])
        job = self._by_slot[slot]
        if job.on_logits is not None and slot in output.logits:
            job.on_logits(progress.step.decoder_start, output.logits[slot])
        if self._samples is not None and slot in output.sampled_logits:
            self._samples.keep(job.sequence, output.sampled_logits[slot])
        self._publish(job)
        is_over = progress.finish is not None or (
            progress.is_prefill_done and self._role is WorkerRole.ENCODER
        )
        cut = output.windows.get(slot, {})
        job.prefix.keep_windows(job.sequence, cut, is_turn_over=is_over)
        if progress.is_prefill_done:
            self._finish_claim(job)
            if self._role is WorkerRole.DECODE:
                job.is_prefilled = True
                self._release_tail(job)
        if progress.finish is not None:
            if job.prefix.parks:
                pages, num_tokens = job.sequence.pages, job.sequence.committed
                payload = self._runner.export_image(pages.slot, pages.blocks, num_tokens)
                job.prefix.park(job.sequence, payload)
            job.prefix.ended(job.sequence)
            if self._samples is not None:
                self._samples.finished(job.sequence)
            self.retire(job)
        job.listener.on_progress(progress, output.encoder_output.get(slot), cut)

    def _publish(self, job: Job) -> None:
        """Let others find what is committed, here and in later lives of the worker."""
        published = job.prefix.publish(job.sequence)
        job.notify()
        self._store(published, job.prefix.opened_at)

    def _store(self, published: list[PublishedBlock], used_at: float) -> None:
        """Copy published blocks for the disk, behind the requests."""
        if self._disk is None or not published:
            return
        if not self._disk.has_room:
            self._disk.skip(len(published))
            return
        # A loan and not the request's own pages: its slot and id are free when it is over.
        chain = [block.record.identity for block in published]
        loan = self._pages.borrow(chain, is_use=False)
        task = asyncio.create_task(self._keep(self._disk, published, loan, used_at))
        self._keeping.add(task)
        task.add_done_callback(self._keeping.discard)

    async def _keep(
        self,
        disk: DiskTier,
        published: list[PublishedBlock],
        loan: PageLoan,
        used_at: float,
    ) -> None:
        """Copy borrowed blocks for the disk, a few between two steps; then let go of them."""
        loop = asyncio.get_running_loop()
        try:
            for first in range(0, len(published), BLOCKS_A_COPY):
                part = await disk.missing(published[first : first + BLOCKS_A_COPY], used_at)
                if part:
                    await loop.run_in_executor(self._thread, disk.keep, part, used_at)
        except Exception:
            logger.exception("%d blocks were not copied for the disk", len(published))
        finally:
            loan.end()

    def _fail_step(self, plan: StepPlan, error: Exception) -> None:
        if isinstance(error, Unavailable):
            self._scheduler.abandon()
            self._break(error.message)
            return
        what = f"step {plan.step} of {len(plan.sequences)} sequences failed"
        reason = f"{what}: {type(error).__name__}: {error}"
        for sequence in self._scheduler.abandon():
            job = self._by_slot[sequence.pages.slot]
            self.fail(job, RipresaError(ErrorCode.INTERNAL, reason))

    def _fail_overdue(self) -> None:
        now = self._clock()
        for job in tuple(self._by_id.values()):
            if job.due is None or now < job.due:
                continue
            if job.request.deadline is not None and now >= job.request.deadline:
                self.fail(job, _deadline_exceeded())
            else:
                self.fail(
                    job,
                    Unavailable("no encoder worker delivered the prompt's state in time; retry"),
                )

    def _break(self, reason: str, kind: type[Unavailable] = Unavailable) -> None:
        """Run no further step; refuse and fail everything as UNAVAILABLE."""
        self._refusal = reason
        self.fail_all(kind(reason))
        self._wake.set()

    def _finish_claim(self, job: Job) -> None:
        if job.request.claim is not None:
            self._listener.finish(job.request.claim)

    def _tell_listener(self, event: CacheEvent) -> None:
        record = event.record
        if self._giving is not None:
            self._giving.filled()
        if isinstance(event, BlockPublished):
            self._listener.held(record.identity, record.origin, HeldKind.BLOCK, Tier.DEVICE)
        else:
            self._listener.dropped(record.identity, HeldKind.BLOCK, Tier.DEVICE)

    def _on_release(self, slot: int) -> None:
        """The slot's pages go back to the pools."""
        job = self._by_slot.pop(slot)
        if job.is_over and job.sequence.pages.slot == slot and not job.released.is_set():
            self._forget(job)
        self._runner.release_slot(slot)

    def _forget(self, job: Job) -> None:
        if not job.is_prefilled:
            self._num_cut_short_tokens += job.sequence.counters.encoder_rows
        del self._by_id[job.request.request_id]
        job.released.set()
        self._ended()

    @staticmethod
    def _is_current(slot: int, job: Job) -> bool:
        """Whether a slot is the one that the request uses now, not one that it gave up."""
        is_parked = job.sequence.status is SequenceStatus.PARKED
        return job.sequence.pages.slot == slot and not is_parked and not job.released.is_set()


def _step_thread(role: WorkerRole) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"{role}-step")


def _check_leader(request: GenerationRequest, outcome: PrefixOutcome) -> None:
    """Raise LeaderGone if others' blocks will not come, so that only one request computes them."""
    leader = request.sources.leader
    # A request that goes on from its own blocks computes the rest by itself.
    if leader is None or leader.request_id == request.request_id or outcome.gone_at is None:
        return
    if outcome.gone_at >= leader.first:
        raise LeaderGone(
            f"block {outcome.gone_at} of the prompt will not come from {leader.holder.worker_id}; "
            "ask the directory who computes it now"
        )


def _deadline_exceeded() -> RipresaError:
    return RipresaError(
        ErrorCode.DEADLINE_EXCEEDED, "the request's deadline passed; nothing of it runs on"
    )
