"""Runs the steps, each in a process pinned to the counted CPU, and reads the counters round each window."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import IO, Any

from gpufind.counters import Counters, Place, difference
from gpufind.elf import exports, instruction_classes
from gpufind.hooks import ROOT, hooked_names
from gpufind.steps import Step

_SCRIPT = ROOT / "tests" / "gpu" / "findings.py"
_LEAST_SECONDS = 8.0
_MAX_LOOKED_UP = 100
_ENV = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}

Result = dict[str, Any]


class Conductor:
    """Counters and workers.

    Attributes:
        files: counted libraries: path -> kind.
        instructions: names by first instruction, by path.
        problems: what went wrong beside the steps.
    """

    def __init__(self, options: dict[str, Any], deadline: float) -> None:
        self.cpu = max(os.sched_getaffinity(0))
        self.counters = Counters(self.cpu)
        self.options = options
        self.files: dict[str, str] = {}
        self.missing: dict[str, list[str]] = {}
        self.instructions: dict[str, dict[str, list[str]]] = {}
        self.problems: list[str] = []
        self._deadline = deadline

    def count_in(self, path: str, library: str) -> None:
        """Count all hooks of a library from now on."""
        try:
            found = exports(path)
        except (OSError, ValueError) as error:
            self.problems.append(f"{path}: {error}")
            return
        self.files[path] = library
        hooks = [found[name] for name in hooked_names(library) if name in found]
        self.missing[path] = [name for name in hooked_names(library) if name not in found]
        self.instructions[path] = instruction_classes(hooks)
        for hook in (hook for hook in hooks if re.fullmatch(self.options.get("match", ".*"), hook.name)):
            self.counters.add(Place(f"{library}:{hook.name}", path, hook.probe_offset))

    def count_looked_up(self, rows: list[dict[str, Any]]) -> None:
        """Count where cuGetProcAddress points to something else than an export."""
        private = {(r["file"], r["offset"]): r["name"] for r in rows if r["offset"] and not r["exports"]}
        for (path, offset), name in [p for p in private.items() if p[0][0].startswith("/")][:_MAX_LOOKED_UP]:
            self.counters.add(Place(f"CUDA@:{name}", path, offset))

    def run(self, step: Step) -> Result:
        """Run one step to its end, or until its time is up."""
        result: Result = {"step": step.name, "origin": step.origin, "state": "ran", "reason": ""}
        result |= {"rows": [], "facts": {}}
        limit = min(step.seconds, self._deadline - time.monotonic())
        if limit < _LEAST_SECONDS:
            return {**result, "state": "not run", "reason": "the time for the whole script is up"}
        start, before = time.monotonic(), self.counters.read()
        with tempfile.TemporaryFile() as log, Worker(step, self.cpu, self.options, log) as worker:
            self._follow(worker, start + limit, result)
            worker.end()
            _explain(result, worker.code, log, limit)
        result["seconds"] = round(time.monotonic() - start, 1)
        result["hits"] = difference(before, self.counters.read())
        result["uncounted"] = sorted(set(result.get("libraries", {})) - set(self.files))
        return result

    def _follow(self, worker: Worker, until: float, result: Result) -> None:
        extra, before = Counters(self.cpu), self.counters.read()
        for message in worker.messages(until):
            kind = message.pop("say")
            if kind == "begin":
                before = self.counters.read()
            elif kind == "end":
                result["rows"].append({**message["row"], "hits": difference(before, self.counters.read())})
            elif kind == "attach":
                self._attach_one(extra, message["name"])
            elif kind == "fact":
                result["facts"][message["name"]] = message["value"]
            else:
                result.update(message, finished=True)
            if kind in ("begin", "end", "attach"):
                worker.go()
        result["refused"] = extra.errors
        extra.close()

    def _attach_one(self, extra: Counters, name: str) -> None:
        for path in (path for path, library in self.files.items() if library == "CUDA"):
            found = exports(path).get(name)
            if found:
                extra.add(Place(name, path, found.probe_offset))


def _explain(result: Result, code: int | None, log: IO[bytes], limit: float) -> None:
    if result.pop("finished", False):
        return
    log.seek(0)
    said = log.read().decode(errors="replace").strip().splitlines()[-3:]
    if code is None:
        result.update(state="too slow", reason=f"ended after {limit:.0f} s")
    elif code < 0:
        result.update(state="crashed", reason=" / ".join([f"signal {-code}", *said]))
    else:
        result.update(state="failed", reason=" / ".join(said) or f"exit code {code}")


class Worker:
    """One process that runs a step."""

    def __init__(self, step: Step, cpu: int, options: dict[str, Any], log: IO[bytes]) -> None:
        theirs, self._to = os.pipe()
        self._from, ours = os.pipe()
        command = [sys.executable, str(_SCRIPT), "--worker", step.name, "--cpu", str(cpu)]
        command += ["--pipes", f"{theirs},{ours}", "--options", json.dumps(options)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=(theirs, ours),
            start_new_session=True, env={**os.environ, **_ENV},
        )  # fmt: skip
        os.close(theirs)
        os.close(ours)
        self.code: int | None = None

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        os.close(self._to)
        os.close(self._from)

    def go(self) -> None:
        """Let the worker go on."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._to, b"\n")

    def messages(self, until: float) -> Iterator[dict[str, Any]]:
        """What it says, until it is done, gone or the time is up."""
        rest = b""
        while (left := until - time.monotonic()) > 0:
            if not select.select([self._from], [], [], left)[0]:
                return
            data = os.read(self._from, 65536)
            if not data:
                self._wait(5)
                return
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                yield json.loads(line)

    def _wait(self, seconds: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.code = self._process.wait(seconds)

    def end(self) -> None:
        """Kill what is left of it: its own process group. A second call does nothing."""
        if self._process.returncode is None or self.code is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
