"""Processes below some that are given, found without privileges: by looking at /proc, and by segments handed over."""

from __future__ import annotations

import contextlib
import os
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from stallscope.capture.ancestors import Ancestors, chain_of, parents_first
from stallscope.capture.announcing import tell_image, tell_process
from stallscope.capture.counting import send_changes
from stallscope.capture.exits import exit_code_of, has_ended, is_zombie, zombie_children
from stallscope.capture.handover import Handed
from stallscope.capture.oom import OomCounts
from stallscope.capture.procfs import Facts, children_of, facts_of, name_of, start_ns_of_ticks
from stallscope.capture.segments import start_ticks_of
from stallscope.capture.shims import Shims
from stallscope.capture.target import Target
from stallscope.errors import TargetProblem
from stallscope.wire.frames import Kind

__all__ = ["SLOTS", "Kin"]

SLOTS = 127  # native/wire.h, WIRE_PROCS; slot 0 is nobody's
MAX_SEEN, MAX_PENDING = 1024, 512
MAX_FOUND = 128  # processes whose descriptors are looked through at a time
PATIENCE_NS, YOUNG_NS, TICK_NS = 1_000_000_000, 5_000_000_000, 10_000_000
Send = Callable[[Kind, dict[str, Any]], None]


@dataclass(eq=False)
class _Ended:
    """Gone, until its last records are read and somebody has told how it ended; `look` is when that was noticed."""

    target: Target
    at_ns: int
    look: int
    is_read: bool = False


class Kin:
    """Who is traced.

    Args:
        helpers: pids of our own processes, which are nobody's job.
        follow: whether descendants are traced.
    """

    def __init__(
        self, shims: Shims, send: Send, clock: Callable[[], int], helpers: Callable[[], set[int]], *, follow: bool
    ) -> None:
        self._shims, self._send, self._clock, self._helpers = shims, send, clock, helpers
        self._follow = follow
        self._roots: list[int] = []
        self._by_pid: dict[int, Target] = {}
        self._ended: list[_Ended] = []
        self._slots: dict[int, Target] = {}
        self._code_of_command: int | None = None
        self._strays: set[int] = set()
        self._pending: deque[tuple[Target, int]] = deque()
        self._next_proc, self._look = 1, 0
        self.turned_away: Counter[str] = Counter()
        self.no_code = self.no_sender = 0
        self._oom = OomCounts()
        self._until: int | None = None
        self.ancestors = Ancestors(send, clock, self._number)
        self.on_image: Callable[[Target], None] = lambda target: None
        shims.prepare = self._claim

    def _number(self) -> int:
        self._next_proc += 1
        return self._next_proc - 1

    def live(self) -> list[Target]:
        """Processes that have not ended."""
        return list(self._by_pid.values())

    def any_live(self) -> bool:
        """Whether anything is left to trace: of a command's, as long as it runs itself."""
        if self._until is None:
            return bool(self._by_pid or self._ended)
        return self._until in self._by_pid or any(one.target.pid == self._until for one in self._ended)

    def by_pid(self, pid: int) -> Target | None:
        """The live process with this pid."""
        return self._by_pid.get(pid)

    def adopt(self, pids: list[int], more: Sequence[int] = ()) -> None:
        """Trace running processes and, when following, those below them. Raises TargetProblem.

        Args:
            more: others that need not be there any more.
        """
        every = [*pids, *more]
        self._roots += every
        self.ancestors.find(every)
        for pid in parents_first(every):
            if self._enter(pid, self._clock()) is None and pid in pids:
                raise TargetProblem(
                    f"cannot trace pid {pid}", why="no such process", hint="check the pid with `ps`"
                )  # fmt: skip
        self.check()

    def _enter(self, pid: int, appeared_ns: int) -> Target | None:
        """The live process of this pid, new if it was not known; None when it is gone."""
        known = self._by_pid.get(pid)
        if known is not None:
            return known
        if len(self._by_pid) >= MAX_SEEN:
            self.turned_away["processes"] += 1
            return None
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            return None
        try:
            facts = facts_of(pid)
        except OSError:
            os.close(pidfd)
            return None
        return self._add(facts, pidfd, appeared_ns)

    def _add(self, facts: Facts, pidfd: int, appeared_ns: int, words: dict[str, str] | None = None) -> Target:
        """`words`: its rank, where that is known from elsewhere than /proc."""
        parent = self._parent_proc(facts)
        target = Target(self._number(), 0, facts, parent, pidfd, appeared_ns, rank_words=words)
        self._by_pid[facts.pid] = target
        self._oom.learn([facts.pid])
        tell_process(self._send, target)
        self.on_image(target)
        return target

    def _parent_proc(self, facts: Facts) -> int | None:
        """Its parent's key; a parent that was not known is found through its child, who made himself known first."""
        ppid = facts.ppid
        if ppid not in self._by_pid and self._is_below(ppid):
            self._enter(ppid, self._clock())
        parent = self._by_pid.get(ppid) or next((one.target for one in self._ended if one.target.pid == ppid), None)
        return parent.proc if parent else self.ancestors.proc_of(ppid)

    def _is_below(self, pid: int) -> bool:
        """Whether the process is, now, a descendant of one that we were given."""
        mine = {os.getpid(), *self._helpers()}
        return pid not in mine and any(root in chain_of(pid) for root in self._roots)

    def take(self, handed: Handed) -> None:
        """A process has handed its segment over; it may be gone already."""
        now = self._clock()
        target = self._by_pid.get(handed.pid) or self._just_ended(handed)
        if target is not None and not target.ended and start_ticks_of(handed.pid) not in (None, handed.start_ticks):
            self._gone(target)  # another process of this pid
            target = None
        if target is None and start_ticks_of(handed.pid) == handed.start_ticks:
            target = self._enter(handed.pid, now)
        if target is None:
            target = self._add(_unknown(handed), -1, now)
        self._refresh(target, now)
        self._pending.append((target, handed.fd))
        self._adopt_pending()
        if len(self._pending) > MAX_PENDING:
            self._turn_away(*self._pending.popleft())

    def _adopt_pending(self) -> None:
        """Segments wait for a slot: nothing in them is lost meanwhile, and those who end give theirs back."""
        while self._pending and (self._pending[0][0].slot or len(self._slots) < SLOTS):
            self._shims.adopt(*self._pending.popleft())

    def _turn_away(self, target: Target, fd: int) -> None:
        os.close(fd)
        self.turned_away["segments"] += 1
        now = self._clock()
        self._send(
            Kind.GAP,
            {"source": "link", "proc": target.proc, "count": None, "from_ns": now, "to_ns": now,
             "reason": f"pid {target.shown_pid} ({target.facts.name}) is not traced: no free process slot"},
        )  # fmt: skip

    def _just_ended(self, handed: Handed) -> Target | None:
        start_ns = start_ns_of_ticks(handed.start_ticks)
        alike = [e.target for e in self._ended if e.target.pid == handed.pid]
        return next((target for target in alike if abs(target.facts.start_ns - start_ns) < TICK_NS), None)

    def _claim(self, target: Target) -> bool:
        """A slot for the records of this process."""
        if target.slot:
            return True
        slot = next((number for number in range(1, SLOTS + 1) if number not in self._slots), None)
        if slot is None:
            return False
        self._slots[slot], target.slot = target, slot
        self._send(Kind.SLOT, {"slot": slot, "proc": target.proc, "at_ns": self._clock()})
        return True

    def _refresh(self, target: Target, now: int) -> None:
        """Tell that it runs another program by now."""
        with contextlib.suppress(OSError):
            if name_of(target.pid) == target.facts.name and now - target.appeared_ns > YOUNG_NS:
                return
            facts = facts_of(target.pid)
            if (facts.name, facts.cmdline) != (target.facts.name, target.facts.cmdline) and facts.cmdline:
                target.facts = facts
                self._shims.retire_if_left(target, now)
                tell_image(self._send, target, now)
                self.on_image(target)

    def check(self) -> None:
        """Once a second: new processes below the given ones, segments nobody handed over, children left to us."""
        now = self._clock()
        mine = self._helpers()
        mine |= {os.getpid(), *(one.target.pid for one in self._ended)}
        for pid in [pid for root in self._roots if self._follow for pid in children_of(root)]:
            if pid not in mine and pid not in self._by_pid and not is_zombie(pid):
                self._enter(pid, now)
        for target in self.live():
            self._refresh(target, now)
        waiting = {target.proc for target, _ in self._pending}
        unread = [target for target in self.live() if target.proc not in waiting and not self._shims.has(target)]
        for target in unread[:MAX_FOUND] if len(self._slots) < SLOTS else []:
            self._shims.find(target)
        self._reap(mine)
        self.ancestors.check()

    def adopt_command(self, pid: int) -> None:
        """Trace a child of ours and all that come to be below us, a subreaper; its end is the capture's."""
        self._until = pid
        self._enter(pid, self._clock())
        self._roots.append(os.getpid())
        self.check()

    def _reap(self, mine: set[int]) -> None:
        """Zombies left to us that nobody here knows; two looks in a row, so that no helper's owner is robbed."""
        strange = zombie_children() - mine - self._by_pid.keys() - {one.target.pid for one in self._ended}
        for pid in strange & self._strays:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        self._strays = strange

    def watch(self) -> None:
        """Who has ended since."""
        self._look += 1
        for target in self.live():
            if self._is_over(target):
                self._gone(target)

    def _is_over(self, target: Target) -> bool:
        return target.pidfd < 0 or has_ended(target.pidfd)

    def _gone(self, target: Target) -> None:
        target.ended = True
        self._by_pid.pop(target.pid, None)
        self._shims.hasten(target)
        self._ended.append(_Ended(target, self._clock(), self._look))

    def command_ended(self, code: int) -> None:
        """How it ended, as wait(2) encodes it."""
        self._code_of_command = code

    def bury(self, *, final: bool = False) -> None:
        """Tell the end of processes: a look later, when all that they handed over has come, and their parent waited."""
        for one in list(self._ended):
            if one.look >= self._look and not final:
                continue
            self._adopt_pending()
            waits_for_slot = any(target is one.target for target, _ in self._pending)
            if waits_for_slot or (self._shims.is_unread(one.target) and not final):
                continue
            self._read_last(one)
            code = self._code(one.target)
            waits = code is None and one.target.pidfd >= 0 and self._clock() - one.at_ns < PATIENCE_NS
            if not waits or final:
                self._ended.remove(one)
                self._tell_end(one, code)
        if final:
            self._bury_rest()

    def _bury_rest(self) -> None:
        """Nothing more comes: what waits for a slot of one that lives waits in vain."""
        while self._pending:
            self._turn_away(*self._pending.popleft())
        for one in self._ended:
            self._read_last(one)
            self._tell_end(one, self._code(one.target))
        self._ended.clear()
        self._oom.tell_rest(self._send, self._clock())

    def _code(self, target: Target) -> int | None:
        if target.pid == self._until:
            return self._code_of_command  # its starter waits for it, not we
        return exit_code_of(target.pid, target.pidfd) if target.pidfd >= 0 else None

    def _read_last(self, one: _Ended) -> None:
        """All of its records and counters; then its slot is free, while its parent may still take its time."""
        target = one.target
        if not one.is_read:
            one.is_read = True
            self._shims.retire(target, one.at_ns)
            self.send_counts(target, self._clock())
            self._shims.forget(target)
            self._slots.pop(target.slot, None)

    def _tell_end(self, one: _Ended, code: int | None) -> None:
        signal = (code & 0x7F) or None if code is not None else None
        plain = None if code is None or signal else code >> 8 & 0xFF
        self.no_code += code is None
        self.no_sender += signal is not None
        body = {"proc": one.target.proc, "at_ns": one.at_ns, "code": plain, "signal": signal}
        self._send(Kind.EXIT, {**body, "oom": None if code is None else self._oom.claim(signal)})
        one.target.close()

    def send_counts(self, target: Target, now: int) -> None:
        """Counters of one process that changed since they were last sent."""
        if self._shims.has(target):
            send_changes(self._send, target, self._shims.changed(target), now)


def _unknown(handed: Handed) -> Facts:
    """A process that was gone before it could be looked at."""
    return Facts(handed.pid, None, 0, "?", [], None, start_ns_of_ticks(handed.start_ticks), os.geteuid())
