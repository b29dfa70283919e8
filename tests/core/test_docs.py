"""The docs name files, commands and targets that are there."""

from __future__ import annotations

import pkgutil
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *ROOT.glob("*/README.md")])
FILES = re.compile(r"`((?:kvbus|connector|tests|docs|traces|docker|\.ci)/[\w./-]+\.(?:py|md|yaml|json|sh|conf))")
LINKS = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
TARGETS = re.compile(r"`make ([a-z-]+)`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_is_there(page: Path) -> None:
    text = page.read_text()
    missing = [name for name in FILES.findall(text) if not any((at / name).exists() for at in (ROOT, page.parent))]
    missing += [link for link in LINKS.findall(text) if not (page.parent / link).exists()]
    makefile = (ROOT / "Makefile").read_text()
    missing += [f"make {name}" for name in TARGETS.findall(text) if not re.search(rf"^{name}:", makefile, re.MULTILINE)]
    assert not missing


def test_docstrings_refer_to_what_is_there() -> None:
    pattern = re.compile(r":(?:mod|class|func|meth|data):`~?(kvbus(?:\.\w+)+)`")
    sources = [path for folder in ("kvbus", "connector") for path in (ROOT / folder).rglob("*.py")]
    names = {name for path in sources for name in pattern.findall(path.read_text())}
    assert names
    assert [name for name in sorted(names) if not _is_there(name)] == []


def _is_there(name: str) -> bool:
    try:
        found = pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return found is not None


def test_tests_readme_names_tests_that_are_there() -> None:
    """``folder/file.py::Class::test``; a later ``::test`` of the same row is in the file before it."""
    text = (ROOT / "tests" / "README.md").read_text()
    file = ""
    for name, test in re.findall(r"`([\w/]+\.py)?((?:::\w+)*)`", text):
        file = name or file
        if not name and not test:
            continue
        source = (ROOT / "tests" / file).read_text()
        for part in filter(None, test.split("::")):
            assert re.search(rf"^\s*(class|(async )?def) {part}\b", source, re.MULTILINE), f"{file}{test}"


def test_the_walk_goes_through_every_room_of_a_request() -> None:
    text = (ROOT / "docs" / "walk.md").read_text()
    steps = [int(step) for step in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)]
    assert steps == list(range(1, len(steps) + 1))
    for room in ("router", "bus", "engine", "protocol", "trace"):
        assert f"`kvbus/{room}/" in text
