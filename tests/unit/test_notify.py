"""Incidents on their way out of a daemon: bounded, counted, and nobody waits."""

from __future__ import annotations

import http.server
import io
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.registry import CollectorRegistry

from stallscope.aggregate.state import Capture, State
from stallscope.diagnose.incident import Culprit, Found, Incident, Place
from stallscope.output.notify import Notifier, Receiver, command_of, message, webhook_of
from stallscope.output.prometheus import Metrics


def state() -> State:
    """A capture that began."""
    found = State()
    found.capture = Capture("1", 100, 5_000_000_100, "host", "object", ["bpf"], [], 1, None)
    return found


def incident(**given: Any) -> Incident:
    """One that runs."""
    plain: dict[str, Any] = {
        "id": 1, "kind": "NOT_ARRIVED", "label": None, "comm": None, "op": "ncclAllReduce", "seq": 7,
        "culprits": [Culprit(Place(2, 5, 1, 4242))], "victims": [], "cascade": [], "start_ns": 200, "reported_ns": 300,
        "end_ns": None, "outcome": "running", "evidence": "api", "confidence": "high", "summary": "rank 5\x1b[31m hangs",
        "next": "look",
    }  # fmt: skip
    return Incident(**{**plain, **given})


class Hook(http.server.BaseHTTPRequestHandler):
    """Takes what is posted; redirects to itself under /away."""

    got: list[tuple[str, dict[str, Any]]] = []  # noqa: RUF012 - of the one test server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.got.append((self.path, json.loads(body)))
        self.send_response(302 if self.path == "/away" else 200)
        if self.path == "/away":
            self.send_header("Location", "/home")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    """Its address."""
    Hook.got.clear()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hook) as found:
        threading.Thread(target=found.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{found.server_address[1]}"
        found.shutdown()


def test_one_line_each_with_class_rank_and_id() -> None:
    """When it begins and when it is over, once each; no control character of a target's comes through."""
    out, now = io.StringIO(), state()
    notifier = Notifier(out, [])
    one = incident()
    for _ in range(3):
        notifier.look(now, [one])
    one.end_ns, one.outcome = 2_000_000_200, "resolved"
    notifier.look(now, [one])
    notifier.look(now, [one])
    assert out.getvalue().splitlines() == [
        "incident NOT_ARRIVED rank 5 id 000000012a05f264-1: rank 5?[31m hangs",
        "incident NOT_ARRIVED rank 5 id 000000012a05f264-1: resolved after 2.00 s",
    ]


def test_a_webhook_gets_json(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever proxy the environment names; a redirection is not followed."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    receiver = Receiver("webhook", webhook_of(f"{server}/hook", 5), 8, pause_s=0.01)
    Notifier(None, [receiver]).look(state(), [incident()])
    receiver.close(10)
    assert receiver.counts == {"sent": 1} and [path for path, _ in Hook.got] == ["/hook"]
    body = Hook.got[0][1]
    assert (body["class"], body["event"], body["culprits"][0]["global_rank"]) == ("NOT_ARRIVED", "opened", 5)
    assert body["start_unix_ns"] == "5000000200" and body["duration_ns"] is None
    assert body == json.loads(json.dumps(message(state(), incident(), "opened")))
    away = Receiver("webhook", webhook_of(f"{server}/away", 5), 8, pause_s=0.01)
    away.put(b"{}")
    away.close(10)
    assert away.counts == {"failed": 1} and "/home" not in [path for path, _ in Hook.got]


def test_a_hook_that_stands_still_costs_nobody_anything() -> None:
    """Its queue has an end; what finds no room is counted; the caller goes on."""
    held, begun = threading.Event(), threading.Event()

    def send(_data: bytes) -> None:
        begun.set()
        held.wait(30)

    receiver = Receiver("command", send, 2)
    receiver.put(b"0")
    assert begun.wait(30)
    for _ in range(5):
        receiver.put(b"x")
    assert receiver.counts == {"dropped": 3}
    held.set()
    receiver.close(10)
    assert receiver.counts["dropped"] == 3


def test_a_command_gets_json_and_no_shell(tmp_path: Path) -> None:
    """Its words are its words; one that fails or takes too long is ended and counted."""
    out = tmp_path / "$(touch x); out"
    program = "import sys; open(sys.argv[1], 'wb').write(sys.stdin.buffer.read())"
    good = Receiver("command", command_of([sys.executable, "-c", program, str(out)], 20), 4)
    good.put(b'{"id": 1}')
    good.close(30)
    assert good.counts == {"sent": 1} and out.read_bytes() == b'{"id": 1}'
    slow = Receiver("command", command_of([sys.executable, "-c", "import time; time.sleep(60)"], 0.2), 4, pause_s=0.01)
    slow.put(b"{}")
    slow.close(30)
    assert slow.counts == {"failed": 1} and "TimeoutExpired" in (slow.problem or "")
    lines = io.StringIO()
    Notifier(lines, [slow]).look(state(), [])
    assert lines.getvalue().startswith("the command hook failed: TimeoutExpired")


def test_metrics_never_go_back() -> None:
    """What a stream that is over found is added; labels come from fixed sets."""
    metrics, registry = Metrics(), CollectorRegistry()
    registry.register(metrics)
    now, found = state(), Found(incidents=[incident(), incident(id=2, kind="IN_API", end_ns=9)])
    now.lost_by = {"bulk ring full": 4}

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"stallscope_{name}", labels)

    metrics.update(now, found, [])
    assert value("incidents_total", **{"class": "NOT_ARRIVED"}) == 1 and value("incidents_running") == 1
    assert value("lost_total", place="bulk ring full") == 4
    metrics.ledger.close(now, found)
    fresh = state()
    fresh.lost_by = {"bulk ring full": 5}  # told again with all that was lost
    metrics.update(fresh, Found(incidents=[incident()]), [])
    assert value("incidents_total", **{"class": "NOT_ARRIVED"}) == 2
    assert value("incidents_total", **{"class": "IN_API"}) == 1
    assert value("lost_total", place="bulk ring full") == 5
