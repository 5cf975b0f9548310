"""Where a runtime may hide in one process: copies, odd names, deleted files, namespaces. Each call is counted once."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from harness import ROOT, SIM_LIB, Program, Tracer, balance
from test_attach_counts import own

pytestmark = pytest.mark.usefixtures("needs_bpf")
PLACES = ["/usr/bin/python3", ROOT / "tests" / "targets" / "places.py"]
RUNTIME = SIM_LIB / "libcudart.so.12"
EXPORTED, INSIDE = {"STALLSCOPE_SIM_DRIVER": "exported"}, {"STALLSCOPE_SIM_DRIVER": "inside"}
Steps = Sequence[Sequence[Any]]


def do(program: Program, steps: Steps) -> None:
    """Each step, one after the other."""
    for step in steps:
        program.say(json.dumps(step))
        program.wait_for("ok")


def trace(before: Steps, after: Steps, env: dict[str, str], words: Sequence[Any] = PLACES) -> tuple[Any, Any]:
    """(truth, report): steps before the attach and after it; only the latter may call."""
    with Program(words, env=env) as program:
        program.wait_for("ready")
        do(program, before)
        with Tracer([program.pid], "--sample", "1/1").attached() as tracer:
            do(program, after)
            program.say('["end"]')
            return program.truth(), tracer.report()


def check(truth: Any, report: Any) -> str:
    """Every call once; the notes as one text."""
    assert own(report) == Counter(truth["calls"])
    assert balance(report)[0] == balance(report)[1]
    return "\n".join(report["capture"]["notes"])


def copy(folder: Path, name: str) -> str:
    """A copy of the simulated runtime with the driver beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(RUNTIME, folder / name)
    if not (folder / "libcuda.so.1").exists():
        (folder / "libcuda.so.1").symlink_to(SIM_LIB / "libcuda.so.1")
    return str(folder / name)


def paths(report: Any) -> list[str]:
    """Of the linked runtimes."""
    return sorted(lib["path"] for lib in report["processes"][0]["libraries"] if lib["library"] == "CUDART")


def test_two_copies_and_a_hashed_name(tmp_path: Path) -> None:
    """Two files with the same functions, both used, loaded before and after the attach."""
    one, two = copy(tmp_path / "a", "libcudart.so.12"), copy(tmp_path / "b", "libcudart-1a2b3c4d.so.12")
    before = [["load", "one", one, "local"]]
    after = [["call", "one", 7], ["load", "two", two, "local"], *settle(), ["call", "two", 11], ["call", "one", 3]]
    truth, report = trace(before, after, EXPORTED)
    check(truth, report)
    assert truth["calls"]["cudaLaunchKernel"] == 21
    assert paths(report) == sorted([one, two])


def settle() -> Steps:
    """Nothing for long enough that what was loaded is linked."""
    return [["sleep", 0.3]]


@pytest.mark.parametrize("when", ["before", "after"])
def test_deleted_after_load(tmp_path: Path, when: str) -> None:
    """A package that was upgraded under a running job."""
    path = copy(tmp_path, "libcudart.so.12")
    load = [["load", "x", path, "local"], ["delete", path]]
    before, after = (load, []) if when == "before" else ([], [*load, *settle()])
    truth, report = trace(before, [*after, ["call", "x", 9]], INSIDE)
    check(truth, report)
    assert paths(report) == [f"{path} (deleted)" if when == "before" else paths(report)[0]]


@pytest.mark.parametrize("how", ["local", "global", "new"])
def test_ways_to_load(tmp_path: Path, how: str) -> None:
    """RTLD_LOCAL, RTLD_GLOBAL, and a namespace of its own."""
    path = copy(tmp_path, "libcudart.so.12")
    truth, report = trace([["load", "x", path, how]], [["call", "x", 9]], INSIDE)
    check(truth, report)


def test_one_file_in_two_namespaces(tmp_path: Path) -> None:
    """dlmopen maps the file a second time: one inode, two addresses."""
    path = copy(tmp_path, "libcudart.so.12")
    steps = [["load", "x", path, "local"], ["load", "y", path, "new"], *settle()]
    truth, report = trace([], [*steps, ["call", "x", 5], ["call", "y", 6]], INSIDE)
    check(truth, report)


def test_closed_and_opened_again(tmp_path: Path) -> None:
    """Eight times at eight addresses: the links hold, and driver calls stay nested."""
    path = copy(tmp_path, "libcudart.so.12")
    other = copy(tmp_path / "other", "libcudart.so.11.0")
    keep = [["load", "keep", str(SIM_LIB / "libcuda.so.1"), "global"], ["load", "x", path, "local"]]
    again: list[Any] = []
    for n in range(8):
        # Something else takes the old place, so that the address is a new one.
        hold = copy(tmp_path / f"hold{n}", "libhold.so")
        again += [["close", "x"], ["load", f"hold{n}", hold, "local"], ["load", "x", path, "local"], *settle()]
        again += [["call", "x", 3]]
    truth, report = trace([*keep, ["load", "z", other, "local"]], [["call", "x", 2], *again], EXPORTED)
    notes = check(truth, report)
    assert "more than" not in notes


@pytest.mark.parametrize("name", ["with space", "with\nnewline", "literal\\012escape", "ünï", "x (deleted)"])
def test_odd_paths(tmp_path: Path, name: str) -> None:
    """What /proc/PID/maps escapes, and what it does not."""
    path = copy(tmp_path / name, "libcudart.so.12")
    truth, report = trace([["load", "x", path, "local"]], [["call", "x", 4]], INSIDE)
    check(truth, report)


def importer(cc: str, folder: Path, name: str) -> str:
    """A library that uses the runtime and defines none of its functions."""
    source = folder / "importer.c"
    source.write_text("extern int cudaLaunchKernel(void); int uses(void) { return cudaLaunchKernel(); }\n")
    folder.joinpath("imp").mkdir(exist_ok=True)
    subprocess.run([cc, "-shared", "-fPIC", "-o", folder / "imp" / name, source], check=True)
    return str(folder / "imp" / name)


def test_mere_importers(tmp_path: Path, needs_tool: Callable[[str], str]) -> None:
    """One has a stub's name and gives no word, one has the runtime's and gets a note; neither is probed."""
    cc = needs_tool("cc")
    stub, named = importer(cc, tmp_path, "libcudart_stub.so"), importer(cc, tmp_path, "libcudart.so.12")
    real = copy(tmp_path / "real", "libcudart.so.12")
    before = [["load", "real", real, "global"], ["load", "s", stub, "local"], ["load", "n", named, "local"]]
    truth, report = trace(before, [["call", "real", 5]], INSIDE)
    notes = check(truth, report)
    assert f"{named} looks like CUDART and defines none of its functions" in notes
    assert "stub" not in notes
    assert paths(report) == [real]


def test_through_an_overlay_and_below_it(tmp_path: Path, needs_root: None) -> None:
    """One inode by two ways in one process, and an overlay over two file systems, whose numbers differ in maps."""
    lower, upper, merged = tmp_path / "lower", tmp_path / "upper", tmp_path / "merged"
    for folder in (lower, upper, merged):
        folder.mkdir()
    script = (
        f"mount -t tmpfs lower {lower} && cp {RUNTIME} {lower}/libcudart.so.12 && mkdir {upper}/u {upper}/w && "
        f"mount -t overlay o -o lowerdir={lower},upperdir={upper}/u,workdir={upper}/w {merged} && "
        f"exec /usr/bin/python3 {PLACES[1]}"
    )
    words = ["unshare", "-m", "sh", "-c", script]
    loads = [["load", "m", f"{merged}/libcudart.so.12", "local"], ["load", "l", f"{lower}/libcudart.so.12", "local"]]
    truth, report = trace(loads, [["call", "m", 4], ["call", "l", 5]], INSIDE, words)
    check(truth, report)


def test_one_of_several_cannot_be_linked(tmp_path: Path, needs_tool: Callable[[str], str]) -> None:
    """A file named libcuda.so.1 that is damaged: a note about it, and the runtime is traced."""
    path, broken = copy(tmp_path, "libcudart.so.12"), tmp_path / "x" / "libnccl.so.2"
    broken.parent.mkdir()
    cc = needs_tool("cc")
    (tmp_path / "e.c").write_text("int ncclAllReduce(void) { return 0; }")
    subprocess.run([cc, "-shared", "-fPIC", "-o", broken, tmp_path / "e.c"], check=True)
    with Program(PLACES, env=INSIDE) as program:
        program.wait_for("ready")
        do(program, [["load", "b", str(broken), "local"], ["load", "x", path, "local"]])
        with broken.open("r+b") as file:  # the headers are in use by nobody any more
            file.seek(32)
            file.write(b"\xff" * 8)
        with Tracer([program.pid], "--sample", "1/1").attached() as tracer:
            do(program, [["call", "x", 5]])
            program.say('["end"]')
            truth, report = program.truth(), tracer.report()
    notes = check(truth, report)
    assert f"{broken} is not linked" in notes
    assert paths(report) == [path]


def test_own_mount_and_pid_namespace(tmp_path: Path, needs_root: None) -> None:
    """The path exists only in there; the report has the host's pid and the one in there."""
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    script = f"mount -t tmpfs x {hidden} && cp {RUNTIME} {hidden}/libcudart.so.12 && exec /usr/bin/python3 {PLACES[1]}"
    words = ["unshare", "-m", "-p", "-f", "--mount-proc", "sh", "-c", script]
    with Program(words, env=INSIDE) as program:
        program.wait_for("ready")
        (inner,) = children(program.pid)
        do(program, [["load", "x", f"{hidden}/libcudart.so.12", "local"]])
        with Tracer([inner], "--sample", "1/1").attached() as tracer:
            do(program, [["call", "x", 6]])
            program.say('["end"]')
            truth, report = program.truth(), tracer.report()
    check(truth, report)
    (process,) = [p for p in report["processes"] if p["traced"]]
    assert (process["pid"], process["ns_pid"], truth["pid"]) == (inner, 1, 1)


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_tracer_in_the_pid_namespace(tmp_path: Path, needs_root: None) -> None:
    """Tracer and target inside: pids as that namespace numbers them."""
    script = ROOT / "tests" / "targets" / "inside.py"
    words = ["unshare", "-m", "-p", "-f", "--mount-proc", sys.executable, script, RUNTIME, "8"]
    done = subprocess.run(
        [str(w) for w in words], capture_output=True, text=True, timeout=120, env={**os.environ, **INSIDE}
    )
    assert done.returncode == 0, done.stderr
    truth, report = json.loads(done.stdout)
    check(truth, report)
    (process,) = [p for p in report["processes"] if p["traced"]]
    assert process["pid"] == truth["pid"] < 100
