"""Roles, and what came to each process from whom; of streams that may hold anything."""

from __future__ import annotations

import json
from typing import Any

import pytest
from aggregate_kit import START, Kit, one

from stallscope.aggregate.limits import LIMITS
from stallscope.diagnose.lineage import Lineage
from stallscope.output.terminal import render
from stallscope.wire.environment import CUT
from stallscope.wire.frames import Frame, Kind

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
SPAWN = [
    "python3",
    "-c",
    "from multiprocessing.spawn import spawn_main; spawn_main(5, pipe_handle=7)",
    "--multiprocessing-fork",
]
FORKSERVER = ["python3", "-c", "from multiprocessing.forkserver import main; main(3, 4, ['__main__'])"]
TRACKER = ["python3", "-c", "from multiprocessing.resource_tracker import main;main(5)"]
TRAIN = ["python3", "train.py"]


class Family(Kit):
    """Processes by number: pid 100 + proc."""

    def person(self, proc: int, parent: int | None, cmdline: list[str], name: str | None = None, *, traced: bool = True,
               env: dict[str, str] | None = None, **more: Any) -> None:  # fmt: skip
        words = name or cmdline[0].rpartition("/")[2]
        self.process(proc, pid=100 + proc, parent=parent, name=words, cmdline=cmdline, traced=traced)
        if env is not None or more:
            self.context(proc, env, **more)

    def context(self, proc: int, env: dict[str, str] | None, **more: Any) -> None:
        body = {"like": None, "overwritten": False, "seen": True, "gone": [], "own": {}}
        self.add(Kind.CONTEXT, at_ns=START, proc=proc, env=env, **(body | more))

    def rank(self, proc: int, number: int = 0) -> None:
        """It has a communicator."""
        self.init_rank(number, proc=proc, pointer=0xABC000)

    def computes(self, proc: int) -> None:
        self.link("CUDART", proc)
        self.launch(proc=proc)
        self.counters()

    def roles(self) -> dict[int, str]:
        state = self.state()
        lineage = Lineage(state)
        return {proc: lineage.role(proc) for proc in state.processes.table}

    def told(self, proc: int) -> dict[str, tuple[str, int, bool | None]]:
        return {name: told[:3] for name, told in Lineage(self.state()).context(proc).items()}


def test_a_torchrun_job() -> None:
    kit = Family()
    kit.person(1, None, ["/sbin/init"], "systemd", traced=False)
    kit.person(2, 1, ["-bash"], "bash", traced=False)
    kit.person(3, 2, ["/usr/bin/python3", "/opt/bin/torchrun", "train.py"], "python3", traced=False)
    for proc in (4, 5):
        kit.person(proc, 3, TRAIN)
        kit.rank(proc, proc - 4)
    kit.person(6, 4, TRACKER, "python3")
    kit.person(7, 4, SPAWN, "python3")
    kit.person(8, 4, TRAIN, "pt_data_worker")
    kit.person(9, 4, TRAIN)
    kit.person(10, 4, ["nvcc", "x.cu"])
    kit.person(11, 4, ["sh", "-c", "ls"])
    kit.person(12, 11, ["ls"])
    assert kit.roles() == {
        1: "helper", 2: "launcher", 3: "launcher", 4: "trainer", 5: "trainer", 6: "helper", 7: "loader_worker",
        8: "loader_worker", 9: "loader_worker", 10: "helper", 11: "helper", 12: "helper",
    }  # fmt: skip


def test_forkserver() -> None:
    """The server and its children have the same command line."""
    kit = Family()
    kit.person(1, None, TRAIN)
    kit.computes(1)
    kit.person(2, 1, FORKSERVER, "python3")
    kit.person(3, 2, FORKSERVER, "python3")
    assert kit.roles() == {1: "trainer", 2: "helper", 3: "loader_worker"}


@pytest.mark.parametrize("words", [["mpirun", "-n", "2", "x"], ["python3", "-m", "torch.distributed.run", "x"], ["slurmstepd"],
                                   ["python3", "-u", "/x/accelerate", "launch"], ["bash", "run.sh"]])  # fmt: skip
def test_launchers_before_anything_runs_on_the_gpu(words: list[str]) -> None:
    kit = Family()
    kit.person(1, None, words)
    assert kit.roles() == {1: "launcher"}


def test_a_script_that_starts_ranks() -> None:
    """Known by what it did; what starts programs of all kinds is none."""
    kit = Family()
    kit.person(1, None, ["containerd-shim-runc-v2"], "containerd-shim", traced=False)
    kit.person(2, 1, ["python3", "start.py"])
    kit.person(3, 2, SPAWN, "python3")
    kit.person(4, 2, SPAWN, "python3")
    kit.rank(3, 0)
    kit.rank(4, 1)
    assert kit.roles() == {1: "helper", 2: "launcher", 3: "trainer", 4: "trainer"}


def test_ranks_before_their_first_call() -> None:
    """Siblings of multiprocessing that have different ranks are no workers."""
    kit = Family()
    kit.person(1, None, ["python3", "start.py"], env={})
    kit.person(2, 1, SPAWN, "python3", env={}, own={"RANK": "0"})
    kit.person(3, 1, SPAWN, "python3", env={}, own={"RANK": "1"})
    assert kit.roles() == {1: "launcher", 2: "trainer", 3: "trainer"}
    report = kit.bye().report()
    assert [p["global_rank"] for p in report["processes"]] == [None, 0, 1]


def test_a_trainer_without_a_gpu() -> None:
    """Workers have a trainer."""
    kit = Family()
    kit.person(1, None, TRAIN)
    kit.person(2, 1, SPAWN, "python3")
    assert kit.roles() == {1: "trainer", 2: "loader_worker"}


def test_a_worker_that_touches_the_gpu() -> None:
    """It has no communicator, and its parent has one."""
    kit = Family()
    kit.person(1, None, TRAIN)
    kit.rank(1)
    kit.person(2, 1, SPAWN, "python3")
    kit.computes(2)
    assert kit.roles() == {1: "trainer", 2: "loader_worker"}


def test_a_worker_with_a_title() -> None:
    """Its command line is gone; its rank is read from what libc has."""
    kit = Family()
    kit.person(
        1,
        None,
        ["VLLM::Engine"],
        env={},
        overwritten=True,
        own={"RANK": "2", "SLURM_PROCID": "x", "PMI_RANK": "9" * 20},
    )
    kit.rank(1)
    kit.person(2, 1, ["reader 1"], env={}, overwritten=True)
    kit.person(3, 2, ["reader 1"], env={}, overwritten=True)
    report = kit.bye().report()
    assert [(p["role"], p["global_rank"]) for p in report["processes"]] == [
        ("trainer", 2),
        ("loader_worker", 2),
        ("helper", 2),
    ]
    assert report["communicators"][0]["members"][0]["global_rank"] == 2


def test_given_a_place_by_its_launcher() -> None:
    kit = Family()
    kit.person(1, None, ["python3", "start.py"], env={})
    kit.person(2, 1, TRAIN, env={"RANK": "0"})
    kit.person(3, 2, ["python3", "tool.py"], env={"RANK": "0"})
    assert kit.roles() == {1: "launcher", 2: "trainer", 3: "helper"}
    kit.computes(3)
    assert kit.roles() == {1: "helper", 2: "launcher", 3: "trainer"}  # 2 only prepared it


def test_a_value_says_from_whom_it_came() -> None:
    kit = Family()
    kit.person(1, None, ["bash"], traced=False, env={"TRACEPARENT": "old", "SLURM_JOB_ID": "7"})
    kit.person(2, 1, TRAIN, env={"TRACEPARENT": TRACE, "RANK": "3"})
    kit.person(3, 2, SPAWN, "python3", env={"TRACEPARENT": TRACE, "RANK": "3"}, gone=["TRACEPARENT", "RANK"])
    kit.person(4, 2, ["python3", "x"], env={})
    kit.person(5, 4, ["python3", "y"], env={})
    kit.person(6, 5, ["python3", "z"], env={}, seen=False)
    kit.person(7, 2, ["title"], env={}, overwritten=True, own={"TRACEPARENT": TRACE})
    kit.person(8, 2, ["gone"])
    kit.person(9, 2, ["hidden"], env=None, seen=False)
    kit.person(10, 2, ["kept"], env={"TRACEPARENT": TRACE}, seen=False)
    assert kit.told(2) == {"TRACEPARENT": (TRACE, 2, False), "RANK": ("3", 2, False), "SLURM_JOB_ID": ("7", 1, True)}
    assert kit.told(3)["TRACEPARENT"] == (TRACE, 3, True) and kit.told(3)["SLURM_JOB_ID"] == ("7", 1, True)
    for proc in (4, 5, 6):  # never had it, whatever can be read now
        assert kit.told(proc)["TRACEPARENT"] == (TRACE, 2, True)
    assert kit.told(7)["TRACEPARENT"] == (TRACE, 7, None) and kit.told(7)["RANK"] == ("3", 2, None)
    assert kit.told(8)["TRACEPARENT"] == (TRACE, 2, None)
    assert kit.told(9)["TRACEPARENT"] == (TRACE, 2, None)
    assert kit.told(10)["TRACEPARENT"] == (TRACE, 10, None)


def test_what_a_process_gave_itself_is_its_childrens() -> None:
    kit = Family()
    kit.person(1, None, TRAIN, env={"RANK": "1"}, own={"TRACEPARENT": TRACE})
    kit.person(2, 1, SPAWN, "python3", env={})
    assert kit.told(1)["TRACEPARENT"] == (TRACE, 1, False) and kit.told(2)["TRACEPARENT"] == (TRACE, 1, True)


def test_like_its_parent() -> None:
    """The parent's of then: what it execs later is its own."""
    kit = Family()
    kit.person(1, None, TRAIN, env={"RANK": "1"})
    kit.person(2, 1, TRAIN, env=None, like=1)
    kit.context(1, {"RANK": "5"})
    kit.person(3, 1, TRAIN, env=None, like=77)
    assert kit.told(2) == {"RANK": ("1", 2, False)} and kit.told(3) == {"RANK": ("5", 1, None)}


def test_ranks_of_workers() -> None:
    """A worker's is its trainer's; a launcher's is nobody's."""
    kit = Family()
    kit.person(1, None, ["srun"], env={})
    kit.process(2, pid=102, parent=1, cmdline=TRAIN, env={"RANK": "3"})
    kit.rank(2)
    kit.person(3, 2, SPAWN, "python3")
    rows = kit.bye().report()["processes"]
    assert [(p["role"], p["global_rank"]) for p in rows] == [("launcher", None), ("trainer", 3), ("loader_worker", 3)]


def test_ancestors_come_last_and_are_not_subject() -> None:
    kit = Family(targets=[102])
    kit.person(1, None, ["bash"], traced=False)
    kit.person(2, 1, TRAIN)
    kit.computes(2)
    kit.add(Kind.EXIT, proc=1, at_ns=START + 5, code=1, signal=None)
    report = kit.bye().report()
    assert [(p["proc"], p["traced"], p["parent"]) for p in report["processes"]] == [(2, True, 1), (1, False, None)]
    text = render(report, 80, tty=False)
    assert "stallscope: python3 (pid 102) on node7" in text and "bash (pid 101) ended" not in text


def test_the_tree_for_a_person() -> None:
    kit = Family()
    kit.person(9, None, ["/sbin/init"], "systemd", traced=False)
    kit.person(1, 9, ["torchrun"])
    kit.process(2, pid=102, parent=1, cmdline=TRAIN, env={"RANK": "3"})
    kit.context(2, {"TRACEPARENT": TRACE})
    kit.rank(2)
    for proc in range(3, 7):
        kit.person(proc, 2, SPAWN, "python3", env={"TRACEPARENT": TRACE}, gone=["TRACEPARENT"])
    kit.person(7, 2, ["tool"], env={})
    kit.person(8, 7, ["title"], env={}, overwritten=True)
    kit.add(Kind.EXIT, proc=7, at_ns=START + 5, code=None, signal=9)
    text = render(kit.bye().report(), 80, tty=False)
    assert text[text.index("processes\n") :].startswith(
        "processes\n"
        "torchrun (pid 101): launcher\n"
        "└ python3 (pid 102): trainer rank 3, trace 4bf92f35..\n"
        "  └ 4 × python3 (103 to 106): loader worker, trace lost by itself\n"
        "  └ tool (pid 107, signal 9): helper, trace lost before it began\n"
        "    └ title (pid 108): helper, trace 4bf92f35.., unknown whether kept\n"
    )
    alone = Family()
    alone.person(1, None, TRAIN)
    assert "\nprocesses\n" not in render(alone.bye().report(), 80, tty=False)


def test_a_value_that_was_replaced() -> None:
    """What it was started with is lost; what it has in its place is told, and counts."""
    kit = Family()
    mine = TRACE.replace("4bf92f35", "ffffffff")
    kit.person(
        1,
        None,
        TRAIN,
        env={"TRACEPARENT": TRACE, "NCCL_TIMEOUT": "60"},
        own={"TRACEPARENT": mine, "NCCL_TIMEOUT": "120"},
    )
    kit.person(2, 1, ["title"], env={"TRACEPARENT": TRACE}, overwritten=True, own={"TRACEPARENT": mine})
    kit.rank(1)
    report = kit.bye().report()
    rows = [one(report["processes"], proc=proc)["trace_context"]["TRACEPARENT"] for proc in (1, 2)]
    assert rows[0] == {"value": TRACE, "from": 1, "lost": True, "now": mine}
    assert rows[1] == {"value": TRACE, "from": 2, "lost": None, "now": mine}
    assert "time-out of the job: 2 min (NCCL_TIMEOUT)" in report["capture"]["notes"]
    assert "trainer, trace ffffffff.. by itself, not 4bf92f35..\n" in render(report, 80, tty=False)


def test_the_tree_stays_short() -> None:
    kit = Family()
    kit.person(1, None, TRAIN)
    for proc in range(2, 60):
        kit.person(proc, proc - 1 if proc % 2 else 1, ["x"], f"n{proc}")
    lines = render(kit.bye().report(), 80, tty=False).splitlines()
    begin = lines.index("processes")
    assert lines[begin + 17].startswith("and 43 more lines")


@pytest.mark.parametrize(("words", "env", "note"), [
    (TRAIN, {"NCCL_TIMEOUT": "1800"}, "time-out of the job: 30 min (NCCL_TIMEOUT)"),
    (TRAIN, {"DEEPSPEED_TIMEOUT": "30"}, "time-out of the job: 30 min (DEEPSPEED_TIMEOUT)"),
    ([*TRAIN, "--ddp-timeout", "90"], {"NCCL_TIMEOUT": "1800"}, "time-out of the job: 90 s (--ddp-timeout)"),
    ([*TRAIN, "--distributed-timeout-minutes=60"], {}, "time-out of the job: 60 min (--distributed-timeout-minutes)"),
    ([*TRAIN, "--ddp-timeout"], {"NCCL_TIMEOUT": "never"}, "time-out of the job: not visible"),
    (TRAIN, {"NCCL_TIMEOUT": "0"}, "time-out of the job: not visible"),
])  # fmt: skip
def test_time_outs(words: list[str], env: dict[str, str], note: str) -> None:
    kit = Family()
    kit.person(1, None, words, env=env)
    kit.rank(1)
    (found,) = [n for n in kit.bye().report()["capture"]["notes"] if n.startswith("time-out")]
    assert found.startswith(note)


def test_no_time_out_without_ranks() -> None:
    kit = Family()
    kit.person(1, None, TRAIN)
    assert not [n for n in kit.bye().report()["capture"]["notes"] if "time-out" in n]


def test_secrets_of_a_stream() -> None:
    """A recording may come from anybody: what is read is held against the same list."""
    kit = Family()
    env = {"AWS_SECRET": "hunter2", "NCCL_TOKEN": "hunter2", "OTEL_X": "http://u:hunter2@h", "RANK": "1\x1b[31m"}
    kit.person(1, None, TRAIN, env=env, own={"PATH": "hunter2", "OTEL_Y": "key=hunter2"})
    report = kit.bye().report()
    assert "hunter2" not in json.dumps(report)
    context = one(report["processes"], proc=1)["trace_context"]
    assert {name: row["value"] for name, row in context.items()} == {
        "OTEL_X": f"http://{CUT}@h", "OTEL_Y": f"key={CUT}", "RANK": "1?[31m",
    }  # fmt: skip


@pytest.mark.parametrize("change", [
    {"proc": None}, {"proc": -1}, {"proc": True}, {"env": []}, {"env": {"RANK": 1}}, {"env": {1: "x"}}, {"like": "1"},
    {"like": -1}, {"gone": "RANK"}, {"gone": [1]}, {"own": {"RANK": None}}, {"own": [["RANK", "1"]]},
    {"env": {f"NCCL_{n}": "" for n in range(300)}},
])  # fmt: skip
def test_bad_frames_end_the_source(change: dict[str, Any]) -> None:
    kit = Family()
    kit.person(1, None, TRAIN)
    state = kit.state()
    body = {
        "at_ns": START,
        "proc": 1,
        "env": {},
        "like": None,
        "overwritten": False,
        "seen": True,
        "gone": [],
        "own": {},
    }
    state.apply(Frame(Kind.CONTEXT, body | change))
    assert state.dropped and state.dropped.startswith("a bad CONTEXT frame")


def test_odd_frames_do_no_harm() -> None:
    """Words instead of truth values, names that are not there, processes that nobody knows, oneself as model."""
    kit = Family()
    kit.person(1, None, TRAIN, env={"RANK": "1"}, gone=["RANK", "OTHER"], seen="yes", overwritten=1)
    kit.context(99, {"RANK": "1"})
    kit.person(2, 1, TRAIN, env=None, like=2)
    state = kit.state()
    assert not state.dropped and state.processes.unknown_frames == 1
    assert state.contexts.table[1][1:4] == (False, False, frozenset({"RANK"})) and 99 not in state.contexts.table
    assert state.contexts.table[2].env is None


def test_families_without_a_beginning() -> None:
    """Nobody is his own ancestor, whatever a stream says."""
    kit = Family()
    kit.person(1, 2, TRAIN)
    kit.person(2, 1, TRAIN)
    kit.person(3, 3, TRAIN)
    table = kit.state().processes.table
    assert {proc: p.parent for proc, p in table.items()} == {1: None, 2: 1, 3: None}
    for proc in range(4, 300):
        kit.person(proc, proc - 1, TRAIN, env={"RANK": "1"})
    kit.bye().report()


def test_memory_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LIMITS, "characters of environments", 100)
    kit = Family()
    for proc in range(1, 6):
        kit.person(proc, None, TRAIN, env={"OTEL_X": "x" * 60})
    report = kit.bye().report()
    assert [bool(p["trace_context"]) for p in report["processes"]] == [True, True, False, False, False]
    assert "characters of environments: 3 turned away (limit 100)" in report["capture"]["notes"]
