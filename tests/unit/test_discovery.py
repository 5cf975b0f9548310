"""Side band records: what the parser makes of bytes, and what the kernel really sends."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stallscope.capture.discovery import (
    Discovery,
    Event,
    Execed,
    Exited,
    Forked,
    Lost,
    Mapped,
    online_cpus,
    parse,
)
from stallscope.capture.kernel import bpf, btf_offsets, perf_event_open


def record(kind: int, body: bytes, misc: int = 0, trailer: tuple[int, int, int] = (1, 2, 99)) -> bytes:
    tail = struct.pack("<IIQ", *trailer)
    return struct.pack("<IHH", kind, misc, 8 + len(body) + len(tail)) + body + tail


def mapped(path: bytes, at_ns: int = 99) -> bytes:
    body = struct.pack("<IIQQQIIQQII", 1, 2, 0x7000, 0x2000, 0x1000, 254, 1, 77, 0, 5, 2) + path + b"\0"
    return record(10, body + bytes(-len(body) % 8), trailer=(1, 2, at_ns))


def test_a_mapping() -> None:
    assert parse(mapped(b"/usr/lib/libcudart.so.12")) == [
        Mapped(1, 2, 99, 0x7000, 0x2000, 0x1000, (254, 1), 77, "/usr/lib/libcudart.so.12")
    ]


@pytest.mark.parametrize("path", [b"", b"/\xff\xfe\n;$(id)", b"//anon", b"/a" * 2000, b"/x (deleted)"])
def test_any_path_is_only_data(path: bytes) -> None:
    (found,) = parse(mapped(path))
    assert isinstance(found, Mapped) and os.fsencode(found.path) == path


def test_the_other_kinds() -> None:
    data = (
        record(7, struct.pack("<IIIIQ", 10, 9, 11, 8, 5))
        + record(4, struct.pack("<IIIIQ", 10, 9, 11, 8, 5))
        + record(3, struct.pack("<II", 1, 2) + b"new name", misc=0)
        + record(3, struct.pack("<II", 1, 2) + b"prog\0\0\0\0", misc=1 << 13)
        + record(2, struct.pack("<QQ", 4, 1234))
    )
    assert parse(data, cpu=3) == [
        Forked(10, 11, 99, 9, 8), Exited(10, 11, 99), Execed(1, 2, 99, "prog"), Lost(1, 2, 99, 3, 1234)]  # fmt: skip


def test_only_wanted_mappings() -> None:
    data = mapped(b"/lib/libc.so.6") + mapped(b"/x/libnccl.so.2") + record(4, bytes(24))
    kinds = [type(event) for event in parse(data, wanted=re.compile(rb"libnccl"))]
    assert kinds == [Mapped, Exited]


@pytest.mark.parametrize("kind", [2, 3, 4, 7, 10, 11, 0xFFFFFFFF])
def test_short_records_of_any_kind_are_left_out(kind: int) -> None:
    for length in range(64):
        parse(record(kind, bytes(length)) + mapped(b"/after"))
        head = struct.pack("<IHH", kind, 0xFFFF, length)
        parse(head + bytes(range(length)))
    assert parse(record(kind, b"") + mapped(b"/after"))[-1:] == parse(mapped(b"/after"))


def test_a_size_beyond_the_end_stops() -> None:
    good = mapped(b"/lib/a")
    assert len(parse(good + struct.pack("<IHH", 10, 0, 0xFFFF) + bytes(100))) == 1
    assert len(parse(good + struct.pack("<IHH", 10, 0, 0) + bytes(100))) == 1
    for end in range(len(good)):
        assert parse(good[:end]) == []


def test_cpu_lists() -> None:
    assert online_cpus("0-3,8,10-11\n") == [0, 1, 2, 3, 8, 10, 11]
    assert len(online_cpus()) == os.sysconf("SC_NPROCESSORS_ONLN")


def test_ring_sizes() -> None:
    with pytest.raises(ValueError, match="pages 3"):
        Discovery(pages=3)


@pytest.fixture
def discovery(needs_bpf: None) -> Iterator[Discovery]:
    with Discovery() as opened:
        yield opened


def seen_by(discovery: Discovery, pid: int) -> list[Event]:
    return [event for event in discovery.read() if event.pid == pid]


def test_a_program_from_fork_to_exit(discovery: Discovery) -> None:
    before = time.monotonic_ns()
    process = subprocess.Popen([shutil.which("true") or "/bin/true"])
    process.wait()
    after = time.monotonic_ns()
    events = seen_by(discovery, process.pid)
    kinds = [type(event) for event in events]
    assert kinds[0] is Forked and kinds[-1] is Exited and kinds.count(Execed) == 1
    assert isinstance(events[0], Forked) and events[0].ppid == os.getpid()
    assert any(isinstance(event, Mapped) and event.path.endswith("/libc.so.6") for event in events)
    times = [event.at_ns for event in events]
    assert times == sorted(times) and before < times[0] and times[-1] < after


def test_a_library_loaded_later(discovery: Discovery, needs_tool: Callable[[str], str], tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"bad\xff\nname")
    folder.mkdir()
    (tmp_path / "e.c").write_text("int answer(void) { return 42; }")
    subprocess.run([needs_tool("cc"), "-shared", "-fPIC", tmp_path / "e.c", "-o", folder / "libx.so"], check=True)
    discovery.read()
    library = ctypes.CDLL(os.fspath(folder / "libx.so"))
    (found,) = [e for e in seen_by(discovery, os.getpid()) if isinstance(e, Mapped) and e.path.endswith("libx.so")]
    stat = (folder / "libx.so").stat()
    assert found.path == os.fspath(folder / "libx.so") and found.tid == threading.get_native_id()
    assert (found.inode, os.makedev(*found.dev)) == (stat.st_ino, stat.st_dev)
    address = ctypes.cast(library.answer, ctypes.c_void_p).value
    assert address is not None and found.address <= address < found.address + found.length


def test_threads_are_told_from_processes(discovery: Discovery) -> None:
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()
    forks = [e for e in seen_by(discovery, os.getpid()) if isinstance(e, Forked)]
    assert [(e.ppid, e.ptid) for e in forks] == [(os.getpid(), threading.get_native_id())]


def test_an_overflow_is_told(needs_bpf: None) -> None:
    with Discovery(pages=1) as small:
        for _ in range(60):
            subprocess.run(["true"], check=True)
        first = small.read()
        subprocess.run(["true"], check=True)
        later = small.read()
    lost = [event for event in first + later if isinstance(event, Lost)]
    assert lost and all(event.missing > 0 for event in lost)


def test_a_closed_discovery_reads_nothing(discovery: Discovery) -> None:
    discovery.close()
    assert discovery.read() == []


def test_refusals_carry_errno() -> None:
    with pytest.raises(OSError, match="perf_event_open") as refused:
        perf_event_open(bytes(128), -1, -1)
    assert refused.value.errno
    with pytest.raises(OSError, match=r"bpf\(9999\)") as refused:
        bpf(9999, bytes(16))
    assert refused.value.errno


def test_offsets_of_this_kernel(needs_bpf: None) -> None:
    wanted = [("task_struct", "tgid"), ("task_struct", "pid"), ("signal_struct", "live"), ("page", "lru"),
              ("task_struct", "no_such"), ("no_such", "pid")]  # fmt: skip
    start = time.process_time()
    found = btf_offsets(wanted)
    assert time.process_time() - start < 0.5
    assert found["task_struct", "tgid"] == (found["task_struct", "pid"] or 0) + 4
    assert found["page", "lru"] == 8  # in an anonymous struct in an anonymous union
    assert found["signal_struct", "live"] is not None
    assert found["task_struct", "no_such"] is None and found["no_such", "pid"] is None


def btf(types: bytes, strings: bytes) -> bytes:
    return struct.pack("<HBBIIIII", 0xEB9F, 1, 0, 24, 0, len(types), len(types), len(strings)) + types + strings


STRINGS = b"\0top\0a\0b\0bits\0c\0"


def small_btf() -> bytes:
    """struct top { int a; union { struct { int _; int b; }; }; int bits : 3; int c; }"""
    kflag = 1 << 31
    types = struct.pack("<IIII", 0, 1 << 24, 4, 0x20)
    types += struct.pack("<III", 0, 4 << 24 | 2, 8) + struct.pack("<IIIIII", 5, 1, 0, 7, 1, 32)
    types += struct.pack("<III", 0, 5 << 24 | 1, 8) + struct.pack("<III", 0, 2, 0)
    types += struct.pack("<III", 1, kflag | 4 << 24 | 4, 20)
    types += struct.pack("<IIIIIIIIIIII", 5, 1, 0, 0, 3, 32, 9, 1, 3 << 24 | 96, 14, 1, 128)
    return btf(types, STRINGS)


def test_offsets_in_anonymous_members_and_of_bit_fields(tmp_path: Path) -> None:
    (tmp_path / "btf").write_bytes(small_btf())
    keys = [("top", name) for name in ("a", "b", "bits", "c", "")]
    assert btf_offsets(keys, str(tmp_path / "btf")) == dict(zip(keys, [0, 8, None, 16, None], strict=True))


def test_damaged_btf(tmp_path: Path) -> None:
    """Every cut, and every byte set to 0xff: an answer or an OSError."""
    good, path = small_btf(), tmp_path / "btf"
    damaged = [good[:n] for n in range(len(good))] + [good[:n] + b"\xff" + good[n + 1 :] for n in range(len(good))]
    for data in damaged:
        path.write_bytes(data)
        try:
            offset = btf_offsets([("top", "b")], str(path))["top", "b"]
        except OSError:
            continue
        assert offset is None or 0 <= offset < 1 << 30


def test_a_type_that_contains_itself(tmp_path: Path) -> None:
    types = struct.pack("<III", 1, 4 << 24 | 1, 8) + struct.pack("<III", 0, 1, 0)
    (tmp_path / "btf").write_bytes(btf(types, STRINGS))
    assert btf_offsets([("top", "b")], str(tmp_path / "btf")) == {("top", "b"): None}
    with pytest.raises(FileNotFoundError):
        btf_offsets([], str(tmp_path / "none"))
