"""Where is the bundled demo model? A checkpoint folder like any other, and this is it."""

from __future__ import annotations

from pathlib import Path

MODEL_NAME = "deepseek-v4.1-demo"
DEMO_MODEL = Path(__file__).parent
"""`config.json`, `tokenizer.json` and `model.safetensors`, beside what they were made from."""
