"""Where are the bundled demo model and its twin? Checkpoint folders like any others."""

from __future__ import annotations

from pathlib import Path

MODEL_NAME = "deepseek-v4.1-demo"
DEMO_MODEL = Path(__file__).parent
"""`config.json`, `tokenizer.json` and `model.safetensors`, beside what they were made from."""
DEMO_TWIN = DEMO_MODEL / "tiny"
"""The same of a model a quarter as large."""
