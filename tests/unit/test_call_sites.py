"""Call sites in the report: put together by line, exact in sum, and honest about the rest."""

from __future__ import annotations

import io
from typing import Any

from aggregate_kit import Kit, call, one

from stallscope.diagnose.callsites import not_own
from stallscope.output.terminal import report_text
from stallscope.wire.frames import Kind

STEP, MAIN = ("/job/train.py", 12, "step"), ("/job/train.py", 40, "main")
TORCH = ("/venv/lib/python3.11/site-packages/torch/cuda/__init__.py", 7, "synchronize")


def kit_with(*durations: int, **hello: Any) -> Kit:
    kit = Kit(**hello)
    kit.process()
    for ns in durations:
        kit.wait(ns=ns)
    return kit


def frame(place: tuple[str, int, str]) -> dict[str, Any]:
    return {"file": place[0], "line": place[1], "function": place[2], "kind": "python"}


def test_stacks_of_one_line_are_one_stall() -> None:
    kit = kit_with(300_000, 2_000_000, 500_000)
    kit.site(1, [STEP, MAIN], [300_000])
    kit.site(2, [STEP], [2_000_000, 500_000])
    stall = one(kit.bye().report()["stalls"])
    assert stall["site"] == stall["user_site"] == frame(STEP) and stall["site_unknown"] is None
    assert (stall["count"], stall["total_ns"], stall["max_ns"]) == (3, 2_800_000, 2_000_000)
    assert [(x["duration_ns"], x["stack"]) for x in stall["longest"]] == [
        (2_000_000, [frame(STEP)]),
        (300_000, [frame(STEP), frame(MAIN)]),
    ]


def test_the_users_own_line_is_told_beside_the_innermost() -> None:
    kit = kit_with(300_000, 400_000)
    kit.site(1, [TORCH, STEP], [300_000])
    kit.site(2, [TORCH, MAIN], [400_000])
    found = {s["user_site"]["line"]: s for s in kit.bye().report()["stalls"]}
    assert {line: s["site"]["file"] for line, s in found.items()} == {12: TORCH[0], 40: TORCH[0]}
    assert (found[12]["total_ns"], found[40]["total_ns"]) == (300_000, 400_000)


def test_what_no_site_accounts_for_is_a_stall_of_its_own() -> None:
    kit = kit_with(300_000, 900_000, 70_000)
    kit.site(1, [STEP], [900_000])
    stalls = kit.bye().report()["stalls"]
    rest = one(stalls, site=None)
    assert (rest["count"], rest["total_ns"], rest["max_ns"]) == (2, 370_000, None)
    assert rest["site_unknown"].startswith("it waited before") and sum(s["count"] for s in stalls) == 3


def test_numbers_are_cumulative_and_late_ones_win() -> None:
    kit = kit_with(100, 200, 300)
    kit.site(1, [STEP], [100])
    kit.site(1, [STEP], [100, 200, 300])
    assert one(kit.bye().report()["stalls"])["count"] == 3


def test_an_unknown_innermost_frame_is_no_site() -> None:
    kit = kit_with(500_000)
    kit.site(1, [(None, None, "?"), STEP], [500_000], why="its code object was gone")  # type: ignore[list-item]
    stall = one(kit.bye().report()["stalls"])
    assert stall["site"] is None and stall["site_unknown"] == "its code object was gone"
    assert stall["user_site"] == frame(STEP)  # the caller is known all the same


def test_a_process_without_python_says_so() -> None:
    kit = kit_with(500_000)
    kit.add(Kind.SITES, at_ns=kit.now, proc=1, rows=[], unknown="there is no Python in the process")
    stall = one(kit.bye().report()["stalls"])
    assert stall["site"] is None and stall["site_unknown"] == "there is no Python in the process"


SHORT = "it was shorter than 1.05 ms, which the shim does not look up"


def test_where_only_long_waits_are_looked_up() -> None:
    kit = kit_with(300_000, 900_000, 2_000_000)
    kit.add(Kind.SITES, at_ns=kit.now, proc=1, rows=[], least_ns=1 << 20)
    kit.site(1, [STEP], [2_000_000])
    rest = one(kit.bye().report()["stalls"], site=None)
    assert (rest["count"], rest["total_ns"], rest["site_unknown"]) == (2, 1_200_000, SHORT)


def test_a_long_one_without_a_line_is_not_called_short() -> None:
    kit = kit_with(300_000, 2_000_000)
    kit.add(Kind.SITES, at_ns=kit.now, proc=1, rows=[], least_ns=1 << 20)
    assert one(kit.bye().report()["stalls"])["site_unknown"].startswith(f"{SHORT}; or it waited before")


def test_all_were_short() -> None:
    kit = kit_with(300_000, 1_000_000)
    kit.add(Kind.SITES, at_ns=kit.now, proc=1, rows=[], least_ns=1 << 20)
    assert one(kit.bye().report()["stalls"])["site_unknown"] == SHORT


def test_nobody_looked() -> None:
    """Recordings from before there were sites."""
    stall = one(kit_with(500_000).bye().report()["stalls"])
    assert stall["site"] is stall["site_unknown"] is stall["user_site"] is None


def test_functions_stay_apart() -> None:
    kit = kit_with(500_000)
    kit.wait("cudaMemcpy", 20_000)
    kit.site(1, [STEP], [500_000])
    kit.site(2, [STEP], [20_000], api="cudaMemcpy")
    assert {s["api"]: s["count"] for s in kit.bye().report()["stalls"]} == {"cudaStreamSynchronize": 1, "cudaMemcpy": 1}


def test_a_call_under_way_has_its_stack() -> None:
    kit = kit_with(500_000)
    kit.site(1, [STEP, MAIN], [500_000])
    rows = [
        [1, tid, [call(api, kit.now)]]
        for tid, api in ((7, "cudaStreamSynchronize"), (8, "cudaMemcpy"), (9, "cudaFree"))
    ]
    kit.add(Kind.INFLIGHT, at_ns=kit.now, final=True, rows=rows, sites=[[1, 7, 1], [1, 8, 1], [1, 9, 99]])
    report = kit.bye().report()
    assert {row["tid"]: row["stack"] for row in report["in_flight"]} == {
        7: [frame(STEP), frame(MAIN)],
        8: None,
        9: None,
    }
    assert "job/train.py:12 step" in report_text(report, io.StringIO())


def test_bad_frames_end_the_source() -> None:
    for rows in ([[1, 1, 1, 1, 1, [160, 1]]], [[1, 1, 1, 1, 1, [1]]], [[1, -1, 1, 1, 1, []]], [[1, 2]], [None]):
        kit = kit_with(500_000)
        kit.add(Kind.SITES, at_ns=kit.now, proc=1, rows=rows)
        assert "a bad SITES frame" in (kit.state().dropped or "")


def test_the_table_of_lines() -> None:
    kit = kit_with(*[1_000_000] * 3)
    for ns in (4_000_000, 2_000_000):
        kit.wait("cudaMemcpy", ns)
    kit.site(1, [TORCH, STEP], [1_000_000] * 2)
    kit.site(2, [MAIN], [4_000_000, 2_000_000], api="cudaMemcpy")
    text = report_text(kit.bye().report(), io.StringIO())
    begin = text.index("the lines that wait most")
    lines = text[begin:].splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[2].split() == ["job/train.py:40", "main", "cudaMemcpy", "2", "6.00", "ms", "<0.5", "%", "-"]
    assert lines[3].split() == ["job/train.py:12", "step", "cudaStreamSynchronize", "2", "2.00", "ms", "<0.5", "%", "-"]
    assert lines[4].startswith("and 1 waits (1.00 ms) from unknown lines: it waited before")
    assert "cudaStreamSynchronize     3 3.00 ms" in text  # the table of functions has them all


def test_whose_code_a_file_is() -> None:
    foreign = ("/usr/lib/python3/dist-packages/x.py", "/usr/lib/python3.11/threading.py", "<frozen runpy>", TORCH[0],
               "/usr/lib/python311.zip/x.py", None)  # fmt: skip
    assert all(map(not_own, foreign))
    assert not any(map(not_own, ("/job/train.py", "<string>", "/home/me/lib/python/train.py")))
