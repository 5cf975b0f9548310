"""The capture that `attach` makes with BPF: its tables, links, and the order in which they are set up."""

from __future__ import annotations

import contextlib
import select
from dataclasses import dataclass, field
from typing import Any

from stallscope.capture.carriers import Carriers
from stallscope.capture.commreader import CommReader
from stallscope.capture.costs import Costs
from stallscope.capture.discovery import Discovery, Lost, Mapped
from stallscope.capture.exitprobes import ExitProbes
from stallscope.capture.gaps import LOSS_PLACES, TURNED_AWAY, Losses
from stallscope.capture.inference import Inference
from stallscope.capture.libmatch import WANTED
from stallscope.capture.linker import Linker
from stallscope.capture.links import RawTracepoint, close_all
from stallscope.capture.linkstyle import Style
from stallscope.capture.loader import Loaded
from stallscope.capture.loop import POLL_MS, Loop
from stallscope.capture.outbox import Outbox
from stallscope.capture.parser_client import ParserClient
from stallscope.capture.pipelines import Pipelines
from stallscope.capture.population import Population
from stallscope.capture.procfs import Mapping
from stallscope.capture.reaper import Reaper
from stallscope.capture.returns import Returns
from stallscope.capture.rings import Thread
from stallscope.capture.sharing import LINKS_PER_FILE, Sharing
from stallscope.capture.shims import Shims
from stallscope.capture.sites import Sites
from stallscope.capture.suspicion import EARLY_NS
from stallscope.capture.tables import CommRows, Tables
from stallscope.capture.target import Target
from stallscope.capture.threads import Threads
from stallscope.capture.ways import NO_LIMIT, way_of
from stallscope.errors import CaptureProblem
from stallscope.wire.frames import Kind

__all__ = ["Session", "Settings"]

BATCH_RECORDS = 8192
# Programs whose tracepoint a kernel may lack, and what is not known then.
UNNEEDED = {"on_signal": "senders of signals are not known", "on_oom": "kills for want of memory are not told"}
INFLIGHT_MIN_NS = 100_000_000
_REC_BYTES = 104


@dataclass
class Settings:
    """What the user asked for.

    Attributes:
        pids: processes to attach to.
        more: others of their job.
        children: whether their children are traced too.
        one_in: record one in so many launches, copies and short waits.
        long_ns: waits from this duration on are always recorded.
        links_per_file: filtered links a file before unfiltered ones take over (capture/sharing.py).
        duration_s: end after so many seconds; None = when the targets end.
        kernel_release: decide about return probes as on that kernel (capture/seccomp.py); None = this one's.
        returns: whether returns are probed (capture/returns.py).
    """

    pids: list[int]
    children: bool = True
    one_in: float = 100.0
    long_ns: int = 200_000
    duration_s: float | None = None
    links_per_file: int = LINKS_PER_FILE
    kernel_release: str | None = None
    returns: str = "auto"
    more: list[int] = field(default_factory=list)


class Session(Loop):
    """Links, loops, unlinks. Use `start`, then `run`, then `finish`, and always `close`.

    A process that has the shim loaded is read through its segment, and nothing of it is linked.
    """

    population_type: type[Population] = Population

    def __init__(
        self, settings: Settings, loaded: Loaded, outbox: Outbox, parser: ParserClient, costs: Costs, shims: Shims
    ) -> None:
        super().__init__(outbox, shims, parser, costs, settings.duration_s)
        self.settings = settings
        self._loaded = loaded
        self.tables = Tables(loaded.maps, settings)
        reaper = Reaper()
        returns = Returns(parser, settings.returns, settings.kernel_release)
        sharing = Sharing(
            way_of(loaded),
            self.tables.share,
            reaper.close_later,
            self.tables.spans.set,
            self._clock,
            # Unfiltered return probes would stand in strangers, whose seccomp filters nobody asked for.
            settings.links_per_file if returns.anywhere else NO_LIMIT,
            returns_anywhere=returns.anywhere,
        )
        self._linker = Linker(sharing, parser, self.tables.ranges.set, outbox.send, self._clock, returns)
        self.population: Population = self.population_type(
            self.tables, self._linker, sharing, reaper, shims, outbox.send, self._clock, follow=settings.children
        )
        self._watch_images()
        self._carriers = Carriers(self._linker, self._clock)
        self._inference = Inference(parser, self.tables.rows, outbox.send, self._clock)
        self._losses = Losses(self._read_losses, outbox.send)
        program = loaded.programs["on_exiting"] if loaded.style is Style.MULTI else None
        self._exit_probes = ExitProbes(program, parser, reaper.close_later)
        self._comms = CommReader(CommRows(self.tables), parser, outbox.send)
        self._sites = Sites(
            self.tables.sites, parser, outbox.send, self._clock, self.population.proc_of_slot,
            works=loaded.style is not Style.PERF_NO_COOKIE,
        )  # fmt: skip
        self._threads = Threads(self.tables.rows.deeds, self._sites.python_of, outbox.send)
        self.population.on_burial = self._threads.bury
        self._pipelines = Pipelines(
            outbox.send, self._clock, self._sites.reader_of,
            self._threads.is_fed, self.tables.is_inside,
        )  # fmt: skip
        self._tracepoints: list[RawTracepoint] = []
        self._discovery: Discovery | None = None
        self._next_early_ns = 0
        self._told_to = (0, 0)
        self._mappings_read_ns = 0
        self._poller = select.epoll()

    def start(self) -> None:
        """Everything that can be linked now is linked when this returns.

        Raises TargetProblem when no given process is there, PermissionProblem or CaptureProblem when the kernel
        refuses.
        """
        self.tables.find_namespace(self._loaded.programs["who_am_i"])
        for program, tracepoint in self._loaded.tracepoints.items():
            if program == "who_am_i":
                continue
            self._trace(program, tracepoint)
        # Discovery before the scan of the maps: what is mapped in between is seen twice rather than never.
        self._discovery = Discovery(wanted=WANTED, whole=lambda pid: self.population.by_pid(pid) is not None)
        self._mappings_read_ns = self._clock()
        # Edge-triggered: only the wakeups that process events force end a pause early. Level-triggered, any record that
        # waits in the ring would, and the loop would spin as long as the target makes calls.
        self._poller.register(self.tables.life.fileno(), select.EPOLLIN | select.EPOLLET)
        self._losses.poll(self._clock())
        self.shims.calibrate()
        self.population.adopt(self.settings.pids, self.settings.more)
        self._carriers.rush(self.population.live())
        self._sites.rush(self.population.live())
        for target in self.population.live():
            self._inference.search(target)
        self.look()  # what came while the stacks were searched
        self._begin_ticking()
        self._next_early_ns = self._clock() + EARLY_NS  # calls that began before are looked for again at the next tick

    def _trace(self, program: str, tracepoint: str) -> None:
        try:
            self._tracepoints.append(RawTracepoint.attach(self._loaded.programs[program], tracepoint))
        except CaptureProblem as problem:
            if program not in UNNEEDED:
                raise
            self._note(self._clock(), f"{UNNEEDED[program]}: {problem.what} ({problem.why})")
            if program == "on_oom":
                self.population.victims = None

    def _pause(self) -> None:
        self._poller.poll(POLL_MS / 1000)

    def _mark(self) -> None:
        self._told_to = self.tables.newest()
        self.shims.mark()

    def _is_told(self) -> bool:
        return self.tables.read_up_to(self._told_to) and self.shims.is_told()

    def _read_news(self) -> None:
        # Before the news: a file is asked for a library inside it only when the library had time to come by its name.
        self._carriers.step(self.population.live())
        self._read_mappings()
        self.population.settle()
        self._sites.look(self.population.live())
        if self.outbox.bulk_ok:
            self._pipelines.step()

    def _read_losses(self) -> dict[str, int]:
        return {name: self.tables.ctl.get(place) for place, name in LOSS_PLACES.items()}

    def _poll_losses(self, now: int) -> None:
        self._losses.poll(now)

    def _lost_by(self) -> dict[str, int]:
        return {**self._losses.totals(), **self.shims.lost_by()}

    def _close_losses(self, now: int) -> None:
        self._losses.finish(now)
        self.shims.close_losses(now)
        for place, what in TURNED_AWAY.items():
            if count := self.tables.ctl.get(place):
                self._note(now, f"{count} {what}")

    def _look_closer(self, now: int, *, slow: bool) -> None:
        if slow or (self._next_early_ns and now >= self._next_early_ns):
            self._check_inferred()
        self.shims.watch(self.population.live())
        self._exit_probes.look(self.population.live(), now)
        self._comms.look(self.population.live(), now)

    def _check_inferred(self) -> None:
        self._next_early_ns = 0
        for target in self.population.live():
            self._inference.check(target)

    def _slow(self, now: int) -> None:
        self._sites.send()
        self._threads.look(self.population.live(), now)
        # Trainers with worker processes are looked at for these.
        crews = self._workers.crews.by_trainer
        self._pipelines.find([target for target in self.population.live() if target.proc not in crews], now)
        super()._slow(now)

    def _open_tap(self, on: bool) -> None:
        self.tables.open_tap(on)
        super()._open_tap(on)

    def _callers(self, target: Target) -> list[Thread]:
        return [*self.tables.rows.rows_of_tgid(target.pid), *super()._callers(target)]

    def _pump_once(self, force: bool) -> bool:
        calls = self.tables.vital.drain(BATCH_RECORDS) if force or self.outbox.vital_ok else None
        bulk = self.tables.bulk.drain(BATCH_RECORDS) if force or self.outbox.bulk_ok else None
        # Process events are read after the calls and told before them: whoever made a call had been forked by then.
        life = self.tables.life.drain(BATCH_RECORDS)
        for index in range(life.n_recs):
            self.population.event(bytes(life.recs[index * _REC_BYTES : (index + 1) * _REC_BYTES]))
        if calls is not None:
            self.outbox.send_records(calls)
        if bulk is not None:
            self.outbox.send_records(bulk)
        has_more = self.shims.drain() if force or self.outbox.bulk_ok else False
        return has_more or any(d is not None and (d.n_recs or d.n_uids) for d in (calls, bulk, life))

    def _read_mappings(self) -> None:
        if self._discovery is None:
            return
        since, self._mappings_read_ns = self._mappings_read_ns, self._clock()
        for event in self._discovery.read():
            if isinstance(event, Mapped):
                target = self.population.by_pid(event.pid)
                if target is not None:
                    self._link_mapped(target, event)
                else:
                    self._stranger(event)
            elif isinstance(event, Lost):
                self._look_again(event, since)

    def _stranger(self, event: Mapped) -> None:
        """A process that is not traced mapped a library of CUDA."""

    def _look_again(self, event: Lost, since_ns: int) -> None:
        """The kernel had more news of mappings than fitted: look at every process instead."""
        text = f"{event.missing} mapping records were lost; every process was looked at again"
        self.outbox.send(Kind.NOTE, {"at_ns": self._clock(), "proc": None, "text": text})
        for target in self.population.live():
            self._linker.link_process(target, since_ns)  # what is new may be as old as the last read

    def _link_mapped(self, target: Target, event: Mapped) -> None:
        mapping = Mapping(event.address, event.address + event.length, event.pgoff, event.dev, event.inode, event.path)
        self._linker.link_mapping(target, mapping, event.at_ns, self.population.is_program(target, event.inode))

    def _flying(self, now: int, *, final: bool) -> list[Any]:
        least = 0 if final else INFLIGHT_MIN_NS
        rows, sites = self.tables.inflight(least, now, self.population.proc_of_slot)
        self._flying_sites = self._sites.numbers(sites)
        return rows + self.shims.inflight(least, now, as_counted=final)

    def _let_go(self) -> None:
        self._read_mappings()
        self.population.settle(final=True)
        self._exit_probes.close()
        self.population.unlink_all()
        self._sites.finish(self.population.live())
        self._threads.look(self.population.live(), self._clock())
        self._pipelines.find([], self._clock())

    def _last_look(self, target: Target) -> None:
        self._inference.check(target)
        self._linker.tell_silent(target, final=True)

    def _oddities(self) -> dict[str, int]:
        rings = (self.tables.vital, self.tables.bulk, self.tables.life)
        return {
            "times a ring made no sense and was emptied": sum(ring.corrupt for ring in rings),
            "records of unknown size were skipped": sum(ring.skipped for ring in rings),
            **{f"processes whose end is not timed: {why}": n for why, n in self._exit_probes.failed.items()},
            "kills for want of memory were not told": self.population.victims.turned_away
            if self.population.victims
            else 0,
            "times a thread's calls under way could not be read": self.tables.rows.torn,
        }

    def close(self) -> None:
        """Give every descriptor back; safe to call at any point."""
        with contextlib.suppress(OSError):
            self._exit_probes.close()
            self.population.unlink_all()
        super().close()
        close_all(list(self._tracepoints), [])
        self._tracepoints = []
        self._poller.close()
        if self._discovery is not None:
            self._discovery.close()
            self._discovery = None
        self.tables.close()
        self._loaded.close()
