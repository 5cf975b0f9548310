"""The library built otherwise: rings of 64 records, a counter of any rate, sanitizers (STALLSCOPE_LONG_TESTS=1)."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from shim_kit import HERE, ROOT, Agent, Read, environment, run
from stallscope.capture._drain import ffi
from variants import program, variant

LONG = os.environ.get("STALLSCOPE_LONG_TESTS") == "1"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rings of 64 and 16 slots."""
    return variant(tmp_path_factory.mktemp("small"), defines="-DSEG_BULK_BITS=6 -DSEG_VITAL_BITS=4")


@pytest.mark.parametrize(("calls", "enough"), [("", 100_000_000), ("nccl", 20_000_000)])
def test_no_record_is_torn(agent: Agent, stubs: Path, small: Path, tmp_path: Path, calls: str, enough: int) -> None:
    """A ring that is overwritten all the time, read all the time: what is given out is what was written."""
    enough = enough if LONG else 300_000
    flood = program(tmp_path, stubs, "flood.c")
    sources = [str(HERE / "hammer.c"), *(str(ROOT / "native/drain" / f"{name}.c") for name in
                                        ("segment", "segcounts", "segbase"))]  # fmt: skip
    # A lease of no time: the writer takes this reader for dead, and overwrites what it is reading.
    folders = [f"-I{ROOT}/native", f"-I{ROOT}/native/drain", "-DLEASE_S=0"]
    subprocess.run(["gcc", "-std=gnu11", "-O2", *folders, *sources, "-o", str(tmp_path / "hammer")], check=True)
    env = environment(stubs, STALLSCOPE_SHIM=f"socket:{agent.path}") | {"LD_PRELOAD": str(small)}
    with subprocess.Popen([str(flood), "600", *calls.split()], env=env, stdout=subprocess.PIPE, text=True) as process:
        agent.wait_for(1)
        words = [str(tmp_path / "hammer"), f"/proc/{os.getpid()}/fd/{agent.fds[0]}", str(enough), *calls.split()]
        done = subprocess.run(words, capture_output=True, text=True, timeout=600)
        process.kill()
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["seen"] >= enough
    assert found["overwritten"] > 0
    assert found["corrupt"] == 0
    assert bool(found["ids"]) == bool(calls)


def test_a_ring_that_is_full_all_the_time(agent: Agent, stubs: Path, small: Path, tmp_path: Path) -> None:
    """Which hooks' records were overwritten is told in the end."""
    env = environment(stubs, STALLSCOPE_SHIM=f"socket:{agent.path}") | {"LD_PRELOAD": str(small)}
    truth = run([stubs / "program", "threads", "20", "5", "1000"], env)
    (read,) = agent.wait_for(1)
    assert read.conserved() == truth == {"cudaLaunchKernel": 100_000}


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory, stubs: Path) -> Path:
    """A program with the library and a counter of its own."""
    folder = tmp_path_factory.mktemp("fake")
    library = variant(folder, defines="-DSEG_FAKE_COUNTER")
    return program(folder, stubs, "slow.c", "-rdynamic", library=library)


class FakeClock:
    """Converts by a rate."""

    def __init__(self, rate: float) -> None:
        self.c = ffi.new("struct seg_clock *")
        self.c.count = 1
        self.c.line[0].ns_per_tick = round(1e9 * 2**32 / rate)


@pytest.mark.parametrize("seconds", [0.5, 3600.0, 86400.0, 864000.0])
@pytest.mark.parametrize("rate", [1e6, 24e6, 1e9, 2.4454e9, 5e9])
def test_long_calls_at_any_rate(agent: Agent, stubs: Path, fake: Path, rate: float, seconds: float) -> None:
    """Right to 0.1 %: in bulk records, in vital ones, and in the totals."""
    env = dict(os.environ, STALLSCOPE_SHIM=f"socket:{agent.path}", SLOW_RATE=str(rate), SLOW_SECONDS=str(seconds))
    run([fake], env)
    (read,) = agent.wait_for(1)
    read = Read(read.segment, FakeClock(rate))  # type: ignore[arg-type]
    assert sum(read.conserved().values()) == 3
    durations = read.recs["dur_ns"][read.recs["dur_ns"] > 0]
    assert len(durations) == 3
    assert durations.tolist() == pytest.approx([seconds * 1e9] * 3, rel=1e-3, abs=2e6)
    assert read.times()["cudaStreamSynchronize"] == pytest.approx(seconds * 1e9, rel=1e-3, abs=2e6)


SANITIZERS = {"address,undefined": "ASAN_OPTIONS=detect_leaks=0", "thread": "TSAN_OPTIONS=halt_on_error=1"}


@pytest.fixture(scope="module", params=SANITIZERS)
def sanitized(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, stubs: Path) -> Iterator[Path]:
    """The program of all modes with a sanitizer in it and in the library."""
    if not LONG:
        pytest.skip("STALLSCOPE_LONG_TESTS is not 1")
    folder, san = tmp_path_factory.mktemp("san"), request.param
    library = variant(folder, san=san, defines="-DSEG_BULK_BITS=6 -DSEG_VITAL_BITS=4")
    name, _, options = SANITIZERS[san].partition("=")
    os.environ[name] = options
    yield program(folder, stubs, "program.c", f"-fsanitize={san}", library=library)
    del os.environ[name]


@pytest.mark.parametrize("mode", ["calls 20000", "storm 100000", "threads 50 4 100", "threads 300 1 20", "forks 5 50",
                                  "vforks 20", "errno", "ends", "fails 700"])  # fmt: skip
def test_sanitizers_find_nothing(agent: Agent, stubs: Path, sanitized: Path, mode: str) -> None:
    """While somebody reads."""
    env = dict(os.environ, STALLSCOPE_SHIM=f"socket:{agent.path}", LD_LIBRARY_PATH=str(stubs))
    with subprocess.Popen(
        [str(sanitized), *mode.split()], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        while process.poll() is None:
            for read in list(agent.read):
                read.drain()
        assert process.stdout is not None and process.stderr is not None
        out, err = process.stdout.read(), process.stderr.read()
    assert process.returncode == 0, err
    assert "ERROR" not in err and "WARNING" not in err and "runtime error" not in err
    for read in agent.read:
        read.conserved()
    assert json.loads(next(line for line in out.splitlines() if line.startswith("{"))) is not None
