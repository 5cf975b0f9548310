"""Why a call waited: what it belongs to, as the order of calls, the copies and the Python stack tell."""

from __future__ import annotations

from typing import NamedTuple

from stallscope.aggregate.hooks import HookFacts
from stallscope.aggregate.process import Process
from stallscope.aggregate.sites import Site, SiteTimes
from stallscope.aggregate.state import State
from stallscope.aggregate.waits import LONG_NS, WHOLE_DEVICE
from stallscope.wire.hook_table import BY_NAME

__all__ = ["Cause", "Causes", "born_here", "cause_without_site"]

TO_DEVICE, TO_HOST, WAY, PINNED, NOT_PINNED = 1, 2, 3, 4, 8  # enum wire_class
DIRECTIONS = {TO_DEVICE: "host_to_device", TO_HOST: "device_to_host"}
NO_PYTHON = "there is no Python in the process"
# torch's own thread, and what it does in the main thread where there are no workers.
_PIN_FILE = "torch/utils/data/_utils/pin_memory.py"
_FREES = ("Free", "Unregister", "Destroy", "Reset", "TrimTo")
_LOADS = ("ModuleLoad", "LibraryLoad")

_Stack = tuple[int, int, tuple[tuple[object, ...], ...]]


class Cause(NamedTuple):
    """One word, None where it is not known or nothing has waited.

    Attributes:
        is_guess: it follows from how long the call took.
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
        self._waited_for = {
            _stack(site) for site in state.sites.table.values()
            if site.what and state.hooks.get(site.hook).kind == "wait" and site.number in state.sites.times
        }  # fmt: skip

    def of(self, site: Site, times: SiteTimes) -> Cause:
        """Of the calls of one stack."""
        hook = self._state.hooks.get(site.hook)
        memory = self._memory(site)
        word, is_guess = self._word(site, hook, memory, times)
        if any((frame["file"] or "").endswith(_PIN_FILE) for frame in site.frames):
            word, is_guess = "pin_memory", False
        return Cause(word, is_guess, DIRECTIONS.get((site.what or 0) & WAY), memory)

    def _word(self, site: Site, hook: HookFacts, memory: str | None, times: SiteTimes) -> tuple[str | None, bool]:
        if hook.kind == "alloc":
            return _of_alloc(hook.name), False
        if site.what is None or hook.kind not in ("wait", "copy"):
            return cause_without_site(hook, site.why), False
        if hook.kind == "wait":
            known = cause_without_site(hook, NO_PYTHON)
            return (_of_copy(site.what, memory) if site.what else known), False
        return self._of_copying(site, hook, memory, times)

    def _of_copying(self, site: Site, hook: HookFacts, memory: str | None, times: SiteTimes) -> tuple[str | None, bool]:
        assert site.what is not None
        if _stack(site) in self._waited_for:
            return _of_copy(site.what, memory), False
        if not _is_async(hook.name):
            return ("copy" if site.what & WAY else None), False
        if memory == "pageable":
            return "pageable", False
        # Where its memory is not known: copies of pinned memory only put something into a queue.
        waited = memory is None and site.what & WAY in DIRECTIONS and times.total_ns >= LONG_NS * times.calls
        return ("pageable" if waited else None), waited

    def _memory(self, site: Site) -> str | None:
        if not site.what or not site.what & (PINNED | NOT_PINNED):
            return None
        if site.what & PINNED:
            return "pinned"
        process = self._state.processes.table.get(site.proc)
        return "pageable" if process is not None and _saw_all_pins(self._state, process) else None


def _of_copy(what: int, memory: str | None) -> str:
    """Of a wait for the copy that the same line made."""
    if what & WAY == TO_HOST:
        return "item"
    return "pageable" if what & WAY == TO_DEVICE and memory == "pageable" else "copy"


def _of_alloc(name: str) -> str:
    if any(word in name for word in _LOADS):
        return "module"
    return "free" if any(word in name for word in _FREES) else "alloc"


def _is_async(name: str) -> bool:
    return name in BY_NAME and "stream" in BY_NAME[name].arguments.split()


def _stack(site: Site) -> _Stack:
    return site.proc, site.what or 0, tuple(tuple(frame.values()) for frame in site.frames)
