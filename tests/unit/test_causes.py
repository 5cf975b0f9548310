"""What makes a call wait, as the report tells it, from frames alone."""

from __future__ import annotations

from typing import Any

import pytest
from aggregate_kit import START, Kit, one

from stallscope.capture.causes import cause_word
from stallscope.capture.pipelines import _Seen
from stallscope.capture.pycode import PyFrame
from stallscope.wire.frames import Kind
from stallscope.wire.hook_table import BY_NAME

STEP, MAIN = ("/job/train.py", 12, "step"), ("/job/train.py", 40, "main")
PIN = ("/venv/lib/python3.11/site-packages/torch/utils/data/_utils/pin_memory.py", 60, "_pin_memory_loop")
TO_DEVICE, TO_HOST, ANY_WAY, PINNED, NOT_PINNED = 1, 2, 3, 4, 8
COPY, STREAM = "cudaMemcpyAsync", "cudaStreamSynchronize"


def kit_of(*calls: tuple[str, int], late: bool = True) -> Kit:
    """`late`: its libraries were there before the attach."""
    kit = Kit()
    kit.process()
    if not late:
        kit.link("CUDART", late_ns=900)
    for api, ns in calls:
        kit.wait(api, ns)
    return kit


def test_a_wait_behind_a_copy_of_its_line_is_the_copys() -> None:
    kit = kit_of((COPY, 5_000), (STREAM, 400_000), (STREAM, 300_000))
    kit.site(1, [STEP], [5_000], api=COPY, what=TO_HOST | PINNED)
    kit.site(2, [STEP], [400_000], what=TO_HOST | PINNED)
    kit.site(3, [MAIN], [300_000], what=0)
    stalls = kit.bye().report()["stalls"]
    assert one(stalls, api=COPY)["cause"] == "item"
    assert {s["site"]["line"]: (s["cause"], s["copy"]) for s in stalls if s["api"] == STREAM} == {
        12: ("item", {"direction": "device_to_host", "memory": "pinned"}),
        40: ("explicit", None),
    }


def test_one_line_that_copies_both_ways_is_two_stalls() -> None:
    kit = kit_of((STREAM, 400_000), (STREAM, 300_000))
    kit.site(1, [STEP], [400_000], what=TO_HOST)
    kit.site(2, [STEP], [300_000], what=TO_DEVICE | PINNED)
    assert {s["cause"]: s["count"] for s in kit.bye().report()["stalls"]} == {"item": 1, "copy": 1}


@pytest.mark.parametrize(
    ("what", "ns", "late", "cause", "guess"),
    [
        (TO_DEVICE | PINNED, 400_000, True, None, None),
        (TO_DEVICE | NOT_PINNED, 5_000, False, "pageable", None),
        (TO_DEVICE | NOT_PINNED, 400_000, True, "pageable", "estimated"),
        (TO_DEVICE | NOT_PINNED, 5_000, True, None, None),
        (TO_DEVICE, 400_000, False, "pageable", "estimated"),
        (TO_HOST | NOT_PINNED, 400_000, False, "pageable", None),
        (ANY_WAY, 400_000, False, None, None),
    ],
)
def test_copies_that_nobody_waits_for(what: int, ns: int, late: bool, cause: str | None, guess: str | None) -> None:
    """Memory that lies in no known range is pageable only where all ranges are known."""
    kit = kit_of((COPY, ns), late=late)
    kit.site(1, [STEP], [ns], api=COPY, what=what)
    stall = one(kit.bye().report()["stalls"])
    assert (stall["cause"], stall.get("cause_is")) == (cause, guess)


def test_the_thread_that_pins_and_other_causes() -> None:
    apis = ("cudaHostAlloc", "cudaMalloc", "cudaFree", "cudaEventSynchronize", "cudaDeviceSynchronize")
    kit = kit_of(*[(api, 300_000) for api in apis])
    for number, api in enumerate(apis):
        kit.site(number, [PIN, MAIN] if api == "cudaHostAlloc" else [MAIN], [300_000], api=api, what=0)
    found = {s["api"]: s["cause"] for s in kit.bye().report()["stalls"]}
    assert list(found.values()).count("pin_memory") == 1 and [found[api] for api in apis] == [
        "pin_memory", "alloc", "free", "event", "explicit",
    ]  # fmt: skip


def test_what_nobody_looked_at_is_not_known() -> None:
    """Recordings from before, and the shim: a stream may have been waited for behind a copy."""
    kit = kit_of((STREAM, 300_000), ("cudaDeviceSynchronize", 300_000))
    assert {s["api"]: s["cause"] for s in kit.bye().report()["stalls"]} == {
        STREAM: None,
        "cudaDeviceSynchronize": "explicit",
    }


def test_how_long_nothing_was_queued() -> None:
    kit = kit_of(("cudaDeviceSynchronize", 300_000), (STREAM, 300_000))
    kit.site(1, [STEP], [300_000], api="cudaDeviceSynchronize", what=0, idle=(1, 7_000_000))
    kit.site(2, [STEP], [300_000], what=0)
    stalls = kit.bye().report()["stalls"]
    whole, stream = (one(stalls, api=api) for api in ("cudaDeviceSynchronize", STREAM))
    assert (whole["dry_count"], whole["dry_ns"], whole["dry_ns_is"]) == (1, 7_000_000, "lower_bound")
    assert stream["dry_count"] is stream["dry_ns"] is stream["step_share"] is None


def test_words_of_functions() -> None:
    """As the diagram in native/wire.h has it."""
    assert cause_word(BY_NAME[COPY]) == 0x10124507
    assert cause_word(BY_NAME["cudaLaunchKernel"]) & 1 == 0
    assert cause_word(BY_NAME["cuMemcpyDtoHAsync_v2"]) >> 4 & 3 == TO_HOST
    assert cause_word(BY_NAME["cudaMemset"]) >> 1 & 7 == 0


def thread(**changes: Any) -> list[Any]:
    row = {"tid": 7, "name": "decode", "python": False, "since": START, "wait_ns": 5, "deeds": [0, 3, 4, 0, 0, 0, 0, 0]}
    return list((row | changes).values())


def test_threads_and_what_they_do() -> None:
    kit = kit_of((STREAM, 300_000))
    kit.add(Kind.THREADS, at_ns=kit.now, proc=1, rows=[thread(), thread(tid=8, name="main", python=True)])
    rows = kit.bye().report()["threads"]
    assert [(r["tid"], r["name"], r["python"], r["copies_to_device"], r["waits"]) for r in rows] == [
        (7, "decode", False, 4, 3),
        (8, "main", True, 4, 3),
    ]


@pytest.mark.parametrize("rows", [[thread(deeds=[1])], [thread(tid=-1)], [thread(name=5)], [thread(python=3)], [None]])
def test_bad_threads_end_the_source(rows: list[Any]) -> None:
    kit = kit_of((STREAM, 300_000))
    kit.add(Kind.THREADS, at_ns=kit.now, proc=1, rows=rows)
    assert "a bad THREADS frame" in (kit.state().dropped or "")


def test_a_pipeline_is_waited_for_in_no_file_of_pythons_own_locks() -> None:
    kit = kit_of((STREAM, 300_000))
    lock = ["/usr/lib/python3.11/threading.py", 320, "wait", "python"]
    own = [*STEP, "python"]
    rows = [[[own], 60, 2, 40], [[lock, own], 1000, 1, 1000]]
    kit.add(Kind.PIPELINE, at_ns=kit.now, proc=1, looks=9, watched_ns=100, rows=rows)
    stall = one(kit.bye().report()["stalls"], kind="data")
    assert (stall["cause"], stall["total_ns"], stall["count"], stall["max_ns"]) == ("pipeline", 60, 2, 40)
    assert stall["site"]["line"] == stall["user_site"]["line"] == 12
    for bad in ([[own, 1, 1]], [[[own], -1, 1, 1]], [[[own], 1, 1]]):
        kit = kit_of((STREAM, 300_000))
        kit.add(Kind.PIPELINE, at_ns=kit.now, proc=1, looks=9, watched_ns=100, rows=bad)
        assert "a bad PIPELINE frame" in (kit.state().dropped or "")


def test_looks_stand_for_the_time_between_them() -> None:
    """Three looks in one wait, then another wait from the same line, then none."""
    seen, stack = _Seen(), (PyFrame(1, 2, 3),)
    for now, turns, here in ((10, 5, stack), (30, 5, stack), (50, 5, stack), (70, 6, stack), (90, 7, ())):
        seen.move(here, turns, 20, now)
    # half of 20 at each end of a wait
    assert seen.sums == {stack: [10 + 20 + 20 + 10 + 10 + 10, 2, 40]}
