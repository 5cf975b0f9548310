"""``python -m tests.culprit [--kinds a,b] [--mode live|late|mid|all] [--ahead 0|100] [--seeds N] [--via bpf|shim] [--keep DIR]``: the table of faults.

via shim: started by `stallscope run`, or, for late and mid, with the shim in it and attached to later.
live: attached from the first call; late: when it has made some thousand; mid: 10 s into the block. all: live and late,
and in the block, with one seed, what can be told there.
--keep: a folder for the recordings, truths and reports of runs that went wrong.
Prints a line as each run ends, in Markdown; exits with 1 if one was wrong.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from culprit_cases import BPF, KINDS, MID, MODES, NAMED_IN_THE_BLOCK, SHIM, Case, is_possible
from culprit_run import Run, RunFailed, play
from culprit_score import Score, score


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.culprit", description="faults, and what is said of them")
    parser.add_argument("--kinds", default=",".join(KINDS), help="default: all")
    parser.add_argument("--mode", choices=(*MODES, "all"), default="live")
    parser.add_argument("--ahead", type=int, choices=(0, 100), help="default: both")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--via", choices=(BPF, SHIM), default=BPF)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("-v", action="store_true", help="also what attach said on stderr")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="what went wrong is recorded there")
    args = parser.parse_args()
    unknown = set(args.kinds.split(",")) - set(KINDS)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}")
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that jobs and tracers end, too
    wrong = run_all(list(_cases(args)), verbose=args.v, keep=args.keep)
    return 1 if wrong else 0


def _cases(args: argparse.Namespace) -> Iterator[Case]:
    for mode in MODES if args.mode == "all" else (args.mode,):
        is_short = args.mode == "all" and mode == MID
        for kind in args.kinds.split(","):
            if is_short and kind not in NAMED_IN_THE_BLOCK:
                continue
            for ahead in (0, 100) if args.ahead is None else (args.ahead,):
                for seed in range(args.first_seed, args.first_seed + (1 if is_short else args.seeds)):
                    case = Case(kind, mode, ahead, seed, args.via)
                    if is_possible(case):
                        yield case


def run_all(cases: list[Case], *, verbose: bool, keep: Path | None) -> int:
    """Play them; how many were wrong."""
    print("| fault | attached | ahead | seed | right answer | said | s | verdict |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    wrong, begun = 0, time.monotonic()
    for case in cases:
        result = _result(case, verbose, keep)
        wrong += bool(result.problems)
        _row(case, result)
    minutes = (time.monotonic() - begun) / 60
    print(f"\n{len(cases) - wrong} of {len(cases)} right, {minutes:.1f} minutes", flush=True)
    return wrong


def _result(case: Case, verbose: bool, keep: Path | None) -> Score:
    recording = keep / f"{case.kind}-{case.mode}-{case.ahead}-{case.seed}-{case.via}.stall" if keep else None
    try:
        run = play(case, recording=recording)
    except RunFailed as error:
        return Score("", None, [f"not played: {error}"])
    if verbose:
        print(run.stderr, file=sys.stderr)
    result = score(case, run)
    if recording:
        _keep(recording, run, result)
    return result


def _keep(recording: Path, run: Run, result: Score) -> None:
    if not result.problems:
        recording.unlink(missing_ok=True)
        return
    for name, words in (("truth", run.truth), ("report", run.report)):
        recording.with_suffix(f".{name}.json").write_text(json.dumps(words, indent=1))


def _row(case: Case, result: Score) -> None:
    who = f" {case.rank}" if case.answer.named and case.kind != "send-send" else ""
    right = f"{' or '.join(case.answer.kinds)}{who}" if case.answer.kinds else "no incident"
    seconds = "" if result.seconds is None else f"{result.seconds:.1f}"
    verdict = "right" if not result.problems else "WRONG: " + "; ".join(" ".join(p.split()) for p in result.problems)
    cells = (case.kind, case.mode, case.ahead, case.seed, right, result.said, seconds, verdict)
    print("| " + " | ".join(str(cell).replace("|", "/") for cell in cells) + " |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
