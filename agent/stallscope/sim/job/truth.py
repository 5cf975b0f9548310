"""The ground truth: what the job knows of itself, from its plan, its layout, and what its ranks wrote down."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

from stallscope.sim.job.board import Board
from stallscope.sim.job.faults import CALL_FAULTS, Fault
from stallscope.sim.job.layout import WORLD, Group, Layout
from stallscope.sim.job.model import Model
from stallscope.sim.job.schedule import Call, Transfer, altered, schedule

Json = dict[str, Any]


def _unique_id(folder: Path, group: Group) -> str | None:
    path = folder / f"{group.name}.id"
    return path.read_bytes().hex() if path.exists() else None


def communicator(folder: Path, layout: Layout, group: Group) -> Json:
    """A child of a split has no unique id: its parent's, its number among the children, and its color."""
    said: Json = {"name": group.name, "kind": group.kind, "ranks": list(group.ranks)}
    if group.kind != layout.split_kind:
        return {**said, "unique_id": _unique_id(folder, group)}
    world = layout.groups(WORLD)[0]
    child = {"parent": WORLD, "parent_unique_id": _unique_id(folder, world), "ordinal": 1, "color": group.number}
    return {**said, "unique_id": None, **child}


def waited_on(layout: Layout, fault: Fault, heads: dict[int, Group]) -> list[Group]:
    """The communicators in which others wait for the rank at fault itself, the one it misses first in front."""
    groups = {group for rank, group in heads.items() if rank != fault.rank and fault.rank in group.ranks}
    usual = altered(schedule(layout, fault.rank), fault, layout, fault.rank)
    order = [item.kind for item in usual if isinstance(item, Call | Transfer)]
    if fault.kind in CALL_FAULTS:
        order.insert(0, fault.comm)
    return sorted(groups, key=lambda group: order.index(group.kind))


def fault_truth(folder: Path, layout: Layout, fault: Fault) -> Json:
    record = json.loads((folder / "fault.json").read_text()) if (folder / "fault.json").exists() else {}
    heads = Model(layout, fault).heads() if fault.blocks(layout) else {}
    groups = [communicator(folder, layout, group) for group in waited_on(layout, fault, heads)]
    return {
        "kind": fault.kind,
        "text": fault.text(),
        "rank": fault.rank,
        "step": fault.step,
        "happened": bool(record),
        "hangs": fault.hangs,
        "culprits": fault.culprits(layout),
        "must_block": fault.blocks(layout),
        "start_ns": record.get("start_ns"),
        "end_ns": record.get("end_ns"),
        "operation": record.get("operation", -1),
        "pauses": record.get("pauses", []),
        "communicator": groups[0] if groups else None,
        "waited_on": groups,
        "heads": {str(rank): group.name for rank, group in heads.items()},
    }


def _rank(folder: Path, board: Board, rank: int) -> Json:
    path = folder / f"rank-{rank}.json"
    if path.exists():
        ended: Json = json.loads(path.read_text())
        return {**ended, "ended": True}
    place = board.read(rank)
    return {"rank": rank, "pid": place.pid, "steps": place.steps, "ended": False, "calls": {}, "long_waits": {}}


def job_truth(folder: Path, args: Namespace, board: Board, seen: Json | None) -> Json:
    layout: Layout = args.layout
    kinds = layout.kinds() if layout.ranks > 1 else []
    groups = [group for kind in kinds for group in layout.groups(kind)]
    return {
        "layout": {"tp": layout.tp, "pp": layout.pp, "dp": layout.dp, "ranks": layout.ranks},
        "ahead": args.ahead,
        "seed": args.seed,
        "fault": fault_truth(folder, layout, args.plan) if args.plan else None,
        "seen": seen,
        "communicators": [communicator(folder, layout, group) for group in groups],
        "ranks": [_rank(folder, board, rank) for rank in range(layout.ranks)],
    }
