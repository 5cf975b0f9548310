"""Where every rank says how far it is: a small shared file, written by the ranks and read by the launcher."""

from __future__ import annotations

import mmap
import struct
import time
from dataclasses import dataclass
from pathlib import Path

HEADER = struct.Struct("<qq")  # the last step, and when the time is up
ROW = struct.Struct("<qqqq32s")  # steps, operations, pid, time of entering, name of the call
SLOT_BYTES = 64


@dataclass(frozen=True)
class Place:
    """Where a rank is: `api` is empty outside of calls that may wait."""

    steps: int
    operations: int
    pid: int
    since_ns: int
    api: str


class Board:
    def __init__(self, path: Path, ranks: int) -> None:
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), SLOT_BYTES * (ranks + 1))

    @staticmethod
    def create(path: Path, ranks: int) -> Board:
        path.write_bytes(bytes(SLOT_BYTES * (ranks + 1)))
        return Board(path, ranks)

    @property
    def last_step(self) -> int:
        """After how many steps all end; 0 while that is open."""
        return int(HEADER.unpack_from(self._memory, 0)[0])

    @last_step.setter
    def last_step(self, step: int) -> None:
        HEADER.pack_into(self._memory, 0, step, self.until_ns)

    @property
    def until_ns(self) -> int:
        """When the time is up; 0 while ranks are still starting."""
        return int(HEADER.unpack_from(self._memory, 0)[1])

    @until_ns.setter
    def until_ns(self, at_ns: int) -> None:
        HEADER.pack_into(self._memory, 0, self.last_step, at_ns)

    def write(self, rank: int, place: Place) -> None:
        row = ROW.pack(place.steps, place.operations, place.pid, place.since_ns, place.api.encode()[:32])
        self._memory[SLOT_BYTES * (rank + 1) : SLOT_BYTES * (rank + 1) + len(row)] = row

    def read(self, rank: int) -> Place:
        steps, operations, pid, since_ns, api = ROW.unpack_from(self._memory, SLOT_BYTES * (rank + 1))
        return Place(steps, operations, pid, since_ns, api.rstrip(b"\0").decode())


class Slot:
    """One rank's own row."""

    def __init__(self, board: Board, rank: int, pid: int) -> None:
        self.board, self._rank, self._pid = board, rank, pid
        self.steps = self.operations = 0
        self.leave()

    def enter(self, api: str) -> None:
        self.operations += 1
        self._write(api)

    def leave(self) -> None:
        self._write("")

    def _write(self, api: str) -> None:
        self.board.write(self._rank, Place(self.steps, self.operations, self._pid, time.monotonic_ns(), api))
