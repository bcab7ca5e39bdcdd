"""Where does a text that streams in pieces first contain one of some strings?"""

from __future__ import annotations

from collections.abc import Sequence

from ripresa.cluster.gateway.tokenizer import TextStream


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


class StoppableText:
    """The text of a stream of tokens up to a stop string, which no cutting of the stream moves.

    Args:
        text: decodes the tokens.
        min_tokens: in the text of so many no stop string is looked for.
    """

    def __init__(self, text: TextStream, stops: Sequence[str], min_tokens: int) -> None:
        self._text = text
        self._stops = StopStrings(stops)
        self._num_free = min_tokens

    @property
    def matched(self) -> str | None:
        return self._stops.matched

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that is certain after these tokens; "" after a match."""
        free, rest = token_ids[: self._num_free], token_ids[self._num_free :]
        self._num_free -= len(free)
        return self._text.feed(free) + self._stops.feed(self._text.feed(rest))

    def finish(self) -> str:
        """What was held back, since nothing follows; "" after a match."""
        return self._stops.feed(self._text.finish()) + self._stops.finish()


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` with which `stop` begins."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
