"""Numbers on the command line: what is no number, or out of bounds, is refused before anything is done (S9)."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Coroutine, Iterator
from typing import Any, get_type_hints

import pytest
import typer.main
import uvloop
from typer.testing import CliRunner

from kvbus.cli import app
from kvbus.errors import ConfigError
from kvbus.router.settings import Settings

COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def numbers() -> Iterator[tuple[str, str]]:
    """Each command's options that take a float."""
    callbacks = {each.name or getattr(each.callback, "__name__", ""): each.callback for each in app.registered_commands}
    for name, callback in callbacks.items():
        assert callback is not None
        hints = get_type_hints(inspect.unwrap(callback))
        for option in COMMANDS[name].params:
            if hints[option.name] is float:
                yield name, max(option.opts, key=len)


NUMBERS = list(numbers())


def test_all_are_found() -> None:
    assert ("router", "--max-wait-s") in NUMBERS
    assert len(NUMBERS) >= 12


@pytest.mark.parametrize(("name", "option"), NUMBERS, ids=lambda each: each)
@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "-1"])
def test_no_number(name: str, option: str, value: str) -> None:
    required = [
        word
        for each in COMMANDS[name].params
        if each.required
        for word in ([each.opts[-1], "x"] if each.opts[-1].startswith("-") else ["x"])
    ]
    result = CliRunner().invoke(app, [name, *required, option, value], env={"COLUMNS": "200", "TERM": "dumb"})
    assert result.exit_code == 2, result.output
    assert f"Invalid value for '{option}': {value}; allowed: " in result.output


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 0.0])
def test_the_routers_settings(value: float) -> None:
    with pytest.raises(ConfigError, match="max_wait_s"):
        Settings(max_wait_s=value)


@pytest.mark.parametrize(("words", "level"), [([], logging.INFO), (["--log-level", "warning"], logging.WARNING)])
def test_the_routers_log_level(monkeypatch: pytest.MonkeyPatch, words: list[str], level: int) -> None:
    """R18"""
    levels: list[int] = []

    def end(coroutine: Coroutine[Any, Any, int]) -> int:
        coroutine.close()
        return 0

    monkeypatch.setattr(logging, "basicConfig", lambda *, level, **_: levels.append(level))
    monkeypatch.setattr(uvloop, "run", end)
    assert CliRunner().invoke(app, ["router", "--nats-url", "nats://h:1", *words]).exit_code == 0
    assert levels == [level]
