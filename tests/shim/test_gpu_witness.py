"""The GPU's witness inside ranks on the simulated NCCL: it takes the plugin's place, and what it tells is exact."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "sim"))

import gpu_scenarios as do
from gpu_kit import FINISHED, QUEUED, STARTED, build
from nccl_kit import Nccl, everywhere, ranks

CLAIMED, TAKEN, OFF, RISK, EVENTS, AT_WORK = 4, 1, 5, 6, 8, 16


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build(tmp_path_factory.mktemp("with a space")))


@pytest.mark.parametrize(("version", "channels"), [(3, 4), (4, 1), (4, 7), (5, 2), (6, 32)])
def test_every_operation_is_told_of_exactly(library: str, version: int, channels: int) -> None:
    settings = {"STALLSCOPE_SIM_NCCL_PROFILER": str(version), "STALLSCOPE_SIM_NCCL_CHANNELS": str(channels)}
    uid = Nccl().unique_id()
    with ranks(4, STALLSCOPE_SHIM_GPU="on", **settings) as pool:
        assert everywhere(pool, do.joined, library, uid) == [AT_WORK + version] * 4
        results = everywhere(pool, do.program)
    for told, issued, lost in results:
        # NCCL before 2.31 may fail when it is asked about more than one transfer of a group.
        transfers = [i for i, call in enumerate(issued) if call[0] in ("ncclSend", "ncclRecv")]
        expected = Counter(call for i, call in enumerate(issued) if i not in transfers or i - 1 not in transfers)
        for kind in (QUEUED, STARTED, FINISHED):
            found = Counter((e.name, e.n, e.comm) for e in told if e.kind == kind)
            assert found == (Counter() if (version, kind) == (3, FINISHED) else expected), kind
        places = {(e.kind, e.n, e.comm): i for i, e in enumerate(told)}
        assert all(places[QUEUED, n, comm] < places[STARTED, n, comm] for _, n, comm in expected)
        assert lost == {}


def test_a_gpu_that_does_not_come_to_it(library: str) -> None:
    uid = Nccl().unique_id()
    with ranks(2, STALLSCOPE_SHIM_GPU="on") as pool:
        everywhere(pool, do.joined, library, uid)
        for rank, worker in enumerate(pool):
            worker.start(do.stuck, rank == 1, 2, rank)
        fine, stuck = (worker.result() for worker in pool)
    assert [(e.kind, e.n) for e in fine] == [(QUEUED, 1), (STARTED, 1)]
    assert [(e.kind, e.n) for e in stuck] == [(QUEUED, 1)]


def test_graphs_are_not_taken_for_calls(library: str) -> None:
    uid = Nccl().unique_id()
    with ranks(2, STALLSCOPE_SHIM_GPU="on") as pool:
        everywhere(pool, do.joined, library, uid)
        results = everywhere(pool, do.graph)
    for told, lost in results:
        assert [(e.kind, e.n) for e in told] == [(QUEUED, 1), (STARTED, 1), (FINISHED, 1)]
        assert lost == {"unmatched": 3}


def only(**settings: str) -> tuple[int, str | None, int]:
    library = settings.pop("library")
    settings = {"STALLSCOPE_SHIM_GPU": "on", **settings}
    with ranks(1, **settings) as (rank,):
        rank.start(do.claimed, library)
        state, value, changed = rank.result()
    assert changed == 0, "the rest of the environment is as before"
    return state, value, changed


def test_a_free_place_is_taken(library: str) -> None:
    assert only(library=library)[:2] == (CLAIMED, library)


@pytest.mark.parametrize("value", ["none", "inspector", "/lib/x.so", ""])
def test_a_place_that_the_user_has_filled_is_left(library: str, value: str) -> None:
    assert only(library=library, NCCL_PROFILER_PLUGIN=value)[:2] == (TAKEN, value)


def test_our_own_name_is_no_other_plugin(library: str) -> None:
    assert only(library=library, NCCL_PROFILER_PLUGIN=library)[:2] == (CLAIMED, library)


def test_the_switch(library: str) -> None:
    assert only(library=library, STALLSCOPE_SHIM_GPU="off")[:2] == (OFF, None)
    assert only(library=library, STALLSCOPE_SHIM_GPU="")[:2] == (RISK, None), "an old NCCL is left alone by itself"
    assert only(library=library, STALLSCOPE_SHIM_GPU="on")[:2] == (CLAIMED, library)
    assert only(library=library, STALLSCOPE_SHIM_GPU="events")[:2] == (EVENTS, None)
    assert only(library=library, STALLSCOPE_SHIM_GPU="auto")[:2] == (EVENTS, None), "where a plugin may do harm"


@pytest.mark.parametrize(("text", "state"), [("NCCL_PROFILER_PLUGIN=mine\n", TAKEN), ("NCCL_DEBUG=INFO\n", CLAIMED),
                                             ("# NCCL_PROFILER_PLUGIN=mine\n", CLAIMED)])  # fmt: skip
@pytest.mark.parametrize("way", ["home", "named"])
def test_a_configuration_file_that_names_one(library: str, tmp_path: Path, text: str, state: int, way: str) -> None:
    file = tmp_path / (".nccl.conf" if way == "home" else "any.conf")
    file.write_text("NCCL_DEBUG=WARN\n" + text)
    settings = {"HOME": str(tmp_path)} if way == "home" else {"NCCL_CONF_FILE": str(file)}
    assert only(library=library, **settings)[0] == state


def test_where_nccl_does_not_take_it_nothing_is_told(library: str) -> None:
    uid = Nccl().unique_id()
    with ranks(2, NCCL_PROFILER_PLUGIN="none") as pool:
        assert everywhere(pool, do.joined, library, uid) == [TAKEN, TAKEN]
        results = everywhere(pool, do.program)
    assert all((told, lost) == ([], {}) for told, _, lost in results)
