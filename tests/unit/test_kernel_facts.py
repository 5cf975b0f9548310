"""Decisions for kernels that the tests can't run on, from given facts; and the lists that they rest on."""

from __future__ import annotations

import errno
import importlib.util
import os
from pathlib import Path
from types import ModuleType

import pytest

from stallscope.capture import linkstyle
from stallscope.capture.linkstyle import Style, best_style
from stallscope.capture.target import Point
from stallscope.capture.ways import PerfWay
from stallscope.errors import CaptureProblem
from stallscope.wire.hook_table import BY_ID, BY_NAME, FEW, HOOKS, MAX_PERF_PROBES

ROOT = Path(__file__).resolve().parents[2]


def generator() -> ModuleType:
    """probes/gen_hooks.py, which is no package's."""
    spec = importlib.util.spec_from_file_location("gen_hooks", ROOT / "probes" / "gen_hooks.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def points(*names: str) -> list[Point]:
    return [Point(BY_NAME[name], 16 * i, 16 * i, 16) for i, name in enumerate(names)]


def test_few_hooks_fill_the_room() -> None:
    chosen = [BY_ID[number] for number in FEW]
    cost = sum(2 if hook.mode == "PAIR" else 1 for hook in chosen)
    assert cost <= MAX_PERF_PROBES
    kinds = [hook.kind for hook in chosen]
    waits = [i for i, kind in enumerate(kinds) if kind in ("wait", "collective", "p2p", "comm", "group")]
    assert max(waits) < kinds.index("launch") < kinds.index("copy")
    assert {"ncclAllReduce", "ncclGroupEnd", "ncclCommInitRank", "cudaDeviceSynchronize"} <= {h.name for h in chosen}


def test_few_def_is_checked() -> None:
    module = generator()
    rows = module.read_table((ROOT / "probes" / "hooks.def").read_text())
    for text, wrong in (
        ("FEW(cudaNoSuch)\n", "does not probe cudaNoSuch"),
        ("FEW(__cudaLaunchKernel)\n", "does not probe"),
        ("FEW(cudaFree)\nFEW(cudaFree)\n", "twice"),
        ("".join(f"FEW({h.name})\n" for h in HOOKS if h.mode == "PAIR"), "are the most"),
    ):
        with pytest.raises(ValueError, match=wrong):
            module.read_few(text, rows)


def test_perf_way_keeps_to_the_room() -> None:
    """Two copies of a library share it; what is left out is named."""
    way = PerfWay({}, cookies=True)
    every = [h.name for h in HOOKS if h.mode != "SHIM"]
    first, note = way.choose("/a/libcudart.so", points(*every))
    assert [p.hook.id for p in first] == list(FEW)
    assert note and f"{len(every) - len(FEW)} are not: " in note and "cuMemAllocAsync" in note
    second, note = way.choose("/b/libcudart.so", points("cudaStreamSynchronize", "cudaFree"))
    assert second == []
    assert note and note.endswith("2 are not: cudaFree, cudaStreamSynchronize")


def test_perf_way_says_nothing_when_all_fit() -> None:
    assert PerfWay({}, cookies=True).choose("/a", points("cudaFree"))[1] is None


def test_without_cookies_a_hook_needs_its_program() -> None:
    way = PerfWay({"enter_1": 5}, cookies=False)
    assert way.max_filtered == 0
    with pytest.raises(CaptureProblem, match="no program for it"):
        way.attach("wait_enter", 0, points("cudaStreamSynchronize"), 0, 0)


@pytest.mark.parametrize(
    ("multi", "cookie_errno", "style"),
    [
        (True, 0, Style.MULTI),
        (None, errno.EPERM, Style.MULTI),
        (False, 0, Style.PERF),
        (False, errno.EINVAL, Style.PERF_NO_COOKIE),
    ],
)
def test_style_by_what_the_kernel_answers(
    multi: bool | None, cookie_errno: int, style: Style, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not run on such kernels: the answers are given."""

    def load_program(*_: object) -> int:
        if cookie_errno:
            raise OSError(cookie_errno, os.strerror(cookie_errno))
        return os.open("/dev/null", os.O_RDONLY)

    monkeypatch.setattr(linkstyle, "has_uprobe_multi", lambda: multi)
    monkeypatch.setattr(linkstyle, "load_program", load_program)
    assert best_style() is style
