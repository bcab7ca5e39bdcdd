"""What does a worker hold of a request's tokens, and when do others find what it computes?

    admitted ── hash ── match ── plan ──▶ adopted chain + own blocks
    step done ── full blocks below the committed position ──▶ published in the recipe's lineage

The first writer of an identity stays. The partial block at the end is never published.
"""

from __future__ import annotations

from ripresa.workers.cache.block_cache import BlockCache
from ripresa.workers.cache.block_hash import BlockHasher, BlockIdentity, HashContext
from ripresa.workers.cache.block_record import BlockRecord, Producer
from ripresa.workers.prompt_plan import (
    PromptPlan,
    block_identity,
    first_execution,
    held_chain,
    re_execution,
)
from ripresa.workers.replay import Recipe
from ripresa.workers.replay_planner import plan_prefill
from ripresa.workers.replay_query import PrefillQuery, ReplayGeometry
from ripresa.workers.request import GenerationRequest
from ripresa.workers.sequence import Sequence


class PrefixCache:
    """A worker's cached prefixes, request by request.

    Args:
        blocks: the worker's blocks.
        geometry: the model, as the replay rules see it.
        layout_digest: names model, weights, KV format and geometry.
    """

    def __init__(self, blocks: BlockCache, geometry: ReplayGeometry, layout_digest: bytes) -> None:
        self.blocks = blocks
        self.geometry = geometry
        self.weights = layout_digest.hex()
        self._layout_digest = layout_digest

    def open(self, request: GenerationRequest) -> RequestPrefix:
        """Hash a request's blocks. Raises InvalidArgument for an impossible token id."""
        context = HashContext(
            model="",
            weights=self.weights,
            kv_format="",
            geometry=self._layout_digest,
            window=self.geometry.window,
            tenant_salt=request.tenant_salt,
        )
        return RequestPrefix(self, request, BlockHasher(context))


class RequestPrefix:
    """One request's blocks by name."""

    def __init__(self, cache: PrefixCache, request: GenerationRequest, hasher: BlockHasher) -> None:
        self._cache = cache
        self._request = request
        self._hasher = hasher
        self._hashes = list(hasher.extend(request.token_ids))
        self._num_published = 0

    @property
    def _window(self) -> int:
        return self._cache.geometry.window

    def plan(self) -> PromptPlan:
        """How this worker computes the request's encoder rows, from what it holds now."""
        request, geometry = self._request, self._cache.geometry
        blocks = self._cache.blocks if request.cache.reads else frozenset[BlockIdentity]()
        if request.recipe is not None:
            return re_execution(
                request.recipe, request.num_tokens, self._window, self._hashes, blocks, frozenset()
            )
        query = PrefillQuery(
            geometry=geometry,
            num_tokens=request.num_tokens,
            chain=self._match(),
            mode=request.cache.mode,
            tail=request.tail,
            seed=request.sampling.seed,
        )
        return first_execution(plan_prefill(query), query.chain)

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

    def publish(self, sequence: Sequence) -> None:
        """Let others find the full blocks that are committed by now."""
        if not self._request.cache.writes:
            return
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
            )
            offer = self._cache.blocks.offer(sequence.pages.blocks[number], record)
            self._cache.blocks.acknowledge(offer, rank=0)
        self._num_published = max(self._num_published, num_full)

    def _match(self) -> tuple[BlockIdentity, ...]:
        request, geometry = self._request, self._cache.geometry
        if not request.cache.reads:
            return ()
        cap = request.num_tokens - (geometry.window + geometry.rewind)
        return self._cache.blocks.match(
            self._hashes, request.cache.mode, max_blocks=max(0, cap) // geometry.window
        )
