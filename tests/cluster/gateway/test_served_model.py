"""Which prompts does the served model take?"""

from __future__ import annotations

from dataclasses import replace

import pytest

from ripresa.cluster.gateway.served_model import ServedModel, check_prompt_ids, check_token_ids
from ripresa.workers.errors import InvalidArgument


@pytest.mark.parametrize("ids", [[5], [3, 5, 4, 5]])
def test_a_prompt_with_a_piece_of_an_image_is_refused(model: ServedModel, ids: list[int]) -> None:
    sees = replace(model, image_token_id=5)
    with pytest.raises(InvalidArgument, match="stands for an image, and images are not") as caught:
        check_prompt_ids(ids, sees, "prompt")
    assert caught.value.field == f"prompt[{ids.index(5)}]"
    check_token_ids(ids, sees, "stop_token_ids")
    check_prompt_ids(ids, model, "prompt")


def test_a_prompt_beyond_the_vocabulary_is_refused(model: ServedModel) -> None:
    with pytest.raises(InvalidArgument, match="not in the vocabulary"):
        check_prompt_ids([model.vocab_size], model, "prompt")
