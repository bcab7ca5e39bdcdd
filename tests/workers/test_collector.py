"""Does the garbage collector look at nothing that start-up left, and at everything after it?"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from ripresa.workers.collector import spare_startup


class Cycle:
    def __init__(self) -> None:
        self.own = self


@pytest.fixture
def manual() -> Iterator[None]:
    """No collection but those that are asked for."""
    gc.disable()
    yield
    gc.unfreeze()
    gc.enable()


def test_start_up_is_set_aside_without_its_garbage(manual: None) -> None:
    kept, garbage = Cycle(), weakref.ref(Cycle())
    spare_startup()
    assert garbage() is None
    new = Cycle()
    looked_at = {id(each) for each in gc.get_objects()}
    assert id(kept) not in looked_at
    assert id(new) in looked_at
    later = weakref.ref(Cycle())
    gc.collect()
    assert later() is None
