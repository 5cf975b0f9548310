"""Views that make no sense: the judge answers, the same each time, and accuses nobody who is its own victim."""

from __future__ import annotations

import random

import pytest

from stallscope.diagnose.judge import judge, silent_mismatches
from stallscope.diagnose.view import (
    DEAD,
    FINISHED,
    IN_API,
    IN_SYNC,
    UNKNOWN,
    USER,
    Comm,
    Key,
    Operation,
    Rank,
    Signature,
    View,
)

STATES = (USER, IN_API, IN_SYNC, DEAD, FINISHED, UNKNOWN)
APIS = ("ncclCommAbort", "ncclAllReduce", "ncclCommInitRank", None)


def operation(rng: random.Random, rank: int, pos: int, comms: list[Comm], numbers: dict[Key, int]) -> Operation:
    comm = rng.randrange(len(comms))
    ends = [rng.randrange(max(1, len(comms[comm].members))) for _ in range(2)]
    kind = rng.choice(("c", "c", "c", "p", "init", "split", "end"))
    prefix: Key = (comm, "p", *ends) if kind == "p" else (comm, kind)
    number = numbers[prefix] = numbers.get(prefix, -1) + 1
    if rng.random() < 0.05:
        number = rng.randint(0, 5)
    api = "p2p" if kind == "p" else rng.choice(("ncclAllReduce", "ncclAllReduce", "ncclReduce"))
    signature = Signature(api, rng.choice((1, 1, 10**6)), rng.choice((7, 7, 2)), 0, -1)
    began = rng.choice((None, True, False))
    return Operation(
        rank, pos, (*prefix, number), "name", signature, rng.choice((1, 2)), pos, rng.random() < 0.9,
        rng.choice((pos, pos // 2, -1)), rng.random() < 0.1, began,
    )  # fmt: skip


def any_view(seed: int) -> View:
    rng = random.Random(seed)
    n = rng.randint(0, 6)
    comms = []
    for c in range(rng.randint(0, 4)):
        members = rng.sample(range(n), rng.randint(0, n))
        nranks = rng.choice((None, len(members), len(members) + 1))
        comms.append(Comm(str(c), nranks, dict(enumerate(members)), rng.random() < 0.85))
    ranks = []
    for r in range(n):
        numbers: dict[Key, int] = {}
        rank = Rank(r, r, rng.choice(STATES), rng.choice((None, rng.randint(0, 50))), rng.choice(APIS))
        rank.stream, rank.gap = rng.choice((None, 1)), rng.random() < 0.1
        rank.operations = [operation(rng, r, pos, comms, numbers) for pos in range(rng.randint(0, 40)) if comms]
        rank.base = {(0, "c"): rng.randint(0, 3)} if comms and rng.random() < 0.3 else {}
        ranks.append(rank)
    return View(100, ranks, comms)


@pytest.mark.parametrize("block", range(10))
def test_any_view_has_an_answer(block: int) -> None:
    for seed in range(40 * block, 40 * block + 40):
        found = judge(any_view(seed))
        assert found == judge(any_view(seed)), seed
        assert found == sorted(found, key=lambda v: v.since_ns), seed
        silent = silent_mismatches(any_view(seed))
        assert all(v.culprits and v.kind == "SILENT_MISMATCH" for v in silent), seed
        assert all(set(v.culprits).isdisjoint(v.victims) for v in found + silent), seed


def test_the_views_have_answers_of_many_kinds() -> None:
    kinds = {verdict.kind for seed in range(400) for verdict in judge(any_view(seed))}
    assert {"NOT_ARRIVED", "DIED", "LEFT", "IN_API", "MISMATCH", "ORDER_DEADLOCK", "CANNOT_DECIDE"} <= kinds


def test_a_rank_with_a_gap_is_never_missed_by_its_records() -> None:
    """Whoever is named in spite of a gap is named for where its host is."""
    for seed in range(400):
        view = any_view(seed)
        for verdict in judge(view):
            gaps = [rank for rank in verdict.culprits if view.ranks[rank].gap]
            assert not gaps or verdict.evidence == "host_state", seed
