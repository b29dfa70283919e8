"""The figures of ``docs/waits.md`` are the code's."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

from kvbus.config import Config
from kvbus.protocol import term_s
from kvbus.protocol.decode import Registrar
from kvbus.protocol.prefill import Matcher
from kvbus.router.fleet.tokenizing import Tokenizing
from kvbus.router.settings import Settings

PAGE = Path(__file__).parents[2] / "docs" / "waits.md"


def bound_of(set_by: str) -> float:
    """The bound in the page's row that names ``set_by``."""
    [row] = [line for line in PAGE.read_text().splitlines() if line.startswith("|") and set_by in line]
    found = re.search(r"\| ([0-9.]+) s \|", row)
    assert found, row
    return float(found[1])


def default(function: object, name: str) -> float:
    return float(inspect.signature(function).parameters[name].default)  # type: ignore[arg-type]


def test_the_page_says_what_the_code_does() -> None:
    config = {field.name: field.default for field in dataclasses.fields(Config)}
    settings = Settings()
    assert bound_of("--max-wait-s") == settings.max_wait_s
    assert bound_of("--first-token-s") == settings.first_token_s
    assert bound_of("--answer-s") == settings.answer_s
    assert bound_of("the router; at most") == settings.takeover_s
    assert bound_of("Tokenizing(answer_s)") == default(Tokenizing, "answer_s")
    assert bound_of("Registrar(patience_s)") == default(Registrar, "patience_s")
    assert bound_of("Registrar(cancel_timeout_s)") == default(Registrar, "cancel_timeout_s")
    assert bound_of("Matcher(registration_hold_s)") == default(Matcher, "registration_hold_s")
    for key in ("unclaimed_s", "transfer_timeout_s", "dead_after_s", "block_lease_s"):
        assert bound_of(key) == config[key]
    assert bound_of("`write_lease_s`, `max_write_s`") == round(term_s(), 3)
