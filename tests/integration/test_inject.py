"""A library put into running programs: exact counts, the program unharmed and afterwards as before, or a clear refusal."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import ROOT, SIM_LIB, STALLSCOPE, TARGETS, Program, Tracer, balance
from inject_kit import Worst
from run_kit import Preloaded, environment
from test_attach_counts import hooked, own

from stallscope.capture import injection as module
from stallscope.capture.injection import Injection, inject
from stallscope.capture.parser_client import ParserClient
from stallscope.errors import StallscopeError

TIMES = int(os.environ.get("STALLSCOPE_INJECT_TIMES", "5"))
MOST_STOPPED_NS = 60_000_000
LIBRARY = "libstallscope-inject.so"
pytestmark = [
    pytest.mark.usefixtures("needs_root"),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="injection is made for x86-64"),
]


@pytest.fixture
def parser() -> Iterator[ParserClient]:
    client = ParserClient()
    client.start()
    yield client
    client.close()


def host(mode: str, *words: str | Path) -> Program:
    program = Program([TARGETS / "host", mode, *words])
    program.wait_for("ready")
    return program


def release(injection: Injection) -> tuple[int, int] | None:
    found = injection.release()
    injection.close()
    return found


def attach(*words: str | int, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [*STALLSCOPE, "attach", *map(str, words), "--method", "inject", "--duration", "1"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)


def own_thread(pid: int) -> bool:
    """Whether a thread of the library's is there."""
    names = [path.read_text().strip() for path in Path(f"/proc/{pid}/task").glob("*/comm")]
    return "stallscope" in names


def test_counts_are_exact() -> None:
    """The million program, from the injection on: each call once, though nobody may use BPF."""
    with Program([TARGETS / "million", "20000", "200", "500"]) as program:
        program.wait_for("ready")
        with Tracer([program.pid], "--method", "inject").attached() as tracer:
            assert re.search(r"\d+ functions in CUDA and CUDART, method inject$", tracer.errors.seen[-1].strip())
            program.say()
            truth, report = program.truth(), tracer.report()
    assert own(report) == hooked(truth["calls"])
    left, made = balance(report)
    assert left == made and report["capture"]["lost"] == 0
    assert report["capture"]["sources"] == ["shim"]
    assert any("calls under way when the library came" in gap["reason"] for gap in report["capture"]["gaps"])
    for api in ("cudaStreamSynchronize", "cudaEventSynchronize", "cuStreamSynchronize"):
        total = sum(stall["total_ns"] for stall in report["stalls"] if stall["api"] == api)
        assert total == pytest.approx(truth["long_waits"][api]["total_ns"], rel=0.05), api


def test_children_have_it_too() -> None:
    """Forked while attached: each by its own memory, if it lives for a second; the one that execs has it no more."""
    with Program([TARGETS / "forker", "3", "40000000", "100"]) as program:
        program.wait_for("ready")
        with Tracer([program.pid], "--method", "inject").attached() as tracer:
            program.say()
            truth, report = program.truth(), tracer.report()
    assert own(report, truth["pid"]) == hooked(truth["calls"])
    for child in truth["children"]:
        assert own(report, child["pid"]) == (Counter() if child["exec"] else hooked(child["calls"]))


@pytest.mark.usefixtures("needs_bpf")
def test_probes_after_it() -> None:
    """What was left in the process is not taken for a shim that counts."""
    with Program([TARGETS / "million", "20000", "200", "500"]) as program:
        program.wait_for("ready")
        assert attach(program.pid).returncode == 4  # nothing was called meanwhile
        with Tracer([program.pid], "--method", "bpf").attached() as tracer:
            program.say()
            truth, report = program.truth(), tracer.report()
    assert own(report) == hooked(truth["calls"])
    assert {call["source"] for call in report["calls"]} == {"bpf"}


def patchable(pid: int) -> dict[str, bytes]:
    """Code, and what the loader protects, of every library; the library itself and libc's own data left out."""
    found = {}
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in maps:
            span, rights, offset, _, inode, *path = line.split()
            start, end = (int(word, 16) for word in span.split("-"))
            ours = LIBRARY in line or "stallscope-injected" in line
            if inode == "0" or ours or (rights[1] == "w" and re.search(r"/(?:libc|ld-linux[^/]*)\.so", path[0])):
                continue
            memory.seek(start)
            found[f"{path[0]} {offset} {rights}"] = memory.read(end - start)
    return found


def test_afterwards_all_is_as_before(parser: ParserClient) -> None:
    """Each byte of code and of slots; the thread and its memory are gone; the library stays, and nothing leads to it."""
    with Program([TARGETS / "million", "2000", "20", "500"]) as program:
        program.wait_for("ready")
        before = patchable(program.pid)
        maps = Path(f"/proc/{program.pid}/maps").read_text()
        injection = inject(program.pid, parser)
        assert injection.slots >= 15 and own_thread(program.pid)
        during = patchable(program.pid)
        assert [name for name in before if before[name] != during[name]]
        assert release(injection) == (injection.slots, 0)
        after = patchable(program.pid)  # with what the library needs and was not there: libpthread.so.0, an empty shell
        assert {name: after.get(name) for name in before} == before
        assert f"{injection.control:x}-" not in Path(f"/proc/{program.pid}/maps").read_text()
        for _ in range(100):
            if not own_thread(program.pid):
                break
            time.sleep(0.01)
        assert not own_thread(program.pid)
        assert LIBRARY in Path(f"/proc/{program.pid}/maps").read_text() and LIBRARY not in maps
        program.say()
        assert program.truth()["calls"]


@pytest.mark.parametrize("mode", ["registers", "heap", "waits", "signals"])
def test_in_and_out_while_it_works(mode: str, parser: ParserClient) -> None:
    """A program that checks its registers, its memory and what its waits return, all the time."""
    worst = Worst()
    with host(mode) as program:
        for _ in range(TIMES):
            injection = inject(program.pid, parser)
            worst.add(injection)
            assert release(injection) == (injection.slots, 0)
        program.say()
        truth = program.truth()
    print(f"{mode}: {TIMES} times, {worst}")
    assert truth["rounds"] > 0 and truth["wrong"] == 0
    assert worst.stopped_ns <= MOST_STOPPED_NS, str(worst)


def test_in_and_out_while_it_calls(parser: ParserClient) -> None:
    """Four threads that launch and wait all the time, some of them inside the library when it goes."""
    worst = Worst()
    with Program([TARGETS / "million", "1000000000", "20000000", "2000"]) as program:
        program.wait_for("ready")
        program.say()
        held: set[tuple[int, int]] = set()
        for _ in range(TIMES):
            injection = inject(program.pid, parser)
            worst.add(injection)
            time.sleep(0.02)
            assert release(injection) == (injection.slots, 0)
            held.add((len(os.listdir(f"/proc/{program.pid}/fd")), mapped_kb(program.pid)))
        time.sleep(0.2)
        assert len({fds for fds, _ in held}) == 1
        # glibc keeps the stack of a thread that ended, and its malloc's 64 MB of addresses: once, not each time
        assert max(kb for _, kb in held) - min(kb for _, kb in held) < 100_000, held
        assert program.process.poll() is None  # it ends at the first call that returns what it should not
        before = switches(program.pid)
        time.sleep(0.3)
        assert switches(program.pid) > before  # its waits go on
    print(f"million: {TIMES} times, {worst}")
    assert worst.slots >= 15 and worst.stopped_ns <= MOST_STOPPED_NS, str(worst)


def mapped_kb(pid: int) -> int:
    return int(re.search(r"VmSize:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1])  # type: ignore[index]


def switches(pid: int) -> int:
    texts = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/status")]
    return sum(int(number) for text in texts for number in re.findall(r"ctxt_switches:\s+(\d+)", text))


def test_inside_malloc_it_is_refused(parser: ParserClient) -> None:
    """Not hung, and the program goes on when its signal handler lets it."""
    with host("inmalloc") as program:
        begun = time.monotonic()
        with pytest.raises(StallscopeError, match=r"cannot inject into pid \d+ \(host\): every thread was") as caught:
            inject(program.pid, parser, patience_s=0.5)
        assert time.monotonic() - begun < 5
        assert caught.value.hint and LIBRARY not in Path(f"/proc/{program.pid}/maps").read_text()
        program.say()
        assert program.truth()["wrong"] == 0


def test_inside_the_loader_it_waits(parser: ParserClient, tmp_path: Path) -> None:
    """A constructor that takes a second holds the loader's lock: the library comes after it."""
    source, library = tmp_path / "slow.c", tmp_path / "slow.so"
    source.write_text(
        "#include <unistd.h>\n__attribute__((constructor)) static void begin(void) { usleep(1200000); }\n"
    )
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True)
    with host("inloader", library) as program:
        begun = time.monotonic()
        injection = inject(program.pid, parser)
        assert time.monotonic() - begun > 0.3  # it was in there
        assert release(injection) is not None
        program.say()
        assert program.truth()["wrong"] == 0


KILLED = """
import sys
from stallscope.capture import injection
from stallscope.capture.parser_client import ParserClient
parser = ParserClient()
parser.start()
again = injection._try
def ask(*words):
    print("now", flush=True)
    return again(*words)
injection._try = ask
injection.inject(int(sys.argv[1]), parser)
"""


def test_killed_in_the_middle(parser: ParserClient) -> None:
    """At any moment: no thread stays stopped, nothing is wrong, and another injector may come."""
    chance = random.Random(7)
    with host("registers") as program:
        for _ in range(6):
            with subprocess.Popen([sys.executable, "-c", KILLED, str(program.pid)], stdout=subprocess.PIPE) as injector:
                assert injector.stdout is not None and injector.stdout.readline() == b"now\n"
                time.sleep(chance.random() * chance.choice((0.0003, 0.003, 0.02)))
                injector.kill()
        end = time.monotonic() + 15  # a library that nobody speaks to lets go after five seconds
        while own_thread(program.pid) and time.monotonic() < end:
            time.sleep(0.1)
        state = Path(f"/proc/{program.pid}/stat").read_text().rpartition(")")[2].split()[0]
        assert state in "SR" and not own_thread(program.pid)
        assert release(inject(program.pid, parser)) is not None
        program.say()
        assert program.truth()["wrong"] == 0


def test_where_pthread_create_waits_the_thread_is_put_back(
    parser: ParserClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In place of pthread_create a function that waits: after 30 ms all registers are as before, and it is said."""
    real = module.make_plan

    def plan(pid: int, client: ParserClient) -> Any:
        found = real(pid, client)
        libc = ctypes.CDLL(None)
        shift = ctypes.cast(libc.sleep, ctypes.c_void_p).value - ctypes.cast(libc.dlopen, ctypes.c_void_p).value
        names = ("pthread_create", "pthread_self", "pthread_detach", "dlopen")
        # sleep(first argument): an address, whose low 32 bits are seconds.
        return found._replace(functions=(found.functions[names.index("dlopen")] + shift, *found.functions[1:]))

    with host("registers") as program:
        monkeypatch.setattr(module, "make_plan", plan)
        with pytest.raises(StallscopeError, match="was put back"):
            inject(program.pid, parser, patience_s=0.1)
        monkeypatch.undo()
        assert release(inject(program.pid, parser)) is not None
        program.say()
        assert program.truth()["wrong"] == 0


def test_one_at_a_time(parser: ParserClient) -> None:
    """A second capture is refused while the first one is there."""
    with host("heap") as program:
        injection = inject(program.pid, parser)
        done = attach(program.pid)
        assert done.returncode == 1 and "another capture has injected the library" in done.stderr
        assert release(injection) == (injection.slots, 0)
        assert attach(program.pid).returncode == 4  # it calls no CUDA
        program.say()
        assert program.truth()["wrong"] == 0


def test_a_tracer_that_is_there_already() -> None:
    with host("heap") as program:
        code = "import ctypes, sys; c = ctypes.CDLL(None); print(c.ptrace(0x4206, int(sys.argv[1]), 0, 0), flush=True)"
        words = [sys.executable, "-c", code + "; sys.stdin.readline()", str(program.pid)]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as tracer:
            assert tracer.stdout is not None and tracer.stdout.readline() == b"0\n"
            done = attach(program.pid)
            tracer.kill()
        assert done.returncode == 1
        assert "another program traces it" in done.stderr and "\n  next: end the debugger" in done.stderr


SECCOMP = """
import ctypes, struct, sys
c = ctypes.CDLL(None)
allow = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0x7FFF0000))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", 1, ctypes.addressof(allow)))
assert c.prctl(38, 1, 0, 0, 0) == 0 and c.prctl(22, 2, program, 0, 0) == 0
print("ready", flush=True)
sys.stdin.readline()
"""


def test_a_seccomp_filter_is_not_tried() -> None:
    with Program([sys.executable, "-c", SECCOMP]) as program:
        program.wait_for("ready")
        done = attach(program.pid)
    assert done.returncode == 1 and "it has a seccomp filter (Seccomp: 2" in done.stderr


@pytest.fixture
def static(tmp_path: Path) -> Path:
    """A static program that rests."""
    source, program = tmp_path / "rest.c", tmp_path / "rest"
    source.write_text('#include <unistd.h>\nint main(void) { write(1, "ready\\n", 6); pause(); return 0; }\n')
    subprocess.run(["gcc", "-static", "-o", program, source], check=True)
    return program


def test_another_root_is_not_tried(static: Path, tmp_path: Path) -> None:
    """As in a container: the library's path leads elsewhere there."""
    with Program(["chroot", tmp_path, "/rest"]) as program:
        program.wait_for("ready")
        done = attach(program.pid)
    assert done.returncode == 1 and "it has other mounts or another root" in done.stderr


def test_a_static_program_is_not_tried(static: Path) -> None:
    with Program([static]) as program:
        program.wait_for("ready")
        done = attach(program.pid)
    assert done.returncode == 1 and "it has no libc.so" in done.stderr


DROP = ["setpriv", "--reuid=12345", "--regid=12345", "--clear-groups", "--inh-caps=-all", "--bounding-set=-all"]


def test_without_rights_auto_takes_it() -> None:
    """One's own processes without any right; another's with a message that names the right."""
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    if scope.exists() and scope.read_text().strip() != "0":
        pytest.skip("kernel.yama.ptrace_scope forbids it")
    env = environment(HOME="/nonexistent")
    with Program([*DROP, TARGETS / "million", "2000", "20", "500"], env=env) as program:
        program.wait_for("ready")
        tracer = subprocess.Popen(
            [*DROP, *STALLSCOPE, "attach", str(program.pid), "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, env=env, cwd="/",
        )  # fmt: skip
        assert tracer.stderr and tracer.stdout
        first = tracer.stderr.readline()
        if "Permission denied" in first:
            tracer.kill()
            pytest.skip("another user can't read this tree")
        assert first.startswith("attached to PID") and first.endswith("method inject\n"), first + tracer.stderr.read()
        program.say()
        truth = program.truth()
        out, _ = tracer.communicate(timeout=60)
    report = json.loads(out)
    assert tracer.returncode == 0 and own(report) == hooked(truth["calls"])
    assert any("BPF can't be used" in note for note in report["capture"]["notes"])
    with host("heap") as program:
        words = [*DROP, *STALLSCOPE, "attach", str(program.pid), "--method", "inject"]
        done = subprocess.run(words, capture_output=True, text=True, env=env, cwd="/", timeout=60)
        assert done.returncode == 3
        assert (
            "the kernel refuses ptrace" in done.stderr and "lacks CAP_SYS_PTRACE\n  next: run it as root" in done.stderr
        )


def test_a_process_that_has_it_preloaded() -> None:
    """Read through that; nothing is injected."""
    with Preloaded([TARGETS / "million", "2000", "20", "500"]) as program:
        program.wait_for("ready")
        with Tracer([program.pid], "--method", "inject").attached() as tracer:
            assert LIBRARY not in Path(f"/proc/{program.pid}/maps").read_text()
            program.say()
            truth, report = program.truth(), tracer.report()
    seen = own(report)
    assert all(seen[api] >= count for api, count in hooked(truth["calls"]).items())


LATER = """
import ctypes, os, sys
print("ready", flush=True)
sys.stdin.readline()
runtime = ctypes.CDLL(os.environ["LATER"])
for _ in range(25):
    runtime.cudaDeviceSynchronize()
print('{"done": 25}', flush=True)
sys.stdin.readline()
"""


def test_a_library_that_is_loaded_later() -> None:
    """Plain Python; its `dlsym` is stood before, so an address that is asked for from now on is seen."""
    with Program([sys.executable, "-c", LATER], env={"LATER": str(SIM_LIB / "libcudart.so.12")}) as program:
        program.wait_for("ready")
        with Tracer([program.pid], "--method", "inject").attached() as tracer:
            program.say()
            program.wait_for("{")
            tracer.stop()
            report = tracer.report()
        program.say()
    assert own(report)["cudaDeviceSynchronize"] == 25


ASKED = """
import sys
print("ready", flush=True)
exec(compile(open(sys.stdin.readline().strip()).read(), "asked", "exec"))
print("asked", flush=True)
sys.stdin.readline()
print('{"ok": true}', flush=True)
"""


def test_the_way_of_python_3_14(parser: ParserClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script and all behind it; `sys.remote_exec` itself is played, where this interpreter has none."""
    with Program([sys.executable, "-c", ASKED]) as program:
        program.wait_for("ready")
        monkeypatch.setattr(sys, "remote_exec", lambda pid, path: program.say(path), raising=False)
        injection = inject(program.pid, parser)
        assert injection.tries == [] and injection.slots >= 1
        program.wait_for("asked")
        assert release(injection) == (injection.slots, 0)
        program.say()
        assert program.truth() == {"ok": True}


def test_help_names_the_ways() -> None:
    done = subprocess.run([*STALLSCOPE, "attach", "--help"], capture_output=True, text=True, cwd=ROOT)
    assert "--method {auto,bpf,inject}" in done.stdout
