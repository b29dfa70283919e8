"""``docs/protocol.md`` says what the two machines do: its diagrams and tables are made from the code.

``KVBUS_DOCS=write`` (``make docs``) writes them anew.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from enum import Enum
from pathlib import Path

import pytest
from support.transitions import NONE, Found, matcher_steps, registrar_steps

from kvbus.protocol.decode import receives
from kvbus.protocol.prefill import transfer

PAGE = Path(__file__).parents[2] / "docs" / "protocol.md"
LIVES = 40_000
"""Four times as many find no other step."""


@pytest.fixture(scope="module")
def transfer_steps() -> Found:
    return matcher_steps(LIVES)


@pytest.fixture(scope="module")
def receive_steps() -> Found:
    return registrar_steps(LIVES)


def names(states: Iterable[Enum]) -> list[str]:
    return [NONE, *(str(state.value) for state in states)]


def diagram(steps: Found) -> str:
    lines = [f"    {before} --> {after}".replace(NONE, "[*]") for before, after in sorted(steps.edges())]
    return "\n".join(["```mermaid", "stateDiagram-v2", *lines, "```"])


def says(name: str, made: str) -> None:
    """The page's part of this name is what was made; or it becomes that."""
    text, mark = PAGE.read_text(), f"<!-- made: {name} -->\n"
    before, _, rest = text.partition(mark)
    said, end, after = rest.partition("<!-- end -->")
    assert end, f"{PAGE.name} has no place for the {name}"
    if os.environ.get("KVBUS_DOCS") == "write":
        PAGE.write_text(f"{before}{mark}{made}\n{end}{after}")
        return
    assert said.splitlines() == made.splitlines(), f"`make docs` writes the {name} of {PAGE.name} anew"


def test_the_transfers_diagram_and_table(transfer_steps: Found) -> None:
    says("transfer diagram", diagram(transfer_steps))
    says("transfer table", transfer_steps.table(names(transfer.Stage)))


def test_the_receives_diagram_and_table(receive_steps: Found) -> None:
    says("receive diagram", diagram(receive_steps))
    says("receive table", receive_steps.table(names(receives.Phase)))


def test_what_happens_is_what_the_tables_of_the_code_allow(transfer_steps: Found, receive_steps: Found) -> None:
    """One event may take two steps: forget a registration that was written, and post its successor's WRITE."""
    for steps, table in ((transfer_steps, transfer.NEXT), (receive_steps, receives.NEXT)):
        one = {(before.value, after.value) for (before, _), after in table.items()}
        two = {(before, last) for before, after in one for first, last in one if first == after}
        assert {edge for edge in steps.edges() if NONE not in edge} <= one | two
        assert {edge for edge in one if edge[0] != edge[1]} <= steps.edges(), "a step of the table never happens"
