"""Attached to processes that have the shim: read through it, late or early, by root or by anybody, nothing twice."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from harness import ROOT, SIM_LIB, STALLSCOPE, TARGETS, Program, Tracer, balance, counts
from run_kit import SHIM, Preloaded, Running, environment, everything, run
from test_attach_counts import hooked, own
from test_late_communicators import state_of

ROUNDS = ("20000", "200", "500")
LONG = ("cudaStreamSynchronize", "cudaEventSynchronize", "cuStreamSynchronize")


def attached(program: Program, *options: str | Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(truth, report) of a program that waits for a line."""
    with Tracer([program.pid], *options).attached() as tracer:
        program.say()
        return program.truth(), tracer.report()


def closes(report: dict[str, Any]) -> bool:
    left, made = balance(report)
    return left == made


@pytest.mark.usefixtures("needs_bpf")
def test_the_same_numbers_by_three_ways() -> None:
    """By BPF, under run, and by attach through the shim: counts equal, waits within 5 % of the program's clock."""
    words = [TARGETS / "million", *ROUNDS]
    reports = {}
    with Program(words) as program:
        program.wait_for("ready")
        truth, reports["bpf"] = attached(program)
        assert own(reports["bpf"]) == hooked(truth["calls"])
    ran = run(words)
    reports["run"] = ran.report
    assert own(ran.report) == everything(ran.truth())
    with Preloaded(words) as program:
        program.wait_for("ready")
        truth, reports["shim"] = attached(program)
        assert own(reports["shim"]) == everything(truth)
    before = {"cudaFree": 1}
    assert own(reports["run"]) == own(reports["shim"]) == own(reports["bpf"]) + type(own(ran.report))(before)
    assert [{c["source"] for c in r["calls"]} for r in reports.values()] == [{"bpf"}, {"shim"}, {"shim"}]
    assert reports["shim"]["capture"]["sources"] == ["bpf", "shim"]
    assert closes(reports["shim"]) and closes(reports["run"])
    for report, told in ((reports["run"], ran.truth()), (reports["shim"], truth)):
        for api in LONG:
            total = sum(stall["total_ns"] for stall in report["stalls"] if stall["api"] == api)
            assert total == pytest.approx(told["long_waits"][api]["total_ns"], rel=0.05), api


@pytest.mark.usefixtures("needs_bpf")
def test_two_captures_at_once() -> None:
    """A job under `run`, and root's attach on it: each has each call once."""
    with Running([TARGETS / "million", *ROUNDS], "--json", env=environment(MILLION_LINGER="1")) as running:
        running.lines.wait_for("ready")
        children = Path(f"/proc/{running.process.pid}/task/{running.process.pid}/children").read_text().split()
        (pid,) = [p for p in children if "million" in Path(f"/proc/{p}/cmdline").read_text()]
        with Tracer([int(pid)]).attached() as tracer:
            running.say()
            truth = json.loads(running.lines.wait_for('{"target"'))
            time.sleep(1)
            running.say()
            theirs = tracer.report()
        assert running.process.wait(30) == 0
        text = running.lines.rest()
        ours = json.loads(text[text.index('{\n "schema"') :])
    assert own(ours) == everything(truth)
    assert own(theirs) == hooked(truth["calls"])  # since it came
    for report in (ours, theirs):
        assert {call["source"] for call in report["calls"]} == {"shim"}
        assert closes(report)


@pytest.mark.usefixtures("needs_bpf")
def test_preloaded_and_no_call_yet(tmp_path: Path) -> None:
    """Nothing is linked; the segment is found when it comes."""
    recording = tmp_path / "early.stall"
    with Preloaded([TARGETS / "lateload", SIM_LIB / "libcudart.so.12"]) as program:
        program.wait_for("ready")
        with Tracer([program.pid], "-o", recording).attached() as tracer:
            program.say()
            truth, report = program.truth(), tracer.report()
    assert own(report) == hooked(truth["calls"])
    assert {call["source"] for call in report["calls"]} == {"shim"}


@pytest.mark.usefixtures("needs_bpf")
def test_children_of_a_shell() -> None:
    """Forked and execed while attached: each process through its own segment."""
    with Preloaded([TARGETS / "forker", "4", "500", "100"], FORKER_CHILD_DELAY_US="1500000") as program:
        program.wait_for("ready")
        truth, report = attached(program)
    assert own(report, truth["pid"]) == hooked(truth["calls"])
    seen = {call["pid"] for call in report["calls"]}
    for child in truth["children"]:
        if child["pid"] in seen:  # one that ends within a quarter of a second leaves no segment to find
            assert own(report, child["pid"]) == hooked(child["calls"])
    assert {call["source"] for call in report["calls"]} == {"shim"}


@pytest.mark.usefixtures("needs_bpf")
@pytest.mark.parametrize("more", [0, 5])
def test_a_late_tracer_knows_who_is_who(more: int, tmp_path: Path) -> None:
    """After thousands of operations, more than rings hold: of the oldest the process's own table knows."""
    recording = tmp_path / "late.stall"
    with Preloaded(
        [sys.executable, ROOT / "tests" / "targets" / "many_operations.py", "6000", str(more)],
        STALLSCOPE_SIM_DEVICES="1",
    ) as program:
        program.wait_for("done")
        with Tracer([program.pid], "-o", recording).attached() as tracer:
            program.say()
            uid = program.truth()["uid"]
            report = tracer.report()
    first, second = sorted(report["communicators"], key=lambda c: -c["members"][0]["next_seq"])
    assert first["unique_id"] == uid and first["identity"] == "verified"
    assert [(m["rank"], m["next_seq"]) for m in first["members"]] == [(0, 6000 + more)]
    # It was made when the vital ring had been full.
    assert [(m["rank"], m["next_seq"]) for m in second["members"]] == [(0, 3)]
    assert counts(report)["ncclAllReduce"] == 6003 + more
    state = state_of(recording)
    places = [place for issuer in state.operations.issuers.values() for place in issuer.places.values()]
    assert sorted(place.collectives for place in places) == [3, 6000 + more]
    assert any("before it was looked at" in note for note in report["capture"]["notes"])
    assert closes(report)


@pytest.mark.usefixtures("needs_bpf")
def test_killed_and_started_again() -> None:
    """The second one goes on where the first one stopped, be it in the middle."""
    with Preloaded([TARGETS / "million", "200000", "2000", "6000"], STALLSCOPE_SIM_DRIVER="private") as program:
        program.wait_for("ready")
        with Tracer([program.pid]).attached() as tracer:
            time.sleep(0.5)
            tracer.process.send_signal(signal.SIGKILL)
            tracer.process.wait()
        with Tracer([program.pid]).attached() as tracer:
            program.say()
            time.sleep(0.1)
            tracer.process.send_signal(signal.SIGKILL)
            tracer.process.wait()
        with Tracer([program.pid]).attached() as tracer:
            truth, report = program.truth(), tracer.report()
    seen = own(report)
    assert closes(report), report["capture"]["notes"]
    assert 0 < sum(seen.values()) < sum(hooked(truth["calls"]).values())
    assert all(seen[api] <= hooked(truth["calls"])[api] for api in seen)


@pytest.mark.usefixtures("needs_bpf")
@pytest.mark.parametrize("sample", ["1/1", "1/100"])
def test_let_go_while_it_makes_calls(sample: str) -> None:
    """Nothing can be unlinked, and still each call is accounted for: counters are those of what was read."""
    with Preloaded([TARGETS / "million", "150000", "100", "300"], STALLSCOPE_SIM_DRIVER="private") as program:
        program.wait_for("ready")
        with Tracer([program.pid], "--sample", sample).attached() as tracer:
            program.say()
            time.sleep(0.15)
            tracer.stop()
            report = tracer.report()
        truth = program.truth()
    assert closes(report), report["capture"]["notes"]
    seen = own(report)
    assert seen and all(seen[api] <= everything(truth)[api] for api in seen)


def test_without_rights(needs_root: None) -> None:
    """Who may not use BPF reads his own processes' shims."""
    words = [str(TARGETS / "million"), *ROUNDS]
    drop = ["setpriv", "--reuid=12345", "--regid=12345", "--clear-groups", "--inh-caps=-all", "--bounding-set=-all"]
    env = environment(LD_PRELOAD=str(SHIM), HOME="/nonexistent")
    with subprocess.Popen(
        [*drop, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    ) as program:
        assert program.stdin and program.stdout
        assert program.stdout.readline() == "ready\n"
        tracer = subprocess.Popen(
            [*drop, *STALLSCOPE, "attach", str(program.pid), "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, env=environment(HOME="/nonexistent"), cwd="/",
        )  # fmt: skip
        assert tracer.stderr and tracer.stdout
        first = tracer.stderr.readline()
        if "Permission denied" in first:
            program.kill()
            pytest.skip("another user can't read this tree")
        assert first.startswith("attached to PID"), first + tracer.stderr.read()
        program.stdin.write("go\n")
        program.stdin.flush()
        truth = json.loads(program.stdout.readline())
        out, _ = tracer.communicate(timeout=60)
    report = json.loads(out)
    assert tracer.returncode == 0 and own(report) == everything(truth) and closes(report)
    assert any("no rights to use BPF" in note for note in report["capture"]["notes"])


def test_doctor_tells_of_the_shim() -> None:
    """That it is there, and that attach will read it."""
    with Preloaded([TARGETS / "million", "10", "1", "300"]) as program:
        program.wait_for("ready")
        done = subprocess.run([*STALLSCOPE, "doctor", str(program.pid), "--json"], capture_output=True, text=True)
        answer = json.loads(done.stdout)
        page = subprocess.run([*STALLSCOPE, "doctor", str(program.pid)], capture_output=True, text=True).stdout
    (check,) = [check for check in answer["target"]["checks"] if check["name"] == "shim"]
    assert check["state"] == "ok" and re.search(r"loaded; [1-9]\d* calls? so far, mode full", check["detail"])
    assert answer["target"]["would_probe"] == []
    assert "shim: loaded" in page
