"""Where segments are looked for, what becomes of communicators' tables, and what libraries are told. Processes are real."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_segments import LAUNCH, REDUCE, Sent, target

from stallscope.capture import shimlinks as module
from stallscope.capture.commreader import MADE, SPREAD, TAKEN
from stallscope.capture.libmatch import SHIM, is_shim
from stallscope.capture.parser_client import ParserFailed
from stallscope.capture.procfs import Mapping
from stallscope.capture.segments import candidates, has_segment, lock, reopen, start_ticks_of
from stallscope.capture.shimcomms import MAX_ROWS, ShimComms
from stallscope.capture.shimlinks import ShimLinks
from stallscope.capture.target import Resolved
from stallscope.wire.frames import Kind


def test_only_what_bears_the_name_is_opened(tmp_path: Path) -> None:
    """A memfd of that name, and a file of that shape; nothing that opening could wait for or act on."""
    memfd, other = os.memfd_create("stallscope-segment"), os.memfd_create("stallscope-segment-not")
    (tmp_path / "12.345.seg").touch()
    file = os.open(tmp_path / "12.345.seg", os.O_RDWR)
    os.mkfifo(tmp_path / "13.345.seg")
    fifo = os.open(tmp_path / "13.345.seg", os.O_RDWR)
    fds = list(candidates(os.getpid()))
    assert {os.fstat(fd).st_ino for fd in fds} == {os.fstat(fd).st_ino for fd in (memfd, file)}
    assert has_segment(os.getpid())
    for fd in (memfd, other, file, fifo, *fds):
        os.close(fd)
    assert not has_segment(os.getpid()) and not has_segment((1 << 22) - 1)
    with pytest.raises(OSError):
        reopen("/dev/null")


def test_a_lock_is_our_own() -> None:
    """Not the process's that made the segment, and gone with our descriptor."""
    memfd = os.memfd_create("x")
    mine, others = (reopen(f"/proc/self/fd/{memfd}") for _ in range(2))
    assert lock(mine) and not lock(others)
    os.close(mine)
    assert lock(others)
    for fd in (memfd, others):
        os.close(fd)


def test_start_ticks() -> None:
    """Of this process, and of none."""
    assert start_ticks_of(os.getpid()) == int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    assert start_ticks_of((1 << 22) - 1) is None


@pytest.mark.parametrize(("path", "yes"), [
    (f"/a/{SHIM}", True), (f"/a b/{SHIM} (deleted)", True), ("/a/libstallscope.so.1", False), ("/libstallscope.so/x", False),
])  # fmt: skip
def test_the_name_of_the_shim(path: str, yes: bool) -> None:
    assert is_shim(path) == yes


def test_communicators_take_rows_once() -> None:
    """And are looked for only when one was made."""
    comms = {100: [SimpleNamespace(pointer=0x7000)]}
    looks, made = [], [0]

    def look() -> Any:
        looks.append(1)
        return comms.items()

    table = ShimComms(lambda: made[0], look)
    assert (table.ctl(TAKEN), table.ctl(MADE), looks) == (0, 0, [])
    made[0] = 1
    assert (table.ctl(TAKEN), table.ctl(MADE), looks) == (1, 1, [1])
    assert table.keys() == [(0x7000 + 100 * SPREAD) & ((1 << 64) - 1)]
    comms[200] = [SimpleNamespace(pointer=p) for p in range(8, 8 * (MAX_ROWS + 8), 8)]
    made[0] = 2
    assert table.ctl(TAKEN) == MAX_ROWS and table.keys()[0] == (0x7000 + 100 * SPREAD) & ((1 << 64) - 1)


class Parser:
    """Knows one NCCL."""

    def resolve(self, fd: int, libraries: frozenset[str]) -> Resolved:
        if libraries == {"CUDART"}:
            raise ParserFailed("cannot read", "x", "why", died=False)
        return Resolved("ab", [], [], False, defined=frozenset({"ncclAllReduce", "other"}), nccl_version="2.27.5")


def test_libraries_are_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the functions that the file has; with all of the table where nobody can tell."""
    sent, process = Sent(), target()
    mappings = [
        Mapping(0x1000, 0x2000, 0, (8, 1), 5, "/lib/libnccl.so.2"), Mapping(0x3000, 0x4000, 0, (8, 1), 6, "/lib/libcudart.so.12"),
        Mapping(0x5000, 0x6000, 0, (8, 1), 5, "/lib/libnccl.so.2"),
    ]  # fmt: skip
    monkeypatch.setattr(module, "executable_mappings", lambda pid: mappings)
    monkeypatch.setattr(module, "open_mapping", lambda pid, mapping: os.open(os.devnull, os.O_RDONLY))
    links = ShimLinks(None, sent.send, lambda: 9)  # type: ignore[arg-type]
    links._resolver = Parser()  # type: ignore[assignment]
    links.tell(process, [REDUCE], 7)
    links.tell(process, [REDUCE, LAUNCH], 8)
    links.tell(process, [REDUCE, LAUNCH, 399], 9)
    nccl, cudart = sent.of(Kind.LINK)
    assert (nccl["library"], nccl["hooks"], nccl["version"], nccl["at_ns"]) == ("NCCL", [REDUCE], "2.27.5", 7)
    assert (nccl["method"], nccl["path"], nccl["build_id"]) == ("shim", "/lib/libnccl.so.2", "ab")
    assert cudart["library"] == "CUDART" and len(cudart["hooks"]) > 50 and cudart["version"] is None
    assert [lib.library for lib in process.linked.values()] == ["NCCL", "CUDART"]
    assert process.links() == ([], [])
    links.forget(process)
    assert process.linked == {}


def test_a_process_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its library is told all the same."""

    def gone(pid: int) -> list[Mapping]:
        raise ProcessLookupError

    monkeypatch.setattr(module, "executable_mappings", gone)
    sent = Sent()
    ShimLinks(None, sent.send, lambda: 9).tell(target(), [LAUNCH], 7)  # type: ignore[arg-type]
    (link,) = sent.of(Kind.LINK)
    assert (link["library"], link["path"]) == ("CUDART", SHIM)


def test_nothing_is_asked_of_a_stranger() -> None:
    """Whose descriptors may not be looked at."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert list(candidates(child.pid)) == []
    child.kill()
    child.communicate()
