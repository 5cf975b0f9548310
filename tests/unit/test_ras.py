"""NCCL's RAS as a witness: the protocol against servers of every temper, and what is made of the answers."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from stallscope.poller import ras
from stallscope.poller.ras import Asker, RasProblem, ask
from stallscope.poller.ras_answer import read_answer

Talk = Callable[[socket.socket], None]

TEXT = """NCCL version 2.27.3 compiled with CUDA 12.9
CUDA runtime version 12090, driver version 12040

Job summary
===========

  Nodes  Processes         GPUs
(total)    (total)      (total)
      2         10           10

The outlier node:
  Node 10.4.109.13 running processes 60004,60035

Communicators... (0.00s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         1         1         2         1   RUNNING  INCOMPLETE
    1         4         1       1-2         2         1   RUNNING  MISMATCH
    2         4         0         0         0         0    NOCOMM  INCOMPLETE,MISMATCH

Errors
======

#0-0 (b3398875b8b2a063) INCOMPLETE
  Missing communicator data from 1 rank
  Rank 1 -- GPU 0 managed by process 60004 on node 10.4.109.13

Warnings
========

#1-0 (fa93daea854b060b) MISMATCH
  Communicator ranks have different AllGather operation counts
  30 ranks have launched up to operation 640
  2 ranks have launched up to operation 641
  Rank 12 -- GPU 4 managed by process 323032 on node 10.137.190.124

"""


def rank(number: int, pid: int, all_reduce: int = 641, **status: Any) -> dict[str, Any]:
    """As RAS describes one in JSON."""
    states = {"init_state": 0, "async_error": 0, "finalize_called": False, "destroy_flag": False, "abort_flag": False}
    return {
        "rank": number, "host": "10.0.0.7", "pid": pid, "cuda_dev": number, "nvml_dev": number,
        "status": states | status, "collective_counts": {"Broadcast": 1, "AllReduce": all_reduce},
    }  # fmt: skip


def job(ranks: list[dict[str, Any]], missing: list[dict[str, Any]] | None = None) -> str:
    """An answer with one communicator."""
    comm = {"hash": "0x9a", "secondary_hash": "0x1:0x2", "size": 8, "ranks": ranks, "missing_ranks": missing or []}
    return json.dumps({"nccl_version": "2.28.9", "communicators_count": 1, "communicators": [comm]})


@contextlib.contextmanager
def server(talk: Talk) -> Iterator[int]:
    """Something that listens; gives its port. One connection after the other."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def work() -> None:
            with contextlib.suppress(OSError):
                while True:
                    sock, _ = listener.accept()
                    with sock, contextlib.suppress(OSError):
                        talk(sock)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(10)


def speaking(answer: str, *, json_too: bool = True, heard: list[str] | None = None) -> Talk:
    """A server that keeps to the protocol."""

    def talk(sock: socket.socket) -> None:
        lines = sock.makefile("r")
        for line in lines:
            word = line.strip()
            if heard is not None:
                heard.append(word)
            if word.startswith("CLIENT PROTOCOL"):
                sock.sendall(b"SERVER PROTOCOL 2\n")
            elif word.startswith("TIMEOUT"):
                sock.sendall(b"OK\n")
            elif word.startswith("SET FORMAT"):
                sock.sendall(b"OK\n" if json_too else b"ERROR: Unknown command SET FORMAT json\n")
            elif word == "VERBOSE STATUS":
                sock.sendall(answer.encode())
                return

    return talk


def test_the_protocol_is_spoken() -> None:
    heard: list[str] = []
    with server(speaking(job([rank(0, 11)]), heard=heard)) as port:
        answer = ask(port)
    assert answer is not None and not answer.cut
    assert json.loads(answer.text)["nccl_version"] == "2.28.9"
    assert heard == ["CLIENT PROTOCOL 2", "TIMEOUT 3", "SET FORMAT json", "VERBOSE STATUS"]


def test_before_2_28_7_it_answers_in_text() -> None:
    with server(speaking(TEXT, json_too=False)) as port:
        answer = ask(port)
    assert answer is not None and answer.text == TEXT


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert ask(port) is None


def hang(sock: socket.socket) -> None:
    """Takes everything, says nothing."""
    while sock.recv(1000):
        pass


def hang_later(sock: socket.socket) -> None:
    """Promises an answer."""
    for reply in (b"SERVER PROTOCOL 2\n", b"OK\n", b"OK\n", b'{"nccl_version": "2.28.9", "commu'):
        sock.recv(1000)
        sock.sendall(reply)
    hang(sock)


@pytest.mark.parametrize(("talk", "why"), [
    (hang, "no answer within 0.5 s"),
    (lambda sock: None, "it closed the connection"),
    (lambda sock: sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n"), "it does not speak the protocol of RAS"),
    (lambda sock: sock.sendall(b"x" * 100_000), "it does not speak the protocol of RAS"),
    (lambda sock: sock.sendall(bytes(range(256)) * 9), "it does not speak the protocol of RAS"),
], ids=["hangs", "closes", "http", "long line", "bytes"])  # fmt: skip
def test_somebody_else_listens(talk: Talk, why: str) -> None:
    begin = time.monotonic()
    # A reset instead of a clean end is as good an answer.
    with server(talk) as port, pytest.raises(RasProblem, match=f"{why}|reset|Broken pipe"):
        ask(port, time_out_s=0.5)
    assert time.monotonic() - begin < 10


def test_an_answer_that_does_not_end_is_cut_in_time() -> None:
    begin = time.monotonic()
    with server(hang_later) as port:
        answer = ask(port, time_out_s=0.5)
    assert answer is not None and answer.cut and time.monotonic() - begin < 10
    said = read_answer(answer.text, cut=answer.cut)
    assert said.says == "NCCL 2.28.9; its answer is too long or too late: only its beginning came"
    assert said.detail == {"nccl_version": "2.28.9", "pids": [], "hashes": [], "cut": True}


def test_an_endless_answer_is_cut_at_256_kb() -> None:
    def talk(sock: socket.socket) -> None:
        for reply in (b"SERVER PROTOCOL 2\n", b"OK\n", b"OK\n"):
            sock.recv(1000)
            sock.sendall(reply)
        while True:
            sock.sendall(b"x" * 65536)

    with server(talk) as port:
        answer = ask(port)
    assert answer is not None and answer.cut and len(answer.text) == 256 << 10


# what is made of it


def test_a_rank_behind_and_one_with_an_error() -> None:
    ranks = [rank(n, 100 + n) for n in range(6)] + [rank(6, 106, 640), rank(7, 107, async_error=6)]
    said = read_answer(job(ranks))
    assert said.says.split("\n") == [
        "NCCL 2.28.9: 1 communicator, 8 processes",
        "000000000000009a of 8 ranks: rank 7 has asynchronous error 6 (pid 107 on 10.0.0.7); "
        "AllReduce launched 641 times by 7 ranks, rank 6: 640",
    ]
    pids = list(range(100, 108))
    assert said.detail == {"nccl_version": "2.28.9", "pids": pids, "hashes": ["000000000000009a"], "cut": False}


def test_missing_ranks() -> None:
    missing = [{"rank": 3, "host": "10.0.0.7", "pid": 103, "status": {"unresponsive": True, "considered_dead": True}},
               {"rank": 4, "host": "unknown", "pid": -1, "status": {"unresponsive": True}}]  # fmt: skip
    said = read_answer(job([rank(n, 100 + n) for n in range(3)], missing))
    assert said.says.split("\n")[1] == (
        "000000000000009a of 8 ranks: rank 3 considered dead (pid 103 on 10.0.0.7); rank 4 no answer"
    )
    assert said.detail["pids"] == [100, 101, 102, 103]


def test_all_well() -> None:
    said = read_answer(job([rank(n, 100 + n) for n in range(8)]))
    assert said.says == "NCCL 2.28.9: 1 communicator, 8 processes; it sees no difference between ranks"


def test_text() -> None:
    said = read_answer(TEXT)
    assert said.says.split("\n") == [
        "NCCL 2.27.3: 9 communicators (4 RUNNING MISMATCH, 4 NOCOMM INCOMPLETE,MISMATCH, 1 RUNNING INCOMPLETE)",
        "b3398875b8b2a063: INCOMPLETE; rank 1 (pid 60004 on 10.4.109.13)",
        "fa93daea854b060b: MISMATCH; AllGather counts differ; 30 ranks up to 640; 2 ranks up to 641; "
        "rank 12 (pid 323032 on 10.137.190.124)",
    ]
    assert said.detail["pids"] == [60004, 60035, 323032]


@pytest.mark.parametrize("answer", [
    "", "{", "{}", "[" * 100_000, '{"a":' * 50_000, '{"communicators": 5}', '{"communicators": [5]}',
    '{"communicators": [{"ranks": 1}]}', '{"communicators": [{"ranks": [{"pid": "x", "status": []}]}]}',
    '{"communicators": [{"ranks": [{"rank": 1e999, "pid": true, "collective_counts": {"\\u001b[2J": 1}}]}]}',
    '{"communicators": [{"size": ' + "9" * 5000 + "}]}", "\x1b[2J" * 1000, "NCCL version \x1b[31m", " " * 200_000,
    "NCCL version 2.27.3\n" + " " * 200_000, "NCCL version 2.27.3\n" + "#0-0 (a) A\n" * 20_000,
    '{"nccl_version": "\\u001b[2J", "communicators": [{"hash": "\\u001b"}]}',
])  # fmt: skip
def test_nonsense_makes_a_short_clean_sentence(answer: str) -> None:
    begin = time.monotonic()
    said = read_answer(answer)
    assert 10 < len(said.says) < 1000 and all(c.isprintable() or c == "\n" for c in said.says)
    assert len(said.says.split("\n")) <= 3
    assert time.monotonic() - begin < 5


# asking


def test_one_question_at_a_time_and_one_every_ten_seconds() -> None:
    now = [0]
    heard: list[str] = []
    with server(speaking(job([rank(0, 11)]), heard=heard)) as port:
        asker = Asker(port, clock=lambda: now[0])
        for instant in (1, 2, 9_999_999_999):
            now[0] = instant
            asker.ask()
            time.sleep(0.2)
        assert heard.count("VERBOSE STATUS") == 1
        now[0] = 10_000_000_001
        asker.ask()
        taken: list[dict[str, Any]] = []
        end = time.monotonic() + 10
        while len(taken) < 2 and time.monotonic() < end:
            taken += asker.take()
            time.sleep(0.02)
    assert [set(body) for body in taken] == [{"at_ns", "source", "says", "detail"}] * 2
    assert taken[0]["source"] == "ras" and taken[0]["detail"]["pids"] == [11]


def test_no_second_question_while_one_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    now, gate, asked = [0], threading.Event(), []

    def slow(port: int) -> None:
        asked.append(port)
        gate.wait(10)

    monkeypatch.setattr(ras, "ask", slow)
    asker = Asker(1, clock=lambda: now[0])
    for instant in range(0, 100, 20):
        now[0] = instant * 1_000_000_000
        asker.ask()
    gate.set()
    assert asked == [1]


def test_a_failure_is_a_testimony_and_silence_is_none() -> None:
    with server(lambda sock: sock.sendall(b"?\n")) as port:
        asker = Asker(port)
        asker.ask()
        end = time.monotonic() + 10
        while not (taken := asker.take()) and time.monotonic() < end:
            time.sleep(0.02)
    assert len(taken) == 1
    assert taken[0]["says"].startswith(f"NCCL's RAS service (port {port}) could not be asked: ")
    silent = Asker(port)
    silent.ask()
    time.sleep(0.3)
    assert silent.take() == []
