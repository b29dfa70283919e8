"""What a run of ``kvbus scale`` does."""

from __future__ import annotations

from dataclasses import dataclass

from kvbus.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Scale:
    """What to run.

    Attributes:
        processes: that the engines are dealt to.
        prompt_blocks: of each prompt; ``max_tokens`` of each answer.
        direct_rate: requests per second that go past the router, to measure the floor.
        warm_s: the first seconds of load, which do not count.
    """

    engines: int = 64
    rate: float = 500.0
    minutes: float = 10.0
    processes: int = 4
    prompt_blocks: int = 2
    max_tokens: int = 4
    direct_rate: float = 5.0
    warm_s: float = 10.0
    seed: int = 1

    def __post_init__(self) -> None:
        if self.engines < 2:
            raise ConfigError("--engines", self.engines, "at least 2")
        if not 1 <= self.processes <= self.engines:
            raise ConfigError("--processes", self.processes, f"1 to --engines={self.engines}")

    @property
    def end_s(self) -> float:
        """Seconds from the start of the load to its end."""
        return self.warm_s + 60 * self.minutes
