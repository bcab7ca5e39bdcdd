"""What do tests serve whose answers shall depend on every bit? Seeded noise of the demo's geometry.

A trained model says the same whatever is a little wrong; this one does not.
"""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from functools import cache
from pathlib import Path

from ripresa.workers.demo.build_tokenizer import TOKENIZER
from ripresa.workers.demo.checkpoint import DEMO_MODEL
from ripresa.workers.models.tiny_checkpoint import WeightFormat, write_tiny_checkpoint

SEED = 41


@cache
def noise_checkpoint() -> Path:
    """The folder of this process, made on the first call and removed at the process' end."""
    folder = Path(tempfile.mkdtemp(prefix="ripresa-noise-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    document = json.loads((DEMO_MODEL / "config.json").read_text())
    write_tiny_checkpoint(folder, document, WeightFormat.BF16, SEED, 1)
    (folder / TOKENIZER.name).write_bytes(TOKENIZER.read_bytes())
    return folder
