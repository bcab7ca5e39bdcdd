"""What is there to ask about? A small ledger of coined entities, and pages with notes in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from ripresa.workers.demo.ledger.draws import Draws

COLORS = ("red", "blue", "green", "black", "white", "brown", "grey", "pink")


class Field(StrEnum):
    """What is recorded of an entity. An owner is an entity too; a note stands on a page."""

    CODE = "code"
    OWNER = "owner"
    PLACE = "place"
    COLOR = "color"
    NOTE = "note"


RECORDED = (Field.CODE, Field.OWNER, Field.PLACE, Field.COLOR)

Value = int | str


@dataclass(slots=True)
class World:
    """Entities with their records, and pages of text.

    Attributes:
        records: of each entity, by name.
        notes: of names that have no record, each on one page.
        pages: texts; a note is a line between paragraphs.
    """

    records: dict[str, dict[Field, Value]] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    pages: list[str] = field(default_factory=list)

    def fact(self, name: str, asked: Field) -> str:
        """What the ledger says of a name, as a sentence.

        Raises:
            KeyError: it says nothing.
        """
        if asked is Field.NOTE:
            return sentence(name, asked, self.notes[name])
        return sentence(name, asked, self.records[name][asked])

    def add_page(self, paragraphs: Sequence[str], notes: dict[str, str], draws: Draws) -> int:
        """A page of paragraphs with notes between them, the first above the last paragraph.

        Returns:
            the page's number, from 1.
        """
        lines = list(paragraphs)
        for name, value in notes.items():
            lines.insert(draws.below(len(paragraphs)), sentence(name, Field.NOTE, value))
        self.notes |= notes
        self.pages.append("\n".join(lines))
        return len(self.pages)


def sentence(name: str, asked: Field, value: Value | None) -> str:
    """One fact in the only form in which facts are written; None for what nobody knows.

    Names are quoted wherever they stand, so that they are always cut into the same tokens.
    """
    if value is None:
        return f'{asked} of "{name}" is unknown'
    return f'{asked} of "{name}" is {quoted(asked, value)}'


def quoted(asked: Field, value: Value) -> str:
    return str(value) if asked in (Field.CODE, Field.COLOR) else f'"{value}"'


def draw_world(draws: Draws, num_entities: int) -> World:
    """Entities whose records are full; every owner is one of the others."""
    names = [draws.name() for _ in range(num_entities)]
    world = World()
    for name in names:
        world.records[name] = {
            Field.CODE: draws.between(100, 999),
            Field.OWNER: draws.pick([other for other in names if other != name]),
            Field.PLACE: draws.name(),
            Field.COLOR: draws.pick(COLORS),
        }
    return world
