"""What /proc says of threads, files and environments, and Python stacks from py-spy's output."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stallscope.capture.hoststate import MAX_THREADS, WrittenFiles, read_threads
from stallscope.capture.procfs import own_tid, rank_words
from stallscope.capture.stacks import MAX_BYTES, MAX_FRAMES, BadDump, Stacks, Wanted, parse_dump
from stallscope.capture.syscalls import _by_number, syscall_name
from stallscope.wire.frames import Kind

FRAME = {"name": "step", "filename": "/j/train.py", "line": 7, "module": None, "locals": None}


def run(program: str, **options: Any) -> subprocess.Popen[str]:
    """A Python that runs this, and has said "ready"."""
    process = subprocess.Popen([sys.executable, "-u", "-c", program], stdout=subprocess.PIPE, text=True, **options)
    assert process.stdout and process.stdout.readline() == "ready\n"
    return process


@pytest.fixture
def reader() -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Reads from a named pipe into which nobody writes."""
    program = "import os; os.mkfifo('p'); f = os.open('p', os.O_RDWR); print('ready'); os.read(f, 1)"
    folder = Path(os.path.realpath("/tmp")) / f"stallscope-test-{os.getpid()}"
    folder.mkdir()
    process = run(program, cwd=folder)
    time.sleep(0.1)
    yield process, folder / "p"
    process.kill()
    process.wait()
    (folder / "p").unlink()
    folder.rmdir()


def test_thread_in_a_read(reader: tuple[subprocess.Popen[str], Path]) -> None:
    """The system call by name, and what its descriptor is open on."""
    process, pipe = reader
    (thread,) = read_threads(process.pid, [])
    assert (thread.tid, thread.state) == (process.pid, "S")
    assert thread.name and thread.wchan
    assert (thread.syscall, thread.file) == ("read", str(pipe))
    assert thread.cpu_ns >= 0


def test_at_most_so_many_threads_the_main_one_and_callers_first() -> None:
    """16, whatever there is; a number that is no thread of it is left out."""
    stop = threading.Event()
    threads = [threading.Thread(target=stop.wait) for _ in range(20)]
    for thread in threads:
        thread.start()
    last = threads[-1].native_id
    assert last
    found = [thread.tid for thread in read_threads(os.getpid(), [last, 999_999_999])]
    stop.set()
    assert found[:2] == [os.getpid(), last]
    assert len(set(found)) == len(found) == MAX_THREADS


def test_a_process_that_is_gone_has_no_threads() -> None:
    """It may end at any moment."""
    process = subprocess.Popen(["true"])
    process.wait()
    assert read_threads(process.pid, []) == []
    assert rank_words(process.pid) == {}
    assert own_tid(process.pid, 77) == 77


def test_numbers_of_both_machines() -> None:
    """As man 2 syscalls has them."""
    intel, arm = _by_number("x86_64"), _by_number("aarch64")
    assert (intel[0], intel[202], intel[230], intel[74]) == ("read", "futex", "clock_nanosleep", "fsync")
    assert (arm[63], arm[98], arm[115], arm[82]) == ("read", "futex", "clock_nanosleep", "fsync")
    assert "poll" not in arm.values()
    assert _by_number("riscv64") == {}
    assert syscall_name(9999) == "syscall 9999"


def test_how_far_a_file_is_written(tmp_path: Path) -> None:
    """Positions from look to look; not what was there before an append, not files that are read."""
    (tmp_path / "old").write_bytes(bytes(5000))
    files = WrittenFiles()
    with (tmp_path / "new.pt").open("wb", buffering=0) as new, (tmp_path / "old").open("rb", buffering=0) as old:
        new.write(bytes(100))
        assert files.advance(os.getpid(), os.getpid()) is None
        new.write(bytes(2000))
        old.read()
        assert files.advance(os.getpid(), os.getpid()) == (str(tmp_path / "new.pt"), 2000)
        assert files.advance(os.getpid(), os.getpid()) is None
        with (tmp_path / "log").open("wb", buffering=0) as log:
            log.write(bytes(300))
            assert files.advance(os.getpid(), os.getpid()) == (str(tmp_path / "log"), 300)
        new.seek(0)
        assert files.advance(os.getpid(), os.getpid()) is None
    with (tmp_path / "old").open("ab", buffering=0) as appended:
        appended.write(bytes(10))
        assert files.advance(os.getpid(), os.getpid()) is None


def test_what_is_said_is_no_file_that_is_written(tmp_path: Path) -> None:
    """A traceback or a watchdog's last words in a job's log."""
    script = (
        "import sys\nfor _ in range(2): sys.stdin.readline(); sys.stderr.write('x' * 9000); print('done', flush=True)"
    )
    with (tmp_path / "log").open("wb") as log:
        program = subprocess.Popen(
            [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
        )
    files = WrittenFiles()
    assert program.stdin and program.stdout
    for _ in range(2):
        program.stdin.write("go\n")
        program.stdin.flush()
        assert program.stdout.readline() == "done\n"
        assert files.advance(program.pid, program.pid) is None
    program.stdin.close()
    assert program.wait(60) == 0
    assert (tmp_path / "log").stat().st_size == 18000


def test_only_numbers_of_an_environment() -> None:
    """The target chooses its environment."""
    words = {
        "RANK": "3",
        "WORLD_SIZE": "8 ",
        "LOCAL_RANK": "-1",
        "PMI_RANK": "1" * 300,
        "SLURM_PROCID": "",
        "HOME": "1",
    }
    process = run("print('ready'); import time; time.sleep(60)", env={**os.environ, **words})
    found = rank_words(process.pid)
    process.kill()
    process.wait()
    assert found == {"RANK": "3", "PMI_RANK": "1" * 64}


def dump(*threads: dict[str, Any]) -> bytes:
    """As py-spy prints it."""
    return json.dumps(
        [{"pid": 1, "thread_name": None, "os_thread_id": None, "frames": [], **t} for t in threads]
    ).encode()


def test_a_dump_is_read() -> None:
    """Innermost first, as it comes; line 0 is one that py-spy could not read."""
    unknown = {**FRAME, "line": 0, "filename": None, "name": "a\x1b[31m"}
    (thread,) = parse_dump(dump({"os_thread_id": 9, "thread_name": "MainThread", "frames": [FRAME, unknown]}))
    assert (thread.tid, thread.name) == (9, "MainThread")
    assert thread.frames == [("/j/train.py", 7, "step", "python"), (None, None, "a\\x1b[31m", "python")]


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{}", b"[1]", b"[" * 100_000, b"\xff\xfe", b'[{"frames": 1}]', b'[{"frames": [1]}]', b'[{"frames": [{}]}]',
        b'[{"frames": [{"name": 5}]}]', b"[" + b",".join([b'{"frames":[]}'] * 5000) + b"]",
    ],
    ids=lambda data: repr(data[:20]),
)  # fmt: skip
def test_a_hostile_dump_is_refused(data: bytes) -> None:
    """Names in it are the target's."""
    with pytest.raises(BadDump):
        parse_dump(data)


def test_a_large_dump_is_cut() -> None:
    """Deep recursion, long names, impossible lines."""
    odd = {**FRAME, "name": "n" * 9999, "line": 1 << 40}
    (thread,) = parse_dump(dump({"os_thread_id": "x", "frames": [odd] * 1000}))
    assert thread.tid is None
    assert len(thread.frames) == MAX_FRAMES
    assert thread.frames[0] == ("/j/train.py", None, "n" * 512, "python")


class Taken:
    """A Stacks with a py-spy of our own."""

    def __init__(self, program: Path) -> None:
        self.frames: list[dict[str, Any]] = []
        self.now_ns = 0
        self.stacks = Stacks(self._send, lambda: self.now_ns, program)

    def _send(self, kind: Kind, body: dict[str, Any]) -> None:
        assert kind == Kind.STACK
        self.frames.append(body)

    def run(self, wanted: Wanted, step_ns: int = 0) -> list[dict[str, Any]]:
        """Until a frame has come."""
        self.stacks.want(wanted)
        end = time.monotonic() + 20
        while not self.frames and time.monotonic() < end:
            self.stacks.step()
            self.now_ns += step_ns
            time.sleep(0.005)
        return self.frames


def script(folder: Path, text: str) -> Path:
    """A stand-in for py-spy."""
    path = folder / "py-spy"
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return path


def test_a_stack_of_the_main_thread_and_of_the_caller(tmp_path: Path) -> None:
    """By the thread's number in its own namespace, the main one by name; another that has no Python frames: nothing."""
    (tmp_path / "out").write_bytes(
        dump({"os_thread_id": 12, "frames": [FRAME]}, {"thread_name": "MainThread", "frames": [FRAME, FRAME]})
    )
    taken = Taken(script(tmp_path, f"cat {tmp_path}/out"))
    frames = taken.run(Wanted(3, 4000, {4000: 1, 4012: 12, 4013: 13}))
    assert [(f["proc"], f["tid"], len(f["frames"]), f["why"], f["by"]) for f in frames] == [
        (3, 4000, 2, None, "py-spy"), (3, 4012, 1, None, "py-spy"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("echo 'Error: no Python' >&2; exit 1", "py-spy: Error: no Python"),
        ("exit 3", "py-spy: ended with code 3"),
        ("kill -9 $$", "py-spy: ended with code -9"),
        ("echo []", "py-spy shows no frames of this thread"),
        ("echo nonsense", "py-spy: no JSON"),
        (f"head -c {3 * MAX_BYTES} /dev/zero", f"py-spy: more than {MAX_BYTES} bytes"),
    ],
)
def test_why_there_is_no_stack(tmp_path: Path, text: str, why: str) -> None:
    """Always one frame, with the reason."""
    (frame,) = Taken(script(tmp_path, text)).run(Wanted(3, 4000, {4000: 4000}))
    assert (frame["proc"], frame["tid"], frame["frames"]) == (3, 4000, [])
    assert frame["why"].startswith(why)


def test_a_py_spy_that_is_missing_or_hangs(tmp_path: Path) -> None:
    """Killed after 2 s of our clock; the loop is never held."""
    (frame,) = Taken(tmp_path / "none").run(Wanted(1, 1, {1: 1}))
    assert frame["why"] == f"py-spy is not installed ({tmp_path / 'none'})"
    taken = Taken(script(tmp_path, "exec sleep 60"))
    start_s = time.monotonic()
    (frame,) = taken.run(Wanted(1, 1, {1: 1}), step_ns=100_000_000)
    assert frame["why"] == "py-spy took more than 2 s"
    assert time.monotonic() - start_s < 10
    taken.stacks.close()


def test_py_spy_has_only_what_it_needs(tmp_path: Path) -> None:
    """Of all capabilities two at most, and no way to more."""
    out = tmp_path / "status"
    taken = Taken(script(tmp_path, f"cat /proc/self/status > {out}; exit 1"))
    out.touch()
    out.chmod(0o666)
    taken.run(Wanted(1, 1, {1: 1}))
    fields = dict(line.split(":\t") for line in out.read_text().splitlines() if ":\t" in line)
    allowed = 1 << 2 | 1 << 19
    assert int(fields["CapPrm"], 16) & ~allowed == 0
    assert int(fields["CapEff"], 16) & ~allowed == 0
    assert fields["NoNewPrivs"] == "1"


def test_the_real_py_spy() -> None:
    """On a Python of our own, which is not stopped."""
    process = run("import time\ndef culprit():\n    time.sleep(60)\nprint('ready')\nculprit()")
    taken = Taken(Path(sys.prefix) / "bin/py-spy")
    (frame,) = taken.run(Wanted(5, process.pid, {process.pid: process.pid}))
    process.kill()
    process.wait()
    assert frame["why"] is None
    assert frame["frames"][0] == ["<string>", 3, "culprit", "python"]
