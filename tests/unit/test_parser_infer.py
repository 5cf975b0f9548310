"""Calls that a live thread was already inside: found for every way a program calls a library, and never made up."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stallscope.capture.blocked import read_blocked, read_memory
from stallscope.capture.inference import Inference
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
int cudaFree(void *p) { volatile char room[100]; room[0] = 1; usleep(p ? (long)p : 1000); sink = room[0]; return 0; }
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
# Threads named by what they do: "i" + anything are in no hooked function but were in several; "w" + a hook's number
# wait inside it. What earlier calls left lies untouched in the idle threads' buffers.
ENDING = """
#include <stdio.h>
#include <string.h>
#include <unistd.h>
int cudaFree(void *);
__attribute__((noinline)) static int wait_once(void) { puts("ready"); fflush(stdout); return cudaFree((void *)900000) + 1; }
__attribute__((noinline)) static long idle(void) { char b[8192]; long n = read(0, b, sizeof b); return b[0] + n; }
__attribute__((noinline)) static long busy(void) {
  char b[8192]; __asm__ volatile("" ::"r"(b) : "memory"); for (volatile long i = 0;; i++); return b[0]; }
static volatile int sink;
int main(int argc, char **argv) { int rest = !strcmp(argv[1], "idle"); sink = wait_once(); return rest ? idle() : busy(); }
"""
WORKER = """
#define _GNU_SOURCE
#include <alloca.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/select.h>
#include <unistd.h>
int cudaStreamSynchronize(void *); int cudaDeviceSynchronize(void); int cudaEventSynchronize(void *);
int cudaFree(void *);
#define NOINLINE __attribute__((noinline))
#define TOUCH(p) __asm__ volatile("" ::"r"(p) : "memory")
static int fds[2]; static pthread_mutex_t m = PTHREAD_MUTEX_INITIALIZER; static pthread_cond_t c = PTHREAD_COND_INITIALIZER;
typedef int (*one_t)(void *); static one_t volatile one = cudaFree;
static int (*volatile none)(void) = cudaDeviceSynchronize;
static volatile int sink;
NOINLINE static int deep(int n) { volatile char pad[64]; pad[0] = n; if (n) return deep(n - 1) + pad[0]; return cudaFree(0); }
NOINLINE static int deep_wait(int n) {
  volatile char pad[64]; pad[0] = n; if (n) return deep_wait(n - 1) + pad[0]; return cudaStreamSynchronize(0); }
NOINLINE static int step(int i) { int r = cudaFree(0); return r + i; }
NOINLINE static long recv_batch(int fd) { char b[2048]; long n = read(fd, b, sizeof b); return n > 0 ? b[0] + n : n; }
NOINLINE static long recv_poll(int fd) {
  char b[1024]; struct pollfd p = {fd, 1}; poll(&p, 1, -1); long n = read(fd, b, sizeof b); return n > 0 ? b[0] + n : n; }
NOINLINE static long recv_select(int fd) {
  char b[512]; fd_set s; FD_ZERO(&s); FD_SET(fd, &s); select(fd + 1, &s, 0, 0, 0); long n = read(fd, b, sizeof b); return n + b[1]; }
NOINLINE static long wait_cond(void) {
  char name[256]; pthread_mutex_lock(&m); pthread_cond_wait(&c, &m); pthread_mutex_unlock(&m);
  snprintf(name, 256, "x%d", fds[0]); return name[1]; }
NOINLINE static void room_read(int n) { char *p = alloca(n); TOUCH(p); char b; read(fds[0], &b, 1); TOUCH(p); }
NOINLINE static void room_cond(int n) {
  char *p = alloca(n); TOUCH(p); pthread_mutex_lock(&m); pthread_cond_wait(&c, &m); pthread_mutex_unlock(&m); TOUCH(p); }
NOINLINE static void room_spin(int n) { char *p = alloca(n); TOUCH(p); for (volatile long i = 0;; i++) TOUCH(p); }
NOINLINE static void big_args(int n) {
  char *p = alloca(n); TOUCH(p); char b[300]; snprintf(b, 300, "%d %d %d %d %d %d %d", n, n, n, n, n, n, n);
  read(fds[0], b, 300); TOUCH(p); TOUCH(b); }
static void *run(void *name) {
  const char *s = name; prctl(PR_SET_NAME, s);
  if (*s == 'i') for (int i = 0; i < 5; i++) step(i);
  if (!strcmp(s, "i read")) return (void *)recv_batch(fds[0]);
  if (!strcmp(s, "i poll")) return (void *)recv_poll(fds[0]);
  if (!strcmp(s, "i select")) return (void *)recv_select(fds[0]);
  if (!strcmp(s, "i cond")) return (void *)wait_cond();
  if (!strcmp(s, "i room 64")) { deep(0); room_read(64); }
  if (!strcmp(s, "i room 300")) { one(0); room_read(300); }
  if (!strcmp(s, "i room 512")) { deep(3); room_read(512); }
  if (!strcmp(s, "i room 4096")) { deep(20); room_read(4096); }
  if (!strcmp(s, "i rcond 200")) { deep(0); room_cond(200); }
  if (!strcmp(s, "i rcond 2000")) { deep(10); room_cond(2000); }
  if (!strcmp(s, "i args")) { deep(3); big_args(400); }
  if (!strcmp(s, "i spin")) { deep(0); room_spin(512); }
  if (!strcmp(s, "w0 call")) sink = cudaStreamSynchronize(0);
  if (!strcmp(s, "w0 deep")) sink = deep_wait(500);
  if (!strcmp(s, "w0 tail")) return (void *)(long)cudaStreamSynchronize(0);
  if (!strcmp(s, "w1 call")) sink = cudaDeviceSynchronize();
  if (!strcmp(s, "w1 pointer")) sink = none();
  if (!strcmp(s, "w2 spin")) sink = cudaEventSynchronize(0);
  pause(); return 0; }
int main(void) {
  static char *names[] = {"i read", "i poll", "i select", "i cond", "i room 64", "i room 300", "i room 512", "i room 4096",
    "i rcond 200", "i rcond 2000", "i args", "i spin", "w0 call", "w0 deep", "w0 tail", "w1 call", "w1 pointer", "w2 spin"};
  pthread_t t; pipe(fds);
  for (unsigned i = 0; i < sizeof names / sizeof *names; i++) pthread_create(&t, 0, run, names[i]);
  usleep(300000); puts("ready"); fflush(stdout); pause(); return 0; }
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
    """Compile C from a string. The flags may begin with the compiler's name."""
    compiler, flags = (flags[0], flags[1:]) if flags[:1] in (("gcc",), ("clang",)) else ("gcc", flags)
    path = out.with_suffix(".c")
    path.write_text(source)
    subprocess.run([compiler, "-w", "-o", str(out), str(path), *flags], check=True)
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
        driver = compile_c(folder / "drv.o", inner, *library, "-c")
        runtime = compile_c(folder / "rt.o", RUNTIME, *library, "-c")
        compile_c(folder / "worker-caller", WORKER, *caller, str(runtime), str(driver))
        return compile_c(folder / "caller", sources, *caller, str(runtime), str(driver))
    compile_c(folder / "libcuda.so.1", DRIVER, *library, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1")
    compile_c(
        folder / "libcudart.so.12", RUNTIME, *library, "-shared", "-fPIC", "-Wl,-soname,libcudart.so.12",
        *rpath, "-l:libcuda.so.1",
    )  # fmt: skip
    linked = [*caller, *rpath, "-l:libcudart.so.12", "-l:libcuda.so.1"]
    compile_c(folder / "worker-caller", WORKER, *linked)
    compile_c(folder / "ending-caller", ENDING, *linked)
    return compile_c(folder / "caller", CALLER, *linked)


@contextmanager
def running(command: list[str]) -> Iterator[int]:
    """Run a target until it says it is ready; end it afterwards."""
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
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
        ).frames  # fmt: skip

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
        assert time.monotonic() - started < 5
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


CLANG = "clang" if shutil.which("clang") else "gcc"
WORKER_LIBRARIES = ["-O2", "-O0", "-O2 -fno-omit-frame-pointer", f"{CLANG} -O2 -fno-omit-frame-pointer"]
WORKERS = [f"{compiler} -O{level}{pointer}" for compiler in dict.fromkeys(("gcc", CLANG)) for level in range(4)
           for pointer in (" -fno-omit-frame-pointer", " -fomit-frame-pointer")]  # fmt: skip
WORKERS += ["-O2 -fno-plt -fno-asynchronous-unwind-tables", "-O2 -fno-plt", f"{CLANG} -O2 -no-pie", "-O2 -static",
            "-O2 -fno-omit-frame-pointer -static-pie", "-O2 -fno-omit-frame-pointer -fcf-protection=full -Wl,-z,lazy",
            "-O2 -s", "-O2 -fno-omit-frame-pointer -mavx2 -fstack-protector-all"]  # fmt: skip


def outermost(inspector: Inspector, tid: int) -> str | None:
    """The outermost hooked call a thread is inside, as capture looks for it."""
    state = read_blocked(inspector.pid, tid)
    if state is not None:
        frames = inspector.ask(*state)
        return NAMES[frames[0].hook_id] if frames else None
    # On a busy machine a running thread may get no time on a CPU while it is sampled.
    samples = next((found for _ in range(40) if (found := sample_running(tid))), [])
    assert samples
    for sample in samples:
        frames = inspector.ask(sample.sp, sample.pc, sample.stack, sample.bp)
        if frames:
            return NAMES[frames[0].hook_id]
    return None


PAIRS = [(library, caller) for i, library in enumerate(WORKER_LIBRARIES) for j, caller in enumerate(WORKERS)
         if os.environ.get("STALLSCOPE_ALL_PAIRS") or (j + j // 4) % 4 == i]  # fmt: skip


@pytest.mark.parametrize(("library", "caller"), PAIRS)
def test_every_thread_of_a_worker(build: Build, client: ParserClient, library: str, caller: str) -> None:
    """Threads that wait inside a hook are found, and no other: leftovers of earlier calls count for nothing."""
    with running([str(build(library, caller).with_name("worker-caller"))]) as pid:
        inspector = Inspector(client, pid, "all")
        found, expected = {}, {}
        try:
            for task in Path(f"/proc/{pid}/task").iterdir():
                name = (task / "comm").read_text().strip()
                expected[name] = NAMES[int(name[1])] if name[0] == "w" and name[1].isdigit() else None
                found[name] = outermost(inspector, int(task.name))
        except PermissionError as problem:
            pytest.skip(f"perf_event_open: {problem}")
        finally:
            inspector.close()
    assert len(found) == 19
    assert found == expected


class NoRows:
    """No thread has made a hooked call."""

    def thread_calls(self, tgid: int, tid: int) -> None:
        return None


@pytest.mark.parametrize("then", ["idle", "busy"])
@pytest.mark.parametrize("caller", ["-O2", "-O2 -fno-omit-frame-pointer"])
def test_a_call_ends_though_its_slot_keeps_its_word(build: Build, client: ParserClient, caller: str, then: str) -> None:
    """After the wait, the room of another frame covers the slot, and nobody writes there."""
    told: list[dict[str, Any]] = []
    with running([str(build("-O2", caller).with_name("ending-caller")), then]) as pid:
        inspector = Inspector(client, pid, "all")
        library = SimpleNamespace(places=set(inspector.hooks))
        inspector.close()
        target: Any = SimpleNamespace(pid=pid, proc=1, linked={1: library}, inferred=[], preloaded=False)
        rows: Any = NoRows()
        inference = Inference(client, rows, lambda kind, body: told.append(body), time.monotonic_ns)
        inference.search(target)
        inference.check(target)
        assert [(NAMES[body["hook"]], body["ended"]) for body in told] == [("cudaFree", None)]
        word = target.inferred[0].return_addr.to_bytes(8, "little")
        end = time.monotonic() + 10
        time.sleep(1)
        while target.inferred and time.monotonic() < end:
            assert read_memory(pid, [(target.inferred[0].slot_addr, 8)]) == [word]
            inference.check(target)
    assert [body["ended"] for body in told] == [None, "left the frame"]
