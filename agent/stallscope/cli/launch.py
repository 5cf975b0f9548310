"""A command started with the shim in it: its environment, its signals, its end."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from stallscope.errors import CaptureProblem
from stallscope.paths import SHIM

if TYPE_CHECKING:
    from stallscope.capture.handover import HandOver

__all__ = ["NOT_EXECUTABLE", "NOT_FOUND", "OWN_FAILURE", "Command", "Preload"]

OWN_FAILURE, NOT_EXECUTABLE, NOT_FOUND = 125, 126, 127
# What a person or a scheduler sends to the process that he started, meaning what runs in it.
PASSED_ON = frozenset(
    (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
)  # fmt: skip
SI_KERNEL = 0x80
FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108 - a folder of our own is made in one of them
MAX_FOLDER = 80  # a socket's path has room for 107 bytes
_SEPARATOR = re.compile(r"[\s:]")


class Preload:
    """What makes ld.so load the shim, and where it hands over.

    Args:
        mode: full, lite or min.

    Attributes:
        handover: None where no folder could be made; segments are then only looked for.
        notes: what could not be had.
        keep: leave the link to the library: processes that need it at their next exec outlive us.

    Raises:
        CaptureProblem: there is no library, or ld.so can't be told of it.
    """

    def __init__(self, mode: str, library: Path = SHIM) -> None:
        if not library.is_file():
            raise CaptureProblem(
                "cannot trace the command", why=f"the shim is not built ({library})",
                hint="run `make build`, or `sudo stallscope attach PID` once the command runs",
            )  # fmt: skip
        self._mode = mode
        self.notes: list[str] = []
        self.keep = False
        self.handover: HandOver | None = None
        self.folder = self._make_folder()
        self.preloaded = self._spell(library)
        if self.folder is not None:
            self._listen(self.folder)

    def _make_folder(self) -> Path | None:
        """A folder that only this user can enter, whose name has nothing that ld.so splits at."""
        for parent in (tempfile.gettempdir(), *FOLDERS):
            if not _SEPARATOR.search(parent) and len(parent) < MAX_FOLDER:
                with contextlib.suppress(OSError):
                    return Path(tempfile.mkdtemp(prefix="stallscope-", dir=parent))
        return None

    def _listen(self, folder: Path) -> None:
        from stallscope.capture.handover import HandOver

        try:
            self.handover = HandOver(folder / "segments")
        except OSError as error:
            self.notes.append(f"processes that live for less than a second may be missed: no socket ({error.strerror})")

    def _spell(self, library: Path) -> str:
        """A path that ld.so takes as one word: LD_PRELOAD is split at spaces and colons, and nothing quotes them."""
        if not _SEPARATOR.search(str(library)):
            return str(library)
        if self.folder is None:
            raise CaptureProblem(
                "cannot trace the command", why=f"LD_PRELOAD can't name {library}, nor can a link be made",
                hint="set TMPDIR to a folder that you may write to, without spaces in its name",
            )  # fmt: skip
        link = self.folder / library.name
        link.symlink_to(library)
        return str(link)

    def environment(self) -> dict[str, str]:
        """The caller's, with the shim before what he preloads himself."""
        given = os.environ.get("LD_PRELOAD", "")
        found = dict(os.environ, LD_PRELOAD=f"{self.preloaded}:{given}" if given else self.preloaded)
        found["STALLSCOPE_SHIM_MODE"] = self._mode
        found.pop("STALLSCOPE_SHIM", None)
        if self.handover is not None:
            found["STALLSCOPE_SHIM"] = f"socket:{self.handover.path}"
        return found

    def close(self) -> None:
        """Remove what was made, but for a link that is still needed."""
        if self.handover is not None:
            self.handover.close()
        if self.folder is not None and not (self.keep and str(self.folder) in self.preloaded):
            shutil.rmtree(self.folder, ignore_errors=True)


class Command:
    """The child. Streams, open descriptors and their limits, process group and ignored signals are the caller's.

    Args:
        files: the caller's limits of open descriptors, where ours are others.

    Attributes:
        pid: None until it is started.
    """

    def __init__(self, words: list[str], environment: dict[str, str], files: tuple[int, int] | None = None) -> None:
        self._words, self._environment, self._files = words, environment, files
        self._process: subprocess.Popen[bytes] | None = None
        self._before: set[signal.Signals | int] | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def start(self) -> int:
        """Its pid. Raises OSError as execvp does. From here on signals are kept for `forward_signals`."""
        self._before = before = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
        try:
            self._process = subprocess.Popen(
                self._words, env=self._environment, close_fds=False,  # ours are all close-on-exec
                preexec_fn=lambda: self._put_back(before),
            )  # fmt: skip
        except subprocess.SubprocessError as error:
            raise OSError(errno.EAGAIN, str(error)) from error
        except ValueError as error:  # a null byte
            raise OSError(errno.EINVAL, str(error)) from error
        return self._process.pid

    def _put_back(self, signals: set[signal.Signals | int]) -> None:
        """In the child: what we changed for ourselves."""
        signal.pthread_sigmask(signal.SIG_SETMASK, signals)
        if self._files is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, self._files)

    def forward_signals(self) -> None:
        """Pass on what was sent to us alone. Ctrl-C is not: the terminal sends it to the command, too."""
        while (info := signal.sigtimedwait(PASSED_ON, 0)) is not None:
            if not (info.si_code == SI_KERNEL and self._shares_terminal()):
                self._send(info.si_signo)

    def _shares_terminal(self) -> bool:
        with contextlib.suppress(OSError):
            return self.pid is not None and os.getpgid(self.pid) == os.getpgrp()
        return False

    def _send(self, number: int) -> None:
        if self._process is not None:
            self._process.send_signal(number)

    def poll(self) -> int | None:
        """How it ended, as wait(2) encodes it; None while it runs."""
        code = self._process.poll() if self._process else None
        if code is None:
            return None
        return -code if code < 0 else code << 8

    def wait(self) -> None:
        """Until it has ended, passing signals on."""
        while self._process is not None and self._process.returncode is None:
            self.forward_signals()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.05)

    def exit_code(self) -> int:
        """As a shell has it: 128 + n when signal n ended it."""
        code = self._process.returncode if self._process else None
        if code is None:
            return OWN_FAILURE
        return 128 - code if code < 0 else code

    def unblock(self) -> None:
        """Signals are ours again: who presses Ctrl-C now means the report."""
        before, self._before = self._before, None
        if before is not None:
            while signal.sigtimedwait(PASSED_ON, 0) is not None:
                pass  # meant for the command, which has ended
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
