"""Is anything left over when a part of the transfer layer is idle?"""

from __future__ import annotations

from collections.abc import Mapping

from ripresa.workers.errors import ErrorCode, RipresaError


def raise_if_left(owner: str, left: Mapping[str, int]) -> None:
    """Raise RipresaError (INTERNAL) if any count is not zero."""
    remaining = {what: count for what, count in left.items() if count}
    if remaining:
        raise RipresaError(ErrorCode.INTERNAL, f"{owner} are idle but hold {remaining}")
