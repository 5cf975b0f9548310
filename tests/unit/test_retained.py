"""An aggregator that comes later is told what the one before knew, and its accounting closes."""

from __future__ import annotations

import socket
import struct
from typing import Any

import numpy as np

from stallscope.aggregate.state import State
from stallscope.capture.retained import MAX_OTHERS, NodeOutbox, Retained
from stallscope.capture.rings import Drained
from stallscope.diagnose.accounting import account
from stallscope.wire.columns import REC
from stallscope.wire.frames import Decoder, Kind
from stallscope.wire.hook_table import BY_NAME

SYNC, LAUNCH = BY_NAME["cudaStreamSynchronize"].id, BY_NAME["cudaLaunchKernel"].id
HELLO: dict[str, Any] = {
    "version": "1", "start_mono_ns": 10, "start_unix_ns": 10, "host": "h", "kernel": "k", "backend": "object",
    "sources": ["bpf"], "targets": [], "sample_one_in": 1.0, "long_ns": 1, "hooks": [], "limits": {},
}  # fmt: skip


def process(proc: int, parent: int | None = None) -> dict[str, Any]:
    """A PROCESS frame."""
    return {"proc": proc, "pid": 100 + proc, "ns_pid": None, "ppid": 1, "parent": parent, "name": "p", "cmdline": ["p"],
            "container_id": None, "start_ns": 1, "at_ns": 1, "env": {"RANK": "3"}}  # fmt: skip


def counts(proc: int, hook: int, calls: int, lost: int = 0) -> dict[str, Any]:
    """A COUNTS frame of one hook."""
    row = struct.pack("<8Q", calls, 0, 0, lost, 0, 0, 0, 0)
    return {"proc": proc, "at_ns": 2, "hooks": [hook], "counts": row, "times": [], "timed": b""}


def batch(slot: int, hook: int, number: int, kind: int = 0, flags: int = 0) -> Drained:
    """Records of that many calls."""
    recs = np.zeros(number, REC)
    recs["slot"], recs["hook"], recs["kind"], recs["flags"], recs["ts_ns"] = slot, hook, kind, flags, 5
    return Drained(memoryview(bytearray(recs.tobytes())), number, memoryview(b""), 0)


class Stream:
    """A node's outbox, and a state at its other end."""

    def __init__(self) -> None:
        ours, self._theirs = socket.socketpair()
        self.outbox = NodeOutbox(Retained(), ours)
        self.state, self._decoder = State(), Decoder()
        self.outbox.send(Kind.HELLO, HELLO)

    def another(self) -> int:
        """The aggregator is another one now."""
        ours, self._theirs = socket.socketpair()
        self.outbox.reopen(ours)
        self.state, self._decoder = State(), Decoder()
        return self.outbox.tell_again(HELLO, 7)

    def read(self) -> State:
        """What it knows by now."""
        self.outbox.flush()
        self._theirs.setblocking(False)
        try:
            while data := self._theirs.recv(1 << 20):
                for frame in self._decoder.feed(data):
                    self.state.apply(frame)
        except BlockingIOError:
            pass
        assert self.state.dropped is None, self.state.dropped
        return self.state


def test_counters_go_on_and_records_are_told_once() -> None:
    """Calls = events + lost + filtered, for the first reader and for the second."""
    stream = Stream()
    send = stream.outbox.send
    send(Kind.PROCESS, process(1))
    send(Kind.SLOT, {"slot": 5, "proc": 1, "at_ns": 1})
    stream.outbox.send_records(batch(5, LAUNCH, 6))
    stream.outbox.send_records(batch(5, SYNC, 3, kind=2))
    stream.outbox.send_records(batch(5, SYNC, 3, kind=2, flags=2))  # their entries were told: no further calls
    send(Kind.COUNTS, counts(1, LAUNCH, 7, lost=1))
    send(Kind.COUNTS, counts(1, SYNC, 3))
    first = account(stream.read())
    assert (first.events, first.lost, first.filtered, first.calls, first.missing) == (9, 1, 0, 10, 0)

    assert stream.another() == 9
    again = account(stream.read())
    assert (again.events, again.lost, again.filtered, again.calls, again.missing) == (0, 1, 9, 10, 0)
    stream.outbox.send_records(batch(5, LAUNCH, 2))
    send(Kind.COUNTS, counts(1, LAUNCH, 9, lost=1))
    again = account(stream.read())
    assert (again.events, again.filtered, again.calls, again.missing) == (2, 9, 12, 0)
    assert again.told_before == 9 and again.history == 0

    assert stream.another() == 11
    third = account(stream.read())
    assert (third.events, third.filtered, third.calls, third.missing) == (0, 11, 12, 0)


def test_the_newest_of_each_is_told() -> None:
    """Program, links, gaps, notes, sites; of an inferred call only while it lasts."""
    stream = Stream()
    send = stream.outbox.send
    send(Kind.PROCESS, process(1))
    send(Kind.IMAGE, {"proc": 1, "at_ns": 2, "name": "new", "cmdline": ["new"], "env": {}})
    send(Kind.SLOT, {"slot": 5, "proc": 1, "at_ns": 1})
    link = {"proc": 1, "library": "CUDART", "path": "/l", "build_id": None, "hooks": [LAUNCH], "at_ns": 4, "appeared_ns": 2,
            "method": "multi", "missing": [], "untimed": False, "version": None}  # fmt: skip
    send(Kind.LINK, link)
    send(Kind.NOTE, {"at_ns": 3, "proc": 1, "text": "a note"})
    inferred = {"proc": 1, "tid": 101, "hook": SYNC, "since_ns": 1, "at_ns": 1, "ended": None}
    send(Kind.INFERRED, inferred)
    send(Kind.INFERRED, {**inferred, "tid": 102})
    send(Kind.INFERRED, {**inferred, "tid": 102, "ended": "returned"})
    site = {"at_ns": 3, "proc": 1, "id": 7, "hook": SYNC, "tid": 101, "frames": [["a.py", 2, "f", "python"]],
            "cut": False, "why": None, "what": 0}  # fmt: skip
    send(Kind.SITE, site)
    send(Kind.SITE_STACK, {"at_ns": 4, "proc": 1, "id": 7, "frames": [["b.so", None, "g", "native"], *site["frames"]]})
    send(Kind.LOST, {"at_ns": 3, "places": {"bulk ring full": 4}})
    stream.read()
    stream.another()
    state = stream.read()
    assert [frame["function"] for frame in state.sites.table[7].frames] == ["g", "f"]
    known = state.processes.table[1]
    assert (known.name, [one.library for one in known.links]) == ("new", ["CUDART"])
    assert (1, "a note") in state.notes and state.lost_by == {"bulk ring full": 4}
    assert [(gap.from_ns, gap.to_ns) for gap in state.gaps if gap.proc == 1] == [(2, 4)]
    assert [call.tid for call in state.flight.inferred.values()] == [101]


def test_who_has_ended_is_forgotten() -> None:
    """With its slot's records; a child is no child of it then, and its environment is its own."""
    stream = Stream()
    send = stream.outbox.send
    context = {"at_ns": 1, "overwritten": False, "seen": False, "gone": [], "own": {}}
    send(Kind.PROCESS, process(1))
    send(Kind.CONTEXT, {"proc": 1, "env": {"RANK": "0"}, "like": None, **context})
    send(Kind.PROCESS, process(2, parent=1))
    send(Kind.CONTEXT, {"proc": 2, "env": None, "like": 1, **context})
    send(Kind.SLOT, {"slot": 5, "proc": 1, "at_ns": 1})
    stream.outbox.send_records(batch(5, LAUNCH, 6))
    send(Kind.EXIT, {"proc": 1, "at_ns": 2, "code": 0, "signal": None, "sender": None, "exiting_ns": None, "oom": None})
    send(Kind.SLOT, {"slot": 5, "proc": 2, "at_ns": 3})
    stream.read()
    assert stream.another() == 0 and stream.outbox.retained.ended == 1
    state = stream.read()
    assert list(state.processes.table) == [2] and state.processes.table[2].parent is None
    assert state.contexts.table[2].env == {"RANK": "0"}


def test_what_is_kept_has_an_end() -> None:
    """A process with endless notes."""
    stream = Stream()
    stream.outbox.send(Kind.PROCESS, process(1))
    for number in range(MAX_OTHERS + 10):
        stream.outbox.send(Kind.NOTE, {"at_ns": 1, "proc": 1, "text": str(number)})
    assert stream.outbox.retained.turned_away == 10


def test_nobody_reads() -> None:
    """While there is no aggregator records stay in their rings, and what is state is kept all the same."""
    stream = Stream()
    stream.outbox.hang_up()
    assert not stream.outbox.bulk_ok and not stream.outbox.vital_ok
    stream.outbox.send(Kind.PROCESS, process(1))
    stream.another()
    assert list(stream.read().processes.table) == [1]
