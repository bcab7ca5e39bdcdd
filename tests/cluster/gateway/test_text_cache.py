"""Is a text encoded once for its tenant, and is what is kept bounded?"""

from __future__ import annotations

from ripresa.cluster.gateway.text_cache import MIN_CHARS, TextCache


class Encoder:
    def __init__(self) -> None:
        self.texts: list[str] = []

    def __call__(self, text: str) -> list[int]:
        self.texts.append(text)
        return [ord(letter) for letter in text]


def test_a_text_is_encoded_once_for_its_tenant() -> None:
    cache, encode = TextCache(), Encoder()
    text = "é" * MIN_CHARS
    for _ in range(3):
        assert list(cache.encoded(text, b"mine", encode)) == [ord("é")] * MIN_CHARS
    assert len(encode.texts) == 1
    cache.encoded(text, b"yours", encode)
    assert len(encode.texts) == 2


def test_the_least_recently_used_text_goes_first() -> None:
    cache, encode = TextCache(2 * MIN_CHARS), Encoder()
    a, b, c = (letter * MIN_CHARS for letter in "abc")
    for text in (a, b, a, c, a, b):
        cache.encoded(text, b"", encode)
    assert encode.texts == [a, b, c, b]


def test_short_and_huge_texts_are_not_kept() -> None:
    cache, encode = TextCache(MIN_CHARS), Encoder()
    for text in ("a", "b" * (MIN_CHARS + 1)):
        for _ in range(2):
            cache.encoded(text, b"", encode)
    assert len(encode.texts) == 4
