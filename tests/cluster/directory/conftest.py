"""What do the directory's tests share? The module beside them that speaks for workers."""

from __future__ import annotations

import sys
from pathlib import Path

# Test folders are no packages; importlib mode does not put them on the path by itself.
sys.path.insert(0, str(Path(__file__).parent))
