"""``docs/trust.md`` says of every kind of message who may say it, on which subject, and by what that is known."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from kvbus.wire import KINDS, Subjects

TEXT = (Path(__file__).parents[2] / "docs" / "trust.md").read_text()
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in TEXT.splitlines() if line.startswith("| `")]
REPLIES = {"rebind!", "drain!", "clock!", "meta!", "cache!"}


def said() -> set[str]:
    """The subjects in the table."""
    return {found[1] for _, subject, *_ in ROWS if (found := re.fullmatch(r"`(.+)`", subject))}


def shape(subject: str) -> str:
    """The area, and how many tokens follow."""
    words = [word for word in subject.split(".") if word not in ("kvbus", "v1", "ns")]
    return " ".join(word if word.islower() else "*" for word in words)


def test_every_kind_has_a_row() -> None:
    assert {kind.strip("`") for kind, *_ in ROWS} == set(KINDS)
    assert {kind.strip("`") for kind, subject, *_ in ROWS if subject == "reply"} == REPLIES


def test_the_subjects_are_the_codes() -> None:
    subjects, made = Subjects("ns"), set()
    for name, method in inspect.getmembers(Subjects, inspect.isfunction):
        parameters = [each for each in inspect.signature(method).parameters if each != "self"]
        if not name.startswith("_") and "by" in parameters:
            made.add(shape(getattr(subjects, name)(*(each.upper() for each in parameters))))
    assert {shape(each) for each in said()} == made


def test_what_is_sealed_says_so() -> None:
    for kind, subject, _, known_by, *_ in ROWS:
        cls = KINDS[kind.strip("`")]
        pooled = subject.startswith("`pool.")
        assert known_by.startswith("seal") == (cls.SEALED and not pooled), (kind, subject)


def test_who_speaks_is_declared_with_each_message() -> None:
    """Answers go to the inbox of who asked, and a rebind is nobody's in particular."""
    assert {kind for kind, cls in KINDS.items() if not cls.SPEAKER[0]} == REPLIES | {"rebind"}
    for cls in KINDS.values():
        fields = {field for field in cls.SPEAKER if field}
        assert fields <= cls.__dataclass_fields__.keys()
