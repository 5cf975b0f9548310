"""The BPF programs, loaded: by bcc where it is, else from the prebuilt object."""

from __future__ import annotations

import array
import contextlib
import json
import mmap
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from stallscope.capture.linkstyle import Style
from stallscope.capture.object_loader import UPROBE_MULTI, load_object
from stallscope.capture.rights import permission_problem, refusal
from stallscope.errors import CaptureProblem, StallscopeError
from stallscope.paths import BPF_OBJECT, NO_COOKIES_OBJECT, PROBES, WIRE_HEADER

__all__ = ["BULK_BYTES", "VITAL_BYTES", "Loaded", "default_interpreters", "load"]

BULK_BYTES = 32 << 20
VITAL_BYTES = 4 << 20
HELPER_SECONDS = 30.0
_HELPER = Path(__file__).with_name("bcc_helper.py")
_SYSTEM_PYTHON = "/usr/bin/python3"
_MAX_ANSWER_BYTES = 1 << 16
_MAX_DESCRIPTORS = 253


class _BackendFailed(Exception):
    """One way to load did not work; `why` in one line, `printed` as the compiler or the verifier said it."""

    def __init__(self, why: str, printed: str = "") -> None:
        super().__init__(why)
        self.why = why
        self.printed = printed

    def __str__(self) -> str:
        return f"{self.why}\n{self.printed}" if self.printed else self.why


@dataclass
class Loaded:
    """Loaded programs and maps, as descriptors.

    Attributes:
        backend: "bcc" or "object".
        style: the kind of link the programs were loaded for.
        programs, maps: descriptors by name.
        tracepoints: raw tracepoint by program name; these programs are not attached yet.
        notes: what a reader of the report should know, e.g. that bcc was missing.
        helper_peak_kib: largest resident size of the bcc helper; 0 for the object.
    """

    backend: str
    programs: dict[str, int]
    maps: dict[str, int]
    tracepoints: dict[str, str]
    notes: list[str] = field(default_factory=list)
    helper_peak_kib: int = 0
    style: Style = Style.MULTI

    def close(self) -> None:
        """Let all of it go; what is linked stays until its link is closed. A second call does nothing."""
        for table in (self.programs, self.maps):
            while table:
                with contextlib.suppress(OSError):
                    os.close(table.popitem()[1])


def default_interpreters() -> list[str]:
    """Pythons that may have bcc: the system's, then our own."""
    found = [_SYSTEM_PYTHON] if os.access(_SYSTEM_PYTHON, os.X_OK) else []
    return [*found, *({sys.executable} - set(found))]


def load(
    backend: str = "auto",
    *,
    bulk_bytes: int = BULK_BYTES,
    vital_bytes: int = VITAL_BYTES,
    interpreters: Sequence[str] | None = None,
    object_file: Path | None = None,
    seconds: float = HELPER_SECONDS,
    style: Style = Style.MULTI,
) -> Loaded:
    """Load all programs and maps.

    Args:
        backend: "bcc", "object", or "auto": bcc, else the object with a note that says why.
        bulk_bytes, vital_bytes: ring sizes, powers of two and multiples of the page size.
        interpreters: Pythons to look for bcc in.
        object_file: another object than ours.
        seconds: how long one bcc helper may take.
        style: the links that the programs are for; the kernel refuses them for others.

    Raises:
        PermissionProblem: the kernel refused for want of rights.
        CaptureProblem: neither way worked.
    """
    sizes = {"bulk": bulk_bytes, "vital": vital_bytes}
    _check_sizes(sizes)
    failed: list[_BackendFailed] = []
    if backend in ("auto", "bcc"):
        try:
            return _by_bcc(default_interpreters() if interpreters is None else interpreters, sizes, seconds, style)
        except _BackendFailed as failure:
            failed.append(failure)
    if backend in ("auto", "object") and not refusal():
        try:
            loaded = _by_object(object_file or _object_of(style), sizes, style)
            loaded.notes += [f"{f.why}: the prebuilt object is used" for f in failed]
            return loaded
        except _BackendFailed as failure:
            failed.append(failure)
    raise _problem(failed) from (failed[-1] if failed else None)


def _problem(failed: list[_BackendFailed]) -> StallscopeError:
    what = "cannot load the BPF programs"
    # Asked for after the fact: the verifier, too, says "Permission denied" to a program it does not like.
    if refusal():
        return permission_problem(what)
    hint = "apt install python3-bpfcc, or: make build; see also: stallscope doctor"
    return CaptureProblem(what, why="; ".join(map(str, failed)), hint=hint)


def _check_sizes(sizes: dict[str, int]) -> None:
    for name, size in sizes.items():
        if size < mmap.PAGESIZE or size & (size - 1) or size > 1 << 30:
            raise CaptureProblem(
                f"cannot make the {name} ring",
                why=f"{size} bytes is no power of two from {mmap.PAGESIZE} to {1 << 30}",
                hint=f"take {BULK_BYTES}",
            )


def _object_of(style: Style) -> Path:
    return NO_COOKIES_OBJECT if style is Style.PERF_NO_COOKIE else BPF_OBJECT


def _attach_type(style: Style) -> int:
    return UPROBE_MULTI if style is Style.MULTI else 0


def _by_object(path: Path, sizes: dict[str, int], style: Style) -> Loaded:
    try:
        programs, maps, sections = load_object(path, sizes, _attach_type(style))
    except StallscopeError as error:
        raise _BackendFailed(f"{error.what}: {error.why}") from error
    except OSError as error:
        first, _, printed = (error.strerror or str(error)).partition("\n")
        raise _BackendFailed(f"the kernel refused the prebuilt object ({first})", printed) from error
    return Loaded("object", programs, maps, _tracepoints(sections), style=style)


def _tracepoints(sections: dict[str, str]) -> dict[str, str]:
    return {name: s.removeprefix("raw_tracepoint/") for name, s in sections.items() if s.startswith("raw_tracepoint/")}


def _by_bcc(interpreters: Sequence[str], sizes: dict[str, int], seconds: float, style: Style) -> Loaded:
    failures: list[_BackendFailed] = []
    for interpreter in interpreters:
        try:
            loaded = _ask_helper(interpreter, sizes, seconds, style)
            loaded.style = style
            return loaded
        except _MissingError as missing:
            failures.append(missing)
    if not failures:
        raise _BackendFailed("no Python to look for bcc in")
    raise _BackendFailed(f"bcc is not installed ({'; '.join(f.why for f in failures)})")


class _MissingError(_BackendFailed):
    """That interpreter has no bcc: the next one may."""


def _flags(sizes: dict[str, int], style: Style) -> list[str]:
    rings = [f"-D{name.upper()}_BYTES={size}" for name, size in sizes.items()]
    few = ["-DNO_COOKIES"] if style is Style.PERF_NO_COOKIE else []
    return ["-DDIALECT_BCC", "-DWIRE_BPF", f"-DPAGE_SIZE={mmap.PAGESIZE}", *rings, *few]


def _ask_helper(interpreter: str, sizes: dict[str, int], seconds: float, style: Style) -> Loaded:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [interpreter, "-I", str(_HELPER), str(theirs.fileno()), str(PROBES / "stallscope.bpf.c")]
    command += [str(PROBES), f"{PROBES},{WIRE_HEADER.parent}", str(_attach_type(style)), *_flags(sizes, style)]
    with ours, theirs:
        try:
            # An empty environment: nothing the caller's shell has set may steer what runs with our rights.
            process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL, env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}, cwd="/",
                start_new_session=True,  # Ctrl-C is for us: the helper is ended, not interrupted
            )  # fmt: skip
        except OSError as error:
            raise _MissingError(f"{interpreter}: {error.strerror}") from error
        theirs.close()
        ours.settimeout(seconds)
        try:
            return _received(interpreter, ours)
        finally:
            process.kill()  # it has answered, or took too long
            process.wait()


def _received(interpreter: str, channel: socket.socket) -> Loaded:
    try:
        data, fds = _message(channel)
    except TimeoutError:
        raise _BackendFailed("bcc took too long to compile the programs") from None
    if not data:
        raise _BackendFailed(f"bcc's helper process ({interpreter}) ended without an answer")
    answer = json.loads(data)
    if "error" in answer:
        raise _failure_of(interpreter, answer["error"], answer["detail"].strip())
    programs = dict(zip(answer["programs"], fds, strict=False))
    maps = dict(zip(answer["maps"], fds[len(programs) :], strict=True))
    return Loaded("bcc", programs, maps, _tracepoints(answer["sections"]), [], answer["peak_kib"])


def _message(channel: socket.socket) -> tuple[bytes, list[int]]:
    # Not socket.recv_fds: it drops its flags argument, and the descriptors would be inherited by whatever starts next.
    space = socket.CMSG_LEN(_MAX_DESCRIPTORS * 4)
    data, ancillary, _, _ = channel.recvmsg(_MAX_ANSWER_BYTES, space, socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(content)
    return data, list(fds)


def _failure_of(interpreter: str, stage: str, detail: str) -> _BackendFailed:
    if stage == "import":
        return _MissingError(f"{interpreter}: {detail.splitlines()[0]}")
    said = next((line for line in detail.splitlines() if "error:" in line), detail.splitlines()[0])
    return _BackendFailed(f"bcc could not {stage} the programs ({said.strip()[:200]})", detail[-2000:])
