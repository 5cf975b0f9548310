"""The capture of a daemon: every process of the node that uses CUDA, for as long as the daemon lives.

Processes are found by the library that they map: by the kernel's news of mappings, and by one look at /proc at the
start and after a change of the rules. The aggregator may be gone for a while: records wait in the rings meanwhile, and
what no longer fits there is counted as ever.
"""

from __future__ import annotations

import os
import socket
from collections import OrderedDict
from typing import Any, Protocol

from stallscope.capture.admission import Admission
from stallscope.capture.costs import Costs
from stallscope.capture.discovery import Lost, Mapped
from stallscope.capture.libmatch import is_shim, match
from stallscope.capture.loader import Loaded
from stallscope.capture.nodepopulation import NodePopulation
from stallscope.capture.oom import Victims
from stallscope.capture.parser_client import ParserClient
from stallscope.capture.procfs import Facts, executable_mappings, facts_of
from stallscope.capture.retained import NodeOutbox
from stallscope.capture.rights import require_readable
from stallscope.capture.session import Session, Settings
from stallscope.capture.shims import Shims
from stallscope.capture.target import Target
from stallscope.errors import PermissionProblem, StallscopeError
from stallscope.wire.frames import Kind

__all__ = ["NodeSession", "Reader"]

FIRST_PAUSE_NS, LONGEST_PAUSE_NS, ABSENT_PAUSE_NS = 100_000_000, 10_000_000_000, 500_000_000
SETTLED_NS = 30_000_000_000  # an aggregator that lived so long is started again at once
MAX_DECIDED = MAX_STRANGERS = 4096
BUDGET_NS = 20_000_000
MAX_TOLD = 64
JITTER_NS = 5_000_000


class Reader(Protocol):
    """Where the stream goes."""

    def connect(self) -> socket.socket | None:
        """A new aggregator, or the same one once more; None while there is none."""

    def hello(self) -> dict[str, Any]:
        """The first frame of a stream that begins now."""


class NodeSession(Session):
    """`start`, `run`, `finish`, `close` as Session; `reload` and `sample` between looks.

    Args:
        admission: which processes are traced.
        reader: asked for another aggregator when one is gone.
        most_ended: after so many ended processes the aggregator is told to begin anew.
        most_bytes: likewise after so many bytes; None where no recording needs it.

    Attributes:
        unreadable: processes that could not be looked into.
        missed: processes that had ended before they could be looked at.
        streams: times that an aggregator began.
    """

    population: NodePopulation
    population_type = NodePopulation
    standstill_ns = 300_000_000
    outbox: NodeOutbox

    def __init__(
        self, settings: Settings, loaded: Loaded, outbox: NodeOutbox, parser: ParserClient, costs: Costs, shims: Shims,
        *, admission: Admission, reader: Reader, most_ended: int, most_bytes: int | None,
    ) -> None:  # fmt: skip
        super().__init__(settings, loaded, outbox, parser, costs, shims)
        self._admission, self._reader = admission, reader
        self._most_ended, self._most_bytes = most_ended, most_bytes
        self.population.admits = self._admits
        self._comms.frees = self._shim_comms.frees = True
        self._decided: OrderedDict[int, Facts] = OrderedDict()
        self._strangers: OrderedDict[int, int] = OrderedDict()
        self._rescan_ns = 0
        self._ended_then = 0
        self._begun_ns = self._connected_ns = self._told_ns = self._clock()
        self._pause_ns, self._retry_ns = FIRST_PAUSE_NS, 0
        self._told = 0
        self.unreadable = self.missed = 0
        self.streams = 1

    def start(self) -> None:
        """As Session's, then the one look at /proc."""
        super().start()
        self.scan(None)

    def scan(self, since_ns: int | None) -> None:
        """Look at every process. `since_ns`: since when those that are new may have made calls unseen."""
        for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdigit()):
            if pid == os.getpid() or self.population.by_pid(pid) is not None:
                continue
            try:
                uses = any(match(m.path) or is_shim(m.path) for m in executable_mappings(pid))
            except PermissionError:
                uses = True  # who it is decides whether that is worth a word
            except OSError:
                continue  # it has ended, or is a kernel thread
            if uses:
                self._consider(pid, since_ns, is_certain=False)

    def _stranger(self, event: Mapped) -> None:
        if event.pid != os.getpid() and match(event.path):
            if len(self._strangers) < MAX_STRANGERS or event.pid in self._strangers:
                self._strangers.setdefault(event.pid, event.at_ns)
            else:
                self._rescan_ns = min(self._rescan_ns or event.at_ns, event.at_ns)

    def _read_mappings(self) -> None:
        """Then the strangers, for some ms: whoever starts processes by the thousand must not stop the loop."""
        super()._read_mappings()
        end_ns = self._clock() + BUDGET_NS
        while self._strangers and self._clock() < end_ns:
            pid, at_ns = self._strangers.popitem(last=False)
            if self.population.by_pid(pid) is None:
                self._consider(pid, at_ns, is_certain=True)

    def _consider(self, pid: int, since_ns: int | None, *, is_certain: bool) -> None:
        """Trace it if the rules say so. `is_certain`: it has mapped a library of CUDA."""
        try:
            facts = facts_of(pid)
        except (OSError, ValueError, LookupError):
            if is_certain:
                self._miss(pid, since_ns)
            return
        if pid in self._decided and _is_same(self._decided[pid], facts):
            return
        why = self._admission.why_not(facts)
        if why is not None:
            self._admission.count(why)
        elif not self._may_read(facts, is_certain):
            why = "it can't be looked into"
        elif self.population.adopt_found(pid, since_ns) is None and not os.path.exists(f"/proc/{pid}"):
            self._miss(pid, since_ns)
        if why is not None:
            self._decide(facts)

    def _decide(self, facts: Facts) -> None:
        """Not to be asked again about the same program, which maps three libraries."""
        self._decided[facts.pid] = facts
        while len(self._decided) > MAX_DECIDED:
            self._decided.popitem(last=False)

    def _may_read(self, facts: Facts, is_certain: bool) -> bool:
        who = f"pid {facts.pid} ({facts.name}, user {facts.uid})"
        try:
            require_readable(facts.pid, f"cannot trace {who}")
        except PermissionProblem as problem:
            # Of a process whose mappings are hidden nobody knows whether it uses CUDA: no word, but a number.
            self.unreadable += 1
            if is_certain:
                now = self._clock()
                self._gap(None, now, now, f"{who} is not traced: {problem.why}")
                self._say(f"{who} uses CUDA and is not traced: {problem.why}")
            return False
        except StallscopeError:
            return True  # ended: whoever adopts it will see
        return True

    def _say(self, text: str) -> None:
        """A note in the stream, at most MAX_TOLD of them."""
        self._told += 1
        if self._told <= MAX_TOLD:
            self._note(self._clock(), text)

    def _miss(self, pid: int, since_ns: int | None) -> None:
        self.missed += 1
        now = self._clock()
        reason = f"pid {pid} had ended before it could be looked at"
        self._gap(None, now if since_ns is None else since_ns, now, reason)

    def _gap(self, count: int | None, from_ns: int, to_ns: int, reason: str, source: str = "link") -> None:
        body = {"source": source, "proc": None, "count": count, "from_ns": from_ns, "to_ns": to_ns, "reason": reason}
        self.outbox.send(Kind.GAP, body)

    def _admits(self, pid: int) -> bool:
        try:
            why = self._admission.why_not(facts_of(pid))
        except (OSError, ValueError, LookupError):
            return False
        if why is not None:
            self._admission.count(why)
        return why is None

    def _look_again(self, event: Lost, since_ns: int) -> None:
        super()._look_again(event, since_ns)
        self._rescan_ns = min(self._rescan_ns or since_ns, since_ns)

    def _is_over(self) -> bool:
        return False

    def _tick(self, now: int, *, told: bool) -> None:
        is_slow = now >= self._next_slow_ns
        super()._tick(now, told=told)
        if not self.outbox.broken:
            self._told_ns = now
        if is_slow:
            self._linker.let_go_of_idle()
            if self._rescan_ns:  # milliseconds on a node with many processes
                since_ns, self._rescan_ns = self._rescan_ns, 0
                self.scan(since_ns)
            self._begin_anew_if_full()

    def _begin_anew_if_full(self) -> None:
        """What an aggregator keeps of ended processes has an end, and a recording, too. Not amid a suspected block."""
        ended = self.outbox.retained.ended - self._ended_then
        is_full = ended >= self._most_ended or (self._most_bytes and self.outbox.sent_bytes >= self._most_bytes)
        is_very_full = ended >= self._most_ended + self._most_ended // 32 or (
            self._most_bytes and self.outbox.sent_bytes >= 2 * self._most_bytes
        )
        if is_full and self.outbox.bulk_ok and (is_very_full or not self._suspicion.on):
            self.begin_stream("the aggregator forgot what had ended")

    def _finds_reader(self, now: int) -> bool:
        """Ask for another aggregator, ever more seldom while they don't last."""
        if now >= self._retry_ns:
            if self._connected_ns and now - self._connected_ns > SETTLED_NS:
                self._pause_ns = FIRST_PAUSE_NS
            sock = self._reader.connect()
            if sock is None:
                self._retry_ns = now + ABSENT_PAUSE_NS
            else:
                self._connected_ns, self._retry_ns = now, now + self._pause_ns
                self._pause_ns = min(2 * self._pause_ns, LONGEST_PAUSE_NS)
                self.outbox.reopen(sock)
                self.begin_stream("the aggregator was restarted")
        return True

    def begin_stream(self, why: str) -> None:
        """Tell everything that is state to an aggregator that knows nothing."""
        now, ended = self._clock(), self.outbox.retained.ended
        told = self.outbox.tell_again(self._reader.hello(), now)
        self._gap(told, self._begun_ns, now, f"{why}: calls of before are counted, without records", "aggregator")
        self._note(now, f"{why}: {ended} processes that had ended before are not told again")
        for reader in (self._comms, self._shim_comms):
            reader.tell_again(now)
        self._suspicion.tell_again(now)
        if self.population.victims is not None:  # it tells so many and no more
            self.population.victims = Victims(self.outbox.send, self.population.live)
        self._told_flying = False
        self._ended_then = ended
        self.streams += 1

    def reload(self, admission: Admission) -> tuple[int, int]:
        """Other rules from now on; how many processes were let go, and how many came."""
        self._admission = admission
        self._decided.clear()
        gone = [target for target in self.population.live() if self._is_out(target)]
        for target in gone:
            self.population.release(target)
            self.outbox.retained.release(target.proc)
        before = len(self.population.live())
        self.scan(None)
        came = len(self.population.live()) - before
        if gone and not self.outbox.broken:
            self.begin_stream("processes were let go by a change of the rules")
        return len(gone), came

    def _is_out(self, target: Target) -> bool:
        """A child stays with its parent, whatever the rules say of itself."""
        if target.parent is not None and any(target.parent == other.proc for other in self.population.live()):
            return False
        return self._admission.why_not(target.facts) is not None

    def sample(self, one_in: float) -> None:
        """Record another share of launches, copies and short waits from now on."""
        self.settings.one_in = one_in
        self.tables.sample(one_in)
        self.shims.sample(one_in)
        self._note(self._clock(), f"from here on 1 in {one_in:g} launches, copies and short waits is recorded")

    def status(self) -> dict[str, Any]:
        """What `stallscope ctl status` tells of capture."""
        now = self._clock()
        targets = self.population.live()
        links = sum(len(entries) + len(returns) for entries, returns in (t.links() for t in targets))
        cost = self._costs.measure(now)
        return {
            "uptime_ns": now - self._begun_ns,
            "backend": self._loaded.backend,
            "sample_one_in": self.settings.one_in,
            "processes": [_about(target) for target in targets],
            "links": links + self._linker.shared_links(),
            "ended": self.outbox.retained.ended,
            "denied": dict(self._admission.denied),
            "unreadable": self.unreadable,
            "missed": self.missed,
            "lost_by": {name: count for name, count in self._lost_by().items() if count},
            "aggregator": {"connected": not self.outbox.broken, "streams": self.streams,
                           "queued_bytes": self.outbox.queued_bytes},
            "cost": {key: cost[key] for key in ("cpu_ns", "rss_bytes", "processes")},
        }  # fmt: skip


def _is_same(one: Facts, other: Facts) -> bool:
    """Start times are read by a clock that jitters."""
    return (one.uid, one.cmdline) == (other.uid, other.cmdline) and abs(one.start_ns - other.start_ns) < JITTER_NS


def _about(target: Target) -> dict[str, Any]:
    libraries = sorted({linked.library for linked in target.linked.values()})
    return {"pid": target.pid, "name": target.facts.name, "uid": target.facts.uid, "libraries": libraries,
            "container_id": target.facts.container_id, "by": "shim" if target.preloaded else "bpf"}  # fmt: skip
