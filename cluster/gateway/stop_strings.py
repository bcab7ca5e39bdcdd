"""Where does a text that streams in pieces first contain one of some strings?"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Holds back what may be the beginning of a stop string until that is decided.

    The match that ends first counts, so that it does not depend on how the text was cut; of those
    that end together the longest.

    Attributes:
        matched: the string that was found; None until then.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(sorted(set(stops), key=len, reverse=True))
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """The text that is certain not to belong to a stop string; "" after a match."""
        if self.matched is not None or not self._stops:
            return "" if self._stops else text
        text = self._held + text
        self._held = ""
        ends = [
            (found + len(stop), stop) for stop in self._stops if (found := text.find(stop)) >= 0
        ]
        if ends:
            end, stop = min(ends, key=lambda match: (match[0], -len(match[1])))
            self.matched = stop
            return text[: end - len(stop)]
        num_held = max(_overlap(text, stop) for stop in self._stops)
        cut = len(text) - num_held
        self._held = text[cut:]
        return text[:cut]

    def finish(self) -> str:
        """What was held back, since nothing follows; "" after a match."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` with which `stop` begins."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
