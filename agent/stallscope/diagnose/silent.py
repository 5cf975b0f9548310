"""Calls that do not fit together and come to an end all the same, with wrong numbers."""

from __future__ import annotations

from stallscope.diagnose.agree import difference, differs
from stallscope.diagnose.blame import Blame
from stallscope.diagnose.replay import API_KINDS, Replay
from stallscope.diagnose.verdict import Verdict
from stallscope.diagnose.view import Key, View
from stallscope.diagnose.wrong import minority

__all__ = ["silent_mismatches"]


def silent_mismatches(view: View) -> list[Verdict]:
    """The first one of each communicator and rank at fault, of kind SILENT_MISMATCH."""
    replay = Replay(view)
    blame = Blame(replay)
    found: dict[tuple[object, ...], Verdict] = {}
    for key, here in replay.at.items():
        if key[1] in API_KINDS or len(here) < 2 or not all(replay.fired[rank][index] for rank, index in here.items()):
            continue
        if differs(replay.signatures(key).values()):
            verdict = _verdict(replay, blame, key)
            found.setdefault((verdict.comm, verdict.culprits), verdict)
    return sorted(found.values(), key=lambda v: (v.since_ns, v.culprits))


def _verdict(replay: Replay, blame: Blame, key: Key) -> Verdict:
    here, signatures = replay.at[key], replay.signatures(key)
    few = minority(signatures) or _changed(blame, key, list(here))
    culprits = few or tuple(sorted(here))
    usual = next(one for rank, one in signatures.items() if rank not in few)
    odd = next(one for one in (signatures[r] for r in culprits) if one != usual)
    words = difference(odd, usual)
    known = all(replay.op(rank, index).done for rank, index in here.items())
    since_ns = min(replay.op(rank, index).enter_ns for rank, index in here.items())
    return Verdict(
        "SILENT_MISMATCH", culprits, key, int(key[0]), since_ns, tuple(sorted(set(here) - set(culprits))), (),
        "completion" if known else "api", "high" if few else "low", f"calls {words[0]} where others call {words[1]}",
    )  # fmt: skip


def _changed(blame: Blame, key: Key, ranks: list[int]) -> tuple[int, ...]:
    """Those for which this call is another one than in their steps before."""
    odd = [rank for rank in ranks if blame.departs_at(rank, key)]
    return tuple(odd) if 0 < len(odd) < len(ranks) else ()
