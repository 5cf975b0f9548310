"""Processes that are known by the segments they left in a folder: also those that this pid namespace does not show.

Who lives says the lock on his file. Of one that is visible here the kernel tells the pid with it, and the rest comes
from /proc as everywhere; of others only what the segment says is known.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass

from stallscope.capture.folder import File, Folder, holder_of
from stallscope.capture.kin import Kin, Send, _Ended
from stallscope.capture.procfs import Facts, facts_of, start_ns_of_ticks
from stallscope.capture.segment import BadSegment, Header, Segment
from stallscope.capture.shims import Shims
from stallscope.capture.target import MAX_PID, Target
from stallscope.wire.frames import Kind

__all__ = ["Guests"]

LOOK_NS = 50_000_000
FADE_NS = 500_000_000
MAX_GUESTS = 384
HIDDEN = (
    "some processes are not visible here: the pid of each is the one in its own pid namespace, and what takes "
    "their /proc is not known (stacks, files, environment, exit code, processes without CUDA calls); "
    "shareProcessNamespace shows it"
)
ADRIFT = "no lock tells that it lives, as where a program has closed all its descriptors: its end can't be seen"


@dataclass(eq=False)
class _Guest:
    """One process: the files that it made, the newest last; `fading_ns`: since when nobody holds its lock.

    `made`: calls that it had made by then; `is_adrift`: it lives without a lock.
    """

    target: Target
    files: list[File]
    lock: int
    has_lock: bool
    fading_ns: int | None = None
    made: int = 0
    is_adrift: bool = False


class Guests(Kin):
    """Who is in the folder.

    Args:
        end_after_ns: with nobody there for so long, and somebody before, there is nothing left to trace; None: there
            always may be.
    """

    def __init__(
        self, folder: Folder, end_after_ns: int | None, shims: Shims, send: Send, clock: Callable[[], int],
        helpers: Callable[[], set[int]],
    ) -> None:  # fmt: skip
        super().__init__(shims, send, clock, helpers, follow=True)
        self._folder, self._end_after_ns = folder, end_after_ns
        self._guests: dict[int, _Guest] = {}
        self._keys: dict[tuple[int, int, int], Target] = {}
        self._next_look_ns = 0
        self._last_ns: int | None = None
        self._hidden = 0

    def any_live(self) -> bool:
        """Whether somebody is there, or may come."""
        if self._end_after_ns is None or self._last_ns is None:
            return True
        if self._guests or self._ended:
            self._last_ns = self._clock()
        return self._clock() - self._last_ns < self._end_after_ns

    def watch(self) -> None:
        """Who has come, who has ended."""
        now = self._clock()
        if now >= self._next_look_ns:
            self._next_look_ns = now + LOOK_NS
            self._look_around(now)
        super().watch()

    def _look_around(self, now: int) -> None:
        # Ends first: a file that is there at the second look was there when its maker's lock was gone, or is new.
        for guest in list(self._guests.values()):
            if guest.target.pidfd < 0 and not guest.target.ended and self._has_ended(guest, now):
                self._gone(guest.target)
        for file in self._folder.news(now):
            self._receive(file, now)

    def _receive(self, file: File, now: int) -> None:
        try:
            with Segment(file.fd) as segment:
                header = segment.header
        except (BadSegment, OSError) as error:
            os.close(file.fd)
            self._shims.refuse(None, f"{file.name}: {error}")
            return
        if len(self._guests) >= MAX_GUESTS:
            os.close(file.fd)
            self._shims.refuse(None, f"{file.name}: there are {MAX_GUESTS} processes already")
            return
        self._last_ns = now
        holder, lock = holder_of(file.fd), os.dup(file.fd)
        target = self._target_of(header, holder, file, now)
        self._enter_guest(target, file, lock, header.who.is_locked)
        self._pending.append((target, file.fd))
        self._adopt_pending()
        if holder is None and header.who.is_locked and target.pidfd < 0 and not target.ended:
            self._gone(target)  # it was over before we came

    def _enter_guest(self, target: Target, file: File, lock: int, has_lock: bool) -> None:
        guest = self._guests.get(target.proc)
        if guest is None:
            self._guests[target.proc] = _Guest(target, [file], lock, has_lock)
            return
        os.close(guest.lock)
        guest.files.append(file)
        guest.lock, guest.has_lock, guest.fading_ns = lock, has_lock, None

    def _target_of(self, header: Header, holder: int | None, file: File, now: int) -> Target:
        key = header.who.pid_ns, header.pid, header.start_ticks
        known = self._keys.get(key)
        if known is not None and not known.ended:
            self._runs_another(known, header, now)
            return known
        target = self._visible(holder, header, now) if holder else None
        self._keys[key] = target = target or self._hidden_one(header, file, now)
        return target

    def _runs_another(self, target: Target, header: Header, now: int) -> None:
        """Of one that is visible /proc tells it."""
        if target.pidfd < 0:
            target.facts = target.facts._replace(name=header.who.name or "?", cmdline=header.who.cmdline)
            self._tell_image(target, now)

    def _visible(self, pid: int, header: Header, now: int) -> Target | None:
        """The process that this namespace shows; None when it is not the one that made the segment, or gone."""
        with contextlib.suppress(OSError):
            if (facts_of(pid).ns_pid or pid) == header.pid:
                self.ancestors.find([pid])
                self._roots.append(pid)
                target = self._enter(pid, now)
                if target is not None:
                    self._learn_ranks(target, header, now)
                return target
        return None

    def _learn_ranks(self, target: Target, header: Header, now: int) -> None:
        """The environment of another user's process can't be read, and its segment tells what matters most of it."""
        if not target.rank_words and header.who.ranks:
            target.rank_words = header.who.ranks
            self._tell_image(target, now, env=target.rank_words)

    def _tell_image(self, target: Target, now: int, **more: dict[str, str]) -> None:
        body = {"name": target.facts.name, "cmdline": target.facts.cmdline, **more}
        self._send(Kind.IMAGE, {"proc": target.proc, "at_ns": now, **body})

    def _hidden_one(self, header: Header, file: File, now: int) -> Target:
        self._hidden += 1
        who = header.who
        facts = Facts(
            pid=MAX_PID + self._hidden, ns_pid=header.pid, ppid=0, name=who.name or "?", cmdline=who.cmdline,
            container_id=None, start_ns=start_ns_of_ticks(header.start_ticks), uid=file.uid,
        )  # fmt: skip
        target = self._add(facts, -1, now, who.ranks)
        if self._hidden == 1:
            self._send(Kind.NOTE, {"at_ns": now, "proc": None, "text": HIDDEN})
        if not who.is_locked:
            self._send(Kind.NOTE, {"at_ns": now, "proc": target.proc, "text": ADRIFT})
        return target

    def _is_below(self, pid: int) -> bool:
        return pid > 0 and super()._is_below(pid)

    def _is_over(self, target: Target) -> bool:
        # Without a pidfd it is not for Kin to say.
        return target.pidfd >= 0 and super()._is_over(target)

    def _has_ended(self, guest: _Guest, now: int) -> bool:
        """Whether the lock is gone, and not just the descriptor: programs that become daemons close all they have."""
        if guest.is_adrift or not guest.has_lock or holder_of(guest.lock) is not None:
            guest.fading_ns = None
            return False
        if guest.fading_ns is None:
            guest.fading_ns, guest.made = now, self._shims.made(guest.target)
        if now - guest.fading_ns < FADE_NS:
            return False
        if self._shims.made(guest.target) != guest.made:
            guest.is_adrift = True
            self._send(Kind.NOTE, {"at_ns": now, "proc": guest.target.proc, "text": ADRIFT})
        return not guest.is_adrift

    def _read_last(self, one: _Ended) -> None:
        super()._read_last(one)
        target, guest = one.target, self._guests.pop(one.target.proc, None)
        if guest is not None:
            os.close(guest.lock)
            for file in guest.files:
                self._folder.remove(file)
        if target.pid in self._roots:
            self._roots.remove(target.pid)
        for key in [key for key, known in self._keys.items() if known is target]:
            del self._keys[key]

    def close(self) -> None:
        """Give the descriptors back; files of processes that live stay."""
        for guest in self._guests.values():
            os.close(guest.lock)
        self._guests.clear()
