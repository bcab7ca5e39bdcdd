"""What does every test start from? One torch thread, and the reference data if it is there."""

from __future__ import annotations

import os
from pathlib import Path

# Before torch is imported here, and inherited by the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest
import torch

torch.set_num_threads(1)

# Examples take the time that a shared machine gives them; a test's own limit is pytest's.
hypothesis.settings.register_profile("no_deadline", deadline=None)
hypothesis.settings.load_profile("no_deadline")

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return REPOSITORY


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of golden cases, hit-rule cases and traces; tests that need it skip without it.

    It is `RIPRESA_SHARED` if that is set, else the folder `shared` beside the checkout. A
    `RIPRESA_SHARED` that names no folder is an error, not a reason to skip.
    """
    named = os.environ.get("RIPRESA_SHARED")
    if named is not None:
        folder = Path(named)
        if not folder.is_dir():
            pytest.fail(f"RIPRESA_SHARED={named} is not a folder: correct it or unset it")
        return folder
    folder = REPOSITORY.parent / "shared"
    if not folder.is_dir():
        pytest.skip("no folder shared beside the checkout, and RIPRESA_SHARED names none")
    return folder
