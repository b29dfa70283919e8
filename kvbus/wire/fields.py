"""The types that fields of messages have, and the check that each of their values passes. Pure.

A check returns the value in its own type, or raises :class:`~kvbus.errors.MessageError` naming the field, the value and
what is allowed. :mod:`kvbus.wire.message` finds it by a field's annotation.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any, cast

from kvbus.errors import MessageError
from kvbus.wire.blocks import BlockRuns

MAX_TEXT_CHARS = 512
MAX_BINARY_BYTES = 4 << 20
MAX_GROUPS = 64
MAX_RUNS = 1 << 16
MAX_BLOCKS = 1 << 20
MAX_PAIRS = 64
MAX_ECHOES = 1024
MAX_MARKS = 1024
MAX_KEY_BYTES = 64
CACHE_KEY_BYTES = 8
MAX_CACHE_KEYS = 1 << 16
_MAX_INT = (1 << 63) - 1
MAX_TOKEN_ID = (1 << 31) - 1


class Role(StrEnum):
    """What an engine does; ``BOTH`` is vLLM's ``kv_both``."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"

    @property
    def prefills(self) -> bool:
        return self is not Role.DECODE

    @property
    def decodes(self) -> bool:
        return self is not Role.PREFILL


class State(StrEnum):
    """What an engine says of itself in its heartbeat."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


_ROLES = {role.value: role for role in Role}
_STATES = {state.value: state for state in State}

Address = Annotated[str, "host:port"]
"""Of an engine's HTTP server; empty while it has none. Anything else would be part of a URL that routers call."""
Key = Annotated[bytes, "key"]
"""A public key or a digest."""
TokenId = Annotated[int, "token id"]
"""Of the model's vocabulary; :data:`NO_TOKEN` if there is none."""
NO_TOKEN = -1
CacheKeys = Annotated[bytes, "cache keys"]
"""Keys of blocks in a prefix cache, :data:`CACHE_KEY_BYTES` each."""
Pairs = tuple[tuple[str, str], ...]
MarkList = tuple[tuple[int, str, int, str], ...]
"""``(attempt, name, time in ns on the sender's monotonic clock, note)``: see :mod:`kvbus.trace.path`."""
Echoes = tuple[tuple[str, int, int, int], ...]
"""``(prefill engine, its incarnation, rank, pulse number)``: see :mod:`kvbus.protocol.lease`."""


def _bad(name: str, value: object, wanted: str) -> MessageError:
    return MessageError(f"{name}: {value!r:.80} is not {wanted}")


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or len(value) > MAX_TEXT_CHARS:
        raise _bad(name, value, f"text of at most {MAX_TEXT_CHARS} characters")
    return value


_ADDRESS = re.compile(r"(?:[A-Za-z0-9][A-Za-z0-9._-]{0,252}|\[[0-9A-Fa-f:.]{2,45}\]):([1-9][0-9]{0,4})")


def is_address(value: str) -> bool:
    """Whether it is ``host:port`` or ``[IPv6]:port``, and nothing else."""
    found = _ADDRESS.fullmatch(value)
    return found is not None and int(found[1]) < 1 << 16


def _address(name: str, value: object) -> str:
    if not isinstance(value, str) or (value and not is_address(value)):
        raise _bad(name, value, "host:port, or empty")
    return value


def _key(name: str, value: object) -> bytes:
    if not isinstance(value, bytes) or len(value) > MAX_KEY_BYTES:
        raise _bad(name, value, f"at most {MAX_KEY_BYTES} bytes")
    return value


def _cache_keys(name: str, value: object) -> bytes:
    if not isinstance(value, bytes) or len(value) % CACHE_KEY_BYTES or len(value) > MAX_CACHE_KEYS * CACHE_KEY_BYTES:
        raise _bad(name, value, f"at most {MAX_CACHE_KEYS} keys of {CACHE_KEY_BYTES} bytes")
    return value


def _role(name: str, value: object) -> Role:
    role = _ROLES.get(value) if isinstance(value, str) else None
    if role is None:
        raise _bad(name, value, f"one of {', '.join(Role)}")
    return role


def _state(name: str, value: object) -> State:
    state = _STATES.get(value) if isinstance(value, str) else None
    if state is None:
        raise _bad(name, value, f"one of {', '.join(State)}")
    return state


def _integer(name: str, value: object) -> int:
    if type(value) is not int or not 0 <= value <= _MAX_INT:
        raise _bad(name, value, f"an integer in 0..{_MAX_INT}")
    return value


def _token_id(name: str, value: object) -> int:
    if type(value) is not int or not NO_TOKEN <= value <= MAX_TOKEN_ID:
        raise _bad(name, value, f"a token id in 0..{MAX_TOKEN_ID}, or {NO_TOKEN} for none")
    return value


def _number(name: str, value: object) -> float:
    if type(value) not in (int, float) or not abs(cast(float, value)) < float("inf"):
        raise _bad(name, value, "a finite number")
    return float(cast(float, value))


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _bad(name, value, "a boolean")
    return value


def _binary(name: str, value: object) -> bytes:
    if not isinstance(value, bytes) or len(value) > MAX_BINARY_BYTES:
        raise _bad(name, value, f"at most {MAX_BINARY_BYTES} bytes")
    return value


def _sequence(name: str, value: object, limit: int, wanted: str) -> list[object] | tuple[object, ...]:
    if not isinstance(value, list | tuple) or len(value) > limit:
        raise _bad(name, value, wanted)
    return value


def _runs(name: str, value: object) -> BlockRuns:
    wanted = f"block runs [[[first, count], ...], ...] of at most {MAX_BLOCKS} blocks"
    groups: list[tuple[tuple[int, int], ...]] = []
    total = 0
    for group in _sequence(name, value, MAX_GROUPS, wanted):
        runs: list[tuple[int, int]] = []
        for run in _sequence(name, group, MAX_RUNS, wanted):
            match run:
                case (first, length) if type(first) is int and type(length) is int and _is_run(first, length):
                    total += length
                    runs.append((first, length))
                case _:
                    raise _bad(name, value, wanted)
        if total > MAX_BLOCKS:
            raise _bad(name, value, wanted)
        groups.append(tuple(runs))
    return tuple(groups)


def _echoes(name: str, value: object) -> Echoes:
    wanted = f"at most {MAX_ECHOES} echoes [engine, incarnation, rank, number]"
    echoes: list[tuple[str, int, int, int]] = []
    for item in _sequence(name, value, MAX_ECHOES, wanted):
        engine, *numbers = _sequence(name, item, 4, wanted) or ("",)
        if len(numbers) != 3:
            raise _bad(name, value, wanted)
        incarnation, rank, number = (_integer(name, each) for each in numbers)
        echoes.append((_text(name, engine), incarnation, rank, number))
    return tuple(echoes)


def _marks(name: str, value: object) -> MarkList:
    wanted = f"at most {MAX_MARKS} marks [attempt, name, time, note]"
    marks: list[tuple[int, str, int, str]] = []
    for item in _sequence(name, value, MAX_MARKS, wanted):
        match _sequence(name, item, 4, wanted):
            case (attempt, what, at_ns, note):
                marks.append((_integer(name, attempt), _text(name, what), _integer(name, at_ns), _text(name, note)))
            case _:
                raise _bad(name, value, wanted)
    return tuple(marks)


def _is_run(first: int, length: int) -> bool:
    return 0 <= first <= _MAX_INT and 0 < length <= MAX_BLOCKS


def _pairs(name: str, value: object) -> Pairs:
    pairs: list[tuple[str, str]] = []
    for item in _sequence(name, value, MAX_PAIRS, f"at most {MAX_PAIRS} pairs"):
        key, text = _sequence(name, item, 2, "a pair") if isinstance(item, list | tuple) and len(item) == 2 else ("", 0)
        pairs.append((_text(name, key), _text(name, text)))
    return tuple(pairs)


CHECK_OF_TYPE: dict[Any, Callable[[str, object], object]] = {
    str: _text,
    int: _integer,
    TokenId: _token_id,
    float: _number,
    bool: _flag,
    bytes: _binary,
    Address: _address,
    Key: _key,
    CacheKeys: _cache_keys,
    Role: _role,
    State: _state,
    BlockRuns: _runs,
    Pairs: _pairs,
    Echoes: _echoes,
    MarkList: _marks,
}
