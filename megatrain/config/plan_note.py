"""A line of the plan, and its grade: what it changes for a user who expects the flags to mean what they say.

changes the result         dropout by default, rows of padding outside of the softmax, a decay cut short ...
costs speed or memory      a flag for speed that has no effect here; the line has the remedy
changes nothing            a flag that is always on, or has no meaning here
"""

from collections.abc import Iterable
from typing import Final, Literal, Self

Grade = Literal["result", "cost", "nothing"]
GRADES: Final[dict[Grade, str]] = {
    "result": "changes the result",
    "cost": "costs speed or memory",
    "nothing": "changes nothing",
}
"""Words of each grade, in the order in which notes are printed."""


class PlanNote(str):
    """The text of a line, with its grade."""

    __slots__ = ("grade", "saves_memory")
    grade: Grade
    saves_memory: bool
    """True: the note is on a flag without effect that would save memory."""

    def __new__(cls, text: str, grade: Grade, saves_memory: bool = False) -> Self:
        note = super().__new__(cls, text)
        note.grade, note.saves_memory = grade, saves_memory
        return note

    def __getnewargs__(self) -> tuple[str, Grade, bool]:  # type: ignore[override]
        return str(self), self.grade, self.saves_memory


def graded(text: str, grade: Grade) -> PlanNote:
    """Return a note of this grade, unless it has one of its own."""
    return text if isinstance(text, PlanNote) else PlanNote(text, grade)


def by_grade(notes: Iterable[PlanNote]) -> dict[Grade, list[PlanNote]]:
    """Return the notes of each grade that has some, in the order of `GRADES`."""
    found = list(notes)
    lists = {grade: [note for note in found if note.grade == grade] for grade in GRADES}
    return {grade: those for grade, those in lists.items() if those}
