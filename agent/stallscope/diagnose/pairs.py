"""Sends and receives after an attach in the middle: which send is met by which receive."""

from __future__ import annotations

from stallscope.aggregate.issuer import Issuer, Place
from stallscope.aggregate.numbering import COLLECTIVE, RECV, SEND
from stallscope.aggregate.state import State

__all__ = ["pair_base", "settle_pairs"]


def pair_base(state: State, issuer: Issuer, place: Place, kind: int, peer: int) -> int | None:
    """What to add to the number of a send or receive so that both ends count alike; None where nobody can tell.

    NCCL does not count them. But collectives of both ends on one communicator are numbered alike, and programs don't
    send across one: counting from the first such collective that both records have, the ends agree.
    """
    if place.how == "exact" and place.late_ns is None:
        return 0
    kept = place.pair_base.get((kind, peer))
    if kept is not None:
        return kept
    other = _other_end(state, place, peer)
    if other is None:
        return None
    theirs, their_place = other
    anchor = _anchor((issuer, place), (theirs, their_place))
    if anchor is None:
        return None
    back = RECV if kind == SEND else SEND
    mine = _before(issuer, anchor, place, kind, peer)
    other_end = _before(theirs, anchor, their_place, back, place.rank)
    if mine is None or other_end is None:
        return None
    place.pair_base[kind, peer], their_place.pair_base[back, place.rank] = -mine, -other_end
    return -mine


def settle_pairs(state: State) -> None:
    """Find what can be found while the logs still reach back to the attach."""
    for issuer in state.operations.issuers.values():
        for place in issuer.places.values():
            if place.how != "read" and place.late_ns is None:
                continue
            for kind, peer in place.peers:
                pair_base(state, issuer, place, kind, peer)


def _other_end(state: State, place: Place, peer: int) -> tuple[Issuer, Place] | None:
    for issuer in state.operations.issuers.values():
        for other in issuer.places.values():
            if other.comm == place.comm and other.comm >= 0 and other.rank == peer:
                return issuer, other
    return None


Anchor = tuple[int, int]  # index of a communicator in Arrivals, number of a collective on it


def _anchor(*ends: tuple[Issuer, Place]) -> Anchor | None:
    """The first collective, on the communicator that both share with the most members, that both logs hold."""
    firsts = [_firsts(issuer, place.late_ns or 0) for issuer, place in ends]
    shared = firsts[0].keys() & firsts[1].keys()
    found = [(comm, max(firsts[0][comm], firsts[1][comm])) for comm in sorted(shared)]
    return found[0] if found else None


def _firsts(issuer: Issuer, since_ns: int) -> dict[int, int]:
    """By communicator whose numbers are known: the first collective in the log, from that instant on."""
    rows = issuer.log.newest(len(issuer.log))
    rows = rows[(rows["kind"] == COLLECTIVE) & (rows["ts_ns"] >= since_ns)]
    found = {}
    for place in issuer.places.values():
        numbers = rows["index"][rows["pointer"] == place.pointer]
        if place.comm >= 0 and place.numbered and place.how in ("exact", "read") and len(numbers):
            found[place.comm] = int(numbers[0]) + (place.base or 0)
    return found


def _before(issuer: Issuer, anchor: Anchor, place: Place, kind: int, peer: int) -> int | None:
    """How many sends (receives) to (from) that peer were counted before the anchor; None where the log has it not."""
    rows = issuer.log.newest(len(issuer.log))
    comm, number = anchor
    there = next(p for p in issuer.places.values() if p.comm == comm)
    is_anchor = (rows["pointer"] == there.pointer) & (rows["kind"] == COLLECTIVE)
    is_anchor &= rows["index"] == number - (there.base or 0)
    if not is_anchor.any():
        return None
    later = rows[int(is_anchor.argmax()) :]
    mine = later["index"][(later["pointer"] == place.pointer) & (later["kind"] == kind) & (later["root"] == peer)]
    return int(mine[0]) if len(mine) else place.peers.get((kind, peer), 0)
