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

    `ops`: indices into the rank's window; `begins`: where in `ops` each unit begins. `at`: the unit in front, of which
    `left` operations have not ended; it could run since `free_ns`. `begun`: the last unit of which anything is known to
    have begun. `proven`: so many leading units are known to be complete.
    """

    __slots__ = ("at", "begins", "begun", "free_ns", "last_batch", "left", "ops", "proven", "rank")

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.last_batch = self.at = self.begun = -1
        self.ops: list[int] = []
        self.begins: list[int] = []
        self.left = self.free_ns = self.proven = 0

    def unit(self, number: int) -> list[int]:
        """The operations of one unit; none behind the last one."""
        return self.ops[self.begin(number) : self.begin(number + 1)]

    def begin(self, number: int) -> int:
        """Where in `ops` a unit begins, or the end of `ops`."""
        return self.begins[number] if number < len(self.begins) else len(self.ops)


class Replay:
    """Plays a View to its end.

    Calls of ranks with gaps, and those on communicators whose numbers prove nothing, hinder nobody here: what is left
    does not rest on them. Operations that are known to be done have ended whatever the model says.

    Args:
        strict: operations whose signatures differ in anything stand, but for those that are known to have ended before;
            else only those that NCCL can't end.
        serial: as if each rank had one stream.

    Attributes:
        at: by key, rank -> index into its window, of those that have issued it.
        fired: by rank, for each of its operations whether it has ended.
        ready_ns: likewise, since when it is in front; 0 where it is not.
        tolerated: what has ended here though its signatures differ.
    """

    def __init__(self, view: View, *, strict: bool = False, serial: bool = False) -> None:
        self.view = view
        self._strict = strict
        ranks = view.ranks
        self.sure = [tuple(r for r in c.members.values() if not ranks[r].gap) for c in view.comms]
        self.at: dict[Key, dict[int, int]] = {}
        self.fired = [bytearray(len(rank.operations)) for rank in ranks]
        self.ready_ns = [[0] * len(rank.operations) for rank in ranks]
        self.tolerated: list[Key] = []
        self._lanes: list[list[_Lane]] = [[] for _ in ranks]
        self._lane_of: list[dict[int, _Lane]] = [{} for _ in ranks]
        self._unit_of = [[0] * len(rank.operations) for rank in ranks]
        self._left: dict[Key, int] = {}
        self._ended: set[Key] = set()
        self._tells_ends = [any(op.ended for op in rank.operations) for rank in ranks]
        self._used = [{key[0] for key in rank.base} for rank in ranks]
        for index in range(len(ranks)):
            self._lay_out(index, serial)
        self._harmless = self._seen_to_end() if strict else set()
        self._spread_proofs()
        self._moved = [lane for lanes in self._lanes for lane in lanes]
        while self._moved:
            self._advance(self._moved.pop())

    def _lay_out(self, rank: int, serial: bool) -> None:
        """Puts a rank's operations into lanes; calls that block only the host have one each."""
        lanes: dict[int | str, _Lane] = {}
        proves = [comm.aligned and rank in self.sure[c] for c, comm in enumerate(self.view.comms)]
        fired, unit_of, lane_of = self.fired[rank], self._unit_of[rank], self._lane_of[rank]
        used, at = self._used[rank], self.at
        for index, (_, _, key, _, _, stream, _, returned, batch, done, started, ended) in enumerate(
            self.view.ranks[rank].operations
        ):
            comm, kind = int(key[0]), key[1]
            if kind != "init":
                used.add(comm)
            alone = kind == "end" or (kind == "p" and (key[2] == key[3] or rank not in self.members(key)))
            if alone or not proves[comm]:
                fired[index] = 1
                continue
            is_api = kind in API_KINDS
            if done or ended or (is_api and returned):
                fired[index] = 1
            if (here := at.get(key)) is None:
                here = at[key] = {}
            if rank in here:  # a number given twice proves nothing
                fired[index] = 1
                continue
            here[rank] = index
            name: int | str = f"api{index}" if is_api else 0 if serial else stream
            if (lane := lanes.get(name)) is None:
                lane = lanes[name] = _Lane(rank)
            if batch != lane.last_batch or batch < 0:
                lane.begins.append(len(lane.ops))
                lane.last_batch = batch
            lane.ops.append(index)
            lane_of[index] = lane
            unit_of[index] = number = len(lane.begins) - 1
            if done or started or ended:
                lane.begun = number
        self._lanes[rank] = list(lanes.values())

    # What is known to be complete.

    def _spread_proofs(self) -> None:
        """What runs before something that has begun, is done, on every rank that took part in it."""
        self._spread_ends()
        todo = []
        for rank, lanes in enumerate(self._lanes):
            ops = self.view.ranks[rank].operations
            for lane in lanes:
                if lane.begun >= 0:
                    self._prove(lane, lane.begun + all(ops[i].done or ops[i].ended for i in lane.unit(lane.begun)))
                    todo.append((lane, 0))
        while todo:
            lane, begin = todo.pop()
            for key in self._last_barriers(lane, begin):
                for other, index in self.at[key].items():
                    theirs, number = self._lane_of[other][index], self._unit_of[other][index]
                    ended = key in self._ended and not self._is_watched(self.op(other, index))
                    units = number + (ended and theirs.unit(number) == [index])
                    before = theirs.proven
                    if other != lane.rank and units > before:
                        self._prove(theirs, units)
                        todo.append((theirs, before))

    def _spread_ends(self) -> None:
        """What has ended on one rank has on all, if they called it alike: who sends less ends first.

        Not where a witness of the rank itself would have told its end.
        """
        views = [rank.operations for rank in self.view.ranks]
        if not any(op.done for ops in views for op in reversed(ops)):
            return
        for fired, ops in zip(self.fired, views, strict=True):
            index = fired.find(0)
            while index >= 0:
                key = ops[index].key
                here = [views[r][i] for r, i in self.at[key].items()]
                if any(op.done for op in here) and key[1] not in API_KINDS and len({op.signature for op in here}) == 1:
                    self._ended.add(key)
                    fired[index] = not self._is_watched(ops[index])
                index = fired.find(0, index + 1)

    def _is_watched(self, op: Operation) -> bool:
        return self._tells_ends[op.rank] and op.started is not None

    def _seen_to_end(self) -> set[frozenset[Signature]]:
        """Signatures that differ and of which all ranks know that the operation ended."""
        found = set()
        for here in self.at.values():
            ops = [self.op(rank, index) for rank, index in here.items()]
            if all(op.done for op in ops):
                found.add(frozenset(op.signature for op in ops))
        return found

    def _prove(self, lane: _Lane, units: int) -> None:
        fired = self.fired[lane.rank]
        for index in lane.ops[lane.begin(lane.proven) : lane.begin(units)]:
            fired[index] = 1
        lane.proven = max(lane.proven, units)
        lane.at = lane.proven - 1

    def _last_barriers(self, lane: _Lane, begin: int) -> list[Key]:
        """Of each communicator, the last proven operation that says something about its other members."""
        ops = self.view.ranks[lane.rank].operations
        last: dict[int | str, Key] = {}
        for index in reversed(lane.ops[lane.begin(begin) : lane.begin(lane.proven)]):
            key = ops[index].key
            if key[0] not in last and key[1] == "c" and ops[index].signature.api in _TOGETHER:
                last[key[0]] = key
        return list(last.values())

    # Playing.

    def _advance(self, lane: _Lane) -> None:
        fired, begins, ops = self.fired[lane.rank], lane.begins, lane.ops
        last = len(begins) - 1
        while True:
            lane.at = at = lane.at + 1
            if at > last:
                return
            begin = begins[at]
            end = begins[at + 1] if at < last else len(ops)
            waiting = [index for index in ops[begin:end] if not fired[index]]
            if waiting:
                break
        lane.left = len(waiting)
        for index in waiting:
            self._arrive(lane, index)

    def _arrive(self, lane: _Lane, index: int) -> None:
        op = self.view.ranks[lane.rank].operations[index]
        key, enter_ns = op.key, op.enter_ns
        self.ready_ns[lane.rank][index] = enter_ns if enter_ns > lane.free_ns else lane.free_ns
        left = self._left.get(key)
        left = (self._missing(key) if left is None else left) - 1
        self._left[key] = left
        if left == 0:
            self._fire(key)

    def _fire(self, key: Key) -> None:
        """All have come: it ends, unless its calls do not fit together."""
        here, ranks, fired = self.at[key].items(), self.view.ranks, self.fired
        different = {ranks[rank].operations[index].signature for rank, index in here}
        if len(different) > 1:
            if self.stands(different):
                return
            if differs(different):
                self.tolerated.append(key)
        now_ns = max([self.ready_ns[rank][index] for rank, index in here])
        for rank, index in here:
            if not fired[rank][index]:
                fired[rank][index] = 1
                lane = self._lane_of[rank][index]
                lane.free_ns = now_ns
                lane.left -= 1
                if lane.left == 0:
                    self._moved.append(lane)

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

    def stands(self, signatures: set[Signature]) -> bool:
        """Whether an operation that was called like this does not end."""
        if not self._strict:
            return blocks(signatures)
        return differs(signatures) and frozenset(signatures) not in self._harmless

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
        heads = sorted({i for lane in self._lanes[rank] for i in self._front(lane)} | set(self._unreturned(rank)))
        narrow = [i for i in heads if stream is not None and self.op(rank, i).stream == stream]
        return narrow or heads

    def _front(self, lane: _Lane) -> list[int]:
        return [index for index in lane.unit(lane.at) if not self.fired[lane.rank][index]]

    def _unreturned(self, rank: int) -> Iterator[int]:
        for index in range(len(self.fired[rank]) - 1, -1, -1):
            if self.op(rank, index).returned:
                return  # one thread issues them in order; of others the front is enough
            if not self.fired[rank][index]:
                yield index

    def in_front(self, rank: int, index: int) -> list[int]:
        """What is in front in the stream of an operation: it itself once it has come."""
        lane = self._lane_of[rank][index]
        return [index] if lane.at >= self._unit_of[rank][index] else self._front(lane)

    def unproven(self, rank: int) -> Iterator[int]:
        """What has ended in the replay and is not known to have ended."""
        for lane in self._lanes[rank]:
            rest = lane.ops[lane.begin(lane.proven) :]
            yield from (i for i in rest if self.fired[rank][i] and not self.is_known(self.op(rank, i)))

    def is_known(self, op: Operation) -> bool:
        """Whether it is known to have ended, on this rank or another one."""
        elsewhere = op.key in self._ended and not self._is_watched(op)
        return op.done or op.ended or elsewhere or (op.key[1] in API_KINDS and op.returned)

    def has_begun(self, rank: int, index: int) -> bool | None:
        """Whether the GPU has come to it; None where nobody told.

        What one group put on a stream is one kernel: inside it, an operation may stand behind another one.
        """
        op, lane = self.op(rank, index), self._lane_of[rank].get(index)
        behind = lane is not None and self._unit_of[rank][index] <= lane.begun
        return True if op.done or op.ended or behind else op.started

    def is_behind_unknown(self, rank: int, index: int) -> bool:
        """Whether an operation on a communicator that proves nothing stands in front of it, in its stream, for all that
        is known."""
        stream = self.op(rank, index).stream
        for before in range(index - 1, -1, -1):
            op = self.op(rank, before)
            if op.stream == stream and op.key[1] in ("c", "p"):
                return not (op.done or op.ended or before in self._lane_of[rank])
        return False

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
