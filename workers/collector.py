"""What of a serving process need the garbage collector never look at? What its start has left."""

from __future__ import annotations

import gc


def spare_startup() -> None:
    """Set aside for good whatever is alive now. Its references are counted as before.

    A full collection looks at every container and stops every thread of Python meanwhile. Imports
    alone leave a quarter of a million of them, for which all streams waited a sixth of a second
    (`tests/bench/gateway.py` prints it).
    """
    # What is set aside is never collected: garbage must not be among it.
    gc.collect()
    gc.freeze()
