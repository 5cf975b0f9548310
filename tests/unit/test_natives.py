"""Native frames between Python frames: where they belong, and what is said where they are not known."""

from __future__ import annotations

import ctypes
import itertools
import os
import struct
from typing import Any

import pytest
from aggregate_kit import Kit, one

from stallscope.capture.natives import TRUNCATED, _Shown, _woven, truncated
from stallscope.capture.parser_client import ParserClient
from stallscope.capture.sitetable import Machine, entries_of
from stallscope.capture.weaving import LAST_NS, MAX_QUEUE, Unwoven, Weaver
from stallscope.wire.frames import Kind

CUT = [None, None, TRUNCATED, "native"]


def machine(words: str) -> list[_Shown]:
    """ "e" an evaluator, "i" another function of the interpreter, else one of an extension."""
    return [_Shown("/x.so", word, word == "e", word in "ei") for word in words.split()]


def python(count: int) -> list[list[Any]]:
    return [["a.py", number, f"f{number}", "python"] for number in range(count)]


def told(frames: list[list[Any]]) -> str:
    return " ".join(str(frame[2]) for frame in frames)


@pytest.mark.parametrize(
    ("machines", "is_whole", "entries", "want"),
    [
        ("a b i e i e main", True, [1, 3], "a b f0 f1 f2"),  # two evaluators; how the thread began is left out
        ("a i e i x i y i e start", True, [2, 3], "a f0 f1 x y f2"),
        ("a i e i x i", False, [2, 3], f"a f0 f1 x {TRUNCATED} f2"),
        ("a i e i e i", False, [2, 3], "a f0 f1 f2"),  # what is missing lies outside of all Python frames
        ("a i", False, [2, 3], f"a {TRUNCATED} f0 f1 f2"),
        ("", False, [2, 3], f"{TRUNCATED} f0 f1 f2"),
        (
            "a e x e y e",
            True,
            [2, 3],
            f"a {TRUNCATED} f0 f1 f2",
        ),  # more evaluators than Python says: neither is believed
        ("a e x e y e", False, [2, 3], f"a {TRUNCATED} f0 f1 f2"),
        ("a e x", True, [2, 3], f"a {TRUNCATED} f0 f1 f2"),
        ("a i", True, [3], f"a {TRUNCATED} f0 f1 f2"),  # an interpreter whose evaluator has no name
    ],
)
def test_where_native_frames_belong(machines: str, is_whole: bool, entries: list[int], want: str) -> None:
    assert told(_woven(machine(machines), is_whole, python(3), entries, False)) == want


@pytest.mark.parametrize(
    ("machines", "is_whole", "want"),
    [
        ("a e x e y e z e start", True, "a f0 x f1 y f2"),
        ("a e x e y", False, f"a f0 x f1 y {TRUNCATED} f2"),
        ("a e x e y e", False, "a f0 x f1 y f2"),
        ("a e", True, f"a {TRUNCATED} f0 f1 f2"),
    ],
)
def test_where_outer_python_frames_are_missing(machines: str, is_whole: bool, want: str) -> None:
    assert told(_woven(machine(machines), is_whole, python(3), [1, 2], True)) == want


def test_so_many_are_shown() -> None:
    """The innermost ones; then that there were more."""
    found = _woven(machine("a " * 20 + "e " + "x " * 20 + "e"), True, python(2), [1, 2], False)
    assert told(found) == "a " * 20 + "f0 " + "x " * 11 + f"{TRUNCATED} f1"


def test_entries_from_c() -> None:
    """CPython 3.11 marks the frame, later ones put one of their own between."""
    frame, marked, between = (True, False), (True, True), (False, False)
    assert entries_of([frame, marked, marked, frame]) == [2, 3]
    assert entries_of([frame, frame, between, frame, between]) == [2, 3]


class Woven:
    """A weaver whose clock stands still, and what it sends."""

    def __init__(self, parser: ParserClient) -> None:
        self.now = 0
        self.sent: list[dict[str, Any]] = []
        self.weaver = Weaver(parser, self._send, lambda: self.now)

    def _send(self, kind: Kind, body: dict[str, Any]) -> None:
        assert kind == Kind.SITE_STACK
        self.sent.append(body)

    def offer(self, number: int, pid: int, stack: bytes | None) -> None:
        copy = None if stack is None else Machine(0x7FFE00001000, 0, stack)
        self.weaver.offer(Unwoven(number, 1, python(2), [1, 2], False), pid, copy)


def test_what_can_not_be_unwound_is_told_at_once(parser: ParserClient) -> None:
    woven = Woven(parser)
    woven.offer(1, os.getpid(), None)
    woven.offer(2, 0x7FFFFFFF, bytes(64))  # no such process
    assert woven.sent == [{"at_ns": 0, "proc": 1, "id": n, "frames": [CUT, *python(2)]} for n in (1, 2)]
    assert truncated([]) == [CUT]


def test_a_stack_of_nonsense(parser: ParserClient) -> None:
    woven = Woven(parser)
    for number, stack in enumerate((bytes(8), b"\xff" * 4096, os.urandom(16384))):
        woven.offer(number, os.getpid(), stack)
    assert not woven.sent
    woven.weaver.step()
    assert [body["frames"] for body in woven.sent] == [[CUT, *python(2)]] * 3


def test_the_queue_has_an_end_and_the_capture_too(parser: ParserClient) -> None:
    woven = Woven(parser)
    before = len(os.listdir("/proc/self/fd"))
    code = ctypes.cast(ctypes.CDLL(None).getpid, ctypes.c_void_p).value
    for number in range(MAX_QUEUE + 3):
        woven.offer(number, os.getpid(), struct.pack("<Q", code) * 8)
    assert [body["id"] for body in woven.sent] == [MAX_QUEUE, MAX_QUEUE + 1, MAX_QUEUE + 2]
    assert len(os.listdir("/proc/self/fd")) == before + 1  # libc
    ticks = itertools.count(0, LAST_NS)
    woven.weaver._clock = lambda: next(ticks)
    woven.weaver.finish()
    assert len(woven.sent) == MAX_QUEUE + 3
    assert len(os.listdir("/proc/self/fd")) == before


def test_native_frames_do_not_change_the_site() -> None:
    kit = Kit()
    kit.process()
    kit.wait(ns=300_000)
    kit.site(1, [("/job/train.py", 12, "step")], [300_000])
    stack = [["/lib/libffi.so", None, "ffi_call", "native"], ["/job/x.so", None, None, "native"],
             ["/job/train.py", 12, "step", "python"]]  # fmt: skip
    kit.add(Kind.SITE_STACK, at_ns=kit.now, id=1, frames=stack)
    kit.add(Kind.SITE_STACK, at_ns=kit.now, id=2, frames=stack)  # of no site that is known
    stall = one(kit.bye().report()["stalls"])
    assert stall["site"] == stall["user_site"] == stall["longest"][0]["stack"][2]
    assert stall["longest"][0]["stack"][:2] == [
        {"file": "/lib/libffi.so", "line": None, "function": "ffi_call", "kind": "native"},
        {"file": "/job/x.so", "line": None, "function": None, "kind": "native"},
    ]
