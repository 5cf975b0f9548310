"""Which programs can cancel threads: by real files, mapped by real processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from stallscope.capture.cancelling import BUDGET_NS, Cancelling
from stallscope.capture.parser_answers import check_imports
from stallscope.capture.parser_client import Imports, ParserClient, ParserFailed
from stallscope.capture.returns import Returns
from stallscope.parser.imports import find_imports
from stallscope.parser.source import Source

CANCELS = "#include <pthread.h>\nint NAME(pthread_t t) { return pthread_cancel(t); }"
PLAIN = "int NAME(void) { return 1; }"
WAITS = '#include <stdio.h>\nCODE\nint main(void) { USE; puts("ready"); fflush(stdout); return getchar(); }'


class Counting:
    """Counts requests; `slow_s`: how long each takes; refuses them where told so."""

    def __init__(self, inner: ParserClient, slow_s: float = 0, *, refuses: bool = False) -> None:
        self.asked = 0
        self._inner, self._slow_s, self._refuses = inner, slow_s, refuses

    def imports(self, fd: int, names: Sequence[str], **options: Any) -> Imports:
        self.asked += 1
        time.sleep(self._slow_s)
        if self._refuses:
            raise ParserFailed("cannot parse", "imports", "as told")
        return self._inner.imports(fd, names, **options)


@pytest.fixture
def compiled(tmp_path: Path, needs_tool: Callable[[str], str]) -> Callable[..., Path]:
    """(name, text, flags...) → a library, or with "-o" among the flags a program."""
    cc = needs_tool("gcc")

    def build(name: str, text: str, *flags: str | Path) -> Path:
        source = tmp_path / f"{name}.c"
        source.write_text(text)
        subprocess.run([cc, "-w", "-o", tmp_path / name, source, *flags], check=True)
        return tmp_path / name

    return build


@contextmanager
def running(*words: str | Path) -> Iterator[int]:
    """Pid of a program that has said that it is ready."""
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.readline() == b"ready\n"
        yield process.pid
        process.kill()


def shared(compiled: Callable[..., Path], name: str, text: str, *flags: str) -> Path:
    """A library whose file has a longer name than the link to it, as installed ones do."""
    path = compiled(f"{name}.so.1.2.3", text, "-shared", "-fPIC", f"-Wl,-soname,{name}.so.1", *flags)
    for link in (f"{name}.so.1", f"{name}.so"):
        (path.parent / link).symlink_to(path.name)
    return path


def linked_with(compiled: Callable[..., Path], folder: Path, *names: str) -> Path:
    """A program that calls `use_NAME` of each library libNAME.so."""
    code = "\n".join(f"int use_{name}(void *);" for name in names)
    use = "if (!stdin) {" + "".join(f"use_{name}(0);" for name in names) + "}"
    words = WAITS.replace("CODE", code).replace("USE", use)
    flags = [f"-l{name}" for name in names]
    return compiled("program", words, f"-L{folder}", *flags, f"-Wl,-rpath,{folder},--no-as-needed")


def found(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return find_imports(Source(file.fileno(), path.name), ["pthread_cancel", "free"])


@pytest.mark.parametrize("flags", [(), ("-s",), ("-s", "-Wl,--hash-style=sysv")])
def test_what_a_file_imports(compiled: Callable[..., Path], flags: tuple[str, ...]) -> None:
    path = compiled("a.so", CANCELS, "-shared", "-fPIC", *flags)
    assert found(path)["imported"] == ["pthread_cancel"]
    assert "libc.so.6" in found(path)["needed"]


@pytest.mark.parametrize(
    "text",
    [
        "int pthread_cancel(long t) { return 0; } int f(void) { return pthread_cancel(1); }",
        "int GC_pthread_cancel(long); int f(void) { return GC_pthread_cancel(1); }",
        'const char *f(void) { return "pthread_cancel"; }',
    ],
)
def test_what_is_no_import(compiled: Callable[..., Path], text: str) -> None:
    assert found(compiled("a.so", text, "-shared", "-fPIC"))["imported"] == []


def test_names_that_share_their_ends(compiled: Callable[..., Path]) -> None:
    text = CANCELS + "int GC_pthread_cancel(long); int g(void) { return GC_pthread_cancel(1); }"
    path = compiled("a.so", text, "-shared", "-fPIC", "-O2", "-Wl,-O2")
    assert path.read_bytes().count(b"pthread_cancel\0") >= 1
    assert found(path)["imported"] == ["pthread_cancel"]


def test_the_program_itself(parser: ParserClient, compiled: Callable[..., Path]) -> None:
    code = CANCELS.replace("NAME", "f")
    path = compiled("program", WAITS.replace("CODE", code).replace("USE", "if (!stdin) f(0)"))
    with running(path) as pid:
        assert Cancelling(parser).who(pid) == str(path)
        why = Returns(parser).why_not(pid)
        assert why is not None and f"{path} imports pthread_cancel" in why and "--returns always" in why
        assert Returns(parser, "always").why_not(pid) is None
        assert Returns(parser).why_not_forked(pid, why) == why
    assert Cancelling(parser).who(pid) is None


def test_what_it_is_linked_with(parser: ParserClient, compiled: Callable[..., Path], tmp_path: Path) -> None:
    """Also by way of another library, and by a link of another name; each file is read once."""
    inner = shared(compiled, "libinner", CANCELS.replace("NAME", "use_deep"))
    outer = PLAIN.replace("NAME", "use_outer") + "int use_deep(void *); int g(void) { return use_deep(0); }"
    shared(compiled, "libouter", outer, f"-L{tmp_path}", "-linner", f"-Wl,-rpath,{tmp_path}")
    path = linked_with(compiled, tmp_path, "outer")
    counting = Counting(parser)
    cancelling = Cancelling(counting)  # type: ignore[arg-type]
    with running(path) as pid:
        assert [cancelling.who(pid) for _ in range(3)] == [str(inner)] * 3
        assert counting.asked == 3
        assert list(cancelling.loaded_later(pid)) == []


def test_what_it_loads_later_counts_as_its_own_affair(
    parser: ParserClient, compiled: Callable[..., Path], tmp_path: Path
) -> None:
    """As with gRPC or FFmpeg in Python."""
    library = shared(compiled, "liblater", CANCELS.replace("NAME", "use_later"))
    script = "import ctypes, sys; ctypes.CDLL(sys.argv[1]); print('ready', flush=True); sys.stdin.read()"
    with running(sys.executable, "-c", script, library) as pid:
        assert Cancelling(parser).who(pid) is None
        assert [path for path in Cancelling(parser).loaded_later(pid) if path] == [str(library)]
        assert Returns(parser).why_not(pid) is None
        why = Returns(parser, "never").why_not(pid)
        assert why is not None and "--returns never" in why


def test_ordinary_python(parser: ParserClient) -> None:
    assert Cancelling(parser).who(os.getpid()) is None


def test_a_program_that_the_parser_refuses(parser: ParserClient) -> None:
    counting = Counting(parser, refuses=True)
    cancelling = Cancelling(counting)  # type: ignore[arg-type]
    assert [cancelling.who(os.getpid()) for _ in range(3)] == [None] * 3
    assert counting.asked == 1


def test_it_takes_no_longer_than_it_may(parser: ParserClient, compiled: Callable[..., Path], tmp_path: Path) -> None:
    """And finds the last of many libraries all the same, at the next library that is linked."""
    names = [f"n{i}" for i in range(6)]
    for name in names[1:]:
        shared(compiled, f"lib{name}", PLAIN.replace("NAME", f"use_{name}"))
    last = shared(compiled, "libn0", CANCELS.replace("NAME", "use_n0"))  # mapped first, at the highest address
    counting = Counting(parser, slow_s=BUDGET_NS / 1.5e9)
    cancelling = Cancelling(counting)  # type: ignore[arg-type]
    with running(linked_with(compiled, tmp_path, *names)) as pid:
        answers = []
        while not answers or answers[-1] is None:
            before = counting.asked
            answers.append(cancelling.who(pid))
            assert 0 < counting.asked - before <= 3
    assert (answers[-1], counting.asked) == (str(last), 7)
    assert len(answers) >= 3


@pytest.mark.parametrize(
    "answer",
    [
        {}, {"imported": ["free"], "needed": []}, {"imported": ["pthread_cancel"] * 2, "needed": []},
        {"imported": [], "needed": ["x" * 600]}, {"imported": [], "needed": ["x"] * 300}, {"imported": 1, "needed": []},
        {"imported": [], "needed": [5]},
    ],
)  # fmt: skip
def test_answers_that_are_refused(answer: dict[str, Any]) -> None:
    with pytest.raises(ParserFailed):
        check_imports(answer, frozenset(("pthread_cancel",)))
