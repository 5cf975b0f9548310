"""``python -m tests.culprit.unseen [--faults a,b] [--mode live|late|mid|all]``: faults that the diagnosis was not written for.

live: attached from the first call; late: after some hundred steps, before the block; mid: 5 s into the block. Prints what is right and what was
said, misses included; nothing is asserted.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER))

from faults import FAULTS, Fault  # noqa: E402

ROOT = FOLDER.parents[2]
STALLSCOPE = ROOT / ".venv" / "bin" / "stallscope"
START_S, BEGIN_S, BLOCK_S, END_S = 30.0, 40.0, 8.0, 60.0
MODES = ("live", "late", "mid")
TRAINED_S, IN_BLOCK_S = 3.0, 5.0
Json = dict[str, Any]


class Said(NamedTuple):
    """The report, what came on stderr with the instants (Unix ns), and from when on the answer was due."""

    report: Json
    lines: list[tuple[int, str]]
    due_ns: int


class Job:
    """The launcher's process is this one's child, so that it can be attached to before it has ranks."""

    def __init__(self, name: str, fault: Fault, folder: Path) -> None:
        words = [sys.executable, str(FOLDER / "launch.py"), name, str(fault.processes), str(folder)]
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=sys.stderr, start_new_session=True)
        self.folder = folder

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"go\n")
        self.process.stdin.close()

    def go_wrong(self) -> None:
        (self.folder / "wrong").touch()

    def end(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def begun(self) -> dict[int, int]:
        """Rank to Unix ns."""
        found = [path for path in self.folder.glob("begun.*") if path.suffix != ".new"]
        return {int(path.suffix[1:]): int(path.read_text().split()[0]) for path in found}


class Tracer:
    def __init__(self, pid: int, recording: Path | None) -> None:
        words = [str(STALLSCOPE), "attach", str(pid), "--json"]
        words += ["-o", str(recording), "--force"] if recording else []
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.lines: list[tuple[int, str]] = []
        self.out = ""
        self._threads = [threading.Thread(target=task, daemon=True) for task in (self._errors, self._report)]
        for thread in self._threads:
            thread.start()

    def _errors(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append((time.time_ns(), line))

    def _report(self) -> None:
        assert self.process.stdout is not None
        self.out = self.process.stdout.read()

    def attached(self) -> bool:
        return self.attached_ns() > 0

    def attached_ns(self) -> int:
        """0 until it is."""
        return next((at for at, line in list(self.lines) if line.startswith("attached to PID")), 0)

    def end(self) -> Json:
        self.process.send_signal(signal.SIGINT)
        self.process.wait(END_S)
        for thread in self._threads:
            thread.join(END_S)
        report: Json = json.loads(self.out) if self.out else {}
        return report


def _until(ready: Any, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if ready():
            return True
        time.sleep(0.05)
    return False


def play(name: str, fault: Fault, mode: str, recording: Path | None) -> Said:
    with tempfile.TemporaryDirectory(prefix="stallscope-unseen-") as text:
        job = Job(name, fault, Path(text))
        try:
            if mode != "live":
                job.go()
                time.sleep(TRAINED_S)
            if mode == "mid":
                job.go_wrong()
                _until(lambda: len(job.begun()) >= max(1, len(fault.culprits)), BEGIN_S)
                time.sleep(IN_BLOCK_S)
            tracer = Tracer(job.process.pid, recording)
            try:
                _until(tracer.attached, START_S)
                if mode == "live":
                    job.go()
                if mode != "mid":
                    time.sleep(TRAINED_S)
                    job.go_wrong()
                    _until(lambda: len(job.begun()) >= max(1, len(fault.culprits)), BEGIN_S)
                time.sleep(BLOCK_S)
            finally:
                report = tracer.end()
            return Said(report, tracer.lines, tracer.attached_ns() if mode == "mid" else min(job.begun().values()))
        finally:
            job.end()


def _rank_of(culprit: Json) -> Any:
    """In the communicator, else, where that is not known, in the job: these programs have them equal."""
    return culprit["global_rank"] if culprit["rank"] is None else culprit["rank"]


def verdict(fault: Fault, said: Said) -> tuple[str, str]:
    """What was said, and whether that is right."""
    incidents = said.report.get("incidents", [])
    words = ["{} {}".format(i["class"], "+".join(str(_rank_of(c)) for c in i["culprits"]) or "-") for i in incidents]
    named = {_rank_of(c) for i in incidents for c in i["culprits"]}
    if not fault.kinds:
        return "; ".join(words) or "nothing", "right" if not incidents else "WRONG"
    if not incidents:
        return "nothing", "MISSED"
    if named != set(fault.culprits):
        return "; ".join(words), "undecided" if not named else "WRONG rank"
    return "; ".join(words), "right" if all(i["class"] in fault.kinds for i in incidents) else "WRONG class"


def _seconds(said: Said) -> str:
    """From the block, or the attach in it, to the first line that tells it."""
    told = [at for at, line in said.lines if line.startswith("incident ")]
    return f"{(told[0] - said.due_ns) / 1e9:.1f}" if told else ""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.culprit.unseen")
    parser.add_argument("--faults", default=",".join(FAULTS), help="default: all")
    parser.add_argument("--mode", choices=(*MODES, "all"), default="all")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="write recordings and reports there")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that jobs and tracers end, too
    if args.keep:
        args.keep.mkdir(exist_ok=True)
    print("| fault | attached | right answer | said | s | verdict |\n|---|---|---|---|---|---|", flush=True)
    for mode in MODES if args.mode == "all" else (args.mode,):
        for name in args.faults.split(","):
            fault = FAULTS[name]
            said = play(name, fault, mode, args.keep / f"{name}.{mode}.stall" if args.keep else None)
            words, judged = verdict(fault, said)
            right = f"{' or '.join(fault.kinds)} {'+'.join(map(str, fault.culprits))}" if fault.kinds else "nothing"
            cells = (f"{name}: {fault.what}", mode, right, words, _seconds(said), judged)
            print("| " + " | ".join(cells) + " |", flush=True)
            if args.keep:
                (args.keep / f"{name}.{mode}.json").write_text(json.dumps(said.report, indent=1))
                (args.keep / f"{name}.{mode}.err").write_text("".join(line for _, line in said.lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
