"""`attach --job`: which other processes of this host belong to the job of those that were given."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable

from stallscope.capture.ancestors import chain_of
from stallscope.capture.peers import peers_of, ties_of
from stallscope.capture.procfs import children_of, facts_of, rank_words
from stallscope.wire.kinship import Person, is_launcher, is_shell, is_system

__all__ = ["job_of", "launcher_of"]

PLACES = ("RANK", "LOCAL_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
ENOUGH = 2


def job_of(pids: list[int]) -> list[int]:
    """All processes that share a launcher or a communicator with one of these, without these: parents first.

    The tracer and its helpers are nobody's job.
    """
    found: dict[int, None] = {}
    for pid in pids:
        _add_family(found, launcher_of(pid))
    for peer in sorted(peers_of({*pids, *found})):
        if peer not in found:
            _add_family(found, launcher_of(peer) or peer)
    mine = {os.getpid(), *children_of(os.getpid()), *_only_ours(pids)}
    return [pid for pid in found if pid not in mine and pid not in pids]


def _add_family(found: dict[int, None], top: int | None) -> None:
    if top is not None:
        found.update(dict.fromkeys([top, *children_of(top)]))


def _only_ours(pids: list[int]) -> set[int]:
    """Ancestors of this process that are not the targets': the shell, the sudo that it was started with."""
    theirs = {one for pid in pids for one in chain_of(pid)}
    return set(chain_of(os.getpid())) - theirs


def launcher_of(pid: int) -> int | None:
    """The process that started the ranks of the job, or that started what did; None where there is none."""
    top: int | None = None
    for one in chain_of(pid):
        person = _person(one)
        if person is None or is_system(person):
            return top
        is_known = is_launcher(person) and not is_shell(person)
        if is_known or (top is None and _starts_ranks(one)):
            top = one
    return top


def _person(pid: int) -> Person | None:
    with contextlib.suppress(OSError):
        facts = facts_of(pid)
        return Person(facts.pid, facts.name, facts.cmdline)
    return None


def _starts_ranks(pid: int) -> bool:
    """Whether its children have different places in a job, or several of them use NCCL and it does not itself."""
    if os.getpid() == pid:
        return False
    families = [[child, *children_of(child)] for child in _children(pid)]
    places = {place for family in families for one in family if any(place := _place(one))}
    if len(places) >= ENOUGH:
        return True
    users = (any(ties_of(one) is not None for one in family) for family in families)
    return sum(users) >= ENOUGH and ties_of(pid) is None


def _children(pid: int) -> Iterable[int]:
    below = children_of(pid)
    return [child for child in below if chain_of(child)[:1] == [pid]]


def _place(pid: int) -> tuple[str, ...]:
    words = rank_words(pid)
    return tuple(words.get(name, "") for name in PLACES)
