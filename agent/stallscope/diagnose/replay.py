"""What would have come to an end by now if every GPU and every link worked.

Streams are queues, and an operation ends when all its members have come to it. What is left is there because somebody
is absent, or because of order, or of a mismatch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from stallscope.diagnose.agree import blocks, differs
from stallscope.diagnose.view import Key, Operation, Signature, View

__all__ = ["API_KINDS", "Replay"]

API_KINDS = ("init", "split")
_TOGETHER = {"ncclAllReduce", "ncclAllGather", "ncclReduceScatter", "ncclAlltoAll"}
"""None of its members can end one of these before all have come."""


class _Lane:
    """The operations of one stream of a rank. A unit is what one group issued there: heads together.

    `proven`: so many leading units are known to be complete. `free_ns`: since when the unit `at` could run.
    """

    __slots__ = ("at", "free_ns", "last_batch", "left", "number", "proven", "units")

    def __init__(self, number: int) -> None:
        self.number = number
        self.last_batch = -1
        self.units: list[list[int]] = []
        self.at = -1
        self.left = 0
        self.free_ns = 0
        self.proven = 0


class Replay:
    """Plays a View to its end.

    Calls of ranks with gaps, and those on communicators whose numbers prove nothing, hinder nobody here: what is left
    does not rest on them. Operations that are known to be done have ended whatever the model says.

    Args:
        strict: operations whose signatures differ in anything stand; else only those that NCCL can't end.
        serial: as if each rank had one stream.
    """

    def __init__(self, view: View, *, strict: bool = False, serial: bool = False) -> None:
        self.view = view
        self._stands = differs if strict else blocks
        ranks = view.ranks
        self.sure = [tuple(r for r in c.members.values() if not ranks[r].gap) for c in view.comms]
        self.at: dict[Key, dict[int, int]] = {}
        self.fired = [bytearray(len(rank.operations)) for rank in ranks]
        self.ready_ns = [[0] * len(rank.operations) for rank in ranks]
        self._lanes: list[list[_Lane]] = [[] for _ in ranks]
        self._place: list[list[tuple[int, int]]] = [[(-1, 0)] * len(rank.operations) for rank in ranks]
        self._left: dict[Key, int] = {}
        self._moved: list[tuple[int, _Lane]] = []
        self._used = [{key[0] for key in rank.base} for rank in ranks]
        for index in range(len(ranks)):
            self._lay_out(index, serial)
        self._spread_proofs()
        self._start()
        self._run()

    def _lay_out(self, rank: int, serial: bool) -> None:
        """Puts a rank's operations into lanes; calls that block only the host have one each."""
        lanes: dict[int | str, _Lane] = {}
        aligned = [comm.aligned for comm in self.view.comms]
        inside = [rank in members for members in self.sure]
        fired, place, used, at = self.fired[rank], self._place[rank], self._used[rank], self.at
        for index, op in enumerate(self.view.ranks[rank].operations):
            key = op.key
            comm, kind = int(key[0]), key[1]
            if kind != "init":
                used.add(comm)
            alone = kind == "end" or (kind == "p" and (key[2] == key[3] or rank not in self.members(key)))
            if alone or not aligned[comm] or not inside[comm]:
                fired[index] = 1
                continue
            is_api = kind in API_KINDS
            if op.done or (is_api and op.returned):
                fired[index] = 1
            if (here := at.get(key)) is None:
                here = at[key] = {}
            if rank in here:  # a number given twice proves nothing
                fired[index] = 1
                continue
            here[rank] = index
            name: int | str = f"api{index}" if is_api else 0 if serial else op.stream
            if (lane := lanes.get(name)) is None:
                lane = lanes[name] = _Lane(len(lanes))
            if op.batch == lane.last_batch and op.batch >= 0:
                lane.units[-1].append(index)
            else:
                lane.units.append([index])
            lane.last_batch = op.batch
            place[index] = (lane.number, len(lane.units) - 1)
        self._lanes[rank] = list(lanes.values())

    # What is known to be complete.

    def _spread_proofs(self) -> None:
        """What runs before something that has begun, is done, on every rank that took part in it."""
        todo = []
        for rank, lanes in enumerate(self._lanes):
            ops = self.view.ranks[rank].operations
            for lane in lanes:
                for number in range(len(lane.units) - 1, -1, -1):
                    unit = lane.units[number]
                    done = all(ops[i].done for i in unit)
                    if done or any(ops[i].done or ops[i].started for i in unit):
                        self._prove(rank, lane, number + done)
                        todo.append((rank, lane, 0))
                        break
        while todo:
            rank, lane, begin = todo.pop()
            for key in self._last_barriers(rank, lane, begin):
                for other, index in self.at[key].items():
                    number, unit_number = self._place[other][index]
                    theirs = self._lanes[other][number]
                    before = theirs.proven
                    if other != rank and unit_number > before:
                        self._prove(other, theirs, unit_number)
                        todo.append((other, theirs, before))

    def _prove(self, rank: int, lane: _Lane, units: int) -> None:
        for unit in lane.units[lane.proven : units]:
            for index in unit:
                self.fired[rank][index] = 1
        lane.proven = max(lane.proven, units)

    def _last_barriers(self, rank: int, lane: _Lane, begin: int) -> list[Key]:
        """Of each communicator, the last proven operation that says something about its other members."""
        ops = self.view.ranks[rank].operations
        last: dict[int | str, Key] = {}
        for unit in reversed(lane.units[begin : lane.proven]):
            for index in unit:
                op = ops[index]
                if op.signature.api in _TOGETHER and op.key[0] not in last and op.key[1] == "c":
                    last[op.key[0]] = op.key
        return list(last.values())

    # Playing.

    def _start(self) -> None:
        for rank, lanes in enumerate(self._lanes):
            self._moved += [(rank, lane) for lane in lanes]

    def _run(self) -> None:
        while self._moved:
            self._advance(*self._moved.pop())

    def _advance(self, rank: int, lane: _Lane) -> None:
        fired = self.fired[rank]
        while True:
            lane.at += 1
            if lane.at >= len(lane.units):
                return
            waiting = [index for index in lane.units[lane.at] if not fired[index]]
            if waiting:
                break
        lane.left = len(waiting)
        for index in waiting:
            self._arrive(rank, index, lane.free_ns)

    def _arrive(self, rank: int, index: int, free_ns: int) -> None:
        op = self.view.ranks[rank].operations[index]
        self.ready_ns[rank][index] = max(op.enter_ns, free_ns)
        left = self._left.get(op.key)
        left = (self._missing(op.key) if left is None else left) - 1
        self._left[op.key] = left
        if left == 0 and (self._is_alike(op) or not self._stands(self.signatures(op.key).values())):
            self._fire(op.key)

    def _is_alike(self, op: Operation) -> bool:
        """The usual case, quickly."""
        ranks, signature = self.view.ranks, op.signature
        return all(ranks[rank].operations[i].signature == signature for rank, i in self.at[op.key].items())

    def _fire(self, key: Key) -> None:
        here = [(rank, index) for rank, index in self.at[key].items() if not self.fired[rank][index]]
        now_ns = max(self.ready_ns[rank][index] for rank, index in here)
        for rank, index in here:
            self.fired[rank][index] = 1
            lane = self._lanes[rank][self._place[rank][index][0]]
            lane.free_ns = now_ns
            lane.left -= 1
            if lane.left == 0:
                self._moved.append((rank, lane))

    def _missing(self, key: Key) -> int:
        here, count = self.at[key], self.unknown(key)
        for member in self.members(key):
            index = here.get(member)
            if index is None:
                count += not self.has_done(member, key)
            elif not self.fired[member][index]:
                count += 1
        return count

    # Questions.

    def members(self, key: Key) -> tuple[int, ...]:
        """The ranks that it needs, without those that nobody traces or whose records have gaps."""
        comm = int(key[0])
        if key[1] != "p":
            return self.sure[comm]
        ends = (self.view.comms[comm].members.get(int(end)) for end in key[2:4])
        return tuple(end for end in ends if end is not None and not self.view.ranks[end].gap)

    def unknown(self, key: Key) -> int:
        """How many ranks have to come to the making of a communicator that nobody can name yet."""
        comm = self.view.comms[int(key[0])]
        return max(0, (comm.nranks or 0) - len(comm.members)) if key[1] == "init" else 0

    def has_done(self, rank: int, key: Key) -> bool:
        """Whether it was before the rank's window."""
        base = self.view.ranks[rank].base
        if key[1] == "c" or key[1] == "split":
            return base.get(key[:2], 0) > int(key[2])
        return base.get(key[:4], 0) > int(key[4]) if key[1] == "p" else key[0] in self._used[rank]

    def signatures(self, key: Key) -> dict[int, Signature]:
        """By rank, of those that have issued it."""
        ranks = self.view.ranks
        return {rank: ranks[rank].operations[index].signature for rank, index in self.at[key].items()}

    def op(self, rank: int, index: int) -> Operation:
        """One operation of a rank, by its place in the window."""
        return self.view.ranks[rank].operations[index]

    def heads(self, rank: int, stream: int | None = None) -> list[int]:
        """What it waits for: the unfinished operations in front, and those whose call has not returned.

        `stream`: only of that one, if anything is unfinished there.
        """
        heads = sorted({i for lane in self._lanes[rank] for i in self._front(rank, lane)} | set(self._unreturned(rank)))
        narrow = [i for i in heads if stream is not None and self.op(rank, i).stream == stream]
        return narrow or heads

    def _front(self, rank: int, lane: _Lane) -> list[int]:
        units = lane.units[lane.at : lane.at + 1]
        return [index for unit in units for index in unit if not self.fired[rank][index]]

    def _unreturned(self, rank: int) -> Iterator[int]:
        for index in range(len(self.fired[rank]) - 1, -1, -1):
            if self.op(rank, index).returned:
                return  # one thread issues them in order; of others the front is enough
            if not self.fired[rank][index]:
                yield index

    def in_front(self, rank: int, index: int) -> list[int]:
        """What is in front in the stream of an operation: it itself once it has come."""
        number, unit = self._place[rank][index]
        lane = self._lanes[rank][number]
        return [index] if lane.at >= unit else self._front(rank, lane)

    def unproven(self, rank: int) -> Iterator[int]:
        """What has ended in the replay and is not known to have ended."""
        for lane in self._lanes[rank]:
            for unit in lane.units[lane.proven :]:
                yield from (i for i in unit if self.fired[rank][i] and not self._is_known(self.op(rank, i)))

    def _is_known(self, op: Operation) -> bool:
        return op.done or (op.key[1] in API_KINDS and op.returned)

    def next_number(self, rank: int, prefix: Key, begin: int = 0) -> int:
        """The number of the rank's first operation of a kind from a place in its window on, issued or not."""
        ops: Iterable[Operation] = self.view.ranks[rank].operations
        width, number = len(prefix), self.view.ranks[rank].base.get(prefix, 0)
        for index, op in enumerate(ops):
            if op.key[:width] == prefix:
                if index >= begin:
                    return int(op.key[-1])
                number = int(op.key[-1]) + 1
        return number
