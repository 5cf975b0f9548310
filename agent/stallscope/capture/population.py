"""The traced processes: adopted, forked, execed, ended."""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from stallscope.capture.ancestors import Ancestors, parents_first
from stallscope.capture.announcing import tell_image, tell_process
from stallscope.capture.counting import send_changes
from stallscope.capture.endings import exit_body
from stallscope.capture.exits import has_ended
from stallscope.capture.linker import Linker
from stallscope.capture.links import close_all
from stallscope.capture.oom import Victims
from stallscope.capture.procfs import Facts, children_of, execed_facts, facts_of, forked_facts, parent_of, task_name
from stallscope.capture.reaper import Reaper
from stallscope.capture.sharing import Sharing
from stallscope.capture.shims import Shims
from stallscope.capture.tables import Tables
from stallscope.capture.target import Target, Unasked, inherited_facts
from stallscope.capture.young import Young
from stallscope.errors import TargetProblem
from stallscope.wire.frames import Kind

__all__ = ["Population"]

FORK, EXEC, EXIT, OOM = 4, 5, 6, 10
_REC = struct.Struct("<QQIIHBBHBBIi8Q")


class _Ended(NamedTuple):
    """An ended process until its last records are read: `code` as wait(2) has it, -1 unknown; ring positions."""

    target: Target
    code: int
    at_ns: int
    newest: tuple[int, int]


class Population:
    """Who is traced. Slots come from BPF for forked children and from here for adopted ones."""

    def __init__(
        self,
        tables: Tables,
        linker: Linker,
        sharing: Sharing,
        reaper: Reaper,
        shims: Shims,
        send: Callable[[Kind, dict[str, Any]], None],
        clock: Callable[[], int],
        *,
        follow: bool,
    ) -> None:
        self._tables = tables
        self._linker = linker
        self._send = send
        self._clock = clock
        self._follow = follow
        self._by_pid: dict[int, Target] = {}
        self._by_slot: dict[int, Target] = {}
        self._dead: list[_Ended] = []
        self._strange_slots: set[tuple[int, int]] = set()
        self._without_record: set[int] = set()
        self._next_proc = 1
        self._young = Young(clock)
        self._reaper = reaper
        self._sharing = sharing
        self._shims = shims
        self.ancestors = Ancestors(send, clock, self._number)
        self.victims: Victims | None = Victims(send, self.live)
        self.on_image: Callable[[Target], None] = lambda target: None
        self.admits: Callable[[int], bool] = lambda pid: True
        self.on_burial: Callable[[Target, int], None] = lambda target, now: None
        linker.before_link = self.send_counts
        linker.on_preloaded = self._preloaded

    def _number(self) -> int:
        self._next_proc += 1
        return self._next_proc - 1

    def live(self) -> list[Target]:
        """Processes that have not ended."""
        return list(self._by_pid.values())

    def any_live(self) -> bool:
        """Whether anything is left to trace."""
        return bool(self._by_pid) or bool(self._dead)

    def by_pid(self, pid: int) -> Target | None:
        """The live process with this host pid, if traced."""
        return self._by_pid.get(pid)

    def proc_of_slot(self, slot: int) -> int | None:
        """Report key of the process in a BPF slot."""
        target = self._by_slot.get(slot)
        return target.proc if target else None

    def is_program(self, target: Target, inode: int) -> bool:
        """Whether the file is the program itself, which may hold a static runtime."""
        try:
            return os.stat(f"/proc/{target.pid}/exe").st_ino == inode
        except OSError:
            return False

    def adopt(self, pids: list[int], more: Sequence[int] = ()) -> None:
        """Trace running processes and, when following, their descendants. Raises TargetProblem.

        Args:
            more: others that need not be there any more.
        """
        every = [*pids, *more]
        self.ancestors.find(every)
        for pid in parents_first(every):
            self._adopt_one(pid, self._parent_proc(pid), given=pid in pids)
        if self._follow:
            self._adopt_descendants(every)
        # Linking takes its time: only now, when no process is left whose forks nobody tells of.
        for target in self.live():
            # Once more: a fork that was under way while its child was found has put the kernel's slot there.
            self._tables.procs.add(target.pid, target.slot, follow=self._follow)
            self._linker.link_process(target, None)

    def _adopt_descendants(self, pids: list[int]) -> None:
        """Until there is no new one: a process that is not in the filter yet may fork meanwhile."""
        # An ancestor of ours may be given (a shell): we and our helpers are not part of its job.
        tried = {*pids, os.getpid(), *children_of(os.getpid())}
        while new := [child for pid in pids for child in children_of(pid) if child not in tried]:
            tried.update(new)
            for child in new:
                # With a slot it was forked by a process in the filter: its record is in the ring.
                if not self._tables.slots.find(child) and self.admits(child):
                    self._adopt_one(child, self._parent_proc(child), given=False)

    def _parent_proc(self, pid: int) -> int | None:
        with contextlib.suppress(OSError):
            ppid = parent_of(pid)
            parent = self._by_pid.get(ppid)
            return parent.proc if parent else self.ancestors.proc_of(ppid)
        return None

    def _adopt_one(self, pid: int, parent: int | None, *, given: bool) -> None:
        if pid in self._by_pid:
            return
        try:
            pidfd = os.pidfd_open(pid)
            facts = facts_of(pid)
        except OSError as error:
            if given:
                raise TargetProblem(
                    f"cannot attach to pid {pid}",
                    why="no such process" if isinstance(error, (ProcessLookupError, FileNotFoundError)) else str(error),
                    hint="check the pid with `ps`; in a container, give the pid as this pid namespace shows it",
                ) from error
            return
        slot = self._claim(pid)
        if not slot:
            os.close(pidfd)
            self._refuse(facts, self._clock())
            return
        target = self._enter(facts, slot, parent, pidfd, self._clock())
        self._announce(target)
        self.on_image(target)
        # The process must be in the filter before its links exist, or their first hits are a stranger's.
        self._tables.procs.add(pid, slot, follow=self._follow)

    def _claim(self, pid: int) -> int | None:
        return self._tables.slots.claim(pid)

    def _refuse(self, facts: Facts, appeared_ns: int) -> None:
        self._send(
            Kind.GAP,
            {"source": "link", "proc": None, "count": None, "from_ns": appeared_ns, "to_ns": self._clock(),
             "reason": f"pid {facts.pid} ({facts.name}) is not traced: no free process slot"},
        )  # fmt: skip

    def _enter(self, facts: Facts, slot: int, parent: int | None, pidfd: int, appeared_ns: int) -> Target:
        target = Target(self._number(), slot, facts, parent, pidfd, appeared_ns)
        self._by_pid[facts.pid] = target
        self._by_slot[slot] = target
        return target

    def _announce(self, target: Target) -> None:
        tell_process(self._send, target)
        self._send(Kind.SLOT, {"slot": target.slot, "proc": target.proc, "at_ns": target.appeared_ns})

    def event(self, record: bytes) -> None:
        """A process event from the life ring, one `wire_rec`."""
        ts_ns, _dur, tgid, _tid, _hook, kind, _flags, slot, _depth, _r, _n, _status, *a = _REC.unpack(record)
        if kind == FORK:
            self._forked(tgid, a[0], a[1], ts_ns)
        elif kind == EXEC:
            self._execed(tgid, ts_ns, struct.pack("<2Q", *a[1:3]), in_main_thread=not a[0] >> 32)
        elif kind == EXIT:
            self._exited(tgid, a[0], ts_ns)
        elif kind == OOM and self.victims is not None:
            self.victims.tell(ts_ns, a[0], self._by_slot.get(slot), struct.pack("<2Q", *a[1:3]))

    def _known_already(self, pid: int, slot: int) -> bool:
        """Whether a forked child was found by the scan before its record came; its second slot is given back."""
        target = self._by_pid.get(pid)
        if target is None:
            return False
        if target.pidfd >= 0 and has_ended(target.pidfd):  # an earlier process of this pid: its exit was lost
            self._exited(pid, -1, self._clock())
            return False
        if slot not in (0, target.slot):
            self._tables.counters.zero(slot)
            self._tables.slots.free(slot)
        return True

    def _forked(self, parent_pid: int, pid: int, slot: int, ts_ns: int) -> None:
        if self._known_already(pid, slot):
            return
        parent = self._by_pid.get(parent_pid)
        if not slot or parent is None:
            self._refuse(inherited_facts(pid, parent_pid, parent, ts_ns), ts_ns)
            return
        target = self._enter(inherited_facts(pid, parent_pid, parent, ts_ns), slot, parent.proc, -1, ts_ns)
        self._linker.link_forked(target, parent)
        with contextlib.suppress(OSError):  # gone again: what is known is the parent's
            target.pidfd = os.pidfd_open(pid)
            target.facts = forked_facts(pid, parent.facts, ts_ns)
        target.rank_words = parent.rank_words
        self._announce(target)
        self._linker.announce(target, ts_ns)
        self._young.add(target, ts_ns)

    def settle(self, *, final: bool = False) -> None:
        """Look at mappings and environment of those that have lived on for a while; `final`: of all of them, now."""
        for target, since_ns in self._young.grown(final=final):
            self._untime(target)
            self._linker.link_process(target, since_ns)
            self.on_image(target)

    def _execed(self, pid: int, ts_ns: int, name: bytes, *, in_main_thread: bool) -> None:
        target = self._by_pid.get(pid)
        if target is None:
            return
        # The links stay: they belong to the main thread's task, and a library that is mapped again is covered from its
        # first call. Only the addresses are new. But where another thread execed, that task is gone.
        if not in_main_thread:
            self._reaper.close_later(*target.links())
            self._forget_links(target)
        else:
            self._untime(target)
        self._shims.retire(target, ts_ns)
        target.preloaded = False
        for linked in target.linked.values():
            linked.places.clear()
        target.ranges.clear()
        target.refused.clear()
        target.unasked = Unasked()
        self._linker.tell_silent(target, final=True)
        target.inferred.clear()
        target.used_nccl = False
        self._tables.ranges.set(target.slot, [])
        try:
            target.facts = execed_facts(target.facts)
        except OSError:  # gone again; it ran another program than its parent all the same
            target.facts = target.facts._replace(name=task_name(name), cmdline=[])
        tell_image(self._send, target, ts_ns)
        self._young.add(target, ts_ns)

    def _untime(self, target: Target) -> None:
        """Asked at the exec and once more a little later: at the exec the parser may have been too busy to answer."""
        if self._linker.must_untime(target):
            close_all(*target.links())
            self._forget_links(target)

    def _preloaded(self, target: Target) -> None:
        """Its shim tells more, at less cost; a call that both saw would count twice."""
        if any(linked.entries or linked.shared for linked in target.linked.values()):
            self._reaper.close_later(*target.links())
            self._forget_links(target)
        self._shims.find(target)

    def _forget_links(self, target: Target) -> None:
        for linked in target.linked.values():
            self._sharing.forget(linked)
            linked.close()
        target.linked.clear()
        target.twins.clear()

    def _exited(self, pid: int, code: int, ts_ns: int) -> None:
        target = self._by_pid.pop(pid, None)
        if target is not None:
            target.ended = True
            self._young.drop(target)
            self._shims.hasten(target)
            self._dead.append(_Ended(target, code, ts_ns, self._tables.newest()))

    def check(self) -> None:
        """Processes whose exit record was lost: their pidfd tells, two looks in a row: it may be in the ring."""
        ended = {target.proc for target in self.live() if target.pidfd >= 0 and has_ended(target.pidfd)}
        for target in self.live():
            if target.proc in ended & self._without_record:
                self._exited(target.pid, -1, self._clock())
        self._without_record = ended
        self._reconcile()
        self.ancestors.check()
        if self.victims is not None:
            self.victims.learn()

    def _reconcile(self) -> None:
        """Slots that BPF gave to a child of which no fork record came; two looks in a row: it may be under way."""
        strange = self._unknown_slots()
        for slot, pid in strange & self._strange_slots:
            now = self._clock()
            try:
                facts = facts_of(pid)
            except OSError:
                self._send(
                    Kind.GAP,
                    {"source": "link", "proc": None, "count": None, "from_ns": now, "to_ns": now,
                     "reason": f"pid {pid} came and went unseen: its fork record was lost"},
                )  # fmt: skip
                self._free_slot(slot)
                continue
            target = self._enter(facts, slot, self._parent_proc(pid), -1, facts.start_ns)
            with contextlib.suppress(OSError):
                target.pidfd = os.pidfd_open(pid)
            self._announce(target)
            self.on_image(target)
            self._linker.link_process(target, facts.start_ns)
            strange.discard((slot, pid))
        self._strange_slots = strange

    def _unknown_slots(self) -> set[tuple[int, int]]:
        return {(s.slot, s.tgid) for s in self._tables.slots.all() if s.slot not in self._by_slot}

    def bury(self, *, final: bool = False) -> None:
        """Last counters of ended processes whose records have all been sent; then their slots are free again."""
        read = [dead for dead in self._dead if self._tables.read_up_to(dead.newest)]
        ready = [dead for dead in read if final or not self._shims.is_unread(dead.target)]
        self._dead = [dead for dead in self._dead if dead not in ready]
        for dead in ready:
            target = dead.target
            self._shims.retire(target, dead.at_ns)
            self.send_counts(target, self._clock())
            self.on_burial(target, self._clock())
            self._linker.tell_silent(target, final=True)
            body = exit_body(self._tables.endings.row(target.slot), dead.code)
            oom = None if self.victims is None else self.victims.holds(target.proc)
            self._send(Kind.EXIT, {"proc": target.proc, "at_ns": dead.at_ns, "oom": oom, **body})
            if not (target.linked or self._shims.has(target)) and self._uses_cuda(target):
                self._never_linked(target, dead.at_ns)
            self._shims.forget(target)
            for linked in target.linked.values():
                self._sharing.forget(linked)
            self._reaper.close_later(*target.links())
            target.close()
            if target.pid not in self._by_pid:
                # The kernel took it out when it ended, unless it ended just before it was put in.
                with contextlib.suppress(OSError):
                    self._tables.procs.remove(target.pid)
            self._free_slot(target.slot)

    def _uses_cuda(self, target: Target) -> bool:
        """Whether it can be expected to: what a user named may have none."""
        return target.parent is not None

    def _never_linked(self, target: Target, ended_ns: int) -> None:
        self._send(
            Kind.GAP,
            {"source": "link", "proc": target.proc, "count": None, "from_ns": target.appeared_ns, "to_ns": ended_ns,
             "reason": "the process ended before anything in it was linked"},
        )  # fmt: skip

    def _free_slot(self, slot: int) -> None:
        self._by_slot.pop(slot, None)
        self._tables.counters.zero(slot)
        self._tables.ranges.set(slot, [])
        self._tables.endings.clear(slot)
        self._tables.flows.clear(slot)
        self._tables.slots.free(slot)

    def send_counts(self, target: Target, now: int) -> None:
        """Counters of one process that changed since they were last sent."""
        changed = self._tables.counters.changed(target.slot)
        if self._shims.has(target):
            changed = self._shims.changed(target, changed)
        send_changes(self._send, target, changed, now)

    def unlink_all(self) -> None:
        """Take every probe away; calls in flight stay in their rows."""
        pairs = [target.links() for target in self.live()] + [self._sharing.links()]
        close_all([x for entries, _ in pairs for x in entries], [x for _, returns in pairs for x in returns])
        for target in self.live():
            target.linked.clear()
        self._reaper.stop()
