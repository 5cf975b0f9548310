"""The start-up of a job: which commands ran before the steady state, how long each, what they waited for, who cared."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from stallscope.aggregate.beginnings import Program
from stallscope.aggregate.process import Exit, Process
from stallscope.aggregate.state import State
from stallscope.diagnose.lineage import TRAINER, WORKER, Lineage
from stallscope.diagnose.spans import Span, covered, minus, union
from stallscope.diagnose.startphases import Phase, phases, steady_ns
from stallscope.diagnose.startwaits import Wait, Waits, is_for_child, is_of_its_own, is_pipe
from stallscope.diagnose.steps import StepsFound
from stallscope.wire.kinship import is_service

__all__ = ["Command", "StartUp", "start_up"]

MOST_COMMANDS, MOST_WAITS, MOST_LOOKED = 64, 16, 512
SHORTEST_NS = 50_000_000
DEPTH = 16
LEAST_NS = 200_000_000  # what is shorter is nothing to act on
ALIKE = 0.9
APART_NS = 100_000_000  # commands of a pipe begin nearer to one another
SLEEPS = ("nanosleep", "clock_nanosleep")  # who looks after children again and again
TERMINALS = ("/dev/pts/", "/dev/tty", "/dev/console")


class Command(NamedTuple):
    """A child process of the start-up that was no trainer, or what a launcher or trainer itself waited for.

    Attributes:
        what: the command line; by: what its parent ran when it was started.
        is_itself: what a launcher or trainer did between its commands.
        to_ns: its end, or the capture's where it still ran then.
        exact: whether begin and end were seen as they happened.
        own_ns: of that time what was neither its children's nor that of those whose output it read.
        waited: the place where it was longest; None where nobody looked.
        ignored: whether who started it went on as if it had succeeded; None where it did, or that is not known.
        avoidable_ns: how long others waited for it while it waited itself; 0 where nobody did.
        times, together_ns: how often its parent ran the same command, and what of those times was avoidable.
    """

    proc: int
    what: list[str]
    by: str | None
    is_itself: bool
    from_ns: int
    to_ns: int
    own_ns: int
    running: bool
    exact: bool
    waited: Wait | None
    exit: Exit | None
    ignored: bool | None
    avoidable_ns: int
    times: int = 1
    together_ns: int = 0


class StartUp(NamedTuple):
    """Rows in the order of time; `worst`: the index among `commands` of the largest avoidable one.

    `steady_ns`: where the start-up ends, None where no steady state was seen.
    """

    commands: list[Command]
    phases: list[Phase]
    worst: int | None
    steady_ns: int | None
    left_out: int


def start_up(state: State, lineage: Lineage, steps: StepsFound | None) -> StartUp:
    """From frames alone."""
    return _StartUp(state, lineage, steps).found()


class _StartUp:
    def __init__(self, state: State, lineage: Lineage, steps: StepsFound | None) -> None:
        self._state, self._lineage, self._steps = state, lineage, steps
        table = state.processes.table
        self._trainers = {p.proc: p for p in table.values() if p.traced and lineage.role(p.proc) == TRAINER}
        self._above = {one.proc for proc in self._trainers for one in lineage.ancestors(proc)}
        self._waits = Waits(state)
        self._began = {proc: self._programs(p)[0].at_ns for proc, p in table.items()}
        self._last_child: dict[int, int] = {}
        for p in table.values():
            if p.parent is not None:
                self._last_child[p.parent] = max(self._last_child.get(p.parent, 0), self._began[p.proc])
        self._family = self._longest()
        self._known_writers: dict[int, list[Span]] = {}
        self._known_own: dict[int, list[Span]] = {}
        self._others = {p.proc: p for p in self._of_others()}

    def _programs(self, process: Process) -> list[Program]:
        known = self._state.beginnings.programs.get(process.proc)
        return known or [Program(process.start_ns, process.name, process.cmdline)]

    def _longest(self) -> dict[int, list[Process]]:
        """By parent: its children that lasted long enough to matter, at most so many in all."""
        lasted = sorted(
            (-(span.to_ns - span.from_ns), p.proc) for p in self._state.processes.table.values()
            if (span := self._lasted(p)).to_ns - span.from_ns >= SHORTEST_NS and p.traced
        )  # fmt: skip
        family: dict[int, list[Process]] = defaultdict(list)
        for _, proc in lasted[:MOST_LOOKED]:
            process = self._state.processes.table[proc]
            if process.parent is not None:
                family[process.parent].append(process)
        return family

    def found(self) -> StartUp:
        """All of it."""
        steady = steady_ns(self._trainers.values(), self._steps)
        end = steady if steady is not None else self._last_begin()
        commands = [self._command(p, end) for p in self._of_commands(end)]
        commands += [row for p in self._others.values() for row in self._own_waits(p, end)]
        commands = self._together(commands)
        longest = sorted(commands, key=lambda c: (-c.avoidable_ns, -c.own_ns, c.from_ns, c.proc))[:MOST_COMMANDS]
        kept = sorted(longest, key=lambda c: (c.from_ns, c.proc))
        worst = _worst(kept)
        rows = phases(self._state, list(self._trainers.values()), self._steps)
        return StartUp(kept, rows, worst, steady, len(commands) - len(kept))

    def _together(self, commands: list[Command]) -> list[Command]:
        """Who looks again and again, `sleep` in between, waits as long as all of these together."""
        alike: dict[tuple[int | None, bool, tuple[str, ...]], list[Command]] = defaultdict(list)
        for one in commands:
            parent = one.proc if one.is_itself else self._state.processes.table[one.proc].parent
            alike[parent, one.is_itself, tuple(one.what)].append(one)
        found = []
        for group in alike.values():
            spans = union(Span(one.from_ns, one.to_ns) for one in group)
            ns = sum(one.avoidable_ns for one in group)
            if ns:  # those that ended before anybody looked are taken to have done the same
                ns += sum(one.own_ns for one in group if one.waited is None)
            ns = min(ns, covered(spans))
            times = 1 if group[0].is_itself else len(group)
            found += [one._replace(times=times, together_ns=ns if times > 1 else one.avoidable_ns) for one in group]
        return found

    def _last_begin(self) -> int | None:
        """Without steps: the newest trainer's first launch, or first call; None where no trainer has come so far."""
        firsts = [p.first_launch_ns or p.first_cuda_ns for p in self._trainers.values()]
        known = [ns for ns in firsts if ns is not None]
        return max(known) if known and len(known) == len(firsts) else None

    def _of_commands(self, end: int | None) -> Iterable[Process]:
        for p in self._state.processes.table.values():
            parent = self._state.processes.table.get(p.parent) if p.parent is not None else None
            is_job = p.proc in self._trainers or p.proc in self._above or self._lineage.role(p.proc) == WORKER
            if parent is None or not parent.traced or is_job or is_service(p):
                continue
            if end is None or self._began[p.proc] < end:
                yield p

    def _of_others(self) -> Iterable[Process]:
        """Those whose own waiting holds the start-up up: launchers and trainers."""
        table = self._state.processes.table
        roots = [p for p in table.values() if p.traced and (p.parent is None or not table[p.parent].traced)]
        chosen = {p.proc: p for p in [*roots, *self._trainers.values()]}
        chosen |= {proc: table[proc] for proc in self._above if table[proc].traced}
        return chosen.values()

    def _lasted(self, process: Process) -> Span:
        end = process.exit.at_ns if process.exit else self._state.now_ns
        return Span(self._began[process.proc], max(self._began[process.proc], end))

    def _is_exact(self, process: Process) -> bool:
        capture = self._state.capture
        return capture is not None and "bpf" in capture.sources and self._began[process.proc] >= capture.start_mono_ns

    def _command(self, process: Process, end: int | None) -> Command:
        lasted = self._lasted(process)
        own = self._own(process, lasted)
        waits = self._waits.of(process.proc, lasted.to_ns)
        waited = max((w.within(own) for w in waits), key=lambda w: w.ns, default=None)
        alone = minus(own, self._later(process))
        blocked = sum(w.ns for w in (w.within(alone) for w in waits) if w.task.syscall and not is_for_child(w.task))
        awaited = blocked >= LEAST_NS and self._awaited(process, end)
        program = self._programs(process)[-1]
        parent = self._state.beginnings.program_at(process.parent or 0, lasted.from_ns)
        is_subshell = parent is not None and program.cmdline == parent.cmdline
        what = ["(subshell)"] if is_subshell else program.cmdline or [program.name]
        seen = waited if waited and waited.ns else None
        return Command(
            process.proc, what, _title(parent), False, *lasted, covered(own), process.exit is None,
            self._is_exact(process), seen, process.exit, self._ignored(process), blocked if awaited else 0,
        )  # fmt: skip

    def _own(self, process: Process, lasted: Span) -> list[Span]:
        """The time that is neither its children's nor that of those that fill the pipe it reads from."""
        if process.proc not in self._known_own:
            self._known_own[process.proc] = self._find_own(process, lasted)
        return self._known_own[process.proc]

    def _find_own(self, process: Process, lasted: Span) -> list[Span]:
        waits = self._waits.of(process.proc, lasted.to_ns)
        children = [self._lasted(one) for one in self._family.get(process.proc, [])]
        if not waits:
            return minus([lasted], children)
        writers = self._writers(process.parent) if any(is_pipe(w.task) for w in waits) else []
        own = [lasted]
        for kind, others in ((is_for_child, children), (is_pipe, [*children, *writers])):
            stays = union(w.span for w in waits if kind(w.task))
            own = minus(own, [span for stay in stays for span in stay.common(union(others))])
        return own

    def _writers(self, parent: int | None) -> list[Span]:
        """When children of that process ran that read no pipe themselves."""
        if parent is None:
            return []
        if parent not in self._known_writers:
            family = self._family.get(parent, [])
            self._known_writers[parent] = union(self._lasted(one) for one in family if not self._reads_pipe(one))
        return self._known_writers[parent]

    def _reads_pipe(self, process: Process) -> bool:
        return any(is_pipe(w.task) for w in self._waits.of(process.proc, self._lasted(process).to_ns))

    def _later(self, process: Process) -> list[Span]:
        """When those ran that were started while it ran: it is in the background then, and they are waited for."""
        found: list[Span] = []
        for _ in range(DEPTH):
            lasted, parent = self._lasted(process), self._state.processes.table.get(process.parent or 0)
            if parent is None:
                break
            for one in self._family.get(parent.proc, []):
                if lasted.from_ns + APART_NS <= self._began[one.proc] < lasted.to_ns:
                    found += self._own(one, self._lasted(one))
            if parent.proc in self._others:
                break
            process = parent
        return found

    def _awaited(self, process: Process, end: int | None) -> bool:
        """Whether who started it waited for it, and others for him, up to a launcher or trainer.

        What outlives the start-up was not waited for.
        """
        for _ in range(DEPTH):
            lasted, parent = self._lasted(process), self._state.processes.table.get(process.parent or 0)
            if parent is None or (end is not None and lasted.to_ns > end) or not self._waits_for(parent, lasted):
                return False
            if parent.proc in self._others:
                return True
            process = parent
        return False

    def _waits_for(self, parent: Process, child: Span) -> bool:
        """Whether a process waited for children most of the time that one ran; so where it was never looked at."""
        waits = [w for w in self._waits.of(parent.proc, self._state.now_ns) if child.common([w.span])]
        idle = [w.span for w in waits if is_for_child(w.task) or is_pipe(w.task) or w.task.syscall in SLEEPS]
        waited = covered(child.common(idle))
        return 2 * waited >= covered(child.common(w.span for w in waits))

    def _ignored(self, process: Process) -> bool | None:
        """Whether its parent went on after its failure: ran on for long, began something else, or ended well."""
        ended, parent = process.exit, self._state.processes.table.get(process.parent or 0)
        if ended is None or parent is None or not (ended.code or ended.signal):
            return None
        later = [self._last_child[parent.proc]]
        later += [one.at_ns for one in self._programs(parent)[1:]]
        went_on = any(ns > ended.at_ns for ns in later)
        if parent.exit is not None:
            went_on = went_on or parent.exit.code == 0
        return went_on or None

    def _own_waits(self, process: Process, end: int | None) -> list[Command]:
        """What a launcher or trainer itself waited for, until its first CUDA call."""
        lasted, rows = self._lasted(process), []
        until = min(ns for ns in (lasted.to_ns, end, process.first_cuda_ns) if ns is not None)
        children = union(self._lasted(one) for one in self._family.get(process.proc, []))
        for w in self._waits.of(process.proc, until):
            # A launcher whose children run looks after them, however it waits.
            may_look = process.proc not in self._trainers and not is_of_its_own(w.task)
            looks_after = may_look or is_for_child(w.task) or is_pipe(w.task)
            own = minus([w.span], children) if looks_after else [w.span]
            wait = w.within(own)
            if w.task.syscall is None or wait.ns < LEAST_NS or (w.task.file or "").startswith(TERMINALS):
                continue
            if is_for_child(w.task):
                continue  # children that were there before the capture, or have not been told
            program = self._state.beginnings.program_at(process.proc, w.span.from_ns)
            words = [] if program is None else program.cmdline or [program.name]
            rows.append(
                Command(process.proc, words, None, True, *w.span, wait.ns, False, False, wait, None, None, wait.ns)
            )
        return sorted(rows, key=lambda row: -row.own_ns)[:MOST_WAITS]


def _worst(commands: list[Command]) -> int | None:
    """The largest avoidable one. Of those that took as long at the same time, the one that was done last waited for
    the others."""
    numbers = range(len(commands))
    largest = max(numbers, key=lambda i: (commands[i].together_ns, commands[i].avoidable_ns), default=None)
    if largest is None or commands[largest].together_ns < LEAST_NS:
        return None
    most = commands[largest]
    beside = (i for i in numbers if commands[i].from_ns < most.to_ns and commands[i].to_ns > most.from_ns)
    alike = (i for i in beside if commands[i].together_ns >= ALIKE * most.together_ns)
    return max(alike, key=lambda i: commands[i].to_ns)


def _title(program: Program | None) -> str | None:
    """Its script, or its name."""
    if program is None:
        return None
    words = program.cmdline[1:]
    script = next((word for word in words if not word.startswith("-")), "")
    is_text = any(word == "-c" for word in words[: words.index(script) if script else 0])
    return (not is_text and script.rpartition("/")[2]) or program.name
