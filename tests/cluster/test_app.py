"""Does a cluster that cannot start say what to do?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import pytest

from ripresa.cluster.app import local_cluster
from ripresa.cluster.config import load_config
from ripresa.workers.errors import Unavailable


@pytest.mark.parametrize(
    ("settings", "failure", "told"),
    [
        (
            (),
            Exception("The current node\ntimed out during startup."),
            r"did not start: The current node\s.*; try again when less else runs here, or",
        ),
        (
            ("ray.address=127.0.0.1:1",),
            ConnectionError("no"),
            r"1 cannot be joined: no; try",
        ),
    ],
)
def test_a_ray_that_does_not_start_is_told_in_words(
    monkeypatch: pytest.MonkeyPatch, settings: Sequence[str], failure: Exception, told: str
) -> None:
    def fail(**_: object) -> NoReturn:
        raise failure

    monkeypatch.setattr("ray.init", fail)
    with pytest.raises(Unavailable, match=told), local_cluster(load_config(None, settings)):
        pytest.fail("it did not start")
