"""Incidents of a daemon, to whoever wants to know at once: the journal, a webhook, a command.

Words in them come from traced programs: they are data in JSON or in one printable line, and no shell reads them.
Nobody waits for a receiver: each has a thread and a queue with an end, and what is dropped or fails is counted.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from stallscope.aggregate.state import State
from stallscope.diagnose.incident import Culprit, Incident
from stallscope.output.stdout import printable
from stallscope.output.words import clean, duration

__all__ = [
    "SCHEMA",
    "Notifier",
    "Receiver",
    "command_of",
    "identity",
    "journal_line",
    "message",
    "warm_up",
    "webhook_of",
]

SCHEMA = "stallscope.incident/1"
TRIES, PAUSE_S = 3, 1.0
MAX_PLACES = 64  # culprits of one message
WARNING, NOTICE = "<4>", "<5>"  # as sd-daemon(3) has them
OPENED, CLOSED = "opened", "closed"
Send = Callable[[bytes], None]


def identity(state: State, incident: Incident) -> str:
    """Unique over restarts and hosts' streams: when the stream began, and the incident's number in it."""
    begun = state.capture.start_unix_ns if state.capture else 0
    return f"{begun:016x}-{incident.id}"


def message(state: State, incident: Incident, event: str) -> dict[str, Any]:
    """What a webhook or a command gets. Instants in ns since 1970, durations in ns; null where not known."""
    capture = state.capture
    offset = capture.start_unix_ns - capture.start_mono_ns if capture else 0
    end_ns = incident.end_ns
    return {
        "schema": SCHEMA,
        "event": event,
        "id": identity(state, incident),
        "host": clean(capture.host) if capture else None,
        "class": incident.kind,
        "label": incident.label,
        "op": incident.op,
        "seq": incident.seq,
        "culprits": [_place(state, culprit) for culprit in incident.culprits[:MAX_PLACES]],
        "culprits_in_all": len(incident.culprits),
        "victims_in_all": len(incident.victims),
        "start_unix_ns": str(incident.start_ns + offset),
        "duration_ns": None if end_ns is None else end_ns - incident.start_ns,
        "outcome": incident.outcome,
        "evidence": incident.evidence,
        "confidence": incident.confidence,
        "summary": clean(incident.summary),
        "next": clean(incident.next),
    }


def _place(state: State, culprit: Culprit) -> dict[str, Any]:
    place, process = culprit.place, state.processes.table.get(culprit.place.proc)
    return {
        "rank": place.rank,
        "global_rank": place.global_rank,
        "pid": place.pid,
        "name": clean(process.name) if process else None,
        "container_id": process.container_id if process else None,
    }


def journal_line(state: State, incident: Incident, event: str) -> str:
    """One line: class, rank, unique id, and what happened."""
    who = [c.place.rank if c.place.global_rank is None else c.place.global_rank for c in incident.culprits]
    ranks = ",".join("?" if rank is None else str(rank) for rank in who[:8]) or "-"
    head = f"incident {incident.kind} rank {ranks} id {identity(state, incident)}"
    if event == OPENED:
        return f"{head}: {clean(incident.summary)}"
    lasted = "" if incident.end_ns is None else f" after {duration(incident.end_ns - incident.start_ns)}"
    return f"{head}: {incident.outcome.replace('_', ' ')}{lasted}"


def _is_journal(stream: TextIO) -> bool:
    """Whether the stream goes to the journal, as sd-daemon(3) says how to tell."""
    try:
        info = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{info.st_dev}:{info.st_ino}"


class Receiver:
    """One that messages go to, in a thread of its own.

    Args:
        name: for messages and metrics.
        send: delivers one message; raises OSError, ValueError or subprocess.SubprocessError where it can't.
        size: how many may wait.

    Attributes:
        counts: sent, dropped (the queue was full), failed (after all tries).
        problem: why the newest one failed.
    """

    def __init__(self, name: str, send: Send, size: int, *, pause_s: float = PAUSE_S) -> None:
        self.name, self._send, self._pause_s = name, send, pause_s
        self.counts: Counter[str] = Counter()
        self.problem: str | None = None
        self._queue: queue.Queue[bytes | None] = queue.Queue(size)
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def put(self, data: bytes) -> None:
        """Deliver it soon; dropped and counted where too many wait."""
        try:
            self._queue.put_nowait(data)
        except queue.Full:
            self.counts["dropped"] += 1

    def _work(self) -> None:
        while (data := self._queue.get()) is not None:
            self.counts["sent" if self._deliver(data) else "failed"] += 1

    def _deliver(self, data: bytes) -> bool:
        for left in reversed(range(TRIES)):
            try:
                self._send(data)
                return True
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                self.problem = f"{type(error).__name__}: {error}"[:200]
            time.sleep(self._pause_s * (left > 0))
        return False

    def close(self, timeout_s: float) -> None:
        """Let what waits go out, for so long at most."""
        try:
            self._queue.put_nowait(None)
            self._thread.join(timeout_s)
        except queue.Full:
            return


def webhook_of(url: str, timeout_s: float) -> Send:
    """POSTs JSON. No proxy of the environment is asked and no redirection followed: the address is the one given."""
    import http.client
    import urllib.request

    class Stay(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, *_: Any) -> None:
            return None

    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), Stay)

    def send(data: bytes) -> None:
        headers = {"Content-Type": "application/json", "User-Agent": "stallscope"}
        request = urllib.request.Request(url, data, headers, method="POST")  # noqa: S310 - the scheme was checked
        try:
            with opener.open(request, timeout=timeout_s) as answer:
                answer.read(1)
        except http.client.HTTPException as error:
            raise OSError(f"no HTTP answer ({type(error).__name__})") from error

    return send


def command_of(words: Sequence[str], timeout_s: float) -> Send:
    """Runs a program with the message on its stdin, and ends it after a time."""

    def send(data: bytes) -> None:
        subprocess.run(
            list(words), input=data, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=timeout_s,
            check=True, cwd="/", env={"PATH": os.defpath},
        )  # fmt: skip

    return send


def warm_up() -> None:
    """Load what name resolution loads at its first use: later this process may be unable to read its modules."""
    "localhost".encode("idna")
    import encodings.idna
    import selectors
    import stringprep

    assert encodings.idna and selectors and stringprep


class Notifier:
    """Tells each incident when it begins and when it is over.

    Args:
        journal: where one line each goes; None for nowhere.
        receivers: get JSON.
    """

    def __init__(self, journal: TextIO | None, receivers: Sequence[Receiver]) -> None:
        self._journal, self.receivers = journal, receivers
        self._is_journal = journal is not None and _is_journal(journal)
        self._begun: set[str] = set()
        self._ended: set[str] = set()
        self._problems: dict[str, str | None] = {}

    def look(self, state: State, incidents: Sequence[Incident]) -> None:
        """Tell what is new."""
        for incident in incidents:
            name = identity(state, incident)
            if name not in self._begun:
                self._begun.add(name)
                self._tell(state, incident, OPENED)
            if incident.end_ns is not None and incident.end_ns > incident.start_ns and name not in self._ended:
                self._ended.add(name)
                self._tell(state, incident, CLOSED)
        self._tell_problems()

    def forget(self) -> None:
        """A stream is over, and its incidents will not come again."""
        self._begun.clear()
        self._ended.clear()

    def _tell(self, state: State, incident: Incident, event: str) -> None:
        self.say(journal_line(state, incident, event), WARNING if event == OPENED else NOTICE)
        if self.receivers:
            data = json.dumps(message(state, incident, event)).encode()
            for receiver in self.receivers:
                receiver.put(data)

    def _tell_problems(self) -> None:
        for receiver in self.receivers:
            if receiver.problem != self._problems.get(receiver.name):
                self._problems[receiver.name] = receiver.problem
                self.say(f"the {receiver.name} hook failed: {clean(receiver.problem or '')}", WARNING)

    def say(self, line: str, priority: str = NOTICE) -> None:
        """One line to the journal."""
        if self._journal is None:
            return
        try:
            head = priority if self._is_journal else ""
            self._journal.write(printable(f"{head}{line}\n", self._journal))
            self._journal.flush()
        except OSError:
            self._journal = None
