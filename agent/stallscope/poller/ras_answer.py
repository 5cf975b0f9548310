"""What an answer of NCCL's RAS service says, in one to three lines.

JSON from 2.28.7 on, before that a text for people. Nothing of it is passed on as it is: whoever listens on the port
chose every byte, so sentences are made here, from numbers, hashes and addresses.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any, NamedTuple

__all__ = ["Testimony", "read_answer"]

MAX_PIDS = 1024
MAX_COMMS = 4096
MAX_RANKS = 1 << 17
SHOWN_RANKS = 4
SHOWN_COMMS = 2
MAX_CLAUSES = 6
SUCCESS, IN_PROGRESS = 0, 7

_VERSION = re.compile(r"\d{1,3}(\.\d{1,3}){1,3}[\w+.-]{0,16}", re.A)
_HASH = re.compile(r"(?:0x)?([0-9a-f]{1,16})")
_HOST = re.compile(r"[0-9a-fA-F.:]{2,45}")
_TEXT_VERSION = re.compile(r"^NCCL version (\S{1,32})", re.M | re.A)
_WORDS = r"[A-Z]+(?:,[A-Z]+){0,4}"
_TEXT_GROUP = re.compile(rf"^ *\d{{1,9}} +(\d{{1,9}}) [ \d-]{{1,80}} ({_WORDS}) +({_WORDS}) *$", re.M | re.A)
_TEXT_TROUBLE = re.compile(rf"^#\d{{1,9}}-\d{{1,9}} \(([0-9a-f]{{1,16}})\) ({_WORDS}) *$", re.M | re.A)
_TEXT_DIFFER = re.compile(r"^ +Communicator ranks have different (\w{1,24}) operation counts", re.M | re.A)
_TEXT_UP_TO = re.compile(r"^ +(\d{1,9}) ranks? ha(?:ve|s) launched up to operation (\d{1,20})", re.M | re.A)
_TEXT_RANK = re.compile(
    r"^ +Rank (\d{1,9}) -- GPU [^\n]{1,40} managed by process (\d{1,9}) on node ([0-9a-f.:]{2,45})", re.M | re.A
)
_TEXT_PIDS = re.compile(r"\bprocess(?:es)? (\d{1,9}(?:,\d{1,9})*)", re.A)


class Testimony(NamedTuple):
    """`says`: for people; `detail`: {nccl_version, pids [..], hashes [..], cut}, see `_detail`."""

    says: str
    detail: dict[str, Any]


class _Nonsense(ValueError):
    """JSON, but not of RAS."""


def read_answer(answer: str, *, cut: bool = False) -> Testimony:
    """Read an answer. Never raises for what it holds."""
    if answer.lstrip().startswith("{"):
        try:
            return _of_json(json.loads(answer), cut)
        except (ValueError, RecursionError):
            version = re.search(r'"nccl_version": "([^"]{1,32})"', answer)
            name = _version(version[1] if version else None)
            why = "too long or too late: only its beginning came" if cut else "damaged"
            return Testimony(f"{name}; its answer is {why}", _detail(name, [], [], cut))
    return _of_text(answer, cut)


def _detail(name: str, pids: list[int], hashes: list[str], cut: bool) -> dict[str, Any]:
    """`pids`: processes that it names, as they see themselves; `hashes`: communicators, 16 hex digits."""
    return {
        "nccl_version": name.removeprefix("NCCL "), "pids": sorted(set(pids))[:MAX_PIDS],
        "hashes": sorted(set(hashes))[:MAX_PIDS], "cut": cut,
    }  # fmt: skip


def _version(text: Any) -> str:
    known = isinstance(text, str) and _VERSION.fullmatch(text)
    return f"NCCL {text}" if known else "NCCL of unknown version"


def _hash(text: Any) -> str:
    found = _HASH.fullmatch(text) if isinstance(text, str) else None
    return found[1].zfill(16) if found else "?"


def _number(row: Any, key: str) -> int | None:
    value = row.get(key) if isinstance(row, dict) else None
    return value if type(value) is int and abs(value) < 1 << 63 else None


def _rows(parent: Any, key: str, limit: int) -> list[dict[str, Any]]:
    rows = parent.get(key, []) if isinstance(parent, dict) else None
    if not isinstance(rows, list) or len(rows) > limit or not all(isinstance(row, dict) for row in rows):
        raise _Nonsense(key)
    return rows


def _of_json(answer: Any, cut: bool) -> Testimony:
    if not isinstance(answer, dict) or "communicators" not in answer:
        raise _Nonsense("communicators")
    comms = _rows(answer, "communicators", MAX_COMMS)
    pids: list[int] = []
    troubles: list[str] = []
    for comm in comms:
        ranks, missing = _rows(comm, "ranks", MAX_RANKS), _rows(comm, "missing_ranks", MAX_RANKS)
        pids += [pid for row in (*ranks, *missing) if (pid := _number(row, "pid")) is not None and pid > 0]
        wrong = [*_missing(missing), *_states(ranks), *_counts(ranks)]
        if wrong:
            troubles.append(
                f"{_hash(comm.get('hash'))} of {_number(comm, 'size') or '?'} ranks: {'; '.join(wrong[:MAX_CLAUSES])}"
            )
    name = _version(answer.get("nccl_version"))
    head = f"{name}: {_many(len(comms), 'communicator')}, {_many(len(set(pids)), 'process', 'processes')}"
    return Testimony(_lines(head, troubles), _detail(name, pids, [_hash(comm.get("hash")) for comm in comms], cut))


def _lines(head: str, troubles: list[str]) -> str:
    if not troubles:
        return f"{head}; it sees no difference between ranks"
    more = f" (and {len(troubles) - SHOWN_COMMS} more)" if len(troubles) > SHOWN_COMMS else ""
    return "\n".join([head, *troubles[:SHOWN_COMMS]]) + more


def _many(number: int, one: str, several: str | None = None) -> str:
    return f"{number} {one if number == 1 else several or one + 's'}"


def _missing(rows: list[dict[str, Any]]) -> list[str]:
    """Ranks that did not answer RAS."""
    names = []
    for row in rows[:SHOWN_RANKS]:
        status = row.get("status")
        status = status if isinstance(status, dict) else {}
        how = "considered dead" if status.get("considered_dead") is True else "no answer"
        names.append(f"rank {_number(row, 'rank')} {how}{_where(row)}")
    if len(rows) > SHOWN_RANKS:
        names.append(f"{len(rows) - SHOWN_RANKS} more ranks missing")
    return names


def _where(row: dict[str, Any]) -> str:
    pid, host = _number(row, "pid"), row.get("host")
    named = isinstance(host, str) and _HOST.fullmatch(host)
    parts = [f"pid {pid}"] * (pid is not None and pid > 0) + [f"on {host}"] * bool(named)
    return f" ({' '.join(parts)})" if parts else ""


def _states(rows: list[dict[str, Any]]) -> list[str]:
    """Ranks with an error, or that are being taken down."""
    found = []
    for row in rows:
        status = row.get("status")
        status = status if isinstance(status, dict) else {}
        error = _number(status, "async_error")
        if error not in (None, SUCCESS, IN_PROGRESS):
            found.append(f"rank {_number(row, 'rank')} has asynchronous error {error}{_where(row)}")
        flags = [word for word in ("abort", "destroy") if status.get(f"{word}_flag") is True]
        if flags:
            found.append(f"rank {_number(row, 'rank')} is in {flags[0]}{_where(row)}")
    more = [f"{len(found) - SHOWN_RANKS} more"] if len(found) > SHOWN_RANKS else []
    return found[:SHOWN_RANKS] + more


def _counts(rows: list[dict[str, Any]]) -> list[str]:
    """Collectives of which some ranks launched fewer than most."""
    found = []
    by_op: dict[str, dict[int, int]] = {}
    for row in rows:
        told, rank = row.get("collective_counts"), _number(row, "rank")
        if not isinstance(told, dict) or rank is None:
            continue
        for op in told:
            number = _number(told, op)
            if number is not None and op.isalpha() and len(op) <= 24 and (op in by_op or len(by_op) < 16):
                by_op.setdefault(op, {})[rank] = number
    for op, counts in by_op.items():
        usual, how_many = Counter(counts.values()).most_common(1)[0]
        others = [(rank, number) for rank, number in sorted(counts.items()) if number != usual]
        if others:
            shown = ", ".join(f"rank {rank}: {number}" for rank, number in others[:SHOWN_RANKS])
            more = f" and {len(others) - SHOWN_RANKS} more" if len(others) > SHOWN_RANKS else ""
            found.append(f"{op} launched {usual} times by {_many(how_many, 'rank')}, {shown}{more}")
    return found


def _of_text(answer: str, cut: bool) -> Testimony:
    version = _TEXT_VERSION.search(answer)
    if version is None:
        return Testimony("the answer on RAS's port is none of NCCL", _detail("", [], [], cut))
    name = _version(version[1])
    pids = [int(pid) for found in _TEXT_PIDS.finditer(answer) for pid in found[1].split(",")]
    groups = [(int(g[1]), g[2], g[3]) for g in _TEXT_GROUP.finditer(answer)]
    states = Counter[str]()
    for number, status, errors in groups:
        states[f"{status} {errors}"] += number
    told = ", ".join(f"{number} {words}" for words, number in states.most_common(SHOWN_RANKS))
    head = f"{name}: {_many(sum(states.values()), 'communicator')}" + (f" ({told})" if told else "")
    parts = [*_TEXT_TROUBLE.finditer(answer)]
    ends = [part.start() for part in parts[1:]] + [len(answer)]
    troubles = [_of_part(part, answer[part.end() : end]) for part, end in zip(parts, ends, strict=False)]
    all_well = bool(states) and all(words.endswith(" OK") for words in states) and not cut
    says = _lines(head, troubles) if troubles or all_well else head
    return Testimony(says, _detail(name, pids, [_hash(part[1]) for part in parts], cut))


def _of_part(head: re.Match[str], body: str) -> str:
    """A paragraph about one communicator."""
    body = body.partition("\n\n")[0]
    differ = [f"{found[1]} counts differ" for found in _TEXT_DIFFER.finditer(body)][:1]
    up_to = [f"{_many(int(found[1]), 'rank')} up to {found[2]}" for found in _TEXT_UP_TO.finditer(body)]
    ranks = [f"rank {found[1]} (pid {found[2]} on {found[3]})" for found in _TEXT_RANK.finditer(body)]
    return f"{_hash(head[1])}: {'; '.join([head[2], *differ, *up_to[:SHOWN_RANKS], *ranks[:SHOWN_RANKS]])}"
