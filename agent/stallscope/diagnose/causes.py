"""Why a call waited: what it belongs to, as the order of calls, the copies and the Python stack tell."""

from __future__ import annotations

from typing import NamedTuple

from stallscope.aggregate.hooks import HookFacts
from stallscope.aggregate.process import Process
from stallscope.aggregate.sites import Site, SiteTimes
from stallscope.aggregate.state import State
from stallscope.aggregate.waits import WHOLE_DEVICE
from stallscope.diagnose.timing import timing_of
from stallscope.wire.hook_table import BY_NAME

__all__ = ["Cause", "Causes", "born_here", "cause_without_site"]

TO_DEVICE, TO_HOST, WAY, PINNED, NOT_PINNED = 1, 2, 3, 4, 8  # enum wire_class
DIRECTIONS = {TO_DEVICE: "host_to_device", TO_HOST: "device_to_host"}
WAITED_NS = 50_000
NO_PYTHON = "there is no Python in the process"
# torch's own thread, and what it does in the main thread where there are no workers.
_PIN_FILE = "torch/utils/data/_utils/pin_memory.py"
_FREES = ("Free", "Unregister", "Destroy", "Reset", "TrimTo")
_LOADS = ("ModuleLoad", "LibraryLoad")

_Stack = tuple[int, int, tuple[tuple[object, ...], ...]]


class Cause(NamedTuple):
    """One word, None where it is not known or nothing has waited.

    Attributes:
        is_guess: it follows from how long the copy took.
        direction, memory: of the copy that the call is, or waits for; None without one, or where not known.
    """

    word: str | None
    is_guess: bool = False
    direction: str | None = None
    memory: str | None = None


def born_here(state: State, process: Process) -> bool:
    """Whether the process had no CUDA before the capture began."""
    start = state.capture.start_mono_ns if state.capture else 0
    first = min((link for link in process.links if link.library != "NCCL"), key=lambda link: link.at_ns, default=None)
    return process.start_ns >= start or (first is not None and first.appeared_ns < first.at_ns)


def _saw_all_pins(state: State, process: Process) -> bool:
    """Whether every range of pinned memory is known: the runtime brings the driver with its first call, and was linked
    before. Else memory may have been pinned between the libraries' appearance and their links."""
    at_ns = [link.at_ns for link in process.links if link.library == "CUDART"]
    appeared_ns = [link.appeared_ns for link in process.links if link.library == "CUDA"]
    return born_here(state, process) and bool(at_ns) and min(at_ns) <= min(appeared_ns, default=state.now_ns)


def cause_without_site(hook: HookFacts, why: str | None) -> str | None:
    """Of calls whose site is not known; `why` it is not."""
    if hook.kind == "alloc":
        return _of_alloc(hook.name)
    if hook.kind != "wait":
        return None
    if "Event" in hook.name:
        return "event"
    return "explicit" if hook.name in WHOLE_DEVICE or hook.name == "cuCtxSynchronize_v2" or why == NO_PYTHON else None


class Causes:
    """Of all sites of one state."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._waited_for: set[_Stack] = set()
        self._long_copies: set[_Stack] = set()
        for site in state.sites.table.values():
            times = state.sites.times.get(site.number)
            if site.what and times is not None:
                hook = state.hooks.get(site.hook)
                if hook.kind == "wait":
                    self._waited_for.add(_stack(site))
                elif _is_async(hook.name) and _is_long(times):
                    self._long_copies.add(_stack(site))

    def of(self, site: Site) -> Cause:
        """Of the calls of one stack."""
        hook = self._state.hooks.get(site.hook)
        memory = self._memory(site)
        word, is_guess = self._word(site, hook, memory)
        if any((frame["file"] or "").endswith(_PIN_FILE) for frame in site.frames):
            word, is_guess = "pin_memory", False
        return Cause(word, is_guess, DIRECTIONS.get((site.what or 0) & WAY), memory)

    def _word(self, site: Site, hook: HookFacts, memory: str | None) -> tuple[str | None, bool]:
        if site.what is None or hook.kind not in ("wait", "copy"):
            return cause_without_site(hook, site.why), False
        if hook.kind == "wait" and not site.what:
            return cause_without_site(hook, NO_PYTHON), False
        if hook.kind == "copy" and not _is_async(hook.name):
            return ("copy" if site.what & WAY else None), False
        return self._of_copy(site, memory)

    def _of_copy(self, site: Site, memory: str | None) -> tuple[str | None, bool]:
        """Of an asynchronous copy, and of the wait for it on the same line."""
        stack, way = _stack(site), (site.what or 0) & WAY
        is_waited_for = stack in self._waited_for
        if way == TO_HOST and is_waited_for:
            return "item", False
        if memory == "pageable" and way in DIRECTIONS:
            return "pageable", False
        if memory is None and way in DIRECTIONS and stack in self._long_copies:
            return "pageable", True
        return ("copy" if is_waited_for else None), False

    def _memory(self, site: Site) -> str | None:
        if not site.what or not site.what & (PINNED | NOT_PINNED):
            return None
        if site.what & PINNED:
            return "pinned"
        process = self._state.processes.table.get(site.proc)
        return "pageable" if process is not None and _saw_all_pins(self._state, process) else None


def _of_alloc(name: str) -> str:
    if any(word in name for word in _LOADS):
        return "module"
    return "free" if any(word in name for word in _FREES) else "alloc"


def _is_async(name: str) -> bool:
    return name in BY_NAME and "stream" in BY_NAME[name].arguments.split()


def _is_long(times: SiteTimes) -> bool:
    """Whether most of these copies waited: one of pinned memory is put into a queue within microseconds."""
    p50_ns = timing_of(times.calls, times.total_ns, times.max_ns, times.hist).p50_ns
    return p50_ns is not None and p50_ns >= WAITED_NS


def _stack(site: Site) -> _Stack:
    """Without native frames: a copy and the wait for it are two functions, reached by different ones."""
    frames = tuple(tuple(frame.values()) for frame in site.frames if frame["kind"] == "python")
    return site.proc, site.what or 0, frames
