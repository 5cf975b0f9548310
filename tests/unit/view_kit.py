"""Makes Views for the tests of the judge: jobs of tensor, pipeline and data parallel ranks on simulated streams.

Not a model of the judge's: hosts issue, streams run in order, operations end when all their ranks have begun them, and
what a host has waited for it knows.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from stallscope.diagnose.view import (
    DEAD,
    FINISHED,
    IN_API,
    IN_SYNC,
    USER,
    Comm,
    Key,
    Operation,
    Rank,
    Signature,
    View,
)

F32, I32 = 7, 2
SYNC_NS = 1000


@dataclass(frozen=True)
class Item:
    """One thing that a host does: "coll", "send", "recv", "kernel", "sync", "init", "split", "end", and the faults' own
    ("stop", "die", "api", "stuck")."""

    what: str
    comm: str = ""
    api: str = ""
    elements: int = 0
    dtype: int = F32
    root: int = -1
    peer: int = -1
    stream: int = 1
    group: int = 0
    after: int = 0
    """Of which stream everything issued so far must be done before (an event); 0: none."""


@dataclass
class Layout:
    tp: int
    pp: int
    dp: int
    comms: dict[str, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        n = self.tp * self.pp * self.dp
        self.n = n
        groups: dict[str, list[int]] = {"world": list(range(n))}
        for r in range(n):
            t, d, p = self.place(r)
            for name, size in ((f"tp{p}.{d}", self.tp), (f"pp{d}.{t}", self.pp), (f"dp{p}.{t}", self.dp)):
                if size > 1:
                    groups.setdefault(name, []).append(r)
        order = ("world", "pp", "dp", "tp")
        self.comms = dict(sorted(groups.items(), key=lambda g: (order.index(g[0].rstrip("0123456789.")), g[0])))

    def place(self, r: int) -> tuple[int, int, int]:
        return r % self.tp, r // self.tp % self.dp, r // (self.tp * self.dp)

    def of(self, kind: str, r: int) -> str:
        t, d, p = self.place(r)
        return {"world": "world", "tp": f"tp{p}.{d}", "pp": f"pp{d}.{t}", "dp": f"dp{p}.{t}"}[kind]

    def has(self, kind: str) -> bool:
        return {"world": self.n, "tp": self.tp, "pp": self.pp, "dp": self.dp}[kind] > 1


def step_of(layout: Layout, r: int, *, micro: int = 1, layers: int = 2, streams: int = 1) -> list[Item]:
    """A training step of a rank."""
    _, _, stage = layout.place(r)
    items: list[Item] = []

    def through(start: int, end: int) -> None:
        if 0 <= start < layout.pp and layout.pp > 1:
            items.append(Item("recv", layout.of("pp", r), "ncclRecv", 16384, peer=start))
        for _ in range(layers):
            items.append(Item("kernel"))
            if layout.has("tp"):
                items.append(Item("coll", layout.of("tp", r), "ncclAllReduce", 32768))
        if 0 <= end < layout.pp and layout.pp > 1:
            items.append(Item("send", layout.of("pp", r), "ncclSend", 16384, peer=end))

    for _ in range(micro):
        through(stage - 1, stage + 1)
    for _ in range(micro):
        through(stage + 1, stage - 1)
    if layout.has("dp"):
        side = 2 if streams > 1 else 1
        after = 1 if streams > 1 else 0
        for api, count in (("ncclReduceScatter", 16384), ("ncclAllReduce", 65536)):
            items.append(Item("coll", layout.of("dp", r), api, count, stream=side, after=after))
    items.append(Item("kernel", after=2 if streams > 1 and layout.has("dp") else 0))
    items.append(Item("coll", "world", "ncclAllReduce", 1))
    return items


@dataclass
class Op:
    rank: int
    item: Item
    key: Key | None
    enter_ns: int
    batch: int
    deps: list[Op]
    done: bool = False
    begun: bool = False
    known: bool = False
    returned: bool = True
    place: int = 0


class Job:
    """Runs programs until nothing moves.

    Args:
        programs: by rank, what the host does, in order.
        ahead: how many operations a host may be ahead; 0: no bound but its syncs.
        broken: whether an operation never ends although all have come.
        noticed: whether calls of different signatures stand.
    """

    def __init__(self, layout: Layout, programs: list[list[Item]], *, seed: int = 0, ahead: int = 0,
                 broken: Callable[[Key], bool] = lambda key: False, slack: int = 64 << 10) -> None:  # fmt: skip
        self.layout, self.programs, self.ahead, self.broken, self.slack = layout, programs, ahead, broken, slack
        self.random = random.Random(seed)
        n = layout.n
        self.names = list(layout.comms)
        self.now = 10**9
        self.pc, self.issued = [0] * n, [[] for _ in range(n)]
        self.gpu_ops: list[list[Op]] = [[] for _ in range(n)]
        self.queues: list[dict[int, list[Op]]] = [defaultdict(list) for _ in range(n)]
        self.fronts: list[dict[int, int]] = [defaultdict(int) for _ in range(n)]
        self.state: list[str] = [USER] * n
        self.api: list[str | None] = [None] * n
        self.since = [0] * n
        self.numbers: list[dict[Any, int]] = [defaultdict(int) for _ in range(n)]
        self.at: dict[Key, dict[int, Op]] = defaultdict(dict)
        self.gone: set[int] = set()
        self.batch = 0
        self.run()

    # Hosts.

    def _state(self, r: int, state: str, api: str | None = None) -> None:
        if (self.state[r], self.api[r]) != (state, api):
            self.state[r], self.api[r], self.since[r] = state, api, self.now

    def _key(self, r: int, item: Item) -> Key | None:
        if item.what in ("kernel", "stuck"):
            return None
        comm = self.names.index(item.comm)
        if item.what in ("send", "recv"):
            me = self.layout.comms[item.comm].index(r)
            ends = (me, item.peer) if item.what == "send" else (item.peer, me)
            prefix: tuple[Any, ...] = (comm, "p", *ends)
        elif item.what == "end":
            return (comm, "end", 0)
        else:
            prefix = (comm, {"coll": "c"}.get(item.what, item.what))
        number = self.numbers[r][prefix]
        self.numbers[r][prefix] += 1
        return (*prefix, number)

    def _issue(self, r: int, item: Item) -> Op:
        key = self._key(r, item)
        if not item.group:
            self.batch += 1
        deps = list(self.queues[r][item.after][-1:]) if item.after else []
        op = Op(r, item, key, self.now, item.group or 10**6 + self.batch, deps)
        if key is not None:
            self.issued[r].append(op)
            self.at[key][r] = op
        if item.what not in ("init", "split", "end"):
            op.place = len(self.queues[r][item.stream])
            self.queues[r][item.stream].append(op)
            self.gpu_ops[r].append(op)
        return op

    def _host(self, r: int) -> bool:
        """One thing; whether it could."""
        if r in self.gone or self.pc[r] >= len(self.programs[r]):
            return False
        item = self.programs[r][self.pc[r]]
        self.now += 1
        if item.what == "stop":
            self._state(r, USER)
            return False
        if item.what == "die":
            self._state(r, DEAD)
            self.gone.add(r)
            return True
        if item.what == "api":
            self._state(r, IN_API, item.api)
            if not (self.issued[r] and self.issued[r][-1].item is item):
                self._issue(r, replace(item, what="end"))
                self.issued[r][-1].item = item
                self.issued[r][-1].returned = False
            return False
        if item.what == "sync":
            if any(self._front(r, stream) for stream in self.queues[r]):
                self._state(r, IN_SYNC, "cudaStreamSynchronize")
                return False
            for op in reversed(self.issued[r]):
                if op.known:
                    break
                op.known = True
        elif item.what in ("init", "split"):
            last = self.issued[r][-1] if self.issued[r] else None
            if last is None or last.returned or last.item is not item:
                last = self._issue(r, item)
                last.returned = False
            members = self.layout.comms[item.comm]
            if len(self.at[last.key]) < len(members):  # type: ignore[index]
                self._state(r, IN_API, item.api)
                return False
            last.returned = last.done = True
        else:
            if self.ahead and len(self.gpu_ops[r]) >= self.ahead:
                old = self.gpu_ops[r][-self.ahead]
                if not old.done:
                    self._state(r, IN_SYNC, "cudaEventSynchronize")
                    return False
                queue = self.queues[r][old.item.stream]
                for op in reversed(queue[: old.place + 1]):
                    if op.known:
                        break
                    op.known = True
            self._issue(r, item)
        self._state(r, USER)
        self.pc[r] += 1
        if self.pc[r] >= len(self.programs[r]):
            self._state(r, FINISHED)
        return True

    # Devices.

    def _front(self, r: int, stream: int) -> list[Op]:
        queue, first = self.queues[r][stream], self.fronts[r][stream]
        while first < len(queue) and queue[first].done:
            first += 1
        self.fronts[r][stream] = first
        return [op for op in queue[first : first + 8] if op.batch == queue[first].batch]

    def _device(self, r: int) -> bool:
        moved = False
        for stream in list(self.queues[r]):
            for op in self._front(r, stream):
                if op.begun or r in self.gone or any(not d.done for d in op.deps) or op.done:
                    continue
                op.begun = moved = True
                if op.key is None:
                    op.done = op.item.what != "stuck"
                else:
                    self._meet(op.key)
        return moved

    def _meet(self, key: Key) -> None:
        comm = self.names[int(key[0])]
        members = self.layout.comms[comm]
        wanted = members if key[1] == "c" else [members[int(key[2])], members[int(key[3])]]
        here = self.at[key]
        if any(m not in here or not here[m].begun for m in wanted) or self.broken(key):
            return
        items = [here[m].item for m in wanted]
        if key[1] == "c" and len({(i.api, i.root) for i in items}) > 1:
            return
        least = min(i.elements for i in items)
        for m in wanted:
            if (here[m].item.elements - least) * 4 <= self.slack:
                here[m].done = True

    def run(self) -> None:
        ranks = list(range(self.layout.n))
        while True:
            self.random.shuffle(ranks)
            moved = False
            for r in ranks:
                for _ in range(self.random.randint(1, 12)):
                    moved |= self._host(r)
            for r in ranks:
                while self._device(r):
                    moved = True
            if not moved:
                return

    # Views.

    def view(self, *, window: int = 2000, known: str = "host", start: bool = False, settle_ns: int = 10**10) -> View:
        """known: "host" (what hosts have waited for), "none", "all" (the truth), "gpu" (what each GPU has ended, as a
        witness tells it). start: with begins on the GPU."""
        ranks = []
        for r in range(self.layout.n):
            ops = self.issued[r]
            cut = max(0, len(ops) - window)
            base: dict[Key, int] = {}
            for op in ops[:cut]:
                if op.key[1] in ("c", "p"):
                    base[op.key[:-1]] = op.key[-1] + 1
            rank = Rank(r, r, self.state[r], self.since[r], self.api[r], base=base)
            rank.operations = [self._operation(op, pos, known, start) for pos, op in enumerate(ops)][cut:]
            ranks.append(rank)
        comms = [Comm(name, len(m), dict(enumerate(m))) for name, m in self.layout.comms.items()]
        return View(self.now + settle_ns, ranks, comms)

    def _operation(self, op: Op, pos: int, known: str, start: bool) -> Operation:
        item = op.item
        is_pair = item.what in ("send", "recv")
        redop = 0 if item.api in ("ncclAllReduce", "ncclReduceScatter", "ncclReduce") else -1
        signature = Signature("p2p" if is_pair else item.api, item.elements, item.dtype, redop, item.root)
        symmetric = item.what == "recv" or item.api in ("ncclAllReduce", "ncclReduceScatter")
        done = {"host": op.known, "none": False, "all": op.done, "gpu": op.done and symmetric}[known]
        began = op.begun if start else None
        return Operation(op.rank, pos, op.key, item.api, signature, item.stream, op.enter_ns, op.returned, op.batch,
                         done, began, known == "gpu" and op.done)  # fmt: skip


def with_fault(layout: Layout, kind: str, rank: int, at: int, steps: int, *, comm: str = "", other: str = "world",
               ahead: int = 0, **shape: Any) -> list[list[Item]]:  # fmt: skip
    """Programs of a job in which one rank does something else in step `at`."""
    programs = []
    partner = -1
    if kind == "send-send":
        members = layout.comms[layout.of("pp", rank)]
        index = members.index(rank)
        partner = members[index + 1] if index + 1 < len(members) else members[index - 1]
    for r in range(layout.n):
        usual = step_of(layout, r, **shape)
        end = [] if ahead else [Item("sync")]
        program: list[Item] = []
        for step in range(steps):
            items = list(usual)
            if step == at and r in (rank, partner):
                items = _altered(layout, kind, r, partner if r == rank else rank, items, comm, other)
            program += items + end
        program += [Item("sync"), *(Item("end", layout.of(k, r), "ncclCommDestroy") for k in ("world",))]
        programs.append(program)
    return programs


def _altered(layout: Layout, kind: str, r: int, partner: int, items: list[Item], comm: str, other: str) -> list[Item]:
    if kind in ("never", "late", "io"):
        return [Item("stop"), *items]
    if kind == "die":
        return [Item("die"), *items]
    if kind == "in-abort":
        return [Item("api", "world", "ncclCommAbort"), *items]
    if kind == "gpu-stuck":
        return [Item("stuck"), *items]
    if kind == "send-send":
        stage, name = layout.place(partner)[2], layout.of("pp", r)
        return [
            Item("send", name, "ncclSend", 16384, peer=stage),
            Item("recv", name, "ncclRecv", 16384, peer=stage),
            *items,
        ]
    name = layout.of(comm, r)
    index = next((i for i, item in enumerate(items) if item.what == "coll" and item.comm == name))
    call, rest = items[index], items[index + 1 :]
    if kind == "swap":
        moved = next(i for i in rest if i.what == "coll" and i.comm == layout.of(other, r))
        rest.remove(moved)
        return [*items[:index], moved, call, *rest]
    instead = {
        "skip": [],
        "extra": [call, call],
        "wrong-op": [replace(call, api="ncclReduce" if call.api == "ncclAllReduce" else "ncclAllReduce",
                             root=0 if call.api == "ncclAllReduce" else -1)],
        "wrong-count": [replace(call, elements=call.elements + 131072)],
        "wrong-dtype": [replace(call, dtype=I32)],
    }.get(kind, [call])  # fmt: skip
    return [*items[:index], *instead, *rest]
