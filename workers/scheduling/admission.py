"""May this request run on this worker at all, and how many positions must it reserve?"""

from __future__ import annotations

from ripresa.workers.errors import InvalidArgument
from ripresa.workers.replay import RULES_VERSION, PlanKind, TailVariant, decoder_start
from ripresa.workers.request import GenerationRequest


def check_request(request: GenerationRequest, window: int, max_model_len: int) -> None:
    """Raise InvalidArgument, naming the field, for a request that no worker can run."""
    _check_tokens(request, max_model_len)
    recipe = request.recipe
    if recipe.rules_version != RULES_VERSION:
        raise InvalidArgument(
            "recipe.rules_version",
            f"{recipe.rules_version!r} differs from this worker's {RULES_VERSION!r}; run one "
            "version of ripresa in the whole cluster",
        )
    if recipe.tail is TailVariant.EXACT:
        raise InvalidArgument(
            "recipe.tail", "tail 'exact' is not available yet; use floored, layer_exact or full"
        )
    if recipe.kind is not PlanKind.COLD or recipe.start != 0:
        raise InvalidArgument(
            "recipe.kind",
            f"kind {recipe.kind} from position {recipe.start} reuses cached state, which is not "
            "available yet; use a cold recipe",
        )
    expected = decoder_start(request.num_prompt_tokens, window, recipe.tail, recipe.start)
    if recipe.decoder_start != expected:
        raise InvalidArgument(
            "recipe.decoder_start",
            f"{recipe.decoder_start} does not follow from {request.num_prompt_tokens} prompt "
            f"tokens, window {window} and tail {recipe.tail}, which give {expected}",
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
    if request.num_tokens >= request.max_total_tokens:
        raise InvalidArgument(
            "sampling.max_tokens",
            f"{request.num_tokens - request.num_prompt_tokens} tokens were generated already and "
            f"{request.sampling.max_tokens} were asked for: nothing is left to do",
        )


def positions_to_reserve(request: GenerationRequest, max_model_len: int, *, generates: bool) -> int:
    """Positions the request may ever occupy on a worker that does or does not generate."""
    if not generates:
        return request.num_tokens
    return min(request.max_total_tokens, max_model_len)
