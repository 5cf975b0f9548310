"""Incidents, episodes and collectives in the report, on the screen, and live."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import pytest
from aggregate_kit import START, Kit, small

from stallscope.diagnose.incident import Collective, Culprit, Episode, Found, Incident, Longest, Place
from stallscope.output.announce import Announcer
from stallscope.output.finish import finish
from stallscope.output.report import report_json
from stallscope.output.terminal import report_text
from stallscope.wire.frames import Kind

SECOND = 1_000_000_000
STACK: list[dict[str, Any]] = [
    {"file": "/job/train.py", "line": 10 * n, "function": f"f{n}", "kind": "python"} for n in range(5)
]
READ: dict[str, str | None] = {"syscall": "read", "file": "/data/batch-7", "wchan": "pipe_read"}
COMM = small().report()["communicators"][0]


def place(rank: int) -> Place:
    return Place(rank, 10 + rank, 1, 4242)


def incident(**changes: Any) -> Incident:
    values: dict[str, Any] = {
        "id": 1, "kind": "NOT_ARRIVED", "label": None, "comm": COMM["id"], "op": "ncclAllReduce", "seq": 812,
        "culprits": [Culprit(place(1), STACK, READ)], "victims": [place(n) for n in (0, 2, 3, 5)], "cascade": ["ab" * 8],
        "start_ns": START + 2 * SECOND, "reported_ns": START + 5 * SECOND, "end_ns": None, "outcome": "running",
        "evidence": "api", "confidence": "high", "summary": "rank 1 has not called ncclAllReduce", "next": "look at pid 4242",
    }  # fmt: skip
    return Incident(**(values | changes))


def episode(**changes: Any) -> Episode:
    longest = [Longest(START + SECOND, 20 * SECOND, "ncclAllReduce", 5, STACK)]
    return replace(Episode(COMM["id"], place(2), 801, 61_300_000_000, 20 * SECOND, SECOND, longest), **changes)


def screen(found: Found, kit: Kit | None = None) -> str:
    return report_text((kit or small()).report(found), io.StringIO())


def test_the_keys_of_an_incident() -> None:
    (row,) = small().report(Found([incident()]))["incidents"]
    assert set(row) - {"duration_ns_is"} == {
        "id", "class", "label", "comm", "comm_uid", "comm_hash", "op", "seq", "culprits", "victims", "cascade", "start_ns",
        "reported_ns", "duration_ns", "ended", "outcome", "evidence", "confidence", "summary", "next", "numbers",
    }  # fmt: skip
    assert (row["class"], row["comm_uid"], row["comm_hash"]) == ("NOT_ARRIVED", "0102030405060708", None)
    assert (row["start_ns"], row["reported_ns"], row["ended"]) == (2 * SECOND, 5 * SECOND, False)
    assert (row["duration_ns"], row["duration_ns_is"]) == (8 * SECOND, "lower_bound")  # the capture lasted 10 s
    who = {"rank": 1, "global_rank": 11, "proc": 1, "pid": 4242, "host": "node7"}
    assert row["culprits"] == [{**who, "stack": STACK, "waiting_in": READ}]
    assert row["victims"][0] == {**who, "rank": 0, "global_rank": 10}


def test_an_incident_that_is_over() -> None:
    (row,) = small().report(Found([incident(end_ns=START + 3 * SECOND, outcome="resolved")]))["incidents"]
    assert (row["duration_ns"], row["ended"], row["outcome"]) == (SECOND, True, "resolved")
    assert not [key for key in row if key.endswith("_is")]


def test_an_incident_from_before_the_capture() -> None:
    found = Found([incident(start_ns=START, since_before=True, end_ns=START + SECOND, outcome="resolved", comm=None)])
    (row,) = small().report(found)["incidents"]
    assert (row["start_ns_is"], row["duration_ns_is"]) == ("estimated", "lower_bound")
    assert row["comm"] is row["comm_uid"] is row["comm_hash"] is None
    assert "before the capture began" in screen(found)


def test_unknown_is_null() -> None:
    bare = incident(
        op=None, seq=None, culprits=[Culprit(Place(None, None, 9, 77))], victims=[], cascade=[], comm="no such"
    )
    (row,) = small().report(Found([bare]))["incidents"]
    who = {"rank": None, "global_rank": None, "proc": 9, "pid": 77, "host": None}
    assert row["culprits"] == [{**who, "stack": None, "waiting_in": None}]
    assert row["comm_uid"] is None and row["op"] is None and row["seq"] is None
    assert "pid 77" in screen(Found([bare]))


def test_episodes_and_collectives() -> None:
    one = Collective(COMM["id"], "ncclAllGather", "bfloat16", 6400, 1_200_000_000, 64.0, None, False)
    report = small().report(Found(episodes=[episode(), episode(total_ns=70 * SECOND, exact=False)], collectives=[one]))
    first, second = report["episodes"]
    assert (first["total_ns"], first["total_ns_is"], first["max_ns_is"]) == (70 * SECOND, "estimated", "estimated")
    assert second["count"] == 801 and "total_ns_is" not in second and second["p99_ns_is"] == "estimated"
    assert second["longest"] == [
        {"at_ns": SECOND, "duration_ns": 20 * SECOND, "op": "ncclAllReduce", "seq": 5, "culprit_stack": STACK}
    ]
    (done,) = report["collectives"]
    assert done == {"comm": COMM["id"], "op": "ncclAllGather", "dtype": "bfloat16", "calls": 6400, "bytes": 1_200_000_000,
                    "calls_per_step": 64.0, "wait_ns": None}  # fmt: skip
    (done,) = small().report(Found(collectives=[one._replace(bounded=True)]))["collectives"]
    assert done["calls_is"] == done["bytes_is"] == "lower_bound" and "wait_ns_is" not in done


def test_the_incident_is_what_the_eye_meets_first() -> None:
    text = screen(Found([incident()]))
    lines = text.splitlines()
    assert lines[0].startswith("INCIDENT 1, NOT OVER after ≥8.00 s: NOT_ARRIVED")
    assert max(map(len, lines)) <= 80
    words = " ".join(text.split())
    for part in (
        "rank 1 has not called ncclAllReduce", "rank 1, global rank 11, pid 4242 on node7", "read of /data/batch-7", "f0",
        "f2 /job/train.py:20", "ncclAllReduce #812", "communicator 0102030405060708", "2 ranks", "2.00 s after the capture began",
        "high confidence", "not what its GPU did", "4 ranks: 10, 12-13, 15", "1 more communicator: abab", "look at pid 4242",
    ):  # fmt: skip
        assert part in words, part
    assert "f3" not in words and text.index("INCIDENT") < text.index("calls made")


def test_those_that_go_on_stand_in_front() -> None:
    over = [incident(id=n, end_ns=START + 4 * SECOND, outcome="timed_out") for n in range(1, 9)]
    text = screen(Found([*over, incident(id=9)]))
    assert text.index("INCIDENT 9, NOT OVER") < text.index("INCIDENT 1, timed out after 2.00 s")
    assert "and 5 more incidents" in text


def test_episodes_on_the_screen() -> None:
    text = " ".join(screen(Found(episodes=[episode()])).split())
    assert "rank 12 made others wait 801 times, 61.3 s in all, longest 20.0 s" in text


def test_no_incident_is_said_only_where_it_is_known() -> None:
    def watched(nranks: int = 1) -> Kit:
        kit = Kit()
        kit.process()
        kit.link("NCCL")
        kit.init_rank(0, pointer=0xABC000, nranks=nranks)
        kit.count("ncclCommInitRank", calls=0)
        return kit

    said = "no incident: no rank held up a collective"
    assert said in screen(Found(), watched().bye())
    assert said not in screen(Found([incident()]), watched().bye())
    assert said not in screen(Found(), watched())  # no farewell
    gap = watched()
    gap.add(Kind.GAP, source="vital", proc=None, count=1, from_ns=START, to_ns=START + 5, reason="ring full")
    assert said not in screen(Found(), gap.bye())
    nothing = Kit()
    nothing.process()
    nothing.launch()
    assert said not in screen(Found(), nothing.bye())


@pytest.mark.parametrize("evil", ["\x1b[2J\x07\x9b31m\r\n[bold red]"])
def test_hostile_words_cannot_steer_the_terminal(evil: str) -> None:
    stack = [{"file": evil, "line": 1, "function": evil, "kind": "python"}]
    bad = incident(
        summary=evil, next=evil, culprits=[Culprit(place(1), stack, {"syscall": evil, "file": evil, "wchan": evil})]
    )
    text = screen(Found([bad]))
    err = io.StringIO()
    Announcer(err).look(Found([bad]))
    for shown in (text, err.getvalue()):
        assert not set(shown) & {"\x1b", "\x07", "\x9b", "\r"} and "[bold red]" in shown
    assert len(err.getvalue().splitlines()) == 2
    json.loads(report_json(small().state(), Found([bad])))


def test_live_lines_come_once() -> None:
    err = io.StringIO()
    announcer, found = Announcer(err), Found([incident()])
    announcer.look(found)
    announcer.look(found)
    first = "incident 1 (NOT_ARRIVED): rank 1 has not called ncclAllReduce\n  next: look at pid 4242\n"
    assert err.getvalue() == first
    found.incidents[0].end_ns, found.incidents[0].outcome = START + 14_300_000_000, "resolved"
    announcer.look(found)
    announcer.look(found)
    assert err.getvalue() == first + "incident 1 resolved after 12.3 s\n"


def test_a_label_is_told_and_another_incident_too() -> None:
    err = io.StringIO()
    announcer = Announcer(err)
    announcer.look(
        Found([incident(label="checkpoint"), incident(id=2, end_ns=START + 4 * SECOND, outcome="timed_out")])
    )
    told = [line[:20] for line in err.getvalue().splitlines() if line.startswith("incident")]
    assert told == ["incident 1 (NOT_ARRI", "incident 2 (NOT_ARRI", "incident 2 timed out"]
    assert "(NOT_ARRIVED, checkpoint)" in err.getvalue()


class Full(io.StringIO):
    """A stream that takes nothing, and counts how often it was asked."""

    asked = 0

    def write(self, text: str) -> int:
        self.asked += 1
        raise BrokenPipeError


def test_nobody_reads_the_live_lines() -> None:
    err = Full()
    announcer = Announcer(err)
    announcer.look(Found([incident()]))
    announcer.look(Found([incident(), incident(id=2)]))
    assert err.asked == 1


def test_an_incident_without_any_call_is_a_report() -> None:
    state, out, err = Kit().state(), io.StringIO(), io.StringIO()
    assert finish(state, Found(), as_json=True, out=out, err=err) == 4
    assert finish(state, Found([incident()]), as_json=True, out=out, err=io.StringIO()) == 0


def test_a_library_that_was_put_in_does_not_say_that_nothing_was_called() -> None:
    """What had fetched its addresses before goes past it: nothing seen is not nothing called."""
    for backend, words in (("inject", "no call came by the library"), ("bcc", "none of its functions was called")):
        kit, err = Kit(backend=backend, sources=["shim" if backend == "inject" else "bpf"]), io.StringIO()
        kit.process()
        kit.link("CUDART")
        assert finish(kit.state(), Found(), as_json=True, out=io.StringIO(), err=err) == 4
        assert words in err.getvalue() and ("--method bpf" in err.getvalue()) == (backend == "inject")
