"""The parser process: no privileges, no way back; and a client that believes nothing it says."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stallscope.capture import parser_client
from stallscope.capture.libmatch import match
from stallscope.capture.parser_answers import check_frames, check_needs, check_symbols
from stallscope.capture.parser_client import ParserClient, ParserFailed

ROOT = os.geteuid() == 0


@pytest.fixture
def client() -> Iterator[ParserClient]:
    client = ParserClient()
    client.start(*((65534, 65534) if ROOT else (os.getuid(), os.getgid())))
    yield client
    client.close()


@pytest.fixture
def library(tmp_path: Path) -> Iterator[int]:
    source = tmp_path / "a.c"
    source.write_text("int cudaMalloc(void) { return 1; }")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(tmp_path / "a.so"), str(source)], check=True)
    fd = os.open(tmp_path / "a.so", os.O_RDONLY)
    yield fd
    os.close(fd)


def status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def test_it_holds_nothing(client: ParserClient, library: int) -> None:
    assert set(client.symbols(library, ["cudaMalloc"]).symbols) == {"cudaMalloc"}
    assert client.pid
    facts = status(client.pid)
    assert {facts[key] for key in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {"0" * 16}
    assert facts["NoNewPrivs"] == "1"
    assert int(facts["VmRSS"].split()[0]) < 16 * 1024
    if ROOT:
        assert facts["Uid"].split() == ["65534"] * 4
        assert facts["Gid"].split() == ["65534"] * 4
        assert (facts["Groups"], facts["CapBnd"]) == ("", "0" * 16)


DROP = """
import os, sys, ctypes, resource
from stallscope.wire.privdrop import drop_privileges, PrivilegeDropError
drop_privileges(65534, 65534, memory=1 << 28, files=32, processes=0)
def denied(do):
    try: do()
    except (OSError, MemoryError): return True
    return False
print(denied(lambda: os.setuid(0)), denied(lambda: os.setgid(0)), denied(lambda: os.setgroups([0])),
      denied(os.fork), denied(lambda: bytearray(1 << 29)), denied(lambda: open("/etc/shadow")),
      resource.getrlimit(resource.RLIMIT_NOFILE), ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))
"""


@pytest.mark.skipif(not ROOT, reason="drops from root")
def test_there_is_no_way_back() -> None:
    done = subprocess.run([sys.executable, "-c", DROP], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "True True True True True True (32, 32) 0"


def test_it_refuses_to_stay_root() -> None:
    code = "from stallscope.wire.privdrop import drop_privileges as d; d(0, 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert "PrivilegeDropError" in done.stderr


def test_it_ignores_sigint_and_ends_with_its_client(client: ParserClient, library: int) -> None:
    client.symbols(library, [])
    pid = client.pid
    assert pid
    os.kill(pid, signal.SIGINT)
    client.symbols(library, [])
    assert client.pid == pid
    assert client._sock and client._process
    client._sock.close()
    assert client._process.wait(5) == 0


def test_it_is_started_again_once(client: ParserClient, library: int) -> None:
    client.symbols(library, [])
    first = client.pid
    assert first
    os.kill(first, signal.SIGKILL)
    assert client.symbols(library, ["cudaMalloc"]).defined_any
    assert client.pid != first


def test_a_stopped_parser_misses_the_deadline(client: ParserClient, library: int) -> None:
    client.symbols(library, [])
    assert client.pid
    os.kill(client.pid, signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(ParserFailed) as caught:
        client.symbols(library, [], deadline_s=0.2)
    assert caught.value.died
    assert time.monotonic() - started < 10
    assert client.symbols(library, ["cudaMalloc"]).defined_any


def test_a_refused_file_leaves_it_running(client: ParserClient, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no ELF file")
    with (tmp_path / "text").open("rb") as file, pytest.raises(ParserFailed) as caught:
        client.symbols(file.fileno(), ["cudaMalloc"])
    assert (caught.value.what, caught.value.died) == ("cannot read ELF file", False)
    read, write = os.pipe()
    with pytest.raises(ParserFailed, match="not a regular file"):
        client.symbols(read, ["cudaMalloc"])
    os.close(read)
    os.close(write)
    assert client.pid


def test_descriptors_do_not_pile_up(client: ParserClient, library: int) -> None:
    for _ in range(300):
        client.symbols(library, ["cudaMalloc"])


HOSTILE = """
import socket, sys, struct, msgpack
s = socket.socket(fileno=int(sys.argv[1]))
n = struct.unpack("<I", s.recv(4))[0]
while n: n -= len(s.recv(n))
out = {"garbage": b"\\xff\\xff", "list": msgpack.packb([1]), "id": msgpack.packb({"id": 77, "ok": True}),
       "ok": msgpack.packb({"id": 1, "ok": True}), "error": msgpack.packb({"id": 1, "ok": False, "error": 3}),
       "deep": b"\\x91" * 100000 + b"\\x01"}
data = out.get(sys.argv[2], b"")
s.sendall(struct.pack("<I", 1 << 31 if sys.argv[2] == "huge" else len(data)) + data)
s.recv(1)
"""


@pytest.mark.parametrize("what", ["garbage", "list", "id", "ok", "error", "huge", "deep"])
def test_a_hostile_parser_is_ended(what: str, library: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def spawn(fd: int, uid: int, gid: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", HOSTILE, str(fd), what], pass_fds=(fd,))

    monkeypatch.setattr(parser_client, "_spawn", spawn)
    client = ParserClient()
    client.start()
    with pytest.raises(ParserFailed) as caught:
        client.symbols(library, ["cudaMalloc"])
    assert caught.value.died
    assert client.pid is None


GOOD: dict[str, Any] = {
    "build_id": "ab", "soname": "x", "needed": [], "machine": "x86_64", "kind": "library",
    "symbols": {"f": [104, 100, 8, 0x1000, "dynsym"]}, "rejected": {}, "imported": [], "exec_segments": [[0, 500, 0]],
    "stripped": False, "notes": [], "digest": None, "words": [], "hull": None,
}  # fmt: skip
BAD: list[dict[str, Any]] = [
    {"symbols": {"g": [104, 100, 8, 4096, "dynsym"]}}, {"symbols": {"f": [103, 100, 8, 4096, "dynsym"]}},
    {"symbols": {"f": [1000, 1000, 8, 4096, "dynsym"]}}, {"symbols": {"f": [100, 100, 1000, 4096, "dynsym"]}},
    {"symbols": {"f": [100, 100, 8, 4096, "x"]}}, {"symbols": {"f": [100, 100, 8, 4096]}}, {"symbols": [1]},
    {"symbols": {"f": [-4, -4, 8, 4096, "dynsym"]}}, {"symbols": {"f": [True, True, 8, 4096, "dynsym"]}},
    {"symbols": {b"f": 1}}, {"symbols": {"f": ["104", 100, 8, 4096, "dynsym"]}}, {"build_id": "xyz"}, {"build_id": 5},
    {"machine": "\x1b[2J"}, {"kind": "other"}, {"imported": ["g"]}, {"imported": ["f", "f"]}, {"rejected": {"f": "?"}},
    {"needed": ["a" * 600]}, {"needed": ["a"] * 300}, {"exec_segments": [[1]]}, {"exec_segments": None}, {"notes": [3]},
    {"digest": "ab"}, {"digest": 5}, {"words": ["f"]}, {"words": None}, {"hull": [3]}, {"hull": [9, 3]}, {"hull": [0, 501]},
]  # fmt: skip


def test_answers_about_symbols_are_checked() -> None:
    assert check_symbols(GOOD, frozenset("f"), 500).symbols["f"].probe_offset == 104
    for change in BAD:
        with pytest.raises(ParserFailed):
            check_symbols({**GOOD, **change}, frozenset("f"), 500)
    assert check_symbols({**GOOD, "soname": "\x1b[2Jx"}, frozenset("f"), 500).soname == "?[2Jx"


def refused(check: Callable[[], object]) -> bool:
    try:
        check()
    except (ParserFailed, TypeError, ValueError):
        return True
    return False


def test_answers_about_frames_are_checked() -> None:
    stack = (0x55).to_bytes(8, "little") * 4
    hooks = frozenset({7})
    assert check_frames([[7, 4104, 0x55, "unwound"]], hooks, 4096, stack)[0].slot_addr == 4104
    rows = [
        [8, 4104, 0x55, "unwound"],
        [7, 4100, 0x55, "unwound"],
        [7, 4128, 0x55, "unwound"],
        [7, 4104, 0x56, "unwound"],
    ]
    rows += [[7, 4104, 0x55, "guess"], [7, 4104, 0x55], [7, "4104", 0x55, "unwound"], [[], 4104, 0x55, "unwound"]]
    for row in rows:
        assert refused(lambda row=row: check_frames([row], hooks, 4096, stack)), row  # type: ignore[misc]
    for need in ([[0, 8]], [[1 << 50, 8]], [[4096, 65]], [[4096, 0]], [[4096]], "x", [[4096, 8]] * 257):
        assert refused(lambda need=need: check_needs(need)), need  # type: ignore[misc]


@pytest.mark.parametrize(
    ("path", "library"),
    [
        ("/usr/lib/libcudart.so", "CUDART"),
        ("/a b/libcudart.so.11.8.89 (deleted)", "CUDART"),
        ("/x/torch.libs/libcudart-9335f6a2.so.12", "CUDART"),
        ("/usr/lib/x86_64-linux-gnu/libcuda.so.550.54.15", "CUDA"),
        ("/usr/lib/wsl/lib/libcuda.so.1", "CUDA"),
        ("/x/nvidia/nccl/lib/libnccl.so.2", "NCCL"),
        ("/x/libnccl-0a1b2c3d.so.2", "NCCL"),
        ("/x/libcuda_stub.so", None),
        ("/x/libcudart_static.a", None),
        ("/x/libcudart-zz.so.12", None),
        ("/x/libcudadebugger.so.1", None),
        ("/x/libnccl-net.so", None),
        ("/x/libcudart.so.12.bak", None),
        ("/x/libcudart.so.12/python3", None),
        ("", None),
    ],
)
def test_library_names(path: str, library: str | None) -> None:
    assert match(path) == library
