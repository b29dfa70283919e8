"""What keeps an engine from starting is the last line its user sees, with what is allowed (P5)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from kvbus_connector import plugin
from kvbus_connector.backends import check_backends, missing_libraries

from kvbus.errors import ConfigError
from kvbus.last_words import ASKED, VARIABLE

# The grandchild finds it, by fork; another one later; a child goes on and ends slowly; the parent ends with noise of
# its own.
PROGRAM = """
import multiprocessing, signal, sys, time
from multiprocessing import shared_memory
from kvbus.errors import ConfigError
from kvbus_connector import reason

def work(error):
    with reason.told():
        raise error

def engine():
    fork = multiprocessing.get_context("fork")
    for error in (ConfigError("pipeline_parallel_size", 2, "1"), ValueError("later")):
        child = fork.Process(target=work, args=(error,))
        child.start()
        child.join()
    raise RuntimeError("noise of the engine")

def slow(ready):
    signal.signal(signal.SIGTERM, lambda *_: (time.sleep(3), sys.exit("noise of a slow child")))
    ready.set()
    signal.pause()

if __name__ == "__main__":
    reason.arrange()
    reason.arrange()
    child = multiprocessing.get_context(sys.argv[1]).Process(target=engine)
    child.start()
    child.join()
    if len(sys.argv) > 2:
        context = multiprocessing.get_context(sys.argv[1])
        ready = context.Event()
        context.Process(target=slow, args=(ready,)).start()
        ready.wait()
    leaked = shared_memory.SharedMemory(create=True, size=1)
    raise RuntimeError("noise of the API server")
"""
LINE = "kvbus: bad configuration: pipeline_parallel_size=2; allowed: 1"


def run(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    program = folder / "program.py"
    program.write_text(PROGRAM)
    clean = {name: value for name, value in os.environ.items() if name != VARIABLE}
    return subprocess.run(
        [sys.executable, str(program), *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**clean, "TMPDIR": str(folder), **environment},
    )


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_what_the_first_process_found_is_printed_last(tmp_path: Path, method: str) -> None:
    done = run(tmp_path, method)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[-1] == LINE
    assert "RuntimeError: noise of the API server" in lines
    assert any("leaked shared_memory" in line for line in lines[:-1])
    assert [path.name for path in tmp_path.iterdir()] == ["program.py"], "nothing is left behind"


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_process_that_ends_slowly_does_not_speak_after_it(tmp_path: Path, method: str) -> None:
    """Another rank of the same engine, for one, which found nothing wrong."""
    lines = run(tmp_path, method, "slow").stderr.splitlines()
    assert lines[-1] == LINE
    assert "noise of a slow child" in lines


def test_a_parent_that_prints_it_gets_it(tmp_path: Path) -> None:
    file = tmp_path / "reason"
    done = run(tmp_path, "fork", **{ASKED: str(file)})
    assert LINE not in done.stderr.splitlines()[-1]
    assert file.read_text() == LINE
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_parent_that_has_loaded_vllm_and_prints_nothing(tmp_path: Path, method: str) -> None:
    """A launcher in Python, for one, or these tests: the reason is the engine's, not theirs."""
    done = run(tmp_path, method, **{VARIABLE: str(tmp_path / "of another")})
    assert done.stderr.splitlines()[-1] == LINE


class TestBackends:
    LOADABLE = ("POSIX", "UCX")

    def check(self, *wanted: str, folders: Sequence[Path] = ()) -> str:
        with pytest.raises(ConfigError) as caught:
            check_backends(wanted, ["FABRIC", "POSIX", "UCX"], self.LOADABLE.__contains__, folders)
        return str(caught.value)

    def test_what_loads_passes(self) -> None:
        check_backends(["UCX", "POSIX"], ["POSIX", "UCX"], self.LOADABLE.__contains__, [])

    def test_one_that_does_not_exist(self) -> None:
        assert self.check("UCX", "UCXX") == (
            "kvbus: bad configuration: backends=['UCX', 'UCXX']; "
            "allowed: what NIXL can load here: POSIX, UCX; there is no plugin UCXX"
        )

    def test_one_whose_library_is_missing(self, tmp_path: Path) -> None:
        library, plugin = tmp_path / "libkvbus_needed.so", tmp_path / "libplugin_FABRIC.so"
        source = tmp_path / "empty.c"
        source.write_text("int kvbus_nothing(void) { return 0; }\n")
        for words in (
            ["-Wl,-soname,libkvbus_needed.so", "-o", str(library), str(source)],
            ["-Wl,--no-as-needed", "-o", str(plugin), str(source), str(library)],
        ):
            if subprocess.run(["cc", "-shared", "-fPIC", *words], capture_output=True, check=False).returncode:
                pytest.skip("a C compiler (`apt-get install gcc`)")
        library.unlink()
        assert missing_libraries(plugin) == ["libkvbus_needed.so"]
        assert self.check("FABRIC", folders=[tmp_path / "no", tmp_path]).endswith(
            "UCX; FABRIC lacks libkvbus_needed.so"
        )

    def test_a_file_that_is_no_library(self, tmp_path: Path) -> None:
        (tmp_path / "libplugin_FABRIC.so").write_bytes(b"junk")
        assert "FABRIC lacks " in self.check("FABRIC", folders=[tmp_path])

    def test_nixl_does_not_say_why(self, tmp_path: Path) -> None:
        assert "there is no plugin FABRIC" in self.check("FABRIC", folders=[tmp_path])


@pytest.mark.parametrize(
    ("given", "chosen_by_vllm", "layout"),
    [(None, None, "DS"), (None, "SD", "DS"), ("SD", None, "SD"), ("DS", None, "DS")],
)
def test_the_state_layout_is_ours_unless_the_user_named_one(
    monkeypatch: pytest.MonkeyPatch, given: str | None, chosen_by_vllm: str | None, layout: str
) -> None:
    """P6: vLLM chooses SD on a CPU that multiplies bfloat16, after plugins are loaded, before connectors are; processes
    that inherit its choice load the plugin again."""
    monkeypatch.setenv(plugin.WANTED_LAYOUT, "DS")  # a program that had loaded vLLM, too, started this engine
    monkeypatch.setenv(plugin.STATE_LAYOUT, "")
    monkeypatch.delenv(plugin.STATE_LAYOUT)
    if given is not None:
        monkeypatch.setenv(plugin.STATE_LAYOUT, given)
    plugin.note_state_layout.cache_clear()
    plugin.note_state_layout()
    if chosen_by_vllm is not None:
        monkeypatch.setenv(plugin.STATE_LAYOUT, chosen_by_vllm)
    plugin.note_state_layout()
    plugin.choose_state_layout()
    assert os.environ[plugin.STATE_LAYOUT] == layout
