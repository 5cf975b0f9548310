"""Programs with libstallscope.so in them, and what their segments hold."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stallscope.capture.segment import Clock, Segment
from stallscope.wire.columns import COUNT, TIME, UID_REC, columns, records
from stallscope.wire.hook_table import BY_ID, HOOKS

ROOT = Path(__file__).resolve().parents[2]
SHIM = ROOT / "build" / "shim" / "libstallscope.so"
HERE = Path(__file__).resolve().parent
DEADLINE_S = 60.0
NAME_OF_TIME = {hook.time_id: hook.name for hook in HOOKS if hook.time_id >= 0}


class Agent:
    """Takes segments from a socket, and reads them."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "agent.sock"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(str(self.path))
        self._socket.listen(1024)
        self.clock = Clock()
        self.read: list[Read] = []
        self.said: list[bytes] = []
        self.fds: list[int] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection:
                said, fds, _, _ = socket.recv_fds(connection, 64, 1)
            self.said.append(said)
            self.read.append(Read(Segment(fds[0]), self.clock))
            self.fds.append(fds[0])

    def wait_for(self, count: int) -> list[Read]:
        """That many segments, in the order in which they came."""
        end = time.monotonic() + DEADLINE_S
        while len(self.read) < count and time.monotonic() < end:
            time.sleep(0.005)
        assert len(self.read) == count, f"{len(self.read)} segments, not {count}"
        return list(self.read)

    def __enter__(self) -> Agent:
        return self

    def __exit__(self, *_: object) -> None:
        # Woken and gone before the descriptor is closed: its number may be the next test's socket at once.
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()
        for read in self.read:
            read.segment.close()
        for fd in self.fds:
            os.close(fd)


class Read:
    """A segment and all that was read of it: `events` by api, `recs` as `wire_rec` rows, `uids`."""

    def __init__(self, segment: Segment, clock: Clock) -> None:
        self.segment, self.clock = segment, clock
        self.events: Counter[str] = Counter()
        self.recs = records(b"")
        self.uids: list[tuple[str, int, bytes]] = []
        self.latest: dict[str, Any] = {}
        self._times: dict[int, Any] = {}

    def drain(self, rounds: int = 1_000_000) -> Read:
        """All that is there, or as much as comes in so many rounds."""
        parts = [self.recs]
        for _ in range(rounds):
            batch = self.segment.drain(1, self.segment.header.pid, self.clock, 8192)
            if not batch.n_recs and not batch.n_uids:
                break
            uids = np.frombuffer(bytes(batch.uids), UID_REC)
            self.uids += [(BY_ID[int(r["rec"]["hook"])].name, int(r["rec"]["kind"]), r["uid"].tobytes()) for r in uids]
            for part in (records(bytes(batch.recs)), uids["rec"]):
                parts.append(part)
                second = (part["kind"] >= 2) & ((part["flags"] & 2) != 0)
                for hook, count in zip(*np.unique(part["hook"][~second], return_counts=True), strict=True):
                    self.events[BY_ID[int(hook)].name] += int(count)
        self.recs = np.concatenate(parts)
        return self

    def counts(self) -> dict[str, Any]:
        """api -> `wire_count` row, of those that changed since the last call."""
        changed = self.segment.counts()
        rows = {BY_ID[h].name: row for h, row in zip(changed.hooks, columns(changed.counts, COUNT), strict=True)}
        self.latest |= rows
        self._times |= dict(zip(changed.time_ids, columns(changed.times, TIME), strict=True))
        return rows

    def times(self) -> dict[str, int]:
        """Total ns of outermost calls by api, as of the last `counts`."""
        return {NAME_OF_TIME[t]: int(row["sum_ns"]) for t, row in self._times.items() if t in NAME_OF_TIME}

    def conserved(self, *, in_flight: Mapping[str, int] | None = None) -> dict[str, int]:
        """Calls made by api; fails unless each is a record, lost, left out by sampling, history, or under way."""
        self.drain()
        rows = self.counts()
        for api, row in rows.items():
            told = sum(int(row[term]) for term in ("lost", "sampled_out", "filtered"))
            told += self.events[api] + (in_flight or {}).get(api, 0)
            assert told == int(row["calls"]), (api, self.events[api], row, self.segment.losses())
        return {api: int(row["calls"]) for api, row in rows.items()}


def environment(stubs: Path, **more: str) -> dict[str, str]:
    """That of a program with the library preloaded."""
    return dict(os.environ, LD_PRELOAD=str(SHIM), LD_LIBRARY_PATH=str(stubs), **more)


def run(words: Sequence[str | Path], env: Mapping[str, str], code: int = 0) -> dict[str, int]:
    """Run to the end; the JSON of its first line that has some, {} without."""
    done = subprocess.run([str(w) for w in words], env=dict(env), capture_output=True, text=True, timeout=120)
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    found: dict[str, int] = json.loads(lines[0]) if lines else {}
    return found


FLAGS = ["-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread"]


def library(folder: Path, kind: str, soname: str, *more: str, cc: str = "gcc") -> Path:
    """One of stubs.c."""
    out = folder / soname
    shared = ["-shared", "-fPIC", f"-Wl,-soname,{soname}", f"-DLIBRARY_{kind}", *more]
    subprocess.run([cc, *FLAGS, *shared, str(HERE / "stubs.c"), "-o", str(out)], check=True)
    return out


def build_stubs(folder: Path, cc: str = "gcc") -> None:
    """The stub libraries, and `program` that calls them."""
    made = [
        library(folder, "cudart", "libcudart.so.12", "-DMARK=12", cc=cc),
        library(folder, "cuda", "libcuda.so.1", cc=cc),
        library(folder, "nccl", "libnccl.so.2", cc=cc),
    ]
    library(folder, "cudart", "libcudart.so.13", "-DMARK=13", cc=cc)
    words = [str(HERE / "program.c"), "-o", str(folder / "program"), f"-Wl,--no-as-needed,-rpath,{folder}"]
    subprocess.run([cc, *FLAGS, *words, *map(str, made)], check=True)
