"""Exact counts from synthetic frames, and what the report says when they are not."""

from __future__ import annotations

import numpy as np
import pytest
from aggregate_kit import ABANDONED, DONE, ENTER, ENTERED, NESTED, START, Kit, call, one, small
from hypothesis import given, settings
from hypothesis import strategies as st

from stallscope.wire.columns import COUNT
from stallscope.wire.frames import Kind
from stallscope.wire.hook_table import BY_NAME


def closes(report: dict) -> bool:
    c = report["capture"]
    made = sum(row["count"] for row in report["calls"])
    return c["events"] + c["lost"] + c["sampled_out"] + sum(c["filtered"].values()) == made


def test_small_stream() -> None:
    report = small().report()
    capture = report["capture"]
    # 3 launches, 3 recorded waits, 1 malloc, 1 init (two records, one call), 1 in flight; 1 sampled out
    assert (capture["events"], capture["sampled_out"], capture["lost"]) == (9, 1, 0)
    assert closes(report) and not any("close" in note for note in capture["notes"])
    assert capture["start_unix_ns"] == "1700000000123456789"
    assert capture["duration_ns"] == 10_000_000_000
    assert capture["sample_one_in"] == 1 and isinstance(capture["sample_one_in"], int)
    sync = one(report["calls"], api="cudaStreamSynchronize")
    assert (sync["count"], sync["nested"], sync["errors"], sync["total_ns"], sync["max_ns"]) == (
        4, 0, 0, 2_340_010, 2_000_000)  # fmt: skip
    assert sync["p50_ns_is"] == "estimated" and abs(sync["p50_ns"] - 40_000) <= 5_000
    launch = one(report["calls"], api="cudaLaunchKernel")
    assert launch["errors"] is None and launch["total_ns"] is None and "p50_ns_is" not in launch
    assert one(report["calls"], api="cudaMalloc")["errors"] == 1


def test_every_key_of_the_schema_is_there() -> None:
    report = small().report()
    assert set(report) >= {
        "capture", "processes", "calls", "communicators", "collectives", "in_flight", "stalls", "episodes",
        "incidents", "witnesses", "startup", "steps", "workers", "gpu"}  # fmt: skip
    assert set(report["processes"][0]) >= {
        "proc", "host", "pid", "ns_pid", "parent", "name", "cmdline", "container_id", "role", "global_rank", "start_ns",
        "first_cuda_at_ns", "exit", "trace_context"}  # fmt: skip
    assert set(report["stalls"][0]) >= {
        "proc", "pid", "kind", "cause", "api", "site", "user_site", "count", "total_ns", "max_ns", "p50_ns", "p99_ns",
        "longest"}  # fmt: skip
    assert set(report["in_flight"][0]) >= {
        "proc", "pid", "tid", "api", "inferred", "age_ns", "comm", "comm_uid", "rank", "seq", "stack"}  # fmt: skip


KINDS = st.sampled_from(["launch", "wait", "quiet wait", "enter", "done", "lost done", "abandoned", "lost", "filtered",
                         "flying", "flying entered"])  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(KINDS, st.integers(1, 3), st.booleans()), max_size=60))
def test_equation_holds_for_any_mix(calls: list[tuple[str, int, bool]]) -> None:
    kit = Kit()
    for proc in (1, 2, 3):
        kit.process(proc, pid=4240 + proc)
    flying: list[list] = []
    made = events = 0
    for what, proc, nested in calls:
        made += 1
        events += what not in ("quiet wait", "lost", "filtered")
        flags = NESTED * nested
        if what == "launch":
            kit.launch(proc=proc, nested=nested)
        elif what in ("wait", "quiet wait"):
            kit.wait(proc=proc, recorded=what == "wait", nested=nested)
        elif what in ("enter", "done", "lost done"):
            kit.recs.append(kit.record("ncclAllReduce", ENTER, slot=proc, flags=flags))
            if what == "done":
                kit.recs.append(kit.record("ncclAllReduce", DONE, slot=proc, flags=flags | ENTERED))
            kit.count("ncclAllReduce", proc, calls=1, nested=nested)
        elif what == "abandoned":
            kit.recs.append(kit.record("cudaMalloc", ABANDONED, slot=proc, flags=flags))
            kit.count("cudaMalloc", proc, calls=1, nested=nested)
        elif what in ("lost", "filtered"):
            kit.count("cudaMemcpy", proc, calls=1, nested=nested, **{what: 1})
        else:
            entered = what == "flying entered"
            if entered:
                kit.recs.append(kit.record("ncclReduce", ENTER, slot=proc, flags=flags))
            kit.count("ncclReduce", proc, calls=1, nested=nested)
            flying.append([proc, 1000 + made, [call("ncclReduce", START, flags=flags | ENTERED * entered)]])
    kit.inflight(flying)
    report = kit.bye().report()
    assert report["capture"]["events"] == events
    assert sum(row["count"] for row in report["calls"]) == made
    assert closes(report)
    assert report["capture"]["notes"] == []
    assert "events_is" not in report["capture"] and not any("count_is" in row for row in report["calls"])


def test_records_that_never_came_are_named() -> None:
    kit = small()
    frames = [f for f in kit.frames if f[0] != Kind.EVENTS]
    kit.frames = frames
    capture = kit.report()["capture"]
    assert "accounting does not close: 7 calls (7 in pid 4242)" in capture["notes"]
    assert capture["events_is"] == "lower_bound"


def test_stale_counters_are_lower_bounds() -> None:
    kit = Kit()
    kit.process()
    kit.launch(times=5)
    kit.counters()
    kit.launch(times=1)
    kit.flush()
    kit.add(Kind.BYE, at_ns=START + 5, reason="stop")
    report = kit.report()
    assert any(note.startswith("accounting does not close: -1 call") for note in report["capture"]["notes"])
    assert one(report["calls"], api="cudaLaunchKernel")["count_is"] == "lower_bound"


def test_before_the_farewell_everything_is_a_lower_bound() -> None:
    kit = small()
    kit.frames.pop()
    report = kit.report()
    assert report["capture"]["events_is"] == report["capture"]["duration_ns_is"] == "lower_bound"
    assert all(row["count_is"] == "lower_bound" for row in report["calls"])
    assert all(row["total_ns_is"] == "lower_bound" for row in report["stalls"])
    assert any("the capture goes on" in note for note in report["capture"]["notes"])


def test_slots_are_used_again() -> None:
    kit = Kit()
    kit.process(1, slot=9)
    kit.recs.append(kit.record("cudaStreamSynchronize", DONE, slot=9, ns=50))
    kit.count("cudaStreamSynchronize", 1, calls=1)
    kit.time("cudaStreamSynchronize", 50, 1)
    kit.process(2, slot=9, pid=4300)
    kit.recs.append(kit.record("cudaStreamSynchronize", DONE, slot=9, ns=40))
    kit.count("cudaStreamSynchronize", 2, calls=1)
    kit.time("cudaStreamSynchronize", 40, 2)
    report = kit.bye().report()
    assert {s["proc"]: s["longest"][0]["duration_ns"] for s in report["stalls"]} == {1: 50, 2: 40}
    assert closes(report)


def test_late_link_makes_lower_bounds_of_that_process_only() -> None:
    kit = Kit()
    kit.process(1)
    kit.process(2, pid=4300)
    kit.link("CUDART", 1, late_ns=700)
    kit.link("CUDART", 2)
    kit.link("CUDA", 2)
    kit.launch(proc=1)
    kit.launch("ncclGroupStart", proc=1)
    kit.launch(proc=2)
    kit.add(Kind.GAP, source="link", proc=1, count=None, from_ns=START + 300, to_ns=START + 1000,
            reason="CUDART not linked yet")  # fmt: skip
    kit.add(Kind.GAP, source="bpf", proc=None, count=4, from_ns=START, to_ns=START + 9, reason="bulk ring full")
    report = kit.bye().report()
    late = [gap for gap in report["capture"]["gaps"] if gap["source"] == "link"]
    assert late == [{"source": "link", "proc": 1, "count": None, "from_ns": 300, "to_ns": 1000,
                     "reason": "CUDART not linked yet"}]  # fmt: skip
    assert one(report["calls"], proc=1, library="CUDART")["count_is"] == "lower_bound"
    assert "count_is" not in one(report["calls"], proc=1, library="NCCL")
    assert "count_is" not in one(report["calls"], proc=2)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.integers(0, 1 << 40), max_size=40), max_size=6))
def test_longest_are_the_longest(batches: list[list[int]]) -> None:
    kit = Kit()
    kit.process()
    for batch in batches:
        for ns in batch:
            kit.wait("cudaMemcpy", ns)
        kit.flush()
    stalls = kit.bye().report()["stalls"]
    everything = sorted((ns for batch in batches for ns in batch), reverse=True)
    if everything:
        # Equal durations beyond the fifth are interchangeable, zero ones never the longest.
        assert [x["duration_ns"] for x in stalls[0]["longest"]] == [ns for ns in everything if ns][:5]
        assert stalls[0]["total_ns"] == sum(everything) and stalls[0]["count"] == len(everything)
    else:
        assert stalls == []


def test_stalls_leave_nested_calls_out() -> None:
    kit = Kit()
    kit.process()
    kit.wait("cudaStreamSynchronize", 1_000_000)
    kit.wait("cuStreamSynchronize", 990_000, nested=True)
    report = kit.bye().report()
    assert [s["api"] for s in report["stalls"]] == ["cudaStreamSynchronize"]
    # Nobody looked up where it waits: an explicit wait, or that of a copy.
    assert report["stalls"][0]["cause"] is None and report["stalls"][0]["kind"] == "sync"
    driver = one(report["calls"], api="cuStreamSynchronize")
    assert (driver["count"], driver["nested"], driver["total_ns"]) == (1, 1, 990_000)


def test_calls_that_could_not_be_timed() -> None:
    kit = Kit()
    kit.process()
    kit.wait(ns=500_000)
    kit.count("cudaStreamSynchronize", calls=1, lost=1)
    stall = kit.bye().report()["stalls"][0]
    assert stall["count"] == 1 and stall["count_is"] == stall["total_ns_is"] == "lower_bound"


def test_first_cuda_call() -> None:
    kit = Kit()
    kit.process(1, start_ns=START + 50)
    kit.process(2, pid=4300)
    kit.recs.append(kit.record("cudaStreamSynchronize", DONE, at=START + 900))
    kit.recs.append(kit.record("cudaLaunchKernel", 0, at=START + 400))
    kit.recs.append(kit.record("cudaLaunchKernel", 0, at=START + 400, slot=2))
    processes = kit.report()["processes"]
    assert processes[0]["first_cuda_at_ns"] == 400
    assert processes[1]["first_cuda_at_ns"] is None, "it ran before the capture: its first call is unknown"


@pytest.mark.parametrize(("libraries", "nested", "text"), [
    (("CUDART", "CUDA"), False, "private addresses"),
    (("CUDART",), False, "libcuda is not loaded"),
    (("CUDART", "CUDA"), True, None),
])  # fmt: skip
def test_runtime_that_passes_the_driver_by(libraries: tuple[str, ...], nested: bool, text: str | None) -> None:
    kit = Kit()
    kit.process()
    for library in libraries:
        kit.link(library)
    kit.launch(times=2)
    if nested:
        kit.launch("cuLaunchKernel", nested=True)
    told = kit.bye().report()["capture"]["notes"]
    notes = [note for note in told if not note.endswith("probed")]
    assert len(told) - len(notes) == len(libraries)
    assert (text is None and not notes) or (text is not None and len(notes) == 1 and text in notes[0])


def test_exit_image_and_inferred() -> None:
    kit = Kit()
    kit.process()
    hook = BY_NAME["cudaDeviceSynchronize"].id
    kit.add(Kind.INFERRED, proc=1, tid=5, hook=hook, since_ns=START + 10, at_ns=START + 10, ended=None)
    kit.add(Kind.INFERRED, proc=1, tid=6, hook=hook, since_ns=START + 10, at_ns=START + 10, ended=None)
    kit.add(Kind.INFERRED, proc=1, tid=6, hook=hook, since_ns=START + 10, at_ns=START + 20, ended="left the frame")
    kit.add(Kind.IMAGE, proc=1, at_ns=START + 30, name="other", cmdline=["other"], env={"RANK": "3"})
    kit.add(Kind.TICK, at_ns=START + 5_000)
    report = kit.report()
    assert [(r["tid"], r["inferred"], r["age_ns"], r["age_ns_is"]) for r in report["in_flight"]] == [
        (5, True, 4990, "lower_bound")]  # fmt: skip
    (process,) = report["processes"]
    assert (process["name"], process["exit"], process["global_rank"]) == ("other", None, 3)
    kit.add(Kind.EXIT, proc=1, at_ns=START + 6_000, code=None, signal=9)
    report = kit.report()
    assert report["in_flight"] == []
    assert report["processes"][0]["exit"] == {
        "code": None, "signal": 9, "sender": None, "at_ns": 6_000, "exiting_ns": None, "oom": None, "cause": "SIGKILL",
    }  # fmt: skip


def test_in_flight_shows_the_outermost_call() -> None:
    kit = Kit()
    kit.process()
    kit.inflight([[1, 7, [call("cudaMemcpy", START + 100), call("cuMemcpyHtoD_v2", START + 150, flags=NESTED)]]],
                 at=START + 1100, final=False)  # fmt: skip
    row = one(kit.report()["in_flight"], tid=7)
    assert (row["api"], row["age_ns"], row["inner"], row["stack"]) == ("cudaMemcpy", 1000, ["cuMemcpyHtoD_v2"], None)


def test_counters_that_go_backwards() -> None:
    kit = Kit()
    kit.process()
    for calls in (5, 3):
        row = np.zeros(1, COUNT)
        row["calls"] = row["sampled_out"] = calls
        kit.add(Kind.COUNTS, proc=1, at_ns=START, hooks=[1], counts=row.tobytes(), times=[], timed=b"")
    kit.add(Kind.BYE, at_ns=START, reason="x")
    report = kit.report()
    assert any("backwards" in note for note in report["capture"]["notes"])
    assert report["calls"][0]["count_is"] == "lower_bound"


def test_tables_are_capped() -> None:
    kit = Kit()
    for proc in range(4100):
        kit.add(Kind.PROCESS, proc=proc, pid=proc, name="x", cmdline=[], start_ns=START)
    for i in range(300):
        kit.add(Kind.NOTE, at_ns=START, proc=None, text=f"note {i}")
    for i in range(8268):
        kit.add(Kind.GAP, source="bpf", proc=None, count=1, from_ns=START + i, to_ns=START + i + 1, reason="r")
    report = kit.report()
    assert len(report["processes"]) == 4096 and len(report["capture"]["gaps"]) == 8192
    notes = report["capture"]["notes"]
    for text in ("processes: 4 turned away (limit 4096)", "notes: 44 turned away (limit 256)", "gaps: 76 turned away"):
        assert any(note.startswith(text) for note in notes), text
