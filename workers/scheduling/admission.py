"""May this request run on this worker at all, and how many positions must it reserve?"""

from __future__ import annotations

from ripresa.workers.errors import InvalidArgument
from ripresa.workers.replay import (
    RULES_VERSION,
    PlanKind,
    Recipe,
    ReplayMode,
    TailVariant,
    canonical_restarts,
    decoder_start,
)
from ripresa.workers.replay_query import ReplayGeometry
from ripresa.workers.request import GenerationRequest


def check_request(request: GenerationRequest, geometry: ReplayGeometry, max_model_len: int) -> None:
    """Raise InvalidArgument, naming the field, for a request that no worker can run."""
    _check_tokens(request, max_model_len)
    if request.recipe is not None:
        check_recipe(request.recipe, request.num_prompt_tokens, geometry)
    else:
        check_tail(request.tail, request.cache.mode, "tail")


def check_tail(tail: TailVariant, mode: ReplayMode, field: str) -> None:
    """Raise InvalidArgument for a tail variant that the mode cannot have."""
    if tail is TailVariant.EXACT and mode is not ReplayMode.EXACT:
        raise InvalidArgument(
            field,
            f"tail 'exact' equals the untrimmed model only in mode 'exact', and the mode is "
            f"{mode.value!r}; ask for that mode or for another tail",
        )


def check_recipe(recipe: Recipe, num_prompt_tokens: int, geometry: ReplayGeometry) -> None:
    """Raise InvalidArgument, naming the field, for a recipe that no execution could follow."""
    window = geometry.window
    if recipe.rules_version != RULES_VERSION:
        raise InvalidArgument(
            "recipe.rules_version",
            f"{recipe.rules_version!r} differs from this worker's {RULES_VERSION!r}; run one "
            "version of ripresa in the whole cluster",
        )
    _check_floors(recipe, num_prompt_tokens, window)
    _check_lineage(recipe, num_prompt_tokens, window)
    _check_source_floor(recipe)
    if recipe.kind is PlanKind.RESUME:
        # An image's own floor, or that of a fresh tail.
        if not 0 <= recipe.decoder_start < num_prompt_tokens:
            raise InvalidArgument(
                "recipe.decoder_start", f"{recipe.decoder_start} is not in the prompt"
            )
        return
    if recipe.tail in (TailVariant.FLOORED, TailVariant.LAYER_EXACT):
        # The planner's tail is one window, an evaluation's as long as it likes.
        if not recipe.start <= recipe.decoder_start < num_prompt_tokens:
            raise InvalidArgument(
                "recipe.decoder_start",
                f"{recipe.decoder_start} is no encoder row of the prompt, which are "
                f"{recipe.start} to {num_prompt_tokens - 1}",
            )
        return
    expected = decoder_start(
        num_prompt_tokens, window, recipe.tail, recipe.start, geometry.num_decoder_layers
    )
    if recipe.decoder_start != expected:
        raise InvalidArgument(
            "recipe.decoder_start",
            f"{recipe.decoder_start} does not follow from {num_prompt_tokens} prompt tokens, "
            f"window {window} and tail {recipe.tail}, which give {expected}",
        )


def _check_floors(recipe: Recipe, num_prompt_tokens: int, window: int) -> None:
    """How long a replay is, is the planner's affair, or an evaluation's."""
    floor = recipe.write_floor
    if (recipe.kind is PlanKind.COLD) is not (floor == 0):
        raise InvalidArgument(
            "recipe.kind", f"kind {recipe.kind} does not go with write floor {floor}"
        )
    is_aligned = floor % window == 0 or recipe.kind is PlanKind.RESUME
    if not is_aligned or not 0 <= floor < num_prompt_tokens:
        raise InvalidArgument(
            "recipe.write_floor",
            f"{floor} is no block boundary in a prompt of {num_prompt_tokens} tokens",
        )
    if not 0 <= recipe.swa_floor <= recipe.start <= floor:
        raise InvalidArgument(
            "recipe.start",
            f"{recipe.start} does not lie between the read floor {recipe.swa_floor} and the write "
            f"floor {floor}",
        )
    if recipe.kind is PlanKind.RESUME:
        if recipe.start != floor:
            raise InvalidArgument(
                "recipe.start", f"{recipe.start} is not the write floor {floor}, as of kind resume"
            )
        return
    if recipe.kind in _FROM_WINDOWS and (recipe.start == 0 or recipe.start % window):
        raise InvalidArgument(
            "recipe.start", f"{recipe.start} is no block boundary, where windows end"
        )
    expected = recipe.start - window + 1 if recipe.kind in _FROM_WINDOWS else recipe.start
    if recipe.swa_floor != expected:
        raise InvalidArgument(
            "recipe.swa_floor",
            f"{recipe.swa_floor} does not go with kind {recipe.kind} from {recipe.start}, whose "
            f"rows read from {expected} on",
        )


def _check_lineage(recipe: Recipe, num_prompt_tokens: int, window: int) -> None:
    restarts, floor, interval = recipe.restarts, recipe.write_floor, recipe.anchor_interval
    if interval is not None:
        _check_anchors(recipe, interval, num_prompt_tokens, window)
        return
    if recipe.kind is PlanKind.ANCHOR:
        raise InvalidArgument("recipe.anchor_interval", "kind anchor needs one")
    in_order = list(restarts) == sorted(set(restarts))
    if not in_order or any(r <= 0 or r % window or r > floor for r in restarts):
        raise InvalidArgument(
            "recipe.restarts",
            f"{restarts} are not ascending block boundaries up to the write floor {floor}",
        )
    if (recipe.kind is PlanKind.BOUNDED) is not (floor in restarts):
        raise InvalidArgument(
            "recipe.restarts",
            f"kind bounded restarts at its write floor, {floor}, and no other kind does; these are "
            f"{restarts}",
        )
    first = {PlanKind.REBUILD: 0, **dict.fromkeys(_FROM_WINDOWS, recipe.start)}.get(recipe.kind)
    if first is not None and any(r >= first for r in restarts):
        raise InvalidArgument(
            "recipe.restarts",
            f"{restarts} do not go with kind {recipe.kind}, whose rows from {first} on do not "
            "restart",
        )


def _check_source_floor(recipe: Recipe) -> None:
    floor = recipe.source_floor
    if floor is None:
        return
    lowest = 0 if recipe.kind is PlanKind.RESUME else recipe.start
    if recipe.tail is not TailVariant.LAYER_EXACT or not lowest <= floor <= recipe.decoder_start:
        raise InvalidArgument(
            "recipe.source_floor",
            f"{floor} is no row of layer E's own window that tail {recipe.tail} reads; only "
            f"layer_exact reads any, from {lowest} to its decoder_start, {recipe.decoder_start}",
        )


_FROM_WINDOWS = (PlanKind.WINDOW, PlanKind.PREVIOUS_WINDOW)


def _check_anchors(recipe: Recipe, interval: int, num_prompt_tokens: int, window: int) -> None:
    if interval < window or interval % window:
        raise InvalidArgument(
            "recipe.anchor_interval", f"{interval} is no multiple of the window {window}"
        )
    if recipe.kind not in (PlanKind.COLD, PlanKind.WINDOW, PlanKind.ANCHOR):
        raise InvalidArgument("recipe.kind", f"mode canonical has no kind {recipe.kind}")
    if recipe.restarts != canonical_restarts(num_prompt_tokens, interval):
        raise InvalidArgument(
            "recipe.restarts",
            f"{recipe.restarts} are not the multiples of {interval} in the prompt",
        )
    is_anchor = recipe.start == 0 or (recipe.start + window) % interval == 0
    is_wrong = not is_anchor if recipe.kind is PlanKind.ANCHOR else recipe.start in recipe.restarts
    if is_wrong:
        raise InvalidArgument(
            "recipe.start",
            f"kind {recipe.kind} does not begin at {recipe.start}: mode canonical restarts one "
            f"window before every multiple of {interval}",
        )


def _check_tokens(request: GenerationRequest, max_model_len: int) -> None:
    if request.num_tokens == 0:
        raise InvalidArgument("token_ids", "the prompt is empty; send at least one token")
    if not 1 <= request.num_prompt_tokens <= request.num_tokens:
        raise InvalidArgument(
            "num_prompt_tokens",
            f"{request.num_prompt_tokens} is not between 1 and the {request.num_tokens} tokens",
        )
    if request.num_tokens >= max_model_len:
        raise InvalidArgument(
            "token_ids",
            f"{request.num_tokens} tokens leave no room to generate in the model's context of "
            f"{max_model_len}; shorten the prompt",
        )
    if request.sampling.max_tokens < 1:
        raise InvalidArgument(
            "sampling.max_tokens", f"{request.sampling.max_tokens} is below 1; ask for at least one"
        )
    if request.given and len(request.given) != request.sampling.max_tokens:
        raise InvalidArgument(
            "given",
            f"{len(request.given)} tokens are given and {request.sampling.max_tokens} asked for; "
            "ask for as many as are given",
        )
    if request.given and request.sampling.constraint is not None:
        raise InvalidArgument("given", "an answer that is given cannot be constrained as well")
    if request.num_tokens >= request.max_total_tokens:
        raise InvalidArgument(
            "sampling.max_tokens",
            f"{request.num_tokens - request.num_prompt_tokens} tokens were generated already and "
            f"{request.sampling.max_tokens} were asked for: nothing is left to do",
        )


def too_large(
    num_tokens: int, num_positions: int, capacity_tokens: int, *, generates: bool
) -> InvalidArgument:
    """The refusal of a request that no KV pool of its kind can ever hold.

    Args:
        num_tokens: of the prompt.
        num_positions: those that it may ever occupy.
        capacity_tokens: of the largest pool.
        generates: whether the pools belong to workers that generate.
    """
    field, remedy = (
        ("token_ids", "shorten the prompt")
        if num_tokens > capacity_tokens
        else ("sampling.max_tokens", "lower max_tokens")
    )
    pool = "decoders" if generates else "encoders"
    return InvalidArgument(
        field,
        f"the request may take {num_positions} tokens and the KV pool holds {capacity_tokens}; "
        f"{remedy} or raise {pool}.num_blocks",
    )


def positions_to_reserve(request: GenerationRequest, max_model_len: int, *, generates: bool) -> int:
    """Positions the request may ever occupy on a worker that does or does not generate."""
    if not generates:
        return request.num_tokens
    return min(request.max_total_tokens, max_model_len)


def positions_to_begin_with(
    request: GenerationRequest, max_model_len: int, reserved_tokens: int, *, generates: bool
) -> int:
    """Positions whose pages are set aside at admission; a longer answer takes more as it grows."""
    most = positions_to_reserve(request, max_model_len, generates=generates)
    return min(most, request.num_tokens + reserved_tokens)
