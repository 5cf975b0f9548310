"""Decisions for kernels that the tests can't run on, from given facts; and the lists that they rest on."""

from __future__ import annotations

import errno
import importlib.util
import os
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from stallscope.capture import linkstyle
from stallscope.capture.linkstyle import Style, best_style
from stallscope.capture.procfs import seccomp_mode
from stallscope.capture.seccomp import ReturnRule, return_probes_allowed, returns_ask_seccomp
from stallscope.capture.sharing import entry_only, program_of
from stallscope.capture.target import Point
from stallscope.capture.ways import PerfWay
from stallscope.errors import CaptureProblem
from stallscope.wire.hook_table import BY_ID, BY_NAME, FEW, HOOKS, MAX_PERF_PROBES

ROOT = Path(__file__).resolve().parents[2]
# Functions of CUDA and NCCL that take a function of the program and may run it, by name or by argument.
CALLS_BACK = ("HostFunc", "Callback", "UserObject", "OccupancyMaxPotential")
CALLABLE = {"callback", "func", "fn", "data", "destroy"}


def generator() -> ModuleType:
    """probes/gen_hooks.py, which is no package's."""
    spec = importlib.util.spec_from_file_location("gen_hooks", ROOT / "probes" / "gen_hooks.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def points(*names: str) -> list[Point]:
    return [Point(BY_NAME[name], 16 * i, 16 * i, 16) for i, name in enumerate(names)]


# Not run on such kernels: the facts are given.
@pytest.mark.parametrize(
    ("release", "mode", "allowed"),
    [
        ("6.10.14-generic", 2, True),
        ("6.11.0", 2, False),
        ("6.11.0-19-generic", 1, False),
        ("6.12.5-amd64", 2, False),
        ("6.12.5-amd64", 0, True),
        ("6.12.5-amd64", None, False),
        ("6.13-rc1", 2, False),
        ("6.13.12", 2, False),
        ("6.14.0", 2, True),
        ("6.1.0-18-amd64", 2, True),
        ("6.18.44", 2, True),
        ("5.15.0-1051-aws", 2, True),
        ("7.12.0", 2, True),
        ("16.12.0", 2, True),
        ("unknown", 2, True),
    ],
)
def test_return_probes_allowed(release: str, mode: int | None, allowed: bool) -> None:
    got, why = return_probes_allowed(release, mode)
    assert got is allowed
    assert bool(why) is not allowed
    if why:
        assert release in why and "counted, not timed" in why


def test_only_x86_has_the_system_call() -> None:
    assert not returns_ask_seccomp("6.12.0", "aarch64")
    assert return_probes_allowed("6.12.0", 2, "aarch64") == (True, "")


def test_the_rule_asks_for_the_process_on_such_kernels_only() -> None:
    asked: list[int] = []

    def mode_of(pid: int) -> int | None:
        asked.append(pid)
        return {1: 0, 2: 2}.get(pid)

    assert ReturnRule("6.18.0", mode_of).why_not(2) is None
    assert asked == []
    rule = ReturnRule("6.12.0", mode_of)
    if os.uname().machine == "x86_64":
        assert not rule.anywhere
        assert rule.why_not(1) is None
        assert "mode filter" in str(rule.why_not(2))
        assert "mode unknown" in str(rule.why_not(3))


def test_seccomp_mode_of_processes() -> None:
    assert seccomp_mode(os.getpid()) is not None
    with subprocess.Popen(["/bin/true"]) as gone:
        gone.wait()
        assert seccomp_mode(gone.pid) is None


def test_entry_only_counts_by_the_launch_program() -> None:
    found = entry_only(points("cudaStreamSynchronize", "ncclAllReduce", "ncclBcast", "cudaLaunchKernel"))
    assert [p.hook.name for p in found] == ["cudaStreamSynchronize", "ncclAllReduce", "cudaLaunchKernel"]
    assert {program_of(p.hook) for p in found} == {"launch"}
    assert [p.hook.cookie for p in found] == [BY_NAME[p.hook.name].cookie for p in found]


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
        way.attach("enter", 0, points("cudaStreamSynchronize"), 0, 0)


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


def test_return_probes_stand_on_the_allow_list_only() -> None:
    """Each with its reason; none on a function that runs the program's code: an exception thrown through a
    return-probed frame ends the process."""
    pairs = [hook for hook in HOOKS if hook.mode == "PAIR"]
    assert len(pairs) > 100
    for hook in pairs:
        assert len(hook.reason) > 15, hook.name
        assert not any(word in hook.name for word in CALLS_BACK), hook.name
        assert not CALLABLE & set(hook.arguments.replace("*", "").split()), hook.name
    for hook in HOOKS:
        if any(word in hook.name for word in CALLS_BACK):
            assert hook.mode == "ENTRY", hook.name
    assert BY_NAME["cudaLaunchHostFunc"].mode == BY_NAME["cuLaunchHostFunc"].mode == "ENTRY"


def test_the_generator_insists_on_a_reason() -> None:
    line = 'HOOK(1, CUDART, cudaX, wait, PAIR, "", "", "")\n'
    with pytest.raises(ValueError, match="no reason"):
        generator().read_table(line)
