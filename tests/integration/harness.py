"""Programs to trace and the tracer, as a person would start them."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stallscope.wire.columns import records
from stallscope.wire.frames import FILE_HEADER_BYTES, Decoder, Kind
from stallscope.wire.hook_table import BY_ID

ROOT = Path(__file__).resolve().parents[2]
TARGETS = ROOT / "build" / "targets"
SIM_LIB = ROOT / "build" / "sim" / "lib"
STALLSCOPE = [sys.executable, "-m", "stallscope.cli.main"]
DEADLINE_S = 60.0
# bcc compiles for 2.5 s at each attach; what it loads is held against the object in test_links.py, and whole runs by it
# are those of test_attach_counts.py.
BACKEND = ["--backend", "object"]


class Lines:
    """Lines of a pipe, read by a thread, so that a test can wait for one with a deadline."""

    def __init__(self, pipe: Any) -> None:
        self._queue: queue.Queue[str | None] = queue.Queue()
        self.seen: list[str] = []
        threading.Thread(target=self._pump, args=(pipe,), daemon=True).start()

    def _pump(self, pipe: Any) -> None:
        for line in pipe:
            self._queue.put(line)
        self._queue.put(None)

    def wait_for(self, start: str, deadline_s: float = DEADLINE_S) -> str:
        """The next line that starts so. Raises AssertionError at the deadline or the end of the pipe."""
        end = time.monotonic() + deadline_s
        while True:
            try:
                line = self._queue.get(timeout=max(0.01, end - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"no line {start!r} within {deadline_s} s; saw {self.seen}") from None
            if line is None:
                self._queue.put(None)
                raise AssertionError(f"pipe ended before {start!r}; saw {self.seen}")
            self.seen.append(line)
            if line.startswith(start):
                return line

    def rest(self) -> str:
        """Everything up to the end of the pipe."""
        while True:
            line = self._queue.get(timeout=DEADLINE_S)
            if line is None:
                return "".join(self.seen)
            self.seen.append(line)


class Program:
    """One target program; speaks by lines, ends with one line of JSON, its own truth."""

    def __init__(self, words: Sequence[str | Path], *, sim: bool = True, env: dict[str, str] | None = None) -> None:
        environment = dict(os.environ, **(env or {}))
        if sim:
            environment["LD_LIBRARY_PATH"] = str(SIM_LIB)
            environment["STALLSCOPE_SIM_LIB"] = str(SIM_LIB)
        self.process = subprocess.Popen(
            [str(w) for w in words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.lines = Lines(self.process.stdout)

    @property
    def pid(self) -> int:
        """Of the program itself."""
        return self.process.pid

    def wait_for(self, start: str, deadline_s: float = DEADLINE_S) -> str:
        """The next line of its output that starts so."""
        return self.lines.wait_for(start, deadline_s)

    def say(self, line: str = "go") -> None:
        """One line to its stdin."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def truth(self) -> dict[str, Any]:
        """Wait for the end; its JSON."""
        line = self.wait_for("{")
        assert self.process.wait(DEADLINE_S) == 0
        found: dict[str, Any] = json.loads(line)
        return found

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()


class Tracer:
    """`stallscope attach` in the background."""

    def __init__(self, pids: Sequence[int], *options: str | Path, env: dict[str, str] | None = None) -> None:
        command = [*STALLSCOPE, "attach", *map(str, pids), "--json", *BACKEND, *map(str, options)]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ, **(env or {}))
        )
        self.errors = Lines(self.process.stderr)

    def attached(self) -> Tracer:
        """Wait until it says that the probes are in place."""
        self.errors.wait_for("attached to PID")
        return self

    def stop(self) -> None:
        """As Ctrl-C does."""
        self.process.send_signal(signal.SIGINT)

    def report(self, code: int = 0) -> dict[str, Any]:
        """Wait for the end; the report. Fails on another exit code."""
        assert self.process.stdout is not None
        out = self.process.stdout.read()
        got = self.process.wait(DEADLINE_S)
        assert got == code, f"exit {got}: {self.errors.rest()}"
        found: dict[str, Any] = json.loads(out)
        return found

    def children(self) -> list[int]:
        """Pids of its helper processes."""
        text = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(word) for word in text.split()]

    def __enter__(self) -> Tracer:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()


def counts(report: dict[str, Any], pid: int | None = None) -> dict[str, int]:
    """api → calls, of one process or of all."""
    found: dict[str, int] = {}
    for call in report["calls"]:
        if pid is None or call["pid"] == pid:
            found[call["api"]] = found.get(call["api"], 0) + call["count"]
    return found


def balance(report: dict[str, Any]) -> tuple[int, int]:
    """(what became of the calls, calls made): the two sides of the equation."""
    capture = report["capture"]
    left = capture["events"] + capture["lost"] + capture["sampled_out"] + sum(capture["filtered"].values())
    return left, sum(call["count"] for call in report["calls"])


def recorded(path: Path) -> dict[str, np.ndarray]:
    """api → `wire_rec` rows of a recording (unique id records without their id)."""
    decoder = Decoder()
    parts = []
    for frame in decoder.feed(path.read_bytes()[FILE_HEADER_BYTES:]):
        if frame.kind == Kind.EVENTS:
            parts.append(records(frame.body["data"]))
    rows = np.concatenate(parts) if parts else records(b"")
    return {BY_ID[h].name: rows[rows["hook"] == h] for h in np.unique(rows["hook"]) if h in BY_ID}


def unique_ids(path: Path) -> list[tuple[str, int, bytes]]:
    """(api, kind, 128 bytes) of each unique id record."""
    from stallscope.wire.columns import UID_REC

    found = []
    for frame in Decoder().feed(path.read_bytes()[FILE_HEADER_BYTES:]):
        if frame.kind == Kind.UIDS:
            for row in np.frombuffer(frame.body["data"], UID_REC):
                found.append((BY_ID[int(row["rec"]["hook"])].name, int(row["rec"]["kind"]), row["uid"].tobytes()))
    return found
