"""Start-ups from synthetic streams: what is a command's own time, who waited for whom, what a late capture can say."""

from __future__ import annotations

from typing import Any

import pytest
from aggregate_kit import START, Kit, one

from stallscope.diagnose.incident import Found
from stallscope.diagnose.spans import Span, covered, minus
from stallscope.diagnose.steps import Part, Range, SlowStep, StepsFound
from stallscope.output.terminal import render
from stallscope.wire.frames import Kind

S = 1_000_000_000
TRAIN = ["python3", "train.py"]
SCRIPT = ["sh", "launch.sh"]


class StartUp(Kit):
    """A launcher (proc 1) that begins with the capture, its commands, a trainer."""

    def __init__(self, **changes: Any) -> None:
        super().__init__(**changes)
        self.begin(1, None, SCRIPT, 0.0)

    def begin(self, proc: int, parent: int | None, cmdline: list[str], at_s: float, **more: Any) -> None:
        """Forked as its parent's image, then executes at once."""
        at = START + int(at_s * S)
        self.process(
            proc, pid=100 + proc, parent=parent, name=cmdline[0], cmdline=cmdline, start_ns=at, at_ns=at, **more
        )

    def end(self, proc: int, at_s: float, code: int | None = 0, signal: int | None = None) -> None:
        self.add(Kind.EXIT, proc=proc, at_ns=START + int(at_s * S), code=code, signal=signal)

    def command(self, proc: int, parent: int, words: str, from_s: float, to_s: float, code: int | None = 0) -> None:
        self.begin(proc, parent, words.split(), from_s)
        self.end(proc, to_s, code)

    def sees(
        self, proc: int, at_s: float, syscall: str | None, file: str | None = None, last_s: float | None = None
    ) -> None:
        """A look that finds it in another place than the one before did."""
        task = [100 + proc, "x", "S" if syscall else "R", syscall, "wchan" if syscall else None, file, 0]
        last = None if last_s is None else START + int(last_s * S)
        self.add(Kind.PLACE, at_ns=START + int(at_s * S), proc=proc, last_ns=last, thread=task)

    def train(self, proc: int, from_s: float, first_s: float) -> None:
        """A trainer; its library is mapped half a second before its first call."""
        self.begin(proc, 1, TRAIN, from_s)
        self.link("CUDART", proc)
        self.frames[-1][1].update(at_ns=START + int((first_s - 0.5) * S), appeared_ns=START + int((first_s - 0.5) * S))
        self.recs.append(self.record("cudaMalloc", 2, slot=proc, at=START + int(first_s * S), ns=250_000_000))
        self.recs.append(self.record("cudaLaunchKernel", 0, slot=proc, at=START + int((first_s + 1) * S)))
        self.count("cudaMalloc", proc, calls=1)
        self.count("cudaLaunchKernel", proc, calls=1)

    def rows(self, steps: StepsFound | None = None) -> list[dict[str, Any]]:
        self.counters()
        self.add(Kind.BYE, at_ns=START + 60 * S, reason="x")
        self.full = self.report(Found(steps=steps))
        rows: list[dict[str, Any]] = self.full["startup"]
        return rows

    def told(self, steps: StepsFound | None = None) -> dict[str, dict[str, Any]]:
        """Commands by their first word."""
        return {row["command"].split()[0]: row for row in self.rows(steps) if "command" in row}

    def largest(self) -> str | None:
        found = [name for name, row in self.told().items() if row["largest"]]
        assert len(found) < 2
        return found[0] if found else None


def test_a_hidden_failure() -> None:
    kit = StartUp()
    kit.command(2, 1, "grep -q x /proc/kmsg", 1, 19, code=1)
    kit.sees(1, 1.3, "wait4")
    kit.sees(2, 1.2, "read", "/proc/kmsg")
    kit.train(3, 19.5, 25)
    grep = kit.told()["grep"]
    assert (grep["at_ns"], grep["duration_ns"], grep["own_ns"]) == (1 * S, 18 * S, 18 * S)
    assert grep["waited_for"] == {
        "syscall": "read", "file": "/proc/kmsg", "wchan": "wchan", "duration_ns": 18 * S, "duration_ns_is": "estimated",
    }  # fmt: skip
    assert (grep["exit"], grep["went_on"], grep["largest"]) == ({"code": 1, "signal": None}, True, True)
    text = " ".join(render(kit.full, 200, tty=False).split())
    said = "18.0 s: `grep -q x /proc/kmsg` (pid 102, by launch.sh) waited in read() on /proc/kmsg, exit 1, and launch.sh went on"
    assert said in text
    assert "the trainer: interpreter and imports 5.00 s, first CUDA call 250 ms" in text


@pytest.mark.parametrize(("code", "shell", "went_on"), [(0, 1, None), (1, 1, None), (1, 0, True)])
def test_whether_the_failure_was_ignored(code: int, shell: int, went_on: bool | None) -> None:
    """A script that ends with the same failure passed it on."""
    kit = StartUp()
    kit.command(2, 1, "check", 1, 3, code=code)
    kit.end(1, 3.1, shell)
    assert kit.told()["check"]["went_on"] is went_on


def test_a_shell_that_waits_for_its_child() -> None:
    """By a look where there was one, and without one all the same."""
    kit = StartUp()
    kit.begin(2, 1, ["sh", "-c", "sleep 3"], 1)
    kit.command(3, 2, "sleep 3", 1.1, 4.1)
    kit.end(2, 4.2)
    kit.sees(2, 1.2, "wait4")
    kit.sees(3, 1.3, "clock_nanosleep")
    told = kit.told()
    assert told["sh"]["own_ns"] == pytest.approx(0.2 * S) and told["sh"]["avoidable_ns"] == 0
    assert told["sleep"]["own_ns"] == pytest.approx(3 * S) and told["sleep"]["largest"]


def test_who_reads_what_another_one_writes() -> None:
    kit = StartUp()
    kit.command(2, 1, "slow", 1, 4)
    kit.command(3, 1, "cat", 1, 4)
    kit.sees(2, 1.2, "recvfrom", "socket:[5]")
    kit.sees(3, 1.2, "read", "pipe:[7]")
    told = kit.told()
    assert (told["cat"]["own_ns"], told["cat"]["avoidable_ns"]) == (0, 0)
    assert told["slow"]["largest"] and told["slow"]["avoidable_ns"] == 3 * S


def test_a_command_in_the_background_holds_nobody_up() -> None:
    """The launcher computes meanwhile; another one outlives the start-up."""
    kit = StartUp()
    kit.command(2, 1, "prefetch", 1, 9)
    kit.sees(1, 0.5, None)
    kit.sees(2, 1.2, "read", "/data")
    kit.begin(4, 1, ["tee", "log"], 1)
    kit.sees(4, 1.5, "read", "pipe:[9]")
    kit.train(3, 2, 20)
    assert kit.largest() is None


@pytest.mark.parametrize(("later_s", "largest"), [(0.01, "flock"), (0.3, "flock"), (-0.01, "flock")])
def test_who_waits_for_one_in_the_background(later_s: float, largest: str) -> None:
    """A shell that starts something else did not wait for the first one; of equal ones the last to end waited for it."""
    kit = StartUp()
    kit.begin(2, 1, ["sh", "-c", "holder"], 1)
    kit.command(3, 2, "holder", 1, 4)
    kit.end(2, 4)
    kit.command(4, 1, "flock lock true", 1 + later_s, 4.02)
    for proc, syscall in ((1, "wait4"), (2, "wait4"), (3, "pause"), (4, "flock")):
        kit.sees(proc, 1.6, syscall, "lock" if proc == 4 else None)
    kit.train(9, 5, 9)
    assert kit.largest() == largest
    assert kit.told()["holder"]["avoidable_ns"] == pytest.approx((later_s if later_s > 0.1 else 3) * S)


def test_a_reader_does_not_put_its_writer_into_the_background() -> None:
    kit = StartUp()
    kit.sees(1, 0.1, "wait4")
    kit.command(2, 1, "writer", 1, 4)
    kit.command(3, 1, "grep -q ready", 1.5, 4)
    kit.sees(2, 1.2, "recvfrom", "socket:[5]")
    kit.sees(3, 1.7, "read", "pipe:[7]")
    kit.train(9, 5, 9)
    assert kit.largest() == "writer" and kit.told()["writer"]["avoidable_ns"] == pytest.approx(3 * S, rel=0.1)


def test_what_computes_is_no_wait() -> None:
    kit = StartUp()
    kit.command(2, 1, "nvcc x.cu", 1, 9)
    kit.sees(1, 1.2, "wait4")
    kit.sees(2, 1.2, None)
    told = kit.told()["nvcc"]
    assert told["avoidable_ns"] == 0 and not told["largest"] and told["waited_for"]["syscall"] is None


def test_the_launcher_itself() -> None:
    """A built-in `read`, from look to look; that it waited for children is theirs."""
    kit = StartUp()
    kit.sees(1, 0.2, "read", "/run/ready")
    kit.sees(1, 6.2, "wait4", last_s=5.8)
    kit.command(2, 1, "ls", 6, 7)
    kit.train(3, 7, 9)
    (row,) = (r for r in kit.rows() if r["what"] == "wait")
    assert (row["at_ns"], row["duration_ns"], row["duration_ns_is"]) == (0, 6 * S, "estimated")
    assert row["largest"] and row["waited_for"]["file"] == "/run/ready" and row["exit"] is None


@pytest.mark.parametrize(("syscall", "file", "largest"), [
    ("openat", "/run/fifo", True), ("read", "/run/fifo", True), ("flock", "/run/lock", True), ("poll", "socket:[1]", False),
    ("read", "pipe:[7]", False), ("clock_nanosleep", None, False),
])  # fmt: skip
def test_a_launcher_that_waits_for_a_name_while_a_child_runs(syscall: str, file: str | None, largest: bool) -> None:
    """Nobody looks after children by opening, locking or reading a file; otherwise it is taken to do so."""
    kit = StartUp()
    kit.begin(2, 1, ["server"], 1)
    kit.sees(2, 1.2, None)
    kit.sees(1, 0.5, "wait4")
    kit.sees(1, 1.4, syscall, file, last_s=1.2)
    kit.sees(1, 4.2, "wait4", last_s=4.0)
    kit.train(3, 5, 9)
    rows = [row for row in kit.rows() if row["what"] == "wait" and row["largest"]]
    assert [row["waited_for"]["file"] for row in rows] == ([file] if largest else [])


def test_who_looks_again_and_again() -> None:
    """Four times 0.5 s of one command are more than 1.5 s of another one."""
    kit = StartUp()
    kit.sees(1, 0.1, "wait4")
    kit.command(2, 1, "check", 1, 2.5)
    kit.sees(2, 1.2, "read", "/x")
    for number in range(4):
        kit.command(3 + number, 1, "sleep 0.5", 3 + number, 3.5 + number)
        kit.sees(3 + number, 3.3 + number, "clock_nanosleep")
    kit.train(9, 7, 9)
    told = kit.told()
    assert (told["sleep"]["times"], told["sleep"]["together_ns"]) == (4, 2 * S)
    assert (told["check"]["times"], told["check"]["together_ns"]) == (1, 1.5 * S)
    assert [r["proc"] for r in kit.full["startup"] if "command" in r and r["largest"]] == [3]
    text = " ".join(render(kit.full, 200, tty=False).split())
    assert "2.00 s in 4 times: `sleep 0.5` (pid 103, by launch.sh)" in text and text.count("`sleep 0.5`") == 1


def test_what_was_too_short_for_a_look_is_like_those_that_were_looked_at() -> None:
    kit = StartUp()
    kit.sees(1, 0.1, "wait4")
    for number in range(10):
        kit.command(2 + number, 1, "sleep 0.2", 1 + number / 4, 1.25 + number / 4)
    kit.sees(5, 1.98, "clock_nanosleep")
    kit.train(20, 4, 9)
    assert kit.told()["sleep"]["together_ns"] == pytest.approx(2.5 * S)


def test_the_same_command_beside_itself_counts_once() -> None:
    kit = StartUp()
    kit.sees(1, 0.1, "wait4")
    for number in (2, 3):
        kit.command(number, 1, "wait-for db", 1, 4)
        kit.sees(number, 1.2, "connect", "socket:[3]")
    assert kit.told()["wait-for"]["together_ns"] == 3 * S


def test_no_status_is_null() -> None:
    kit = StartUp(sources=["shim"])
    kit.command(2, 1, "check", 1, 3, code=None)
    row = kit.told()["check"]
    assert row["exit"] is None and row["went_on"] is None and row["duration_ns_is"] == "estimated"
    assert any("within a second" in note for note in kit.full["capture"]["notes"])


def test_still_running() -> None:
    kit = StartUp()
    kit.begin(2, 1, ["check"], 1)
    kit.sees(1, 1.2, "wait4")
    kit.sees(2, 1.2, "connect", "socket:[3]")
    row = kit.told()["check"]
    assert (row["duration_ns"], row["duration_ns_is"], row["exit"], row["largest"]) == (
        59 * S,
        "lower_bound",
        None,
        True,
    )
    assert "≥59.0 s: `check`" in render(kit.full, 200, tty=False)


def test_what_came_before_the_capture() -> None:
    """A command that began long before: of its wait only the rest was seen. A trainer that was there: no numbers."""
    kit = Kit()
    kit.process(1, pid=101, cmdline=SCRIPT, name="sh", start_ns=START - 30 * S, at_ns=START)
    kit.process(2, pid=102, parent=1, cmdline=["check"], name="check", start_ns=START - 20 * S, at_ns=START)
    kit.add(Kind.PLACE, at_ns=START + 1000, proc=2, last_ns=None, thread=[102, "x", "S", "read", "w", "/f", 0])
    kit.add(Kind.EXIT, proc=2, at_ns=START + 5 * S, code=1, signal=None)
    kit.process(3, pid=103, parent=1, start_ns=START - 10 * S, at_ns=START)
    kit.link("CUDART", 3)
    kit.launch(proc=3)
    report = kit.bye().report()
    check = one([row for row in report["startup"] if "command" in row], command="check")
    assert (check["at_ns"], check["duration_ns"], check["duration_ns_is"]) == (-20 * S, 25 * S, "estimated")
    assert check["waited_for"]["duration_ns_is"] == "lower_bound"
    assert check["waited_for"]["duration_ns"] == 5 * S - 1000
    assert "start-up: 30.0 s of it were before the capture" in "\n".join(report["capture"]["notes"])
    imports = one(report["startup"], what="imports")
    assert imports["at_ns"] is imports["duration_ns"] is None and "before the capture" in imports["why"]


def part(proc: int, **changes: Any) -> Part:
    row = Part(proc, 100, None, 10_000_000, 12_000_000, START + 30 * S, START + 50 * S, "ncclAllReduce", True, 20.0, True,
               0, 0)  # fmt: skip
    return row._replace(**changes)


def test_the_way_of_a_trainer() -> None:
    """Warm-up: the steps that are different, and those behind them that are slow."""
    kit = StartUp()
    kit.train(2, 1, 10)
    kit.init_rank(0, proc=2, pointer=0xABC000)
    flat = Range(1, 20, 20, None, START + 30 * S, START + 32 * S, "no x", None, (2,))
    slow = SlowStep(2, 21, START + 33 * S, S, 10_000_000, "slow")
    rows = kit.rows(StepsFound([part(2)], [flat], 0, [slow]))
    way = {row["what"]: (row["at_ns"], row["duration_ns"]) for row in rows if row["proc"] == 2}
    assert way["imports"] == (1 * S, int(8.5 * S))
    assert way["first_cuda_call"] == way["context"] == (10 * S, 250_000_000)
    assert way["first_launch"] == (11 * S, None)
    assert way["warm_up"] == (11 * S, 22 * S) and way["first_steady_step"] == (33 * S, 10_000_000)
    assert way["communicators"][1] == 5_000_000
    assert one(rows, what="warm_up")["why"].startswith("steps 1 to 21") and "duration_ns_is" not in one(
        rows, what="imports"
    )


def test_commands_of_the_steady_state_are_no_start_up() -> None:
    kit = StartUp()
    kit.train(2, 1, 10)
    kit.command(3, 2, "nvidia-smi", 5, 6)
    kit.command(4, 2, "nvidia-smi -q", 40, 45)
    kit.begin(5, 2, ["python3", "-c", "from multiprocessing.resource_tracker import main;main(5)"], 6)
    rows = kit.rows(StepsFound([part(2)]))
    assert [row["proc"] for row in rows if "command" in row] == [3]


def test_tables_are_bounded() -> None:
    """Thousands of commands, places and programs."""
    kit = StartUp()
    for proc in range(2, 2000):
        kit.begin(proc, 1, [f"c{proc}"], proc / 100, slot=1)
        kit.end(proc, proc / 100 + (proc % 7) / 10, code=proc % 2)
        kit.sees(proc, proc / 100, "read", "pipe:[3]")
    for number in range(400):
        kit.sees(1, number / 10, "read", str(number), last_s=number / 10)
        kit.add(Kind.IMAGE, proc=1, at_ns=START + number, name=f"p{number}", cmdline=[])
    rows = kit.rows()
    assert len(rows) <= 64
    notes = "\n".join(kit.full["capture"]["notes"])
    assert "places of a program: 144 turned away" in notes and "programs of a process: 385 turned away" in notes
    assert "shorter commands are not listed" in notes


@pytest.mark.parametrize("bad", [{"thread": None}, {"thread": [1, 2]}, {"last_ns": START + 9 * S}, {"at_ns": "x"}])
def test_a_bad_frame_ends_the_source(bad: dict[str, Any]) -> None:
    kit = StartUp()
    body = {"at_ns": START, "proc": 1, "last_ns": None, "thread": [1, "x", "S", None, None, None, 0]}
    kit.add(Kind.PLACE, **(body | bad))
    dropped = kit.state().dropped
    assert dropped is not None and dropped.startswith("a bad PLACE frame")


def test_spans() -> None:
    whole = [Span(0, 10)]
    assert minus(whole, [Span(2, 4), Span(3, 5), Span(9, 20)]) == [Span(0, 2), Span(5, 9)]
    assert covered([Span(0, 4), Span(2, 6), Span(8, 9)]) == 7 and covered([]) == 0
    assert Span(0, 5).common([Span(3, 9), Span(7, 8)]) == [Span(3, 5)]
