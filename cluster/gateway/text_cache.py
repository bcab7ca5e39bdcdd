"""Which pieces of prompts were encoded lately? Conversations repeat theirs with every turn."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from threading import Lock

MIN_CHARS = 200
"""Shorter texts are encoded as fast as they are found."""


class TextCache:
    """Token ids of texts, the least recently used go first. Thread-safe.

    A text is found by the tenant alone that brought it: how long an encoding takes must tell
    nobody what others have sent.

    Args:
        max_chars: how much text is kept in all.
    """

    def __init__(self, max_chars: int = 8_000_000) -> None:
        self._max_chars = max_chars
        self._num_chars = 0
        self._ids: OrderedDict[tuple[bytes, str], array[int]] = OrderedDict()
        self._lock = Lock()

    def encoded(
        self, text: str, salt: bytes, encode: Callable[[str], Sequence[int]]
    ) -> Sequence[int]:
        """The text's token ids, which `encode` gives."""
        if not self._is_kept(text):
            return encode(text)
        key = (salt, text)
        with self._lock:
            found = self._ids.get(key)
            if found is not None:
                self._ids.move_to_end(key)
                return found
        ids = array("I", encode(text))
        self._keep(key, ids)
        return ids

    def _is_kept(self, text: str) -> bool:
        return MIN_CHARS <= len(text) <= self._max_chars

    def _keep(self, key: tuple[bytes, str], ids: array[int]) -> None:
        with self._lock:
            if key not in self._ids:
                self._ids[key] = ids
                self._num_chars += len(key[1])
            while self._num_chars > self._max_chars:
                (_, oldest), _ = self._ids.popitem(last=False)
                self._num_chars -= len(oldest)
