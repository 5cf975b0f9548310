"""The screen for a person: what is on it, how wide it is, and what it must not let through."""

from __future__ import annotations

import io
import re

import pytest
from aggregate_kit import START, Kit, small

from stallscope.output.report import build_report
from stallscope.output.terminal import print_report
from stallscope.output.words import cut, duration
from stallscope.wire.frames import Kind


def screen(kit: Kit) -> str:
    out = io.StringIO()
    print_report(build_report(kit.state()), out)
    return out.getvalue()


def test_one_screen_of_80_columns() -> None:
    text = screen(small())
    assert max(map(len, text.splitlines())) <= 80
    for part in (
        "captured 9, lost 0, sampled out 1", "python3 (pid 4242) on node7", "10.0 s traced", "every call recorded",
        "cudaStreamSynchronize", "enqueue calls", "cudaLaunchKernel", "0102030405060708", "10.0.0.7:41833",
        "since before the attach", "a note", "returned an error",
    ):  # fmt: skip
        assert part in text, part


def test_no_total_over_a_gap_without_a_mark() -> None:
    kit = Kit()
    kit.process()
    kit.link("CUDART", late_ns=900)
    kit.wait(ns=3_000_000)
    kit.launch(times=7)
    text = screen(kit.bye())
    assert "≥3.00 ms" in text and re.search(r"cudaLaunchKernel +≥7 ", text)
    kit = Kit()
    kit.process()
    kit.wait(ns=3_000_000)
    assert "≥" not in screen(kit.bye())


def test_launches_have_no_gpu_time() -> None:
    kit = Kit()
    kit.process()
    kit.launch(times=3)
    text = screen(kit.bye())
    assert not re.search(r"GPU time", text, re.I) and "how long it ran is not known" in text


def test_hostile_names_cannot_steer_the_terminal() -> None:
    kit = Kit()
    kit.process(name="\x1b[2J\x07[bold red]evil", cmdline=[])
    kit.add(Kind.NOTE, at_ns=START, proc=1, text="\x9b31m [link=file:///]x\r\n")
    text = screen(kit.bye())
    assert not set(text) & {"\x1b", "\x07", "\x9b", "\r"} and "[bold red]evil" in text


def test_an_ascii_stream() -> None:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii")
    kit = small()
    kit.frames.pop()
    print_report(build_report(kit.state()), out)
    out.flush()
    assert b"cudaStreamSynchronize" in raw.getvalue()


def test_long_tables_are_cut() -> None:
    kit = Kit()
    for proc in range(1, 60):
        kit.process(proc, pid=10_000_000 + proc, name="x" * 200)
        kit.wait("cudaMemcpyFromSymbolAsync_ptsz", ns=10**15, proc=proc)
        kit.launch("cuLaunchCooperativeKernel_ptsz" if proc % 2 else "cudaLaunchKernel", times=2, proc=proc)
    text = screen(kit.bye())
    assert "and 47 more (--json shows all)" in text
    assert max(map(len, text.splitlines())) <= 80 and len(text.splitlines()) <= 50


@pytest.mark.parametrize(("ns", "words"), [
    (None, "-"), (0, "0 ns"), (999, "999 ns"), (1_000, "1.00 us"), (45_600_000, "45.6 ms"), (999_960_000, "1000 ms"),
    (1_230_000_000, "1.23 s"), (83_000_000_000, "83.0 s"), (86_400_000_000_000, "86,400.0 s"),
])  # fmt: skip
def test_durations(ns: int | None, words: str) -> None:
    assert duration(ns) == words


def test_cut_names() -> None:
    assert cut("abcdef", 6) == "abcdef" and cut("abcdefg", 6) == "abcd.."
