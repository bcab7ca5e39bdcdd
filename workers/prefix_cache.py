"""What does a worker hold of a request's tokens, and when do others find what it computes?

    admitted ── hash ── match ── plan ──▶ adopted chain + own blocks
    step done ── full blocks below the committed position ──▶ published in the recipe's lineage

The first writer of an identity stays. The partial block at the end is never published.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from ripresa.workers.cache.block_cache import BlockCache
from ripresa.workers.cache.block_hash import BlockHasher, BlockIdentity, worker_context
from ripresa.workers.cache.block_record import BlockRecord, Producer, PublishedBlock, PublishOutcome
from ripresa.workers.cache.cache_events import CacheListener, Origin, origin, tenant_digest
from ripresa.workers.cache.parked_states import (
    ParkedState,
    ParkedStates,
    Preempted,
    token_digest,
)
from ripresa.workers.cache.session_leases import Arrival, EndedTurn, SessionLeases
from ripresa.workers.cache.window_pool import WindowPool
from ripresa.workers.config import (
    DEFAULT_ANCHOR_INTERVAL,
    LeaseConfig,
    ParkConfig,
    WindowConfig,
    WindowPolicy,
)
from ripresa.workers.errors import ConfigError
from ripresa.workers.prefix_place import WantedPrefix
from ripresa.workers.prompt_plan import (
    PromptPlan,
    block_identity,
    first_execution,
    held_chain,
    re_execution,
)
from ripresa.workers.replay import PlanKind, Recipe, ReplayMode
from ripresa.workers.replay_planner import plan_prefill
from ripresa.workers.replay_query import PrefillQuery, ReplayGeometry
from ripresa.workers.request import GenerationRequest
from ripresa.workers.sequence import Sequence
from ripresa.workers.transfer.base import PulledImage

NUM_LAST_WINDOWS = 3
"""Boundaries of a finished turn whose windows are kept, so that any append finds one."""

MAX_POOLS_REMEMBERED = 4
"""Ended turns are remembered while their blocks are at most so many times the worker's."""


class PrefixCache:
    """A worker's cached prefixes, request by request.

    Args:
        blocks: the worker's blocks.
        geometry: the model, as the replay rules see it.
        layout_digest: names model, weights, KV format and geometry.
        windows: which encoder windows are kept.
        parked: how sessions' states are kept.
        leases: how long before all else.
        num_blocks: of the worker's pool.
        clock: seconds since the epoch.
        listener: hears of the windows; blocks tell by themselves.
        anchor_interval: A of mode canonical, a multiple of W.
    """

    def __init__(
        self,
        blocks: BlockCache,
        geometry: ReplayGeometry,
        layout_digest: bytes,
        windows: WindowConfig,
        parked: ParkConfig,
        leases: LeaseConfig,
        num_blocks: int,
        clock: Callable[[], float],
        listener: CacheListener,
        anchor_interval: int = DEFAULT_ANCHOR_INTERVAL,
    ) -> None:
        if anchor_interval < 1 or anchor_interval % geometry.window:
            raise ConfigError(
                "engine.anchor_interval",
                f"{anchor_interval} is no multiple of the model's window {geometry.window}",
            )
        self.anchor_interval = anchor_interval
        self.parked: ParkedStates[torch.Tensor] = ParkedStates(parked.capacity_bytes)
        self.time_to_live_s = parked.time_to_live_s
        self.clock = clock
        self.blocks = blocks
        self.leases = SessionLeases(
            blocks, self.parked, MAX_POOLS_REMEMBERED * num_blocks, leases.max_time_s
        )
        self.windows = WindowPool(
            0 if windows.policy is WindowPolicy.ZERO else windows.capacity_bytes, listener
        )
        self.window_config = windows
        self.geometry = geometry
        self.weights = layout_digest.hex()
        self.layout_digest = layout_digest

    def open(self, request: GenerationRequest) -> RequestPrefix:
        """Hash a request's blocks. Raises InvalidArgument for an impossible token id."""
        context = worker_context(self.layout_digest, self.geometry.window, request.tenant_salt)
        return RequestPrefix(self, request, BlockHasher(context))


class RequestPrefix:
    """One request's blocks by name.

    Attributes:
        opened_at: when the request came, by the cache's clock.
    """

    def __init__(self, cache: PrefixCache, request: GenerationRequest, hasher: BlockHasher) -> None:
        self._cache = cache
        self._request = request
        self._hasher = hasher
        self.opened_at = cache.clock()
        self._tenant = tenant_digest(request.tenant_salt)
        self._hashes = list(hasher.extend(request.token_ids))
        self._num_published = 0
        self._handed_over: int | None = None
        self._last_windows: deque[tuple[int, torch.Tensor]] = deque(maxlen=NUM_LAST_WINDOWS)

    @property
    def hashes(self) -> tuple[bytes, ...]:
        """Of the full blocks known so far, in order."""
        return tuple(self._hashes)

    def origin(self, number: int) -> Origin:
        """Where block `number` stands among all prompts."""
        return origin(self._tenant, self._hashes, number)

    @property
    def _window(self) -> int:
        return self._cache.geometry.window

    def plan(self) -> PromptPlan:
        """How this worker computes the request's encoder rows, from what it holds now."""
        request, geometry = self._request, self._cache.geometry
        nothing: frozenset[BlockIdentity] = frozenset()
        blocks = self._cache.blocks if request.cache.reads else nothing
        windows = self._cache.windows if request.cache.reads else nothing
        if request.recipe is not None:
            return re_execution(
                request.recipe, request.num_tokens, self._window, self._hashes, blocks, windows
            )
        state = self._parked_state()
        if state is not None:
            return state
        query = PrefillQuery(
            geometry=geometry,
            num_tokens=request.num_tokens,
            chain=self._match(),
            windows=windows,
            mode=request.cache.mode,
            tail=request.tail,
            seed=request.sampling.seed,
            anchor_interval=self._interval,
        )
        plan = first_execution(plan_prefill(query), query.chain)
        if plan.recipe.kind is PlanKind.BOUNDED:
            self._cache.windows.miss(plan.chain[-1])
        return plan

    def park(self, sequence: Sequence, payload: torch.Tensor) -> None:
        """Keep the state of a turn that is over for the session's next one."""
        request, cache = self._request, self._cache
        assert request.session_id is not None
        state = ParkedState(
            token_ids=tuple(sequence.token_ids[: sequence.committed]),
            recipe=sequence.recipe,
            payload=payload,
            expires=cache.clock() + cache.time_to_live_s,
        )
        cache.parked.put(request.tenant_salt, request.session_id, state)

    def begun(self) -> None:
        """The request was admitted: its session goes on, or something else begins."""
        request = self._request
        arrival = Arrival(
            request.tenant_salt,
            request.session_id,
            request.token_ids,
            self._hashes,
            self._window,
        )
        self._cache.leases.arrived(arrival, self.opened_at)

    def ended(self, sequence: Sequence) -> None:
        """The turn is over, and its state parked: its session may go on from what is held."""
        request, cache = self._request, self._cache
        if not request.cache.writes:
            return
        num_blocks = sequence.committed // self._window
        hashes = self._hashes[:num_blocks]
        turn = EndedTurn(
            request_id=request.request_id,
            tenant_salt=request.tenant_salt,
            session_id=request.session_id,
            chain=held_chain(sequence.recipe, hashes, self._window, cache.blocks),
            num_blocks=num_blocks,
            last_block=hashes[-1] if hashes else None,
            tail=tuple(sequence.token_ids[num_blocks * self._window : sequence.committed]),
            expected_s=request.expect_next_within_s,
        )
        cache.leases.turn_over(turn, cache.clock())

    def wanted_image(self) -> PulledImage | None:
        """The session's state that a source of the request may have; None if none is wanted."""
        request, source = self._request, self._request.sources.image
        if source is None or request.recipe is not None or not self._may_resume:
            return None
        if not 0 < source.num_tokens < request.num_tokens:
            return None
        held = self._held_state()
        if held is not None and len(held.token_ids) >= source.num_tokens:
            return None
        assert request.session_id is not None
        digest = token_digest(request.token_ids[: source.num_tokens])
        return PulledImage(request.tenant_salt, request.session_id, source.num_tokens, digest)

    def take_image(self, num_tokens: int, recipe: Recipe, payload: torch.Tensor) -> None:
        """Keep a state of the session that another worker had parked."""
        request, cache = self._request, self._cache
        assert request.session_id is not None
        state = ParkedState(
            token_ids=request.token_ids[:num_tokens],
            recipe=recipe,
            payload=payload,
            expires=cache.clock() + cache.time_to_live_s,
        )
        cache.parked.put(request.tenant_salt, request.session_id, state)

    def preempt(self, sequence: Sequence, payload: torch.Tensor, blocks: torch.Tensor) -> None:
        """Keep the state, and the own whole blocks, of a request that has to give up its pages."""
        state = ParkedState(
            token_ids=tuple(sequence.token_ids[: sequence.committed]),
            recipe=sequence.recipe,
            payload=payload,
            expires=math.inf,
            first_block=sequence.pages.num_adopted,
            blocks=blocks,
        )
        self._cache.parked.put(self._request.tenant_salt, self._preempted, state)

    def resumption(self, sequence: Sequence) -> PromptPlan:
        """How a preempted request goes on: from its kept state, or by its recipe once more."""
        request, cache, recipe = self._request, self._cache, sequence.recipe
        tokens = tuple(sequence.token_ids)
        state = cache.parked.find(request.tenant_salt, self._preempted, tokens, cache.clock())
        self._num_published = 0
        if state is not None:
            chain = self.chain(recipe)[: state.first_block]
            if len(chain) == state.first_block:
                return PromptPlan(recipe, chain, (), parked=state)
        nothing: frozenset[BlockIdentity] = frozenset()
        return re_execution(
            recipe,
            sequence.num_tokens,
            self._window,
            self._hashes,
            cache.blocks if request.cache.reads else nothing,
            cache.windows if request.cache.reads else nothing,
        )

    def forget_preempted(self) -> None:
        """The request goes on, or is over. Idempotent."""
        self._cache.parked.drop(self._request.tenant_salt, self._preempted)

    @property
    def _preempted(self) -> Preempted:
        return Preempted(self._request.request_id)

    @property
    def parks(self) -> bool:
        """Whether the request's state is worth keeping when its turn is over."""
        cache = self._request.cache
        if self._request.session_id is None or cache.mode is ReplayMode.CANONICAL:
            return False
        return cache.writes and cache.resumes

    def _parked_state(self) -> PromptPlan | None:
        """The plan of a session that goes on from its parked state; None if it cannot."""
        request, cache = self._request, self._cache
        state = self._held_state()
        if state is None:
            return None
        num_blocks = len(state.token_ids) // self._window
        chain = held_chain(state.recipe, self._hashes[:num_blocks], self._window, cache.blocks)
        if not state.image.is_covered_by(chain, self._window):
            return None
        query = PrefillQuery(
            geometry=cache.geometry,
            num_tokens=request.num_tokens,
            chain=chain,
            image=state.image,
            mode=request.cache.mode,
            tail=request.tail,
            seed=request.sampling.seed,
        )
        plan = plan_prefill(query)
        if plan.recipe.kind is not PlanKind.RESUME:
            return None
        return replace(first_execution(plan, chain), parked=state)

    @property
    def _may_resume(self) -> bool:
        """Whether the request may go on from a parked state."""
        use = self._request.cache
        if self._request.session_id is None or use.mode is ReplayMode.CANONICAL:
            return False
        return use.resumes and use.reads

    def _held_state(self) -> ParkedState[torch.Tensor] | None:
        """The session's state that is parked here and that the request could go on from."""
        request, cache = self._request, self._cache
        if request.session_id is None or not self._may_resume:
            return None
        return cache.parked.find(
            request.tenant_salt, request.session_id, request.token_ids, cache.clock()
        )

    def wanted(self) -> WantedPrefix:
        """Which blocks are worth bringing for the request: those that its plan could reuse."""
        request, cache = self._request, self._cache
        hashes = self._hashes[: request.num_tokens // self._window]
        if request.recipe is None:
            state = self._held_state()
            # The cap is no rule for a session that goes on: it needs all blocks below its state.
            num_parked = 0 if state is None else len(state.token_ids) // self._window
            hashes = hashes[: max(self._num_usable_blocks, num_parked)]
        return WantedPrefix(
            request_id=request.request_id,
            window=self._window,
            hashes=hashes,
            mode=request.cache.mode,
            recipe=request.recipe,
            sources=request.sources,
            blocks=cache.blocks,
            windows=cache.windows,
            interval=self._interval,
        )

    def held(self, wanted: WantedPrefix) -> tuple[BlockIdentity, ...]:
        """The longest chain of `wanted` that is held here."""
        if wanted.recipe is None:
            return self._cache.blocks.match(wanted.hashes, wanted.mode, wanted.interval)
        return held_chain(wanted.recipe, wanted.hashes, wanted.window, self._cache.blocks)

    def expected_chain(self) -> tuple[BlockIdentity, ...]:
        """Blocks that a hand-over will probably not have to bring."""
        if self._request.recipe is not None:
            return self.chain(self._request.recipe)
        return self._match()

    def chain(self, recipe: Recipe) -> tuple[BlockIdentity, ...]:
        """All leading blocks that are held in the recipe's lineage."""
        if not self._request.cache.reads:
            return ()
        return held_chain(recipe, self._hashes, self._window, self._cache.blocks)

    def publish(self, sequence: Sequence) -> list[PublishedBlock]:
        """Let others find the full blocks that are committed by now; those that are new."""
        published: list[PublishedBlock] = []
        if not self._request.cache.writes:
            return published
        num_full = sequence.committed // self._window
        if num_full > len(self._hashes):
            known = self._hasher.num_tokens
            self._hashes += self._hasher.extend(sequence.token_ids[known : sequence.committed])
        first = max(self._num_published, sequence.pages.num_adopted)
        for number in range(first, num_full):
            is_prompt = (number + 1) * self._window <= sequence.prefill_stop
            record = BlockRecord(
                identity=block_identity(sequence.recipe, self._hashes, number, self._window),
                producer=Producer.PREFILL if is_prompt else Producer.DECODE,
                weights=self._cache.weights,
                origin=self.origin(number),
            )
            offer = self._cache.blocks.offer(sequence.pages.blocks[number], record)
            if self._cache.blocks.acknowledge(offer, rank=0) is PublishOutcome.PUBLISHED:
                block = sequence.pages.blocks[number]
                published.append(PublishedBlock(number, block, record))
        self._num_published = max(self._num_published, num_full)
        return published

    def windows_to_cut(
        self, sequence: Sequence, start: int, stop: int, period: int | None = None
    ) -> tuple[int, ...]:
        """Boundaries whose windows encoder rows [start, stop) should leave behind.

        Args:
            period: those at its multiples are handed over.
        """
        if not self._request.cache.writes or start == stop:
            return ()
        first = max(start // self._window + 1, -(-self._native_from(sequence) // self._window) + 1)
        exact_from = sequence.encoder_pass.exact_from
        if exact_from is not None:
            # Below it some layers leave out rows of the window.
            first = max(first, exact_from // self._window + 1)
        boundaries = (number * self._window for number in range(first, stop // self._window + 1))
        last = sequence.prefill_stop - NUM_LAST_WINDOWS * self._window
        return tuple(
            x
            for x in boundaries
            if self._is_kept(sequence, x)
            or (self._keeps_any and x > last)
            or (period is not None and x % period == 0)
        )

    def keep_windows(
        self, sequence: Sequence, cut: Mapping[int, torch.Tensor], *, is_turn_over: bool
    ) -> None:
        """Take the windows that a committed step left, after `publish`."""
        for boundary, payload in sorted(cut.items()):
            self._last_windows.append((boundary, payload))
            if self._is_kept(sequence, boundary):
                self._put(sequence, boundary, payload)
        if is_turn_over:
            for boundary, payload in self._last_windows:
                self._put(sequence, boundary, payload)
            self._last_windows.clear()

    def keep_handed_over(self, sequence: Sequence, boundary: int, payload: torch.Tensor) -> None:
        """Take the newest window of a prompt under way, in place of the one before.

        If the sender dies, another one goes on from it.
        """
        if not self._request.cache.writes:
            return
        before, self._handed_over = self._handed_over, boundary
        self._put(sequence, boundary, payload.detach().cpu().clone())
        if before is not None and not self._is_kept(sequence, before):
            number = before // self._window - 1
            identity = block_identity(sequence.recipe, self._hashes, number, self._window)
            self._cache.windows.drop(identity)

    def _put(self, sequence: Sequence, boundary: int, payload: torch.Tensor) -> None:
        number = boundary // self._window - 1
        identity = block_identity(sequence.recipe, self._hashes, number, self._window)
        self._cache.windows.put(identity, payload, self.origin(number))

    @property
    def _keeps_any(self) -> bool:
        return self._cache.window_config.policy is not WindowPolicy.ZERO

    def _is_kept(self, sequence: Sequence, boundary: int) -> bool:
        """Whether the policy wants a window, wherever the turn ends."""
        config = self._cache.window_config
        match config.policy:
            case WindowPolicy.ZERO:
                return False
            case WindowPolicy.FULL:
                return True
            case WindowPolicy.PERIODIC:
                return boundary % config.period == 0
            case WindowPolicy.JUNCTION:
                number = boundary // self._window - 1
                return number < len(self._hashes) and self._cache.windows.was_missed(
                    block_identity(sequence.recipe, self._hashes, number, self._window)
                )

    def _native_from(self, sequence: Sequence) -> int:
        """Rows from here on are no replay: others may go on from what they leave in the rings."""
        recipe, rows = sequence.recipe, sequence.encoder_pass
        if sequence.is_inbound and rows.stop <= sequence.prefill_stop:
            # The hit rule leaves more than one whole native window at the end of a prompt.
            return max(0, sequence.prefill_stop - self._window)
        if rows.start == 0 or rows.swa_floor < rows.start:
            # They go on from a window, or from a parked state.
            return rows.start
        is_direct = (rows.start, rows.write_floor) == (recipe.start, recipe.write_floor)
        if is_direct and recipe.kind is PlanKind.REBUILD:
            return rows.write_floor
        return rows.start + self._window

    @property
    def _interval(self) -> int | None:
        """A, if the request's mode restarts there."""
        is_canonical = self._request.cache.mode is ReplayMode.CANONICAL
        return self._cache.anchor_interval if is_canonical else None

    def _match(self) -> tuple[BlockIdentity, ...]:
        request = self._request
        if not request.cache.reads:
            return ()
        return self._cache.blocks.match(
            self._hashes,
            request.cache.mode,
            self._interval,
            max_blocks=self._num_usable_blocks,
        )

    @property
    def _num_usable_blocks(self) -> int:
        """Blocks that a first execution may reuse by the hit rule's cap."""
        geometry = self._cache.geometry
        cap = self._request.num_tokens - (geometry.window + geometry.rewind)
        return max(0, cap) // geometry.window
