"""Probes as kernels without uprobe_multi have them: a perf event each, with a cookie or with a program of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import TARGETS, Program, Tracer, balance
from test_attach_counts import hooked, own
from test_attach_harmless import breakpoints, check_nothing_left, named, places
from test_links import WAITS, built, calls_of, offsets_of, program, trace
from test_links import Program as Caller
from test_sharing import CROWD

from stallscope.capture.links import close_all
from stallscope.capture.linkstyle import Style, best_style, has_cookies
from stallscope.capture.linkwords import LinkPoint
from stallscope.capture.loader import Loaded, load
from stallscope.capture.perf_links import PerfLink
from stallscope.errors import CaptureProblem, PermissionProblem, TargetProblem
from stallscope.wire.hook_table import BY_ID, FEW, MAX_PERF_PROBES

pytestmark = pytest.mark.usefixtures("needs_bpf", "needs_root")
__all__ = ["built", "places", "program"]
NAMES = {BY_ID[number].name for number in FEW}
STYLES = ["perf", "perf-nocookie"]
PAIRS = 11  # in each of two libraries: 44 probes
DETACH_S, CLEAN_S = 6.0, 10.0


def few(calls: Counter[str]) -> Counter[str]:
    """Only those that are probed."""
    return Counter({api: count for api, count in calls.items() if api in NAMES})


def run_million(style: str, backend: str, *options: str) -> tuple[Any, Any]:
    """(truth, report) of the four-thread program."""
    with Program([TARGETS / "million", "20000", "200", "300"], env={"STALLSCOPE_SIM_DRIVER": "exported"}) as million:
        million.wait_for("ready")
        with Tracer([million.pid], "--links", style, "--backend", backend, *options).attached() as tracer:
            million.say()
            return million.truth(), tracer.report()


@pytest.mark.parametrize("backend", ["bcc", "object"])
@pytest.mark.parametrize("style", STYLES)
def test_every_count_is_exact(style: str, backend: str, request: pytest.FixtureRequest) -> None:
    """Each probed function, in four threads; and the note names those that are not."""
    if backend == "bcc":
        request.getfixturevalue("needs_bcc")
    truth, report = run_million(style, backend, "--sample", "1/7")
    assert own(report) == few(hooked(truth["calls"]))
    assert balance(report)[0] == balance(report)[1]
    assert report["capture"]["lost"] == 0
    assert sum(call["nested"] for call in report["calls"]) > 0
    check_notes(report["capture"]["notes"])


def check_notes(notes: list[str]) -> None:
    """One note a library: how many functions are left out, and which."""
    left = [note for note in notes if "because this kernel has no uprobe_multi" in note]
    assert len(left) == 2
    for note in left:
        count, _, names = note.rpartition(" are not: ")
        found = names.split(", ")
        assert int(count.rpartition(" ")[2]) == len(found) > 20
        assert not NAMES & set(found)
    assert any("cudaMalloc," in note and "cudaEventRecord," in note for note in left)


@pytest.mark.parametrize("style", STYLES)
def test_total_of_waits(style: str) -> None:
    """Waits are timed as ever."""
    truth, report = run_million(style, "object")
    totals: Counter[str] = Counter()
    for call in report["calls"]:
        totals[call["api"]] += call["total_ns"] or 0
    want = truth["long_waits"]["cudaStreamSynchronize"]["total_ns"]
    assert want <= totals["cudaStreamSynchronize"] * 1.05


@pytest.mark.parametrize("words", [["100000", "100", "300"], ["20", "4", "300000"]], ids=["load", "under-way"])
@pytest.mark.parametrize("style", STYLES)
def test_many_processes(style: str, words: list[str]) -> None:
    """The second process of a file makes its probes unfiltered; no call is lost, doubled or left open."""
    env = {"STALLSCOPE_SIM_DRIVER": "private", "CROWD_SETTLE_S": "0.6"}
    with Program([*CROWD, "4", "0", *words], env=env) as crowd:
        crowd.wait_for("ready")
        with Tracer([crowd.pid], "--links", style).attached() as tracer:
            crowd.say()
            truth, report = crowd.truth(), tracer.report()
    for child in truth["children"]:
        made, first = few(hooked(child["calls"])), few(hooked(child["before_calls"]))
        assert own(report, child["pid"]) in (made, made + first), child["pid"]
    assert balance(report)[0] == balance(report)[1]
    assert report["in_flight"] == []


@pytest.mark.parametrize("style", STYLES)
def test_forked_children(style: str) -> None:
    """Children that fork from a process with the library mapped, one of which execs."""
    with Program([TARGETS / "forker", "4", "2000", "100"], env={"FORKER_CHILD_DELAY_US": "300000"}) as forker:
        forker.wait_for("ready")
        with Tracer([forker.pid], "--links", style).attached() as tracer:
            forker.say()
            truth, report = forker.truth(), tracer.report()
    assert truth["children"]
    for child in truth["children"]:
        if not child["exec"]:
            assert own(report, child["pid"]) == few(hooked(child["calls"]))
    assert balance(report)[0] == balance(report)[1]


@pytest.mark.parametrize("style", STYLES)
def test_detach_and_kill_of_the_tracer(style: str, places: dict[Path, list[tuple[int, bytes]]]) -> None:
    """Ctrl-C and SIGKILL leave a target without breakpoints, within the bars."""
    with Program([TARGETS / "million", "1", "1", "300"]) as million:
        million.wait_for("ready")
        for stop in (signal.SIGINT, signal.SIGKILL):
            with Tracer([million.pid], "--links", style).attached() as tracer:
                assert breakpoints(million.pid, places) == 16
                pids, start = named(tracer), time.monotonic()
                tracer.process.send_signal(stop)
                tracer.process.wait(30)
                while breakpoints(million.pid, places):
                    time.sleep(0.05)
                assert time.monotonic() - start < CLEAN_S
                check_nothing_left(pids)
        million.say()
        assert million.truth()["calls"]


@pytest.fixture
def perf(bpf_object: Path) -> Iterator[Loaded]:
    result = load("object", object_file=bpf_object, style=Style.PERF)
    yield result
    result.close()


def link_all(loaded: Loaded, caller: Caller) -> tuple[list[PerfLink], list[PerfLink]]:
    """44 probes: eleven functions of two libraries, entry and return."""
    entries, returns = [], []
    for library in caller.libraries[:2]:
        points = [LinkPoint(o, h.cookie) for o, h in zip(offsets_of(library)[:PAIRS], WAITS, strict=False)]
        with open(library, "rb") as file:
            for name, links, back in (("pair_return", returns, True), ("enter", entries, False)):
                program = [loaded.programs[name]] * PAIRS
                link = PerfLink.attach(file.fileno(), points, program, caller.pid, is_return=back, cookies=True)
                links.append(link)
    assert sum(len(link.offsets) for link in entries + returns) == MAX_PERF_PROBES
    return entries, returns


def clean(caller: Caller) -> bool:
    """No breakpoint in any probed function."""
    return all(caller.bytes_at(x, o) == b"\x55" for x in caller.libraries[:2] for o in offsets_of(x)[:PAIRS])


def test_the_full_number_counts_and_detaches_in_time(perf: Loaded, program: Caller) -> None:
    trace(perf, program.pid)
    start = time.monotonic()
    entries, returns = link_all(perf, program)
    attached = time.monotonic() - start
    program.call(100)
    assert [calls_of(perf, h.id) for h in WAITS[:PAIRS]] == [200] * PAIRS
    start = time.monotonic()
    close_all(entries, returns)
    detached = time.monotonic() - start
    print(f"{MAX_PERF_PROBES} probes: attach {attached:.3f} s, detach {detached:.2f} s")
    assert clean(program)
    assert detached < DETACH_S
    assert attached < 2.0
    program.call(1)
    assert calls_of(perf, WAITS[0].id) == 200


def test_the_full_number_is_gone_in_time_after_a_kill(program: Caller, bpf_object: Path) -> None:
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            link_all(load("object", object_file=bpf_object, style=Style.PERF), program)
            signal.pause()
        os._exit(1)
    end = time.monotonic() + 30
    last = program.libraries[1]
    while program.bytes_at(last, offsets_of(last)[PAIRS - 1]) == b"\x55" and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(0.3)
    start = time.monotonic()
    os.kill(child, signal.SIGKILL)
    while not clean(program) and time.monotonic() < start + 30:
        time.sleep(0.02)
    took = time.monotonic() - start
    os.waitpid(child, 0)
    print(f"{MAX_PERF_PROBES} probes: clean {took:.2f} s after SIGKILL")
    assert took < CLEAN_S


def test_other_processes_see_nothing(perf: Loaded, program: Caller, built: tuple[Path, list[Path]]) -> None:
    """A filtered event: a stranger has no breakpoint."""
    with contextlib.closing(Caller(*built)) as stranger:
        entries, returns = link_all(perf, program)
        assert clean(stranger)
        assert not clean(program)
        close_all(entries, returns)


def test_one_bad_offset_spares_the_others(perf: Loaded, program: Caller) -> None:
    trace(perf, program.pid)
    good = offsets_of(program.libraries[0])[:2]
    points = [LinkPoint(o, h.cookie) for o, h in zip([good[0], 1 << 40, good[1]], WAITS, strict=False)]
    launch = [perf.programs["launch"]] * 3
    with open(program.libraries[0], "rb") as file:
        link = PerfLink.attach(file.fileno(), points, launch, program.pid, is_return=False, cookies=True)
        assert link.offsets == good
        assert len(link.notes) == 1 and "the file ends before it" in link.notes[0]
        link.close()
        with pytest.raises(CaptureProblem, match="the file ends before it"):
            PerfLink.attach(file.fileno(), points[1:2], launch[:1], program.pid, is_return=False, cookies=True)


def test_gone_process_and_missing_rights(
    perf: Loaded, built: tuple[Path, list[Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    running = Caller(*built)
    running.close()
    point, launch = [LinkPoint(offsets_of(built[1][0])[0], 1)], [perf.programs["launch"]]
    with open(built[1][0], "rb") as file:
        with pytest.raises(TargetProblem, match="no such process"):
            PerfLink.attach(file.fileno(), point, launch, running.pid, is_return=False, cookies=True)
        monkeypatch.setattr("stallscope.capture.perf_links.capability_held", lambda _: False)
        monkeypatch.setattr("stallscope.capture.perf_links.perf_event_open", refuse)
        with pytest.raises(PermissionProblem, match="CAP_SYS_ADMIN"):
            PerfLink.attach(file.fileno(), point, launch, 0, is_return=False, cookies=True)


def refuse(*_: object) -> int:
    raise PermissionError(13, "Permission denied")


def test_programs_without_cookies_load(no_cookies_object: Path, needs_bcc: None) -> None:
    """Both backends load the same: a program for each of the few probes, and none that asks for a cookie."""
    start = time.monotonic()
    by_bcc = load("bcc", style=Style.PERF_NO_COOKIE)
    took = time.monotonic() - start
    by_object = load("object", object_file=no_cookies_object, style=Style.PERF_NO_COOKIE)
    print(f"bcc compiles and loads {len(by_bcc.programs)} programs in {took:.1f} s")
    want = {f"enter_{number}" for number in FEW}
    want |= {f"return_{number}" for number in FEW if BY_ID[number].mode == "PAIR"}
    assert len(want) <= MAX_PERF_PROBES
    # Where returns may not be probed, paired functions are only counted.
    want |= {f"count_{number}" for number in FEW if BY_ID[number].mode == "PAIR"}
    want |= {"on_fork", "on_exec", "on_exit", "who_am_i", "on_signal", "on_oom", "on_exiting"}
    assert set(by_bcc.programs) == set(by_object.programs) == want
    assert set(by_bcc.maps) == set(by_object.maps)
    by_bcc.close()
    by_object.close()


def test_what_this_kernel_has() -> None:
    assert best_style() is Style.MULTI
    assert has_cookies()
