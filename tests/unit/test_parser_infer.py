"""Calls that a live thread was already inside: found for every way a program calls a library, and never made up."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stallscope.capture.blocked import read_blocked, read_memory
from stallscope.capture.parser_client import InferredFrame, ParserClient
from stallscope.capture.spinning import sample_running

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="reads x86-64 code")

RUNTIME = """
#include <unistd.h>
extern int cuStreamSynchronize(void *);
volatile int spin = 1, sink;
__attribute__((noinline)) static int wait_inside(volatile char *p) { p[0] = 1; for (;;) pause(); return p[1]; }
int cudaStreamSynchronize(void *s) { int r = cuStreamSynchronize(s); sink = r; return r + 1; }
int cudaDeviceSynchronize(void) { volatile char room[200]; sink = wait_inside(room); return sink; }
int cudaEventSynchronize(void *e) { while (spin) sink++; return 0; }
int cudaFree(void *p) { sink = 3; return 0; }
__attribute__((noinline)) static int deep(int n) { volatile char b[64]; b[0] = n; return n ? deep(n - 1) + b[0] : 0; }
int cudaMalloc(void) { sink = deep(40); return sink; }
"""
DRIVER = """
#include <unistd.h>
volatile int sink;
int cuStreamSynchronize(void *s) { volatile char room[300]; room[0] = 1; pause(); sink = room[1]; return sink; }
"""
CALLER = """
#include <stdio.h>
#include <string.h>
#include <unistd.h>
int cudaStreamSynchronize(void *); int cudaDeviceSynchronize(void); int cudaEventSynchronize(void *);
int cudaMalloc(void);
volatile int sink;
__attribute__((noinline)) static void idle(void) { volatile char big[6000]; pause(); sink = big[7]; }
__attribute__((noinline)) static int helper(int n) { int r = cudaMalloc(); return r + n; }
int main(int argc, char **argv) {
  int (*volatile one)(void *) = cudaStreamSynchronize; int (*volatile none)(void) = cudaDeviceSynchronize;
  puts("ready"); fflush(stdout);
  if (!strcmp(argv[1], "stream")) sink = cudaStreamSynchronize(0);
  if (!strcmp(argv[1], "device")) sink = cudaDeviceSynchronize();
  if (!strcmp(argv[1], "event")) sink = cudaEventSynchronize(0);
  if (!strcmp(argv[1], "pstream")) sink = one(0);
  if (!strcmp(argv[1], "pdevice")) sink = none();
  if (!strcmp(argv[1], "idle")) { sink = helper(argc); idle(); }
  return sink;
}
"""
CTYPES = """
import ctypes, sys
lib = ctypes.CDLL(sys.argv[2], mode=ctypes.RTLD_GLOBAL)
print("ready", flush=True)
getattr(lib, {"stream": "cudaStreamSynchronize", "device": "cudaDeviceSynchronize"}[sys.argv[1]])(None)
"""
NAMES = ["cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMalloc", "cuStreamSynchronize"]
NAMES += ["cudaFree"]


def compile_c(out: Path, source: str, *flags: str) -> Path:
    """Compile C from a string."""
    path = out.with_suffix(".c")
    path.write_text(source)
    subprocess.run(["gcc", "-w", "-o", str(out), str(path), *flags], check=True)
    return out


Build = Callable[[str, str], Path]


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Build libraries and a caller once for each pair of flags; returns the caller."""
    done: dict[tuple[str, str], Path] = {}

    def run(library_flags: str, caller_flags: str) -> Path:
        key = (library_flags, caller_flags)
        if key not in done:
            done[key] = _build(tmp_path_factory.mktemp("infer"), library_flags.split(), caller_flags.split())
        return done[key]

    return run


def _build(folder: Path, library: list[str], caller: list[str]) -> Path:
    rpath = [f"-L{folder}", f"-Wl,-rpath,{folder}"]
    if "-static" in caller or "-static-pie" in caller:
        sources, inner = (s.replace("volatile int sink;", "extern volatile int sink;") for s in (CALLER, DRIVER))
        driver = compile_c(folder / "drv.o", inner, "-c", *library)
        runtime = compile_c(folder / "rt.o", RUNTIME, "-c", *library)
        return compile_c(folder / "caller", sources, *caller, str(runtime), str(driver))
    compile_c(folder / "libcuda.so.1", DRIVER, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", *library)
    compile_c(
        folder / "libcudart.so.12", RUNTIME, "-shared", "-fPIC", "-Wl,-soname,libcudart.so.12", *library,
        *rpath, "-l:libcuda.so.1",
    )  # fmt: skip
    return compile_c(folder / "caller", CALLER, *caller, *rpath, "-l:libcudart.so.12", "-l:libcuda.so.1")


@contextmanager
def running(command: list[str]) -> Iterator[int]:
    """Run a target until it says it is ready; end it afterwards."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout and process.stdout.readline() == "ready\n"
            time.sleep(0.05)
            yield process.pid
        finally:
            process.kill()


class Inspector:
    """What capture does: maps, hook addresses and files of a process, and the question to the parser."""

    def __init__(self, client: ParserClient, pid: int, files: str) -> None:
        self.client = client
        self.pid = pid
        self.fds: list[int] = []
        self.maps: list[tuple[int, int, int, int]] = []
        self.hooks: list[tuple[int, int, int]] = []
        known: dict[str, int] = {}
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            fields = line.split()
            if "x" not in fields[1]:
                continue
            start, end = (int(x, 16) for x in fields[0].split("-"))
            path = fields[5] if len(fields) > 5 and fields[5].startswith("/") else ""
            hooked = any(word in path for word in ("cuda", "caller"))
            index = -1
            if (path and files == "all") or hooked:
                if path not in known:
                    known[path] = len(self.fds)
                    self.fds.append(os.open(path, os.O_RDONLY))
                index = known[path]
            offset = int(fields[2], 16)
            self.maps.append((start, end, -1 if files == "none" else index, offset))
            if hooked:
                self._add_hooks(self.fds[index], start, end, offset)
        if files == "none":
            self.close()

    def _add_hooks(self, fd: int, start: int, end: int, offset: int) -> None:
        for name, s in self.client.symbols(fd, NAMES).symbols.items():
            address = start + s.symbol_offset - offset
            if start <= address < end:
                self.hooks.append((NAMES.index(name), address, s.size))

    def ask(self, sp: int, pc: int, stack: bytes, bp: int | None = None) -> list[InferredFrame]:
        return self.client.infer(
            sp=sp, pc=pc, stack=stack, bp=bp, maps=self.maps, hooks=self.hooks, files=self.fds,
            read=lambda ranges: read_memory(self.pid, ranges),
        )  # fmt: skip

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)
        self.fds = []


@pytest.fixture(scope="session")
def client() -> Iterator[ParserClient]:
    client = ParserClient()
    yield client
    client.close()


def blocked_calls(client: ParserClient, pid: int, files: str) -> list[tuple[str, str]]:
    """(function, evidence) of the calls a blocked process's main thread is inside, outermost first."""
    inspector = Inspector(client, pid, files)
    try:
        state = read_blocked(pid, pid)
        assert state is not None
        return [(NAMES[f.hook_id], f.evidence) for f in inspector.ask(*state)]
    finally:
        inspector.close()


LIBRARY_FLAGS = ["-O2", "-O0", "-O2 -fcf-protection=full", "-O2 -fno-omit-frame-pointer"]
CALLER_FLAGS = ["-O2", "-O2 -fno-plt", "-O0 -fcf-protection=full -Wl,-z,lazy", "-O2 -Wl,-z,lazy", "-O2 -no-pie"]
FILES = ["all", "hooked"]


@pytest.mark.parametrize("files", [*FILES, "none"])
@pytest.mark.parametrize("caller", [*CALLER_FLAGS, "-O2 -static", "-O2 -static-pie"])
@pytest.mark.parametrize("library", LIBRARY_FLAGS)
def test_blocked_in_a_library_called_by_name(
    build: Build, client: ParserClient, library: str, caller: str, files: str
) -> None:
    with running([str(build(library, caller)), "device"]) as pid:
        assert blocked_calls(client, pid, files) == [("cudaDeviceSynchronize", "call_site")]


@pytest.mark.parametrize("files", FILES)
@pytest.mark.parametrize("library", LIBRARY_FLAGS)
def test_nested_calls_outermost_first(build: Build, client: ParserClient, library: str, files: str) -> None:
    with running([str(build(library, "-O2")), "stream"]) as pid:
        expected = [("cudaStreamSynchronize", "call_site"), ("cuStreamSynchronize", "call_site")]
        assert blocked_calls(client, pid, files) == expected


@pytest.mark.parametrize("files", FILES)
@pytest.mark.parametrize("what", ["pdevice", "pstream"])
@pytest.mark.parametrize("library", LIBRARY_FLAGS)
def test_called_through_a_pointer(build: Build, client: ParserClient, library: str, what: str, files: str) -> None:
    with running([str(build(library, "-O0")), what]) as pid:
        found = blocked_calls(client, pid, files)
    assert found[0] == ("cudaDeviceSynchronize" if what == "pdevice" else "cudaStreamSynchronize", "unwound")
    assert found[1:] == ([] if what == "pdevice" else [("cuStreamSynchronize", "call_site")])


@pytest.mark.parametrize("files", FILES)
@pytest.mark.parametrize("what", ["device", "stream"])
@pytest.mark.parametrize("library", LIBRARY_FLAGS)
def test_called_by_ctypes(build: Build, client: ParserClient, library: str, what: str, files: str) -> None:
    runtime = build(library, "-O2").parent / "libcudart.so.12"
    with running([sys.executable, "-c", CTYPES, what, str(runtime)]) as pid:
        time.sleep(0.2)
        found = blocked_calls(client, pid, files)
    assert found[0] == ("cudaDeviceSynchronize" if what == "device" else "cudaStreamSynchronize", "unwound")
    assert len(found) == (1 if what == "device" else 2)


@pytest.mark.parametrize("caller", CALLER_FLAGS)
def test_a_call_that_returned_is_not_found(build: Build, client: ParserClient, caller: str) -> None:
    """Its whole stack lies untouched in the room of the present frame: only unwinding from the pc tells."""
    with running([str(build("-O2", caller)), "idle"]) as pid:
        assert blocked_calls(client, pid, "all") == []


@pytest.mark.parametrize("library", LIBRARY_FLAGS)
def test_a_spinning_thread_is_sampled(build: Build, client: ParserClient, library: str) -> None:
    with running([str(build(library, "-O2")), "event"]) as pid:
        assert read_blocked(pid, pid) is None
        try:
            samples = sample_running(pid)
        except PermissionError as problem:
            pytest.skip(f"perf_event_open: {problem}")
        assert samples
        inspector = Inspector(client, pid, "all")
        found = [inspector.ask(s.sp, s.pc, s.stack, s.bp) for s in samples]
        inspector.close()
    calls = {(NAMES[f.hook_id], f.evidence) for frames in found for f in frames}
    assert calls == {("cudaEventSynchronize", "call_site")}


def test_a_waiting_or_vanished_thread_gives_no_sample(build: Build) -> None:
    with running([str(build("-O2", "-O2")), "device"]) as pid:
        started = time.monotonic()
        assert sample_running(pid) == []
        assert time.monotonic() - started < 0.5
    assert sample_running(pid) == []
    assert read_blocked(pid, pid) is None
    assert read_memory(pid, [(4096, 8)]) == [b""]


def test_breakpoints_at_the_entries_do_no_harm(build: Build, client: ParserClient) -> None:
    """As a uprobe leaves them: 0xcc at each hook's first byte, in memory only."""
    with running([str(build("-O2", "-O0")), "pdevice"]) as pid:
        inspector = Inspector(client, pid, "all")
        with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
            for _, address, _ in inspector.hooks:
                memory.seek(address)
                memory.write(b"\xcc")
        inspector.close()
        assert blocked_calls(client, pid, "all") == [("cudaDeviceSynchronize", "unwound")]


def test_a_frame_names_the_slot_of_the_return_address(build: Build, client: ParserClient) -> None:
    with running([str(build("-O2", "-O2")), "stream"]) as pid:
        inspector = Inspector(client, pid, "all")
        state = read_blocked(pid, pid)
        assert state is not None
        sp, pc, stack = state
        frames = inspector.ask(sp, pc, stack)
        inspector.close()
    assert [f.slot_addr for f in frames] == sorted((f.slot_addr for f in frames), reverse=True)
    for frame in frames:
        assert int.from_bytes(stack[frame.slot_addr - sp :][:8], "little") == frame.return_addr
