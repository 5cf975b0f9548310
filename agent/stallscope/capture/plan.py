"""What `attach` would link in a process, found the same way, with nothing linked."""

from __future__ import annotations

import os
import time
from typing import NamedTuple

from stallscope.capture.cancelling import Cancelling
from stallscope.capture.carriers import BUDGET_NS, DEADLINE_S, LIBRARIES, MAX_FILES, likely_first
from stallscope.capture.libmatch import is_shim, match
from stallscope.capture.mapped import open_mapping
from stallscope.capture.parser_client import ParserClient, ParserFailed
from stallscope.capture.procfs import Mapping, children_of, clean, executable_mappings, live_path
from stallscope.capture.resolver import EVERY, Resolver, is_whole
from stallscope.capture.returns import Returns
from stallscope.capture.rights import has_uprobe_multi
from stallscope.capture.sharing import LINKS_PER_FILE, entry_only
from stallscope.capture.target import Resolved
from stallscope.capture.ways import PerfWay
from stallscope.wire.hook_table import HOOKS

__all__ = ["ENTRY_NS", "PAIR_NS", "WAYS", "Plan", "Planned", "plan"]

# Medians of `make bench` (percall) on a KVM guest, AMD EPYC, Linux 6.18; other machines differ by a factor of two.
ENTRY_NS, PAIR_NS = 1000, 2600
MAX_CHILDREN = 256
WAYS = {
    "filtered": "uprobe_multi link of this process alone",
    "shared": f"unfiltered uprobe_multi link: more than {LINKS_PER_FILE} processes of the job map the file",
    "perf": "perf_event uprobes: this kernel has no uprobe_multi",
}


class Planned(NamedTuple):
    """One library in one file.

    Attributes:
        way: a key of WAYS.
        functions: how many are probed; timed: how many of them also at their return.
        missing: hooks that this version of the library does not have.
    """

    library: str
    path: str
    build_id: str | None
    functions: int
    timed: int
    missing: int
    way: str


class Plan(NamedTuple):
    """What would be linked, and a sentence for each thing that would stay unseen, or that the user should know."""

    pid: int
    files: list[Planned]
    unseen: list[str]
    remarks: list[str]


def plan(pid: int, parser: ParserClient) -> Plan:
    """Look at the process as it is now. What can't be looked at becomes a sentence in `unseen`."""
    try:
        mappings = executable_mappings(pid)
        program = os.stat(f"{live_path(pid)}/exe").st_ino
    except OSError as error:
        return Plan(pid, [], [f"everything: the maps of pid {pid} can't be read ({error.strerror})"], [])
    if any(is_shim(mapping.path) for mapping in mappings):
        return Plan(pid, [], [], ["its shim is read; no probe is set in a process that has one"])
    return _Planner(pid, parser, mappings, program).plan()


class _Planner:
    """One look at one process."""

    def __init__(self, pid: int, parser: ParserClient, mappings: list[Mapping], program: int) -> None:
        self._pid = pid
        self._program = program
        self._resolver = Resolver(parser)
        self._mappings = list({(m.device, m.inode): m for m in reversed(mappings)}.values())
        self._job = [found for child in children_of(pid)[:MAX_CHILDREN] if (found := _inodes(child))]
        self._untimed = Returns(parser).why_not(pid)
        self._cancelling = Cancelling(parser)
        self._few = PerfWay({}, cookies=True) if has_uprobe_multi() is False else None
        self._files: list[Planned] = []
        self._unseen: list[str] = []
        self._silent: list[str] = []

    def plan(self) -> Plan:
        """All of it."""
        named = [m for m in self._mappings if match(m.path) or m.inode == self._program]
        for mapping in named:
            self._named(mapping, match(mapping.path))
        here = {file.library for file in self._files if match(file.path) == file.library}
        self._inside(named, LIBRARIES - here)
        self._tell()
        return Plan(self._pid, self._files, self._unseen, [] if self._untimed else self._cancellers())

    def _resolve(self, mapping: Mapping, libraries: frozenset[str], deadline_s: float | None) -> Resolved | None:
        try:
            fd = open_mapping(self._pid, mapping)
            try:
                return self._resolver.resolve(fd, libraries, deadline_s=deadline_s)
            finally:
                os.close(fd)
        except (OSError, ParserFailed) as error:
            if match(mapping.path) or isinstance(error, OSError) or error.died:
                self._unseen.append(f"{clean(mapping.path)}: {error}")
            return None

    def _named(self, mapping: Mapping, library: str | None) -> None:
        resolved = self._resolve(mapping, frozenset((library,)) if library else EVERY, None)
        if resolved is None:
            return
        found = {p.hook.library for p in resolved.points}
        for each in sorted(found):
            self._add(each, mapping, resolved)
        if library and not found:
            self._unseen.append(f"{clean(mapping.path)} looks like {library} and defines none of its functions")
        if not library and not found:
            self._note_silent(mapping, resolved)
        for name, why in sorted(resolved.rejected.items()):
            self._unseen.append(f"{name} in {clean(mapping.path)}: no probe can stand there ({why})")

    def _inside(self, named: list[Mapping], libraries: frozenset[str]) -> None:
        """Libraries under other names, within the bounds that a capture keeps."""
        files = [m for m in self._mappings if m not in named or match(m.path) == "NCCL"]
        end_ns, asked = time.monotonic_ns() + BUDGET_NS, 0
        for mapping in sorted(files, key=likely_first) if libraries else []:
            wanted = libraries - {match(mapping.path) or ""}
            if asked >= MAX_FILES or time.monotonic_ns() > end_ns:
                self._unseen.append(
                    f"libraries inside {len(files) - asked} mapped files that are not searched for them"
                )
                return
            asked += 1
            resolved = self._resolve(mapping, wanted, DEADLINE_S) if wanted else None
            if resolved is None:
                continue
            for library in sorted(lib for lib in wanted if is_whole(resolved, lib)):
                self._add(library, mapping, resolved)
            if "CUDART" in wanted and not is_whole(resolved, "CUDART"):
                self._note_silent(mapping, resolved)

    def _note_silent(self, mapping: Mapping, resolved: Resolved) -> None:
        if resolved.stripped and resolved.has_runtime_words:
            self._silent.append(clean(mapping.path))

    def _add(self, library: str, mapping: Mapping, resolved: Resolved) -> None:
        path = clean(mapping.path)
        points = [p for p in resolved.points if p.hook.library == library]
        if self._few is not None:
            points, left_out = self._few.choose(path, points)
            self._unseen += [left_out] if left_out else []
        if self._untimed:
            points = entry_only(points)
        known = sum(1 for hook in HOOKS if hook.library == library and hook.mode != "SHIM")
        timed = sum(1 for p in points if p.hook.mode == "PAIR")
        self._files.append(
            Planned(
                library, path, resolved.build_id, len(points), timed, known - len(points),
                self._way(mapping),
            )
        )  # fmt: skip

    def _way(self, mapping: Mapping) -> str:
        if self._few is not None:
            return "perf"
        users = 1 + sum(1 for inodes in self._job if mapping.inode in inodes)
        return "shared" if users > LINKS_PER_FILE else "filtered"

    def _tell(self) -> None:
        if self._untimed:
            self._unseen.append(f"times, errors and calls under way: {self._untimed}")
        found = {file.library for file in self._files}
        for path in self._silent:
            rest = "only its driver calls" if "CUDA" in found else "none of its calls until libcuda is loaded"
            self._unseen.append(f"stripped static runtime in {path}: {rest} would be seen")
        for library in sorted({"CUDART", "CUDA", "NCCL"} - found):
            self._unseen.append(f"{library}: not in the process now; probed when it comes")
        self._unseen.append("cudaStreamQuery, cudaEventQuery and the like: polled too often for a probe")

    def _cancellers(self) -> list[str]:
        """Said here and not acted upon: see Cancelling."""
        end_ns, remarks = time.monotonic_ns() + BUDGET_NS, []
        for path in self._cancelling.loaded_later(self._pid):
            if path is not None:
                remarks.append(
                    f"{path} can cancel threads; as it was loaded by the program, they are taken to be its own, which "
                    "make no CUDA calls; if they do, their destructors are skipped: attach --returns never"
                )
            if time.monotonic_ns() > end_ns:
                return [*remarks, "which other libraries can cancel threads was not looked at: there are too many"]
        return remarks


def _inodes(pid: int) -> frozenset[int]:
    try:
        return frozenset(m.inode for m in executable_mappings(pid))
    except OSError:
        return frozenset()
