"""What /proc says of threads, files and environments."""

from __future__ import annotations

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
from stallscope.capture.syscalls import _by_number, syscall_name


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


@pytest.mark.parametrize(("makes", "begins"), [
    ("s = socket.socketpair(); p.register(s[0], 1)", "socket:["),
    ("s = socket.socketpair(); p.register(s[0], 1); p.register(s[1], 1)", None),
    ("p.register(os.pidfd_open(os.getpid()), 1)", None),
    ("s = socket.socketpair(); s[0].setblocking(False)\nwhile s[0].send(bytes(1 << 20)) == 1 << 20: pass\np.register(s[0], select.POLLOUT)", "socket:["),
    ("s = socket.socketpair(); p.register(s[0], 1); p.register(s[1], select.POLLERR)", "socket:["),
    ("import ctypes; p.register(ctypes.CDLL(None).inotify_init(), 1)", "anon_inode:inotify"),
])  # fmt: skip
def test_the_only_file_that_is_polled(makes: str, begins: str | None) -> None:
    process = run(f"import os, select, socket; p = select.poll(); {makes}; print('ready'); p.poll()")
    try:
        time.sleep(0.2)
        (thread,) = read_threads(process.pid, [])
        assert thread.syscall == "poll"
        assert thread.file is None if begins is None else (thread.file or "").startswith(begins)
    finally:
        process.kill()
        process.wait()


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
