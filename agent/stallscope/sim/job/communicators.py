"""A rank's communicators: by ncclCommInitRank(Config) from ids that pass through files, one by ncclCommSplit."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from stallscope.sim.job.cuda import UNIQUE_ID_BYTES, Config, Runtime, UniqueId
from stallscope.sim.job.layout import WORLD, Group, Layout

POLL_S = 0.002


@dataclass
class Communicator:
    group: Group
    handle: ctypes.c_void_p
    rank: int
    operations: int = 0  # collectives, sends and receives that this rank called


class Maker:
    """Makes what a rank needs; `before` is called ahead of each, with its kind."""

    def __init__(self, runtime: Runtime, layout: Layout, rank: int, folder: Path) -> None:
        self._runtime, self._layout, self._rank, self._folder = runtime, layout, rank, folder

    def make(self, before: Callable[[str], None]) -> dict[str, Communicator]:
        kinds = self._layout.kinds()
        groups = {kind: self._layout.group_of(kind, self._rank) for kind in kinds}
        for group in groups.values():
            self._publish(group)
        made: dict[str, Communicator] = {}
        for kind in kinds:
            before(kind)
            split = kind == self._layout.split_kind
            made[kind] = self._split(made[WORLD], groups[kind]) if split else self._init(groups[kind])
        return made

    def _publish(self, group: Group) -> None:
        """The group's first rank makes the unique id, before anybody could be late."""
        if group.ranks[0] != self._rank or group.kind == self._layout.split_kind:
            return
        path = self._folder / f"{group.name}.id"
        fresh = path.with_suffix(".new")
        fresh.write_bytes(self._runtime.unique_id())
        fresh.rename(path)

    def _unique_id(self, group: Group) -> UniqueId:
        path = self._folder / f"{group.name}.id"
        while not path.exists():
            time.sleep(POLL_S)
        return UniqueId.from_buffer_copy(path.read_bytes()[:UNIQUE_ID_BYTES])

    def _init(self, group: Group) -> Communicator:
        handle, unique_id = ctypes.c_void_p(), self._unique_id(group)
        made = Communicator(group, handle, group.ranks.index(self._rank))
        size = len(group.ranks)
        if group.kind == WORLD:
            config = ctypes.byref(Config(group.name))
            self._runtime.nccl("ncclCommInitRankConfig", ctypes.byref(handle), size, unique_id, made.rank, config)
        else:
            self._runtime.nccl("ncclCommInitRank", ctypes.byref(handle), size, unique_id, made.rank)
        return made

    def _split(self, world: Communicator, group: Group) -> Communicator:
        handle = ctypes.c_void_p()
        config = ctypes.byref(Config(group.name))  # without one the child would take over its parent's name
        color, key = group.number, group.ranks.index(self._rank)
        self._runtime.nccl("ncclCommSplit", world.handle, color, key, ctypes.byref(handle), config)
        return Communicator(group, handle, key)
