"""Where should a prompt run? Every route's cost in seconds; the cheapest one wins, with its reason.

    route  =  decode worker  x  { appends by itself | each encoder }
    cost   =  queue + bytes / bandwidth + (new + recomputed rows) x seconds a row

What of the prompt is cached is one term of it, not a rule. A pure function of load reports and of
the directory's hints; the workers check what the hints say.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from ripresa.cluster.directory.events import Lookup
from ripresa.cluster.placement import computing_worker
from ripresa.cluster.routing.held_prefix import HeldPrefix, PrefixChain
from ripresa.cluster.routing.route_plan import Candidate, Cost, PlannedHit, RoutePlan
from ripresa.cluster.routing.worker_load import PlannerSettings, WorkerLoad
from ripresa.workers.address import WorkerAddress
from ripresa.workers.errors import Unavailable
from ripresa.workers.prefix_sources import (
    BlockSource,
    ImageSource,
    LeaderSource,
    PrefixSources,
)
from ripresa.workers.replay import PlanKind, Recipe, ReplayMode, TailVariant
from ripresa.workers.replay_plan import PrefillPlan
from ripresa.workers.replay_planner import plan_hit
from ripresa.workers.replay_query import PrefillQuery, ReplayGeometry
from ripresa.workers.scheduling.admission import too_large

MAX_ALTERNATIVES = 12
MAX_ENCODERS = 3
"""Encoders that a route is compared for: those that would be done first."""


@dataclass(frozen=True, slots=True)
class SessionHome:
    """The decode worker that keeps a session's state after `num_tokens` processed positions.

    Attributes:
        restarts: lineage of the blocks below it.
    """

    worker_id: str
    num_tokens: int
    restarts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Leader:
    """Another request that computes blocks [first, stop) of this prompt, and where."""

    request_id: str
    holder: WorkerAddress
    first: int
    stop: int


@dataclass(frozen=True, slots=True)
class RouteQuery:
    """A prompt that is to be placed.

    Attributes:
        num_tokens: prompt, and tokens streamed before.
        hashes: of its full blocks; () if nothing of it is to be reused.
        mode, interval, tail: how it is computed.
        lookup: the directory's hints; None for none.
        leader: whom the request follows; None for nobody.
        home: where its session's state is parked; None for nowhere.
        recipe: of a request that is executed again; None for the first time.
        avoid: workers that failed this request or refused it.
        decoder: the decode worker, if it is chosen already: then an encoder is wanted.
        max_total_tokens: positions that it may ever occupy where it generates.
    """

    geometry: ReplayGeometry
    num_tokens: int
    hashes: Sequence[bytes] = ()
    mode: ReplayMode = ReplayMode.BOUNDED
    interval: int | None = None
    tail: TailVariant = TailVariant.FLOORED
    lookup: Lookup | None = None
    leader: Leader | None = None
    home: SessionHome | None = None
    recipe: Recipe | None = None
    avoid: Set[str] = frozenset()
    decoder: str | None = None
    max_total_tokens: int = 0

    def fits(self, worker: WorkerLoad) -> bool:
        """Whether the worker's KV pool could ever hold the request."""
        return worker.holds(self.num_positions(worker))

    def num_positions(self, worker: WorkerLoad) -> int:
        """Positions that the request may occupy there."""
        if worker.is_encoder:
            return self.num_tokens
        return max(self.num_tokens, self.max_total_tokens)


class NoWorker(Unavailable):
    """Nobody is there who could take the request."""


class AllLeaving(NoWorker):
    """Every worker that could take the request takes no new ones."""


def nobody_among(workers: Iterable[WorkerLoad]) -> NoWorker:
    """Why none of these could take a request."""
    if any(worker.is_leaving and not worker.is_encoder for worker in workers):
        return AllLeaving("every decode worker is leaving; retry when others have joined")
    return NoWorker("no decode worker is ready; retry, or check the cluster's status")


def plan_route(
    query: RouteQuery, workers: Sequence[WorkerLoad], settings: PlannerSettings
) -> RoutePlan:
    """The cheapest route.

    Raises:
        InvalidArgument: the request fits no decode worker's KV pool.
        NoWorker: no decode worker is left, or no encoder if one is wanted.
    """
    fit = [worker for worker in workers if query.fits(worker) and not worker.is_leaving]
    alive = [worker for worker in fit if worker.worker_id not in query.avoid]
    decoders = [
        worker
        for worker in alive
        if not worker.is_encoder and query.decoder in (None, worker.worker_id)
    ]
    encoders = [worker for worker in alive if worker.is_encoder]
    if not decoders:
        _check_some_pool_fits(query, workers)
        raise nobody_among(workers)
    if query.decoder is not None and not encoders:
        raise NoWorker("no encoder worker is left for the prompt")
    routes = _Routes(query, decoders, encoders, settings, {w.worker_id: w for w in workers})
    ranked = sorted(routes.candidates(), key=routes.rank)
    chosen, rest = ranked[0], tuple(ranked[1 : 1 + MAX_ALTERNATIVES])
    decoder = next(worker for worker in decoders if worker.worker_id == chosen.decoder)
    return RoutePlan(
        chosen,
        _reason(chosen, rest, bool(encoders)),
        rest,
        None if chosen.encoder is not None else _max_chunk_rows(decoder, query, settings),
        tuple(_left_out(query, workers)),
    )


@dataclass(frozen=True, slots=True)
class _Work:
    """What one worker would do to compute the prompt's encoder rows."""

    hit: PlannedHit
    sources: PrefixSources
    chain: PrefixChain
    num_encoder_rows: int
    num_decoder_rows: int
    bring_s: float


@dataclass(slots=True)
class _Routes:
    query: RouteQuery
    decoders: list[WorkerLoad]
    encoders: list[WorkerLoad]
    settings: PlannerSettings
    known: Mapping[str, WorkerLoad]
    _held: HeldPrefix = field(init=False)
    _loads: Mapping[str, WorkerLoad] = field(init=False)
    _holders: dict[bool, str | None] = field(init=False)
    _plans: dict[tuple[PrefixChain, tuple[int, ...]], PrefillPlan] = field(init=False)
    _cold: _Work = field(init=False)

    def __post_init__(self) -> None:
        query = self.query
        everybody = (*self.decoders, *self.encoders)
        leaving = (worker for worker in self.known.values() if worker.is_leaving)
        self._loads = {worker.worker_id: worker for worker in everybody}
        self._plans = {}
        window = query.geometry.window
        if query.recipe is None:
            limit = max(0, query.num_tokens - window - query.geometry.rewind) // window
        else:
            limit = query.recipe.write_floor // window
        self._held = HeldPrefix(
            query.lookup,
            query.hashes,
            window,
            limit,
            query.mode,
            query.interval,
            None if query.recipe is None else query.recipe.restarts,
            {worker.worker_id: worker.address for worker in (*everybody, *leaving)},
        )
        self._holders = {True: self._holder(self.decoders), False: self._holder(self.encoders)}
        self._cold = _work_of(self._plan(PrefixChain(), {}), PrefixChain(), 0, PrefixSources(), 0.0)

    def candidates(self) -> list[Candidate]:
        works = [(worker, self._work(worker)) for worker in self.encoders]
        holder = self._holders[False]
        # When an encoder is done does not depend on the decode worker: the first few do for all.
        works.sort(key=lambda entry: self._ready_order(entry[0], entry[1], holder))
        found = []
        for decoder in self.decoders:
            if self.query.decoder is None:
                found.append(self._local(decoder))
            found += [self._split(decoder, *entry) for entry in works[:MAX_ENCODERS]]
        return self._with_notes(found)

    def _ready_order(
        self, encoder: WorkerLoad, work: _Work, holder: str | None
    ) -> tuple[bool, float, int, str]:
        """The holder that the placement rule prefers, then whoever is done first."""
        ready_s = encoder.queue_s + work.bring_s + encoder.prefill_s(work.num_encoder_rows, None)
        return encoder.worker_id != holder, ready_s, encoder.num_requests, encoder.worker_id

    def _holder(self, workers: Sequence[WorkerLoad]) -> str | None:
        """The one of these workers that should compute what it holds; None if none holds any."""
        best = self._held.best
        held = {worker.worker_id: self._held.share(worker.worker_id, best) for worker in workers}
        if not any(held.values()):
            return None
        work = {worker.worker_id: worker.queue_s for worker in workers}
        name = computing_worker(held, work, self.settings.max_lead, self.settings.max_lead_s)
        return name if held[name] else None

    def rank(self, candidate: Candidate) -> tuple[bool, float, int, int, str, str]:
        """Cheaper first; among equals whoever has fewer requests."""
        decoder, computing = self._loads[candidate.decoder], self._loads[candidate.computing]
        return (
            bool(candidate.note),
            candidate.cost.total_s,
            computing.num_requests,
            decoder.num_requests,
            candidate.decoder,
            candidate.computing,
        )

    def _with_notes(self, candidates: list[Candidate]) -> list[Candidate]:
        """Routes that other rules than cost exclude, while others remain, say why."""
        limit = self.settings.max_local_rows
        home = self._home(candidates)
        noted = []
        for candidate in candidates:
            note = ""
            holder = self._holders[candidate.encoder is None]
            if candidate.sources.blocks and holder not in (None, candidate.computing):
                note = f"{holder} holds more of it and is not far busier than the others"
            if home is not None and candidate is not home:
                note = f"the session's state is parked on {home.decoder}, which is not far busier"
            num_rows = self.query.num_tokens - candidate.hit.start
            if (
                limit is not None
                and candidate.encoder is None
                and self.encoders
                and num_rows > limit
                and candidate.hit.kind is not PlanKind.RESUME
            ):
                note = f"{num_rows} rows are more than planner.max_local_rows, {limit}"
            noted.append(replace(candidate, note=note) if note else candidate)
        return noted

    def _home(self, candidates: Sequence[Candidate]) -> Candidate | None:
        """The route that goes on from the session's parked state, if its worker has the time."""
        resuming = (c for c in candidates if c.hit.kind is PlanKind.RESUME)
        home = next((c for c in resuming if c.sources.image is None), None)
        if home is None:
            return None
        work = {worker.worker_id: worker.queue_s for worker in self.decoders}
        max_lead, max_lead_s = self.settings.max_lead, self.settings.max_lead_s
        name = computing_worker({home.decoder: 1}, work, max_lead, max_lead_s)
        return home if name == home.decoder else None

    def _local(self, decoder: WorkerLoad) -> Candidate:
        work = self._resume(decoder) or self._cheaper(decoder, self._moved(decoder))
        num_rows = work.num_encoder_rows + work.num_decoder_rows
        bound = _max_chunk_rows(decoder, self.query, self.settings)
        cost = Cost(
            queue_s=decoder.queue_s,
            bring_s=work.bring_s,
            prefill_s=decoder.prefill_s(num_rows, bound),
        )
        return Candidate(decoder.worker_id, None, work.hit, cost, work.sources)

    def _split(self, decoder: WorkerLoad, encoder: WorkerLoad, work: _Work) -> Candidate:
        total = self.query.num_tokens // self.query.geometry.window
        lacking = total - self._held.share(decoder.worker_id, work.chain)
        sizes = encoder.sizes
        before = encoder.queue_s + work.bring_s
        prefill_s = encoder.prefill_s(work.num_encoder_rows, None)
        tail_s = decoder.prefill_s(work.num_decoder_rows, None)
        hand_over_s = self._transfer_s(lacking * sizes.block_bytes + sizes.hand_over_bytes)
        # The decode worker's queue goes on while the encoder computes.
        waits_s = max(0.0, decoder.queue_s - before - prefill_s - hand_over_s)
        cost = Cost(encoder.queue_s, work.bring_s, prefill_s, hand_over_s, waits_s + tail_s)
        return Candidate(decoder.worker_id, encoder.worker_id, work.hit, cost, work.sources)

    def _resume(self, decoder: WorkerLoad) -> _Work | None:
        """The session going on from its parked state; None if it is not parked there."""
        query, home = self.query, self.query.home
        if home is None or home.worker_id != decoder.worker_id or query.recipe is not None:
            return None
        if home.num_tokens >= query.num_tokens or not _may_resume(query):
            return None
        new = query.num_tokens - home.num_tokens
        hit = PlannedHit(PlanKind.RESUME, home.num_tokens)
        num_decoder_rows = min(new, query.geometry.window)
        return _Work(hit, PrefixSources(), PrefixChain(), new, num_decoder_rows, 0.0)

    def _moved(self, decoder: WorkerLoad) -> _Work | None:
        """The session going on from its parked state, brought from its home; None if it cannot."""
        query, home = self.query, self.query.home
        if home is None or home.worker_id not in self.known:
            return None
        work = self._resume(replace(decoder, address=self.known[home.worker_id].address))
        if work is None:
            return None
        window, holder = query.geometry.window, self.known[home.worker_id].address
        num_blocks, sizes = home.num_tokens // window, decoder.sizes
        restarts = tuple(r for r in home.restarts if r < num_blocks * window)
        chain = PrefixChain(restarts, num_blocks)
        num_local = self._held.share(decoder.worker_id, chain)
        blocks = (BlockSource(holder, restarts, 0, num_blocks),) if num_blocks else ()
        bring_s = self._transfer_s(sizes.image_bytes)
        if num_local < num_blocks:
            bring_s += self._transfer_s((num_blocks - num_local) * sizes.block_bytes)
        hit = replace(work.hit, num_blocks=num_blocks, num_local=num_local, restarts=restarts)
        sources = PrefixSources(blocks, image=ImageSource(holder, home.num_tokens))
        return replace(work, hit=hit, sources=sources, chain=chain, bring_s=bring_s)

    def _cheaper(self, decoder: WorkerLoad, moved: _Work | None) -> _Work:
        """What a decode worker does without the session's state, or with it if that is sooner."""
        work = self._work(decoder)
        if moved is None or self._seconds(decoder, moved) > self._seconds(decoder, work):
            return work
        return moved

    def _work(self, worker: WorkerLoad) -> _Work:
        """The cheaper of what it holds by itself, and of that with what others hold."""
        alone = self._with_chain(worker, self._held.local(worker.worker_id), brings=False)
        together = self._with_chain(worker, self._held.best, brings=True)
        return self._led(min(together, alone, key=lambda work: self._seconds(worker, work)))

    def _seconds(self, worker: WorkerLoad, work: _Work) -> float:
        return work.bring_s + worker.row_s * work.num_encoder_rows

    def _with_chain(self, worker: WorkerLoad, chain: PrefixChain, *, brings: bool) -> _Work:
        if not chain.num_blocks:
            return self._cold
        name, held, sizes = worker.worker_id, self._held, worker.sizes
        num_local = held.share(name, chain)
        blocks: tuple[BlockSource, ...] = ()
        if brings:
            blocks, num_blocks = held.bring(name, chain)
            chain = held.cut(chain, num_blocks)
        holders = held.windows(name, chain)
        if not brings:
            holders = {boundary: None for boundary, at in holders.items() if at is None}
        plan = self._plan(chain, holders)
        sources = PrefixSources(blocks)
        bring_s = sum(
            self._transfer_s((part.stop - part.first) * sizes.block_bytes) for part in blocks
        )
        boundary = plan.window_from
        at = None if boundary is None else holders.get(boundary)
        if boundary is not None and at is not None:
            window = held.window_source(chain, boundary, at)
            sources = replace(sources, windows=(window,))
            bring_s += self._transfer_s(sizes.window_bytes)
        return _work_of(plan, chain, num_local, sources, bring_s)

    def _led(self, work: _Work) -> _Work:
        """The same behind a leader: what it computes is waited for, not computed."""
        leader, window = self.query.leader, self.query.geometry.window
        if leader is None or leader.stop <= work.hit.num_blocks:
            return work
        followed = LeaderSource(leader.holder, leader.request_id, leader.first, leader.stop)
        spared = (leader.stop - max(work.hit.num_blocks, leader.first)) * window
        return replace(
            work,
            sources=replace(work.sources, leader=followed),
            num_encoder_rows=max(window, work.num_encoder_rows - spared),
        )

    def _plan(self, chain: PrefixChain, holders: Mapping[int, WorkerAddress | None]) -> PrefillPlan:
        key = (chain, tuple(holders))
        found = self._plans.get(key)
        if found is None:
            query = self.query
            hinted = self._held.hinted(chain)
            window = query.geometry.window
            found = plan_hit(
                PrefillQuery(
                    query.geometry,
                    query.num_tokens,
                    hinted,
                    frozenset(hinted[boundary // window - 1] for boundary in holders),
                    mode=query.mode,
                    tail=query.tail,
                    anchor_interval=query.interval,
                ),
                chain.num_blocks,
            )
            self._plans[key] = found
        return found

    def _transfer_s(self, num_bytes: int) -> float:
        settings = self.settings
        return settings.round_trip_s + num_bytes / settings.bandwidth_bytes_per_s


def _check_some_pool_fits(query: RouteQuery, workers: Sequence[WorkerLoad]) -> None:
    """Raise InvalidArgument if there are decode workers, all with too small a pool."""
    decoders = [worker for worker in workers if not worker.is_encoder]
    if not decoders or any(map(query.fits, decoders)):
        return
    largest = max(worker.capacity_tokens or 0 for worker in decoders)
    num_positions = query.num_positions(decoders[0])
    raise too_large(query.num_tokens, num_positions, largest, generates=True)


def _left_out(query: RouteQuery, workers: Sequence[WorkerLoad]) -> Iterator[str]:
    """Workers that cannot take the request whatever it would cost there, and why."""
    for worker in workers:
        pool = "encoders" if worker.is_encoder else "decoders"
        if not query.fits(worker):
            yield (
                f"{worker.worker_id}: its KV pool holds {worker.capacity_tokens} tokens and the "
                f"request may take {query.num_positions(worker)} ({pool}.num_blocks)"
            )
        elif worker.is_leaving:
            yield f"{worker.worker_id}: is leaving and takes nothing new"
        elif worker.worker_id in query.avoid:
            yield f"{worker.worker_id}: failed or refused this request before"


def _may_resume(query: RouteQuery) -> bool:
    """Whether the request's mode goes on from parked states (replay rules, section 6)."""
    match query.mode:
        case ReplayMode.BOUNDED:
            return True
        case ReplayMode.EXACT:
            return query.tail is TailVariant.EXACT
        case ReplayMode.CANONICAL:
            return False


def _work_of(
    plan: PrefillPlan, chain: PrefixChain, num_local: int, sources: PrefixSources, bring_s: float
) -> _Work:
    """What a prefill is to a worker that holds `num_local` blocks of the chain by itself."""
    reused = plan.num_reused_blocks
    hit = PlannedHit(plan.recipe.kind, plan.start, reused, min(num_local, reused), chain.restarts)
    # What layers leave out of a rebuilt window costs nothing.
    num_encoder_rows = -(-plan.num_row_layers // plan.num_encoder_layers)
    first, stop = plan.decoder_rows
    return _Work(hit, sources, chain, num_encoder_rows, stop - first, bring_s)


def _max_chunk_rows(
    decoder: WorkerLoad, query: RouteQuery, settings: PlannerSettings
) -> int | None:
    """Rows of a chunk with which a step beside streams keeps the inter-token target."""
    if not decoder.row_s:
        return None
    rows = (settings.inter_token_target_s - decoder.decode_step_s) / decoder.row_s
    window = query.geometry.window
    return max(2 * window, int(max(0.0, rows)) // window * window)


def _reason(chosen: Candidate, rest: Sequence[Candidate], has_encoders: bool) -> str:
    where = "local" if chosen.encoder is None else "on an encoder"
    if chosen.encoder is None and not has_encoders:
        where = "local, since there are no encoders"
    hit = chosen.hit
    if hit.kind is PlanKind.RESUME:
        image = chosen.sources.image
        whence = "is parked there" if image is None else f"comes from {image.holder.worker_id}"
        what = f"the session's state of {hit.start} tokens {whence}"
    else:
        what = f"{hit.kind} from {hit.start}"
    reason = f"{where}; {what}; {chosen.cost}"
    cheaper = [other for other in rest if other.cost.total_s < chosen.cost.total_s]
    if cheaper:
        return f"{reason}; cheaper ones were left out: {cheaper[0].name}: {cheaper[0].note}"
    return f"{reason}; next best {rest[0].name}: {rest[0].cost}" if rest else reason
