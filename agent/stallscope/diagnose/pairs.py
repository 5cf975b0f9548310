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
    if place.how == "exact":
        return 0
    kept = place.pair_base.get((kind, peer))
    if kept is not None:
        return kept
    other = _other_end(state, place, peer)
    if other is None:
        return None
    theirs, their_place = other
    anchor = _anchor(issuer, theirs)
    if anchor is None:
        return None
    place.pair_base[kind, peer] = -_before(issuer, anchor, place.pointer, kind, peer)
    back = RECV if kind == SEND else SEND
    their_place.pair_base[back, place.rank] = -_before(theirs, anchor, their_place.pointer, back, place.rank)
    return place.pair_base[kind, peer]


def settle_pairs(state: State) -> None:
    """Find what can be found while the logs still reach back to the attach."""
    for issuer in state.operations.issuers.values():
        if issuer.log.total > len(issuer.log):
            continue
        for place in issuer.places.values():
            if place.how != "read":
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


def _anchor(one: Issuer, two: Issuer) -> Anchor | None:
    """The first collective, on the communicator that both share with the most members, that both logs hold."""
    firsts = [_firsts(issuer) for issuer in (one, two)]
    shared = firsts[0].keys() & firsts[1].keys()
    found = [(comm, max(firsts[0][comm], firsts[1][comm])) for comm in sorted(shared)]
    return found[0] if found else None


def _firsts(issuer: Issuer) -> dict[int, int]:
    """By communicator whose numbers are known: the first collective since the attach; only while the log holds it."""
    if issuer.log.total > len(issuer.log):
        return {}
    known = [p for p in issuer.places.values() if p.comm >= 0 and p.how in ("exact", "read") and p.collectives]
    return {place.comm: place.base or 0 for place in known}


def _before(issuer: Issuer, anchor: Anchor, pointer: int, kind: int, peer: int) -> int:
    """How many sends (receives) to (from) that peer stand in the log before the anchor."""
    rows = issuer.log.newest(len(issuer.log))
    comm, number = anchor
    place = next(p for p in issuer.places.values() if p.comm == comm)
    is_anchor = (rows["pointer"] == place.pointer) & (rows["kind"] == COLLECTIVE)
    is_anchor &= rows["index"] == number - (place.base or 0)
    end = int(is_anchor.argmax()) if is_anchor.any() else 0
    mine = (rows["pointer"][:end] == pointer) & (rows["kind"][:end] == kind) & (rows["root"][:end] == peer)
    return int(mine.sum())
