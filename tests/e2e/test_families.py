"""What vLLM can run, kvbus carries: model families and engine options, each against one engine by itself.

One row, one cluster: boots cost most of the time. ``KVBUS_MATRIX=all`` runs every row (``make matrix``), without it the
rows with ``always`` run. What a row proves: equal tokens, and that the prompt's KV came from outside.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support.engines import TRANSFER_ALL, complete, complete_all, prompt_tokens, say
from support.families import VOCABULARY, family

from kvbus.errors import LocalClusterError
from kvbus.local import Cluster, cache_dir
from kvbus.local.cluster import Engine, EngineSpec, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.matrix, pytest.mark.timeout(900)]

ARGUMENTS = ("--max-model-len", "2048", "--max-num-batched-tokens", "256", "--seed", "1", "--skip-tokenizer-init")
LENGTHS = (1, 2, 31, 33, 127, 128, 129, 300, 513, 777)
HEADS = 4
BF16 = ("--dtype", "bfloat16")
NGRAM = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}'


@dataclass(frozen=True)
class Row:
    """``arguments`` are those of every engine, ``prefill`` and ``decode`` those of one kind.

    ``exact``: answers do not depend on what else is in the batch, so requests may run side by side.
    ``computed``: of each prompt decode itself computes at most so many tokens.
    """

    name: str
    family: str = "llama"
    arguments: Sequence[str] = ()
    prefill: Sequence[str] = ()
    decode: Sequence[str] = ()
    role: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    exact: bool = True
    computed: int = 1
    always: bool = False


DS = {"VLLM_SSM_CONV_STATE_LAYOUT": "DS"}
ROWS = (
    Row("llama"),
    Row("mistral", "mistral"),
    Row("gemma3", "gemma3", always=True),
    Row("gpt-oss", "gpt-oss", exact=False),
    Row("deepseek-v2", "deepseek-v2"),
    Row("granite4", "granite4", ("--no-enable-prefix-caching",), environment=DS, exact=False, always=True),
    Row("qwen3-next", "qwen3-next", BF16, environment=DS, exact=False),
    Row("fp8-kv", arguments=("--kv-cache-dtype", "fp8_e5m2")),
    Row("ngram-on-decode", decode=("--speculative-config", NGRAM)),
    Row("kv-both", role="kv_both"),
    Row("data-parallel-prefill", prefill=("--data-parallel-size", "2")),
    Row("data-parallel-decode", decode=("--data-parallel-size", "2")),
    Row("sync-scheduling", arguments=("--no-async-scheduling",)),
    Row("no-prefix-caching", arguments=("--no-enable-prefix-caching",)),
)


def _prompts() -> list[list[int]]:
    """Some of each length, one twice, one longer than another that it begins with, one that repeats itself; and last
    some that differ only in what lies long before their end."""
    chance = random.Random(11)

    def some(tokens: int) -> list[int]:
        return [chance.randrange(10, VOCABULARY) for _ in range(tokens)]

    found, tail = [some(tokens) for tokens in LENGTHS], some(40)
    return [*found, found[-3], found[-3] + found[4], found[3] * 5, *(some(260) + tail for _ in range(HEADS))]


def _chosen() -> list[Row]:
    return [row for row in ROWS if row.always or os.environ.get("KVBUS_MATRIX") == "all"]


@pytest.fixture(scope="session")
def models() -> Path:
    return cache_dir() / "families"


Answers = list[tuple[int, ...]]


@pytest.fixture(scope="session")
def expected() -> dict[tuple[str, ...], Answers]:
    """What single engines answered, by model and arguments: rows that share them share it."""
    return {}


async def _expected(row: Row, models: Path, logs: Path, known: dict[tuple[str, ...], Answers]) -> Answers:
    key = (row.family, *row.arguments)
    if key not in known:
        spec = EngineSpec(
            "alone", family(row.family, models), row.family, None, [*ARGUMENTS, *row.arguments], row.environment
        )
        engine = Engine(spec, logs)
        try:
            try:
                wait_until(lambda: engine.healthy, [engine.child], f"booting {row.family} alone", say)
            except LocalClusterError:
                unable = re.findall(r"NotImplementedError: (.*)", engine.child.log.read_text())
                if not unable:
                    raise
                pytest.skip(f"vLLM itself cannot, on this CPU: {unable[-1]}")
            known[key] = [(await _complete(engine.url, row, ids)) for ids in _prompts()]
        finally:
            engine.child.stop()
        assert len(set(known[key][-HEADS:])) > 1, "only the end of a prompt counts: another one's KV would not be seen"
    return known[key]


async def _complete(url: str, row: Row, ids: Sequence[int]) -> tuple[int, ...]:
    return (await complete(url, ids, model=row.family, detokenize=False)).tokens


@pytest.mark.parametrize("row", _chosen(), ids=lambda row: row.name)
async def test_equals_one_engine(
    row: Row, models: Path, tmp_path: Path, expected: dict[tuple[str, ...], Answers]
) -> None:
    wanted = await _expected(row, models, tmp_path, expected)
    prompts = _prompts()
    with Cluster(
        family(row.family, models),
        tmp_path,
        arguments=[*ARGUMENTS, *row.arguments],
        prefill_arguments=row.prefill,
        decode_arguments=row.decode,
        extra=TRANSFER_ALL,
        transfer={"kv_role": row.role} if row.role else None,
        environment=row.environment,
        say=say,
    ) as cluster:
        urls = {name: engine.url for name, engine in cluster.engines.items()}
        before = {name: await prompt_tokens(url) for name, url in urls.items()}
        for ids, answer in zip(prompts, wanted, strict=True):
            got = await complete(cluster.url, ids, model=row.family, detokenize=False)
            assert got.tokens == answer, f"{row.name}: {len(ids)} tokens"
        spent = [await prompt_tokens(url) - before[name] for name, url in urls.items()]
        external = sum(each.external + each.cached for each in spent if each.external)
        computed = sum(each.computed for each in spent if each.external)
        print(f"{row.name}: {external} tokens from outside or cached, {computed} computed on decode")
        assert external, "no KV came from outside"
        if not row.role:
            assert computed <= row.computed * len(prompts)
        if row.exact:
            found = await complete_all(cluster.url, prompts, model=row.family, detokenize=False)
            assert [each.tokens for each in found] == wanted
