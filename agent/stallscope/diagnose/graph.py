"""Who waits for whom: unfinished operations, the operations that hold up their absent members, and causes that are no
wait."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from stallscope.diagnose.replay import Replay
from stallscope.diagnose.view import DEAD, FINISHED, IN_API, IN_SYNC, UNKNOWN, USER, Key, Rank

__all__ = ["LIFE_CYCLE", "MISMATCH", "UNPROVEN", "Cause", "Graph", "Node", "build", "components", "is_leaving"]

LIFE_CYCLE = ("ncclCommAbort", "ncclCommDestroy", "ncclCommFinalize", "ncclCommRevoke", "ncclCommInit", "ncclCommSplit",
              "ncclCommShrink", "ncclCommGrow", "ncclCommWindow", "ncclCommRegister", "ncclCommDeregister",
              "ncclCommSuspend", "ncclCommResume")  # fmt: skip
"""Calls that wait for no operation of a peer, or only for its own call."""
_LEAVING = ("ncclCommAbort", "ncclCommDestroy", "ncclCommFinalize", "ncclCommRevoke")
MISMATCH, UNPROVEN = "MISMATCH", "UNPROVEN"


class Cause(NamedTuple):
    """Why an operation does not come to its end. UNPROVEN: its absent member waits for something that should have
    ended; UNKNOWN: nothing is known of the member. `rank` is -1 for a mismatch."""

    kind: str
    rank: int


@dataclass
class Node:
    """An unfinished operation for which somebody waits. `edges`: operations that hold up a member, and which."""

    key: Key
    since_ns: int
    waiting: list[int] = field(default_factory=list)
    edges: list[tuple[Key, int]] = field(default_factory=list)
    causes: list[Cause] = field(default_factory=list)


Graph = dict[Key, Node]


def is_leaving(rank: Rank) -> bool:
    """Whether its host is inside the end of a communicator."""
    return rank.state == IN_API and (rank.api or "").startswith(_LEAVING)


def build(replay: Replay) -> Graph:
    """All nodes, of which at least one rank is at the head, with their edges."""
    graph: Graph = {}
    heads = []
    for number, rank in enumerate(replay.view.ranks):
        for index in replay.heads(number):
            key, ready_ns = replay.op(number, index).key, replay.ready_ns[number][index]
            ready_ns = ready_ns or replay.op(number, index).enter_ns
            node = graph.setdefault(key, Node(key, ready_ns))
            node.since_ns = min(node.since_ns, ready_ns)
            node.waiting.append(number)
        stream = rank.stream if rank.state == IN_SYNC else None
        heads.append(tuple(dict.fromkeys(replay.op(number, i).key for i in replay.heads(number, stream))))
    for node in graph.values():
        _connect(replay, node, heads)
    return graph


def _connect(replay: Replay, node: Node, heads: list[tuple[Key, ...]]) -> None:
    here = replay.at[node.key]
    come = {}
    for member in replay.members(node.key):
        index = here.get(member)
        if index is None:
            if not replay.has_done(member, node.key):
                _absent(replay, node, member, heads[member])
        elif replay.fired[member][index]:
            come[member] = replay.op(member, index).signature
        else:
            front = [replay.op(member, i).key for i in replay.in_front(member, index)]
            node.edges += [(key, member) for key in front if key != node.key]
            if node.key in front:
                come[member] = replay.op(member, index).signature
    if replay.stands(set(come.values())):
        node.causes.append(Cause(MISMATCH, -1))
    if replay.unknown(node.key):
        _strangers(replay, node)


def _strangers(replay: Replay, node: Node) -> None:
    """A communicator is made, and not all its ranks have come: who is not waiting anywhere is one of them."""
    inside = set(replay.view.comms[int(node.key[0])].members.values())
    ranks = enumerate(replay.view.ranks)
    idle = [n for n, rank in ranks if n not in inside and rank.state in (USER, DEAD) and not rank.gap]
    if 0 < len(idle) <= replay.unknown(node.key):
        kinds = {USER: "NOT_ARRIVED", DEAD: "DIED"}
        node.causes += [Cause(kinds[replay.view.ranks[n].state], n) for n in idle]
    else:
        node.causes.append(Cause(UNKNOWN, -1))


def _absent(replay: Replay, node: Node, member: int, heads: tuple[Key, ...]) -> None:
    rank = replay.view.ranks[member]
    edges = [(key, member) for key in heads if key != node.key]
    kind = _host_cause(rank, node.key)
    if kind in ("NOT_ARRIVED", "LEFT"):
        edges = []
    elif not kind and not edges:
        kind = _no_head(replay, member)
    node.edges += edges
    if kind and not (kind == "IN_API" and edges):
        node.causes.append(Cause(kind, member))


def _host_cause(rank: Rank, key: Key) -> str:
    """What its host says of why it is not there; empty where it waits."""
    if rank.state == DEAD:
        return "DIED"
    if is_leaving(rank):
        return "IN_API"
    has_left = any(op.key[0] == key[0] and op.key[1] == "end" for op in reversed(rank.operations))
    if rank.state == FINISHED or has_left:
        return "LEFT"
    return "NOT_ARRIVED" if rank.state == USER else ""


def _no_head(replay: Replay, member: int) -> str:
    """Nothing that it has issued should make it wait."""
    rank = replay.view.ranks[member]
    if rank.state == UNKNOWN:
        return UNKNOWN
    if rank.state == IN_API:
        calls = (r for r in replay.view.ranks if r.state == IN_API and not (r.api or "").startswith(LIFE_CYCLE))
        is_full = not (rank.api or "").startswith(LIFE_CYCLE) and sum(1 for _ in calls) > 1
        return UNPROVEN if is_full else "IN_API"  # several hosts inside calls: NCCL's queue of work is full
    return UNPROVEN if any(True for _ in replay.unproven(member)) else "GPU_STUCK"


def components(graph: Graph) -> list[list[Key]]:
    """Strongly connected ones, by Tarjan, successors first. No recursion: a job has thousands of operations."""
    number: dict[Key, int] = {}
    low: dict[Key, int] = {}
    stack: list[Key] = []
    found: list[list[Key]] = []
    for start in graph:
        if start not in number:
            _walk(graph, start, number, low, stack, found)
    return found


def _walk(graph: Graph, start: Key, number: dict[Key, int], low: dict[Key, int], stack: list[Key],
          found: list[list[Key]]) -> None:  # fmt: skip
    path = [(start, iter([key for key, _ in graph[start].edges]))]
    number[start] = low[start] = len(number)
    stack.append(start)
    closed = {key for component in found for key in component}
    while path:
        key, rest = path[-1]
        for after in rest:
            if after not in graph or after in closed:
                continue
            if after not in number:
                number[after] = low[after] = len(number)
                stack.append(after)
                path.append((after, iter([k for k, _ in graph[after].edges])))
                break
            low[key] = min(low[key], number[after])
        else:
            path.pop()
            if path:
                low[path[-1][0]] = min(low[path[-1][0]], low[key])
            if low[key] == number[key]:
                component = stack[stack.index(key) :]
                del stack[-len(component) :]
                found.append(component)
                closed.update(component)
