"""What capture reads of an end: rows of wire_ending, memory cgroups, where a thread is."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stallscope.capture import oom as oom_module
from stallscope.capture import workers as workers_module
from stallscope.capture.crews import MAX_WORKERS, Crews
from stallscope.capture.endings import Sent, exit_body
from stallscope.capture.oom import OomCounts, Victims, memory_cgroup
from stallscope.capture.whereabouts import BUSY, Whereabouts, pipes_of, where_is
from stallscope.capture.workers import Workers
from stallscope.wire.frames import Kind

MS, S = 1_000_000, 1_000_000_000
SPAWNED = ["python3", "-c", "spawn_main()", "--multiprocessing-fork"]


def row(exiting_ns: int = 0, **sent: tuple[int, int, int, bytes]) -> bytes:
    """A wire_ending with the signals of these names: (ts_ns, tgid, si_code, comm)."""
    data = bytearray(struct.pack("<Q", exiting_ns) + bytes(32 * 32))
    for name, fields in sent.items():
        struct.pack_into("<QIi16s", data, 8 + 32 * signal.Signals[name], *fields)
    return bytes(data)


def test_the_signal_it_died_of_is_told() -> None:
    sent = {"SIGTERM": (50, 7, 0, b"torchrun"), "SIGKILL": (90, 8, 0, b"slurmd\0rest")}
    assert exit_body(row(70, **sent), 9) == {
        "code": None, "signal": 9, "exiting_ns": 70, "sender": list(Sent(9, 90, 8, "slurmd")),
    }  # fmt: skip
    assert exit_body(row(**sent), 9)["exiting_ns"] == 90


def test_who_ends_by_a_code_was_asked_by_the_newest_signal() -> None:
    body = exit_body(
        row(60, SIGINT=(40, 3, 0, b"sh"), SIGTERM=(50, 7, -6, b"a\x1bb"), SIGUSR1=(55, 9, 0, b"x")), 3 << 8
    )
    assert body == {"code": 3, "signal": None, "exiting_ns": 60, "sender": [15, 50, 7, "a\\x1bb"]}


def test_the_kernel_sends_too() -> None:
    body = exit_body(row(SIGSEGV=(5, 99, 1, b"python3")), 0x80 | 11)
    assert body["sender"] == [11, 5, None, "kernel"] and body["signal"] == 11


@pytest.mark.parametrize("code", [-1, 0, 7 << 8])
def test_nothing_was_seen(code: int) -> None:
    assert exit_body(row(), code) == {
        "code": None if code < 0 else code >> 8, "signal": None, "exiting_ns": None, "sender": None,
    }  # fmt: skip


def target(proc: int, parent: int | None = None, cmdline: list[str] | None = None, **more: Any) -> Any:
    facts = SimpleNamespace(pid=1000 + proc, name="python3", cmdline=cmdline or ["python3", "train.py"])
    return SimpleNamespace(proc=proc, pid=1000 + proc, parent=parent, facts=facts, ended=False, **more)


@pytest.fixture
def counter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    file = tmp_path / "job" / "memory.events"
    file.parent.mkdir()
    file.write_text("low 0\noom 3\noom_kill 2\n")
    monkeypatch.setattr(oom_module, "_mounts", lambda: [oom_module._Mount(tmp_path, "/", True)])
    monkeypatch.setattr(oom_module, "memory_cgroup", lambda pid: "/job" if pid < 1000 else "/../etc")
    yield file


def test_a_count_explains_a_kill_once(counter: Path) -> None:
    counts, told = OomCounts(), []
    counts.learn([1, 2000])
    assert counts.claim(signal.SIGKILL) is False
    counter.write_text("oom_kill 5\n")
    assert [counts.claim(signal.SIGKILL), counts.claim(signal.SIGTERM), counts.claim(None)] == [True, False, False]
    counts.tell_rest(lambda kind, body: told.append((kind, body["kills"], body["cgroup"], body["ours"])), 5)
    assert told == [(Kind.OOM, 2, "/job", True)]
    counter.unlink()
    assert counts.claim(signal.SIGKILL) is None


def test_no_counter_can_be_read(counter: Path) -> None:
    counts = OomCounts()
    counts.learn([2000])  # its cgroup leads out of the mount
    assert counts.claim(signal.SIGKILL) is None


def test_victims(counter: Path) -> None:
    told: list[dict[str, Any]] = []
    victims = Victims(lambda kind, body: told.append(body), lambda: [target(-990)])
    victims.tell(5, 10, target(3), b"python3\0\0")
    victims.tell(6, 11, None, b"otel\x07\0")
    victims.tell(7, 3000, None, b"far\0")
    victims.tell(8, 0, None, b"")
    victims.learn()
    counter.write_text("oom_kill 3\n")
    victims.tell(9, 0, None, b"gone\0")  # nothing is left of it, but one of our cgroups has lost a process
    victims.tell(10, 0, None, b"gone\0")
    assert [(b["proc"], b["pid"], b["name"], b["ours"]) for b in told] == [
        (3, 10, "python3", True), (None, 11, "otel\\x07", True), (None, 3000, "far", False), (None, None, None, None),
        (None, None, "gone", True), (None, None, "gone", False),
    ]  # fmt: skip
    assert victims.holds(3) and not victims.holds(4)
    assert memory_cgroup(os.getpid())


def test_where_a_thread_is() -> None:
    read, write = os.pipe()
    waits = "import os, select, sys; p = select.poll(); p.register(int(sys.argv[1]), 1); print(1, flush=True); p.poll()"
    child = subprocess.Popen([sys.executable, "-c", waits, str(read)], stdout=subprocess.PIPE, pass_fds=[read])
    try:
        assert child.stdout and child.stdout.readline()
        inode = os.fstat(read).st_ino
        deadline = time.monotonic() + 10
        while (found := where_is(child.pid, child.pid)) and found.syscall != "poll" and time.monotonic() < deadline:
            time.sleep(0.01)
        assert found == Whereabouts("poll", (f"pipe:[{inode}]",)) and found.pipes == {inode}
        assert inode in pipes_of(child.pid)
    finally:
        child.kill()
        child.wait()
        os.close(read)
        os.close(write)
    assert where_is(child.pid, child.pid) is None and pipes_of(child.pid) == set()


def test_a_path_is_told_and_is_no_pipe(tmp_path: Path) -> None:
    path = tmp_path / "pipe:[7]"
    os.mkfifo(path)
    child = subprocess.Popen(["cat", "pipe:[7]"], cwd=tmp_path)
    try:
        deadline = time.monotonic() + 10
        while (found := where_is(child.pid, child.pid)) and found.syscall != "openat" and time.monotonic() < deadline:
            time.sleep(0.01)
        assert found == Whereabouts("openat", ("pipe:[7]",)) and found.pipes == set()
    finally:
        child.kill()
        child.wait()


@pytest.fixture
def pipes(monkeypatch: pytest.MonkeyPatch) -> dict[int, set[int]]:
    """Which pipes a pid holds."""
    from stallscope.capture import crews

    held: dict[int, set[int]] = {}
    monkeypatch.setattr(crews, "pipes_of", lambda pid: held.get(pid, set()))
    monkeypatch.setattr(crews, "standard_pipes_of", lambda pid: {99})
    return held


def test_who_is_a_crew(pipes: dict[int, set[int]]) -> None:
    server = ["python3", "-c", "from multiprocessing.forkserver import main; main()"]
    people = [
        target(1), target(2, 1, SPAWNED), target(3, 1), target(4, 1, ["cat"]), target(5, 1, server),
        target(6, 5, server), target(7, None, ["bash"]), target(8, 7, ["bash"]),
        target(9, 1, ["python3", "-c", "from multiprocessing.resource_tracker import main"]),
        target(10, None, ["torchrun"]), target(11, 10, SPAWNED),
    ]  # fmt: skip
    crews = Crews()
    crews.find(people, 0)
    assert {proc: sorted(crew.workers) for proc, crew in crews.by_trainer.items()} == {1: [2, 3, 6]}
    crews.find([target(1), *(target(20 + i, 1, SPAWNED) for i in range(MAX_WORKERS + 5))], 0)
    assert len(crews.by_trainer[1].workers) == MAX_WORKERS and crews.turned_away == 5
    crews.find([], 0)
    assert crews.by_trainer == {}


def test_pipes_of_the_dead_count_on(pipes: dict[int, set[int]]) -> None:
    trainer, worker = target(1), target(2, 1, SPAWNED)
    pipes.update({1001: {5, 6, 99}, 1002: {5, 99}})
    crews = Crews()
    crews.find([trainer, worker], 0)
    crew = crews.by_trainer[1]
    assert crew.pipes == {5, 6} and crew.holders == {5: {2}, 99: {2}}
    pipes[1002] = {6}
    crews.find([trainer, worker], 0)  # it let one go and lives
    assert crew.holders.get(5, set()) == set() and crew.holders[6] == {2}
    pipes[1002] = set()
    crews.find([trainer, worker], 0)
    assert crew.holders[6] == {2}


@pytest.mark.parametrize(("later_s", "holders"), [(59, {2}), (61, set())])
def test_who_closes_its_pipe_and_ends_then(pipes: dict[int, set[int]], later_s: int, holders: set[int]) -> None:
    trainer, worker = target(1), target(2, 1, SPAWNED)
    pipes.update({1001: {5, 6}, 1002: {5}})
    crews = Crews()
    crews.find([trainer, worker], 0)
    pipes[1002] = {6}  # its at-exit handlers run
    crews.find([trainer, worker], 0)
    crews.find([trainer, worker, target(3, 1)], later_s * 1000 * MS)
    crews.find([trainer, target(3, 1)], later_s * 1000 * MS)
    assert crews.by_trainer[1].holders[5] == holders


def test_looks_add_up(pipes: dict[int, set[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 1.6 s the trainer waits for 1 s while worker 2 reads a file and worker 3 waits for orders."""
    now, told, where = [0], [], {}
    pipes.update({1001: {5, 6}, 1002: {5}, 1003: {5, 6}})
    monkeypatch.setattr(workers_module, "where_is", lambda pid, tid: where.get(pid))
    looks = Workers(lambda kind, body: told.append(body), lambda: now[0], set)
    crew = [target(1), target(2, 1, SPAWNED), target(3, 1, SPAWNED)]
    looks.find(crew, 0)
    for step in range(81):
        now[0] = step * 20 * MS
        waits = 15 <= step < 65
        where[1001] = Whereabouts("poll", ("pipe:[5]",)) if waits else Whereabouts(BUSY)
        where[1002] = Whereabouts("read", ("/data/a",)) if waits else Whereabouts(BUSY)
        where[1003] = Whereabouts("read", ("pipe:[6]",))
        looks.step()
    looks.find(crew, now[0])
    (trainer,), workers = told[-1]["trainers"], {one[0]: one for one in told[-1]["workers"]}
    assert trainer[:5] == [1, 81, 1600 * MS, 1000 * MS, 1] and trainer[6:] == [None, [], False, "poll", "pipe:[5]"]
    busy, idle, blocked, charged = workers[2][3:7]
    assert busy + blocked == 1600 * MS and idle == 0 and abs(blocked - 1000 * MS) <= 100 * MS
    assert abs(charged - 1000 * MS) <= 100 * MS and workers[2][9:] == ["read", "/data/a"]
    assert workers[3][3:7] == [0, 1600 * MS, 0, 0]


def test_a_lock_counts_while_another_thread_is_in_a_workers_pipe(
    pipes: dict[int, set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    now, told, inside = [0], [], set()
    pipes.update({1001: {5}, 1002: {5}})
    where = {1001: Whereabouts("futex"), 77: Whereabouts("poll", ("pipe:[5]",)), 1002: Whereabouts(BUSY)}
    monkeypatch.setattr(workers_module, "where_is", lambda pid, tid: where.get(tid))
    monkeypatch.setattr(workers_module, "threads_of", lambda pid: [1001, 77])
    looks = Workers(lambda kind, body: told.append(body), lambda: now[0], lambda: inside)
    looks.find([target(1), target(2, 1, SPAWNED)], 0)
    for step in range(100):
        now[0] = (step + 10) * 20 * MS
        if step == 50:
            inside.add((1, 1001))  # the main thread waits inside a CUDA call from now on
        looks.step()
    looks.find([target(1), target(2, 1, SPAWNED)], now[0])
    (trainer,) = told[-1]["trainers"]
    assert abs(trainer[3] - 1000 * MS) <= 120 * MS and trainer[4] == 1 and trainer[6] is None
