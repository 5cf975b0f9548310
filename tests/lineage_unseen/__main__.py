"""``python -m tests.lineage_unseen [CASE...]``: programs whose truth is known, that those who wrote LINEAGE had not seen.

Each is attached to before its first instruction, or started by `run`. Prints what is right and what was said; nothing is
asserted, and the exit code is the number of those that are not right.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
sys.path.insert(0, str(FOLDER))

from cases import CASES, Case, Seen  # noqa: E402

STALLSCOPE = ROOT / ".venv" / "bin" / "stallscope"
DEADLINE_S = 90.0
GIVEN = {"TRACEPARENT": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "OTEL_SERVICE_NAME": "train"}


def seen_by(case: Case, folder: Path) -> Seen:
    """One program, traced to its end."""
    program, recording = folder / "program", folder / "seen.stall"
    program.write_text(case.text)
    words = [sys.executable if case.text.startswith("from programs") else "bash", str(program)]
    env = {**os.environ, **GIVEN, **case.env, "LD_LIBRARY_PATH": str(ROOT / "build" / "sim" / "lib"),
           "PYTHONPATH": str(FOLDER), "D": str(folder), "PY": sys.executable}  # fmt: skip
    run = _attached if case.via == "attach" else _ran
    out, report = run(words, env, recording)
    text = subprocess.run([STALLSCOPE, "report", recording], capture_output=True, text=True).stdout
    return Seen(report, out, text, recording.read_bytes())


def _attached(words: list[str], env: dict[str, str], recording: Path) -> tuple[str, Any]:
    gate = ["sh", "-c", 'echo here; read _; exec "$@"', "gate", *words]
    errors = recording.with_suffix(".err")
    with contextlib.ExitStack() as stack:
        program = stack.enter_context(
            subprocess.Popen(gate, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, start_new_session=True)
        )
        stack.callback(_end, program.pid)
        assert program.stdin and program.stdout and program.stdout.readline()
        command = [STALLSCOPE, "attach", str(program.pid), "--json", "-o", recording]
        tracer = stack.enter_context(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stack.enter_context(errors.open("w")), text=True)
        )
        stack.callback(tracer.kill)
        deadline = time.monotonic() + DEADLINE_S
        while "attached to PID" not in errors.read_text():
            assert tracer.poll() is None and time.monotonic() < deadline, errors.read_text()
            time.sleep(0.1)
        program.stdin.write(b"go\n")
        program.stdin.flush()
        report, _ = tracer.communicate(timeout=DEADLINE_S)
        _end(program.pid)
        return program.stdout.read().decode(), json.loads(report)


def _end(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _ran(words: list[str], env: dict[str, str], recording: Path) -> tuple[str, Any]:
    command = [STALLSCOPE, "run", "--json", "-o", recording, "--", *words]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=env, timeout=DEADLINE_S
    )
    said, brace, rest = done.stdout.partition('{\n "schema"')
    return said, json.JSONDecoder().raw_decode(brace + rest)[0]


def main() -> int:
    """See above."""
    chosen = [case for case in CASES if not sys.argv[1:] or case.name in sys.argv[1:]]
    wrong = 0
    for case in chosen:
        with tempfile.TemporaryDirectory() as folder:
            said = case.said(seen_by(case, Path(folder)))
        is_right = said == case.right if not callable(case.right) else case.right(said)
        wrong += not is_right
        print(f"{'right' if is_right else 'WRONG'} {case.name} ({case.via}): {case.truth}; said {said}", flush=True)
    print(f"{len(chosen) - wrong} of {len(chosen)} right")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
