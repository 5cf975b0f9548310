"""The screen for a person: what is on it, how wide it is, and what it must not let through."""

from __future__ import annotations

import io
import re

import pytest
from aggregate_kit import START, Kit, small

from stallscope.output.terminal import report_text
from stallscope.output.words import cut, duration
from stallscope.wire.frames import Kind


def screen(kit: Kit) -> str:
    return report_text(kit.report(), io.StringIO())


def test_one_screen_of_80_columns() -> None:
    text = screen(small())
    assert max(map(len, text.splitlines())) <= 80
    for part in (
        "calls made: ≥10 (9 recorded, 0 lost, 1 not sampled)", "python3 (pid 4242) on node7", "10.0 s traced", "every call recorded",
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
    out.write(report_text(kit.report(), out))
    out.flush()
    assert b"cudaStreamSynchronize" in raw.getvalue()


def test_long_tables_are_cut() -> None:
    kit = Kit()
    for proc in range(1, 60):
        kit.process(proc, pid=10_000_000 + proc, name="x" * 200)
        kit.wait("cudaMemcpyFromSymbolAsync_ptsz", ns=10**15, proc=proc)
        kit.launch("cuLaunchCooperativeKernel_ptsz" if proc % 2 else "cudaLaunchKernel", times=2, proc=proc)
    text = screen(kit.bye())
    assert "and 47 more: --json shows all" in text
    assert max(map(len, text.splitlines())) <= 80 and len(text.splitlines()) <= 53


def test_who_waits_now_comes_first() -> None:
    text = screen(small())
    assert text.index("waiting now") < text.index("where the time went") < text.index("enqueue calls")
    kit = Kit()
    kit.process()
    kit.link("CUDART")
    kit.wait()
    assert "waiting now: no thread was seen inside a call" in screen(kit.bye())
    # Cut before the last look: nothing is known.
    kit.frames.pop()
    assert "waiting now" not in screen(kit)


def test_waits_that_do_not_matter_are_one_line() -> None:
    kit = Kit()
    kit.process()
    kit.link("CUDART", late_ns=900)
    kit.wait(ns=2_000_000_000)
    for api in ("cudaMemcpy", "cudaDeviceSynchronize", "cudaEventSynchronize"):
        kit.wait(api, ns=1_000)
    text = screen(kit.bye())
    assert "≥20 %" in text and "and 3 more below 0.5 %: --json shows all" in text
    assert "cudaMemcpy" not in text and "≥0 %" not in text


@pytest.mark.parametrize(("late_ns", "share"), [(0, "<0.5 %"), (900, " - ")])
def test_nothing_but_small_waits(late_ns: int, share: str) -> None:
    kit = Kit()
    kit.process()
    kit.link("CUDART", late_ns=late_ns)
    for api in ("cudaMemcpy", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaStreamSynchronize"):
        kit.wait(api, ns=1_000)
    text = screen(kit.bye())
    assert text.count(share) == 3 and "and 1 more below 0.5 %" in text and "≥0 %" not in text


def test_a_driver_call_cut_by_the_attach_does_not_head_the_list() -> None:
    kit = Kit()
    kit.process()
    kit.link("CUDART")
    kit.link("CUDA")
    kit.wait("cuStreamSynchronize", ns=5_000_000_000)
    for _ in range(20):
        kit.wait(ns=50_000_000)
        kit.wait("cuStreamSynchronize", ns=50_000_000, nested=True)
    text = screen(kit.bye())
    assert 0 < text.index("cudaStreamSynchronize") < text.index("cuStreamSynchronize")


def test_whose_a_row_is() -> None:
    kit = Kit()
    kit.process(1, pid=11)
    kit.process(2, pid=22)
    for proc in (1, 2):
        kit.wait(ns=1_000_000_000, proc=proc)
    kit.bye()
    assert not re.search("name|rank", screen(kit))
    report = kit.report()
    report["processes"][0] |= {"name": "trainer", "global_rank": 7}
    text = report_text(report, io.StringIO())
    assert re.search(r"rank +pid +name +function", text)
    assert re.search(r"\b7 +11 trainer +cudaStreamSync", text) and re.search(r"- +22 python3 +cudaStreamSync", text)
    assert max(map(len, text.splitlines())) <= 80


def test_how_it_ended() -> None:
    kit = Kit(targets=[1])
    for proc, (code, signal) in enumerate([(0, None), (0, None), (3, None), (None, 9), (None, 999)], 1):
        kit.process(proc, pid=proc)
        kit.wait(proc=proc)
        kit.add(Kind.EXIT, proc=proc, at_ns=START + 1_000_000_000, code=code, signal=signal)
    text = screen(kit.bye())
    assert "(pid 3) ended with exit code 3 at 1.00 s" in text
    assert "(pid 4) ended by signal 9 (SIGKILL) at 1.00 s" in text and "(pid 5) ended by signal 999 at" in text
    assert "(pid 1) ended" not in text
    kit = Kit(targets=[1])
    kit.process(1, pid=1)
    kit.wait()
    kit.add(Kind.EXIT, proc=1, at_ns=START + 1_000_000_000, code=0, signal=None)
    assert "(pid 1) ended with exit code 0 at 1.00 s" in screen(kit.bye())


def test_late_links_are_one_line_a_process() -> None:
    kit = Kit()
    kit.process()
    for library, late_ns in (("CUDART", 900), ("CUDA", 500)):
        kit.link(library, late_ns=late_ns)
    kit.wait()
    text = screen(kit.bye())
    assert "- pid 4242: calls in the first 900 ns of libcudart, libcuda were not seen" in text
    assert "missed" not in text
    kit = Kit()
    for proc in range(1, 30):
        kit.process(proc, pid=100 + proc)
        kit.link("CUDART", proc, late_ns=proc)
        kit.link("CUDA", proc, late_ns=proc)
        kit.wait(proc=proc)
    text = " ".join(screen(kit.bye()).split())
    assert "29 processes: calls in the first up to 29 ns of libcudart, libcuda were not seen" in text


@pytest.mark.parametrize(("ns", "words"), [
    (None, "-"), (0, "0 ns"), (999, "999 ns"), (1_000, "1.00 us"), (45_600_000, "45.6 ms"), (999_960_000, "1000 ms"),
    (1_230_000_000, "1.23 s"), (83_000_000_000, "83.0 s"), (86_400_000_000_000, "86,400.0 s"),
])  # fmt: skip
def test_durations(ns: int | None, words: str) -> None:
    assert duration(ns) == words


def test_cut_names() -> None:
    assert cut("abcdef", 6) == "abcdef" and cut("abcdefg", 6) == "abcd.."
