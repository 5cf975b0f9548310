"""The simulated NCCL: right numbers, who waits for whom, what is left behind, and what a tracer can read."""

from __future__ import annotations

import os
import re
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import nccl_programs as programs
import nccl_scenarios as do
from nccl_kit import ROOT, Nccl, Rank, everywhere, ranks

SIM = ROOT / "build/sim/lib"
LIBRARY = SIM / "libnccl.so.2"
BLOCKED_S = 0.3  # what has not ended by then is called blocked
SOON_S = 10.0
EXPORTS = [
    "AllGather",
    "AllReduce",
    "Bcast",
    "Broadcast",
    "CommAbort",
    "CommCount",
    "CommCuDevice",
    "CommDeregister",
    "CommDestroy",
    "CommFinalize",
    "CommGetAsyncError",
    "CommInitAll",
    "CommInitRank",
    "CommInitRankConfig",
    "CommInitRankScalable",
    "CommRegister",
    "CommShrink",
    "CommSplit",
    "CommUserRank",
    "CommWindowDeregister",
    "CommWindowRegister",
    "GetErrorString",
    "GetLastError",
    "GetUniqueId",
    "GetVersion",
    "GroupEnd",
    "GroupSimulateEnd",
    "GroupStart",
    "MemAlloc",
    "MemFree",
    "Recv",
    "RedOpCreatePreMulSum",
    "RedOpDestroy",
    "Reduce",
    "ReduceScatter",
    "Send",
]


@pytest.fixture(scope="session", autouse=True)
def _built_nccl() -> None:
    subprocess.run(["make", "-s", "-C", str(ROOT / "native/sim")], check=True)


@pytest.fixture(scope="module")
def nccl(_built_nccl: None) -> Nccl:
    return Nccl()


@pytest.fixture(scope="module")
def eight(_built_nccl: None) -> Iterator[list[Rank]]:
    """Ranks for tests that leave nothing behind."""
    with ranks(8) as pool:
        yield pool


def joined(nccl: Nccl, pool: list[Rank]) -> None:
    everywhere(pool, do.join, nccl.unique_id())


def tell(pool: list[Rank], work: object, *args: object) -> list[object]:
    for rank in pool:
        rank.start(work, *args)  # type: ignore[arg-type]
    return [rank.result() for rank in pool]


def blocked(pool: list[Rank], seconds: float = BLOCKED_S) -> list[bool]:
    """Whose stream is busy after that time."""
    return [not idle for idle in tell(pool, do.idle, seconds)]


def faults(path: Path, text: str) -> None:
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").rename(path)
    time.sleep(0.1)  # longer than they may leave it unread


# the library as an object


def symbols() -> dict[str, tuple[str, int]]:
    listed = subprocess.run(["nm", "-D", "--defined-only", LIBRARY], capture_output=True, text=True, check=True).stdout
    rows = (line.split() for line in listed.splitlines())
    return {name: (kind, int(address, 16)) for address, kind, name in rows}


def test_exports_are_those_of_2_27(nccl: Nccl) -> None:
    found = symbols()
    assert set(found) == {f"{p}{n}" for n in EXPORTS for p in ("nccl", "pnccl")} | {"ncclResetDebugInit"}
    assert all(found[f"nccl{name}"][1] == found[f"pnccl{name}"][1] for name in EXPORTS)
    assert len({address for _, address in found.values()}) == len(EXPORTS) + 1


def test_each_function_begins_with_push(nccl: Nccl) -> None:
    code = LIBRARY.read_bytes()
    leaves = {"GetErrorString", "GetVersion", "ResetDebugInit"}  # nobody hooks these
    for name, (_, address) in symbols().items():
        assert code[address] == 0x55 or name.lstrip("p")[4:] in leaves, name  # .text lies at its address in this file


def test_calls_through_the_plt_are_the_real_ones(nccl: Nccl) -> None:
    listed = subprocess.run(["readelf", "-rW", LIBRARY], capture_output=True, text=True, check=True).stdout
    assert set(re.findall(r"JUMP_SLO\w*\s+\w+\s+(p?nccl\w+)", listed)) == {
        "ncclBroadcast", "ncclGetUniqueId", "ncclCommGetAsyncError", "ncclCommDeregister"
    }  # fmt: skip


@pytest.mark.parametrize(
    "function, offset", [("CommUserRank", 0x1044B8), ("CommCount", 0x1044BC), ("CommCuDevice", 0x1044C0)]
)
def test_machine_code_tells_the_offsets(nccl: Nccl, function: str, offset: int) -> None:
    start = symbols()[f"nccl{function}"][1]
    command = ["objdump", "-d", f"--start-address={start}", f"--stop-address={start + 80}", LIBRARY]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert len(re.findall(rf"mov\s+{offset:#x}\(%r\w+\),%e\w\w", text)) == 1
    # The first instruction that copies rdi keeps it in the register that is read from.
    kept = re.search(r"mov\s+%rdi,(%r\w+)", text)
    assert kept and f"{offset:#x}({kept[1]})" in text


def test_debug_information_names_the_fields(nccl: Nccl) -> None:
    from elftools.elf.elffile import ELFFile

    with LIBRARY.open("rb") as file:
        for unit in ELFFile(file).get_dwarf_info().iter_CUs():
            for die in unit.iter_DIEs():
                if die.tag == "DW_TAG_structure_type" and die.attributes.get("DW_AT_name"):
                    if die.attributes["DW_AT_name"].value != b"ncclComm" or not die.has_children:
                        continue
                    at = {
                        c.attributes["DW_AT_name"].value: c.attributes["DW_AT_data_member_location"].value
                        for c in die.iter_children()
                    }
                    assert (at[b"rank"], at[b"commHash"], at[b"seqNumber"]) == (0x1044B8, 0x1044B0, 0x106550)
                    return
    pytest.fail("no struct ncclComm")


def test_unique_id_layout(nccl: Nccl) -> None:
    ids = [nccl.unique_id() for _ in range(3)]
    for uid in ids:
        family, port, address = struct.unpack_from("<H", uid, 8)[0], uid[10:12], uid[12:16]
        assert (family, address, uid[16:]) == (2, bytes([127, 0, 0, 1]), bytes(112))
        assert int.from_bytes(port, "big") >= 32768
    assert len({uid[:8] for uid in ids}) == 3


def digest(chunks: list[bytes]) -> int:
    """The hash of NCCL 2.26 and later."""
    mask, a, b = 2**64 - 1, 1, 1
    for chunk in chunks:
        a ^= len(chunk)
        for at in range(0, len(chunk), 8):
            a = (a + b) & mask
            b ^= a
            a = (a ^ a >> 31) * 0x9DE62BBC8CEF3CE3 & mask
            b = (b ^ b >> 32) * 0x485CD6311B599E79 & mask
            a = (a + int.from_bytes(chunk[at : at + 8], "little")) & mask
    h = ((a ^ a >> 31) * 0xBAC3BD562846DE6B + b) & mask
    return (h ^ h >> 32) * 0x995A187A14E7B445 & mask


def test_communicator_reads_like_a_real_one(nccl: Nccl, eight: list[Rank]) -> None:
    uid = nccl.unique_id()
    everywhere(eight[:3], do.join, uid)
    for index, seen in enumerate(tell(eight[:3], do.struct_fields)):
        assert isinstance(seen, dict)
        assert (seen["rank"], seen["nRanks"], seen["cudaDev"], seen["localRanks"]) == (index, 3, 0, 3)
        assert (seen["start"], seen["end"], seen["opCount"]) == (0x0280028002800280, 0x0280028002800280, 0)
        assert seen["magic"] == int.from_bytes(uid[:8], "little")
        assert seen["hash"] == digest([uid])
    for code, seen in tell(eight[:3], do.use_after_destroy):  # type: ignore[misc]
        assert (code, seen["rank"], seen["start"], seen["end"]) == (4, -1, 0, 0)


def test_version_and_words(nccl: Nccl) -> None:
    import ctypes

    version = ctypes.c_int()
    assert nccl.lib.ncclGetVersion(ctypes.byref(version)) == 0 and version.value == 22705
    nccl.lib.ncclGetErrorString.restype = ctypes.c_char_p
    assert nccl.lib.ncclGetErrorString(0) == b"no error"
    assert nccl.lib.ncclGetErrorString(99) == b"unknown result code"


# numbers


@pytest.mark.parametrize("count", range(2, 9))
def test_every_operation_type_and_root(nccl: Nccl, eight: list[Rank], count: int) -> None:
    done = everywhere(eight[:count], programs.every_operation, nccl.unique_id())
    assert len(set(done)) == 1 and done[0] > 200
    everywhere(eight[:count], programs.pre_mul_sum, nccl.unique_id())


def test_two_hundred_random_programs_end(nccl: Nccl, eight: list[Rank]) -> None:
    assert (
        everywhere(eight, programs.random_programs, [nccl.unique_id() for _ in range(200)], 0, seconds=90) == [200] * 8
    )


def test_alone_nothing_waits(nccl: Nccl, eight: list[Rank]) -> None:
    assert everywhere(eight[:1], programs.every_operation, nccl.unique_id())[0] > 200


# who waits for whom


def test_all_ranks_in_one_process(nccl: Nccl, eight: list[Rank]) -> None:
    assert tell(eight[:1], do.init_all, 2) == [[[0, 0, 3], [1, 1, 3]]]


def test_a_call_returns_at_once_and_waits_its_turn(nccl: Nccl, eight: list[Rank]) -> None:
    joined(nccl, eight[:2])
    for called, ended in tell(eight[:2], do.behind_a_kernel, 0.2):  # type: ignore[misc]
        assert called < 0.15 and ended >= 0.2
    tell(eight[:2], do.destroy)


@pytest.mark.parametrize("name", ["ncclAllReduce", "ncclAllGather"])
def test_an_absent_rank_blocks_the_others(nccl: Nccl, eight: list[Rank], name: str) -> None:
    pool = eight[:4]
    joined(nccl, pool)
    if name == "ncclAllGather":
        tell(pool[:3], do.start, 4, name)
    else:
        tell(pool[:3], do.start, 4)
    assert blocked(pool) == [True, True, True, False]
    tell(pool[3:], do.start, 4, name)
    assert blocked(pool, SOON_S) == [False] * 4
    tell(pool, do.destroy)


def test_a_dead_rank_blocks_the_others_and_abort_frees_them(nccl: Nccl) -> None:
    with ranks(3) as pool:
        joined(nccl, pool)
        pool[2].kill()
        tell(pool[:2], do.start, 4)
        assert blocked(pool[:2]) == [True, True]
        tell(pool[:1], do.abort)
        assert blocked(pool[:2]) == [False, True]
        tell(pool[1:2], do.abort)
        assert blocked(pool[1:2], SOON_S) == [False]


def test_a_missing_rank_blocks_initialisation_on_the_host(nccl: Nccl) -> None:
    uid = nccl.unique_id()
    with ranks(3) as pool:
        for index in (0, 2):
            pool[index].start(do.join, uid, 3, index)
        assert not pool[0].ended(BLOCKED_S) and not pool[2].ended(0)
        pool[1].start(do.join, uid, 3, 1)
        assert [rank.result(SOON_S) for rank in pool] == [None] * 3


def test_a_missing_rank_blocks_a_split_on_the_host(nccl: Nccl) -> None:
    with ranks(3) as pool:
        joined(nccl, pool)
        for rank, color in ((0, 1), (1, 1)):
            pool[rank].start(do.split, color, -rank)
        assert not pool[0].ended(BLOCKED_S) and not pool[1].ended(0)
        pool[2].start(do.split, -1, 0)
        assert [rank.result(SOON_S) for rank in pool] == [(2, 1), (2, 0), None]


@pytest.mark.parametrize("call", ["init", "split", "send"])
def test_abort_from_another_thread_frees_a_blocked_call(nccl: Nccl, call: str) -> None:
    with ranks(2) as pool:
        joined(nccl, pool)
        assert tell(pool[:1], do.aborted_by_another_thread, call, nccl.unique_id()) == [(True, 3)]


def test_shrink_leaves_the_others(nccl: Nccl) -> None:
    with ranks(3) as pool:
        joined(nccl, pool)
        tell([pool[0], pool[2]], do.start, 4)  # rank 1 never comes
        assert tell([pool[0], pool[2]], do.shrink, [1], 1) == [(2, 0, True), (2, 1, True)]


def test_nonblocking_initialisation(nccl: Nccl) -> None:
    uid = nccl.unique_id()
    with ranks(2) as pool:
        pool[0].start(do.join_named, uid, 0, b"dp", 2, 0)
        assert pool[0].result() == 7
        pool[1].start(do.join_named, uid, 0, b"dp", 2, 1)
        assert pool[1].result() in (0, 7)
        assert tell(pool, do.become_ready, SOON_S) == [0, 0]
        tell(pool, do.start, 4)
        assert blocked(pool, SOON_S) == [False, False]
        pool[0].start(do.abort_in_the_back, nccl.unique_id(), 2, 0)
        assert pool[0].result() == 7


@pytest.mark.parametrize("turned", [False, True])
def test_groups_on_two_communicators(nccl: Nccl, eight: list[Rank], turned: bool) -> None:
    pool, other = eight[:2], nccl.unique_id()
    joined(nccl, pool)
    for index, rank in enumerate(pool):
        rank.start(do.two_in_a_group, other, turned and index == 1, 2, index)
    assert [rank.result() for rank in pool] == [[2, 4], [2, 4]]
    for index, rank in enumerate(pool):
        rank.start(do.reordered_group, index == 1)
    assert [rank.result() for rank in pool] == [[2, 4], [2, 4]]
    tell(pool, do.destroy)


def test_nothing_starts_before_the_group_ends(nccl: Nccl, eight: list[Rank]) -> None:
    pool = eight[:2]
    joined(nccl, pool)
    tell(pool[:1], do.start, 4)
    assert tell(pool[1:], do.held_group, "ncclAllReduce") == [False]
    assert blocked(pool[:1]) == [True]
    tell(pool[1:], do.close_group)
    assert blocked(pool, SOON_S) == [False, False]
    tell(pool, do.destroy)


def test_messages_to_one_peer_stay_in_order(nccl: Nccl, eight: list[Rank]) -> None:
    pool = eight[:2]
    joined(nccl, pool)
    pool[0].start(do.transfers, [(1, 10), (1, 11), (0, 5), (1, 12)], [(0, 0), (1, 0)])
    pool[1].start(do.transfers, [(0, 20)], [(0, 0)] * 3)
    assert [rank.result() for rank in pool] == [[5, 20], [10, 11, 12]]
    tell(pool, do.destroy)


def test_a_send_waits_for_its_peer_alone(nccl: Nccl) -> None:
    with ranks(3) as pool:
        joined(nccl, pool)
        pool[0].start(do.send, 4, 1, 7)  # the first time connects: on the host
        assert not pool[0].ended(BLOCKED_S)
        pool[1].start(do.recv, 4, 0)
        assert pool[0].result() is None and pool[1].result() is None
        assert blocked(pool, SOON_S) == [False] * 3
        pool[0].start(do.send, 4, 1, 8)  # now only the stream waits
        pool[0].result()
        assert blocked(pool) == [True, False, False]
        pool[1].start(do.recv, 4, 0)
        pool[1].result()
        assert blocked(pool, SOON_S) == [False] * 3
        pool[1].start(do.received, 4)
        assert pool[1].result() == [8.0] * 4


def test_eager_sends_do_not_wait(nccl: Nccl) -> None:
    with ranks(2, STALLSCOPE_SIM_NCCL_EAGER="64") as pool:
        joined(nccl, pool)
        pool[1].start(do.recv, 4, 0)
        pool[0].start(do.send, 4, 1, 7)
        assert [rank.result() for rank in pool] == [None, None]
        pool[0].start(do.send, 4, 1, 8)
        pool[0].result()
        assert blocked(pool[:1], SOON_S) == [False]


def test_graphs_repeat_the_collective(nccl: Nccl, eight: list[Rank]) -> None:
    joined(nccl, eight[:2])
    assert tell(eight[:2], do.graph, 3) == [8, 8]
    tell(eight[:2], do.destroy)


def test_the_host_waits_when_the_queue_is_full(nccl: Nccl) -> None:
    with ranks(2, STALLSCOPE_SIM_NCCL_FIFO="16") as pool:
        joined(nccl, pool)
        assert tell(pool[:1], do.host_blocked_calls, 16) == [16]
        assert tell(pool[1:], do.start_many, 16) == [16]
        assert blocked(pool[1:], SOON_S) == [False]
    with ranks(2, STALLSCOPE_SIM_NCCL_FIFO="16") as pool:
        joined(nccl, pool)
        assert tell(pool[:1], do.host_blocked_calls, 16) == [16]
        tell(pool[:1], do.abort)  # also frees the host


def test_wrong_calls_say_so(nccl: Nccl, eight: list[Rank]) -> None:
    joined(nccl, eight[:1])
    (seen,) = tell(eight[:1], do.wrong_calls)
    assert seen == {
        "null": 4, "type": 4, "fp8": 4, "op": 4, "peer": 4, "root": 4, "end": 5, "group": 4, "zero": 0,
    }  # fmt: skip
    tell(eight[:1], do.destroy)


# calls that do not fit


def mismatch(nccl: Nccl, pool: list[Rank], *calls: tuple[int, str]) -> list[bool]:
    joined(nccl, pool)
    for rank, call in zip(pool, calls, strict=True):
        rank.start(do.start, *call)
        rank.result()
    return blocked(pool)


def test_slightly_different_sizes_end_with_wrong_numbers(nccl: Nccl) -> None:
    with ranks(2) as pool:
        assert mismatch(nccl, pool, (1000, "ncclAllReduce"), (998, "ncclAllReduce")) == [False, False]
        assert pool[0].start(do.received, 1000) is None
        assert pool[0].result()[997:] == [2.0, -1.0, -1.0]


def test_very_different_sizes_block_those_who_want_more(nccl: Nccl) -> None:
    with ranks(3) as pool:
        calls = [(10, "ncclAllReduce"), (200_000, "ncclAllReduce"), (200_000, "ncclAllReduce")]
        assert mismatch(nccl, pool, *calls) == [False, True, True]
        tell(pool, do.abort)
        assert blocked(pool, SOON_S) == [False] * 3


def test_different_operations_block_all(nccl: Nccl) -> None:
    with ranks(2) as pool:
        assert mismatch(nccl, pool, (10, "ncclAllReduce"), (10, "ncclAllGather")) == [True, True]


def test_nothing_to_do_is_no_barrier(nccl: Nccl, eight: list[Rank]) -> None:
    joined(nccl, eight[:2])
    tell(eight[:1], do.start, 0)
    assert blocked(eight[:1]) == [False]
    tell(eight[:2], do.destroy)


def test_the_newer_library_exchanges(nccl: Nccl) -> None:
    with ranks(3, NCCL_KIT_LIBRARY="newer/libnccl.so.2") as pool:
        joined(nccl, pool)
        assert tell(pool, do.newer_exchanges) == [
            [[0, 10, 20], [-1, -1, -1], [20, -1, -1]],
            [[1, 11, 21], [-1, -1, -1], [21, -1, -1]],
            [[2, 12, 22], [0, 10, 20], [22, -1, -1]],
        ]


# faults by plan


def test_never_completes_blocks_all_until_it_is_taken_away(nccl: Nccl, tmp_path: Path) -> None:
    plan = tmp_path / "plan"
    plan.write_text("# nothing yet\n")
    with ranks(3, STALLSCOPE_SIM_FAULTS=str(plan)) as pool:
        joined(nccl, pool)
        faults(plan, "cuda.other rank=1\nnccl.never_completes rank=1 op=1\n")
        tell(pool, do.start, 4)
        assert blocked(pool, SOON_S) == [False] * 3
        tell(pool, do.start, 4)
        assert blocked(pool) == [True] * 3
        faults(plan, "")
        assert blocked(pool, SOON_S) == [False] * 3


def test_slow_async_error_and_names(nccl: Nccl, tmp_path: Path) -> None:
    plan = tmp_path / "plan"
    plan.write_text("nccl.slow rank=1 ns=400000000 name=tp\nnccl.async_error rank=0 code=6 name=tp\n")
    with ranks(2, STALLSCOPE_SIM_FAULTS=str(plan)) as pool:
        everywhere(pool, do.join_named, nccl.unique_id(), 1, b"dp")
        tell(pool, do.start, 4)
        assert blocked(pool, 0.2) == [False, False]
        assert tell(pool, do.async_error) == [0, 0]
        everywhere(pool, do.join_named, nccl.unique_id(), 1, b"tp")
        tell(pool, do.start, 4)
        assert blocked(pool, 0.1) == [True, True]
        assert blocked(pool, SOON_S) == [False, False]
        assert tell(pool, do.async_error) == [6, 0]


def test_abort_hangs_by_plan(nccl: Nccl, tmp_path: Path) -> None:
    plan = tmp_path / "plan"
    plan.write_text("nccl.abort_hangs rank=0\n")
    with ranks(2, STALLSCOPE_SIM_FAULTS=str(plan)) as pool:
        joined(nccl, pool)
        for rank in pool:
            rank.start(do.abort)
        assert pool[1].ended(SOON_S) and not pool[0].ended(BLOCKED_S)
        faults(plan, "")
        assert pool[0].ended(SOON_S)


# what is left behind


def left_behind() -> list[str]:
    sockets = [line for line in Path("/proc/net/unix").read_text().splitlines() if "stallscope-nccl" in line]
    return sockets + [name for name in os.listdir("/dev/shm") if "nccl" in name]


@pytest.mark.parametrize("state", ["joining", "idle", "in a collective", "in a split", "sending"])
def test_the_killed_leave_nothing_behind(nccl: Nccl, state: str) -> None:
    uid = nccl.unique_id()
    before = set(left_behind())
    with ranks(3) as pool:
        if state == "joining":
            for index in (0, 1):
                pool[index].start(do.join, uid, 3, index)
        else:
            joined(nccl, pool)
        if state == "in a collective":
            tell(pool[:2], do.start, 1_000_000)
        if state == "in a split":
            pool[0].start(do.split, 0, 0)
        if state == "sending":
            pool[0].start(do.send, 100_000, 1, 1)
        time.sleep(0.1)
        for rank in pool:
            rank.kill()
    assert set(left_behind()) - before == set()


# the profiler plugin


def test_profiler_plugin_hears_of_everything(nccl: Nccl, tmp_path: Path) -> None:
    plugin, log, uid = tmp_path / "libnccl-profiler-own.so", tmp_path / "log", nccl.unique_id()
    source = str(Path(__file__).parent / "nccl_plugin.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-Wall", "-Werror", "-o", str(plugin), source], check=True)
    with ranks(2) as other, ranks(1, NCCL_PROFILER_PLUGIN=str(plugin), NCCL_PLUGIN_LOG=str(log)) as own:
        pool = [own[0], other[0]]
        everywhere(pool, do.join_named, uid, 1, b"tp")
        tell(own, do.start, 4)
        assert "type 64" not in log.read_text() or blocked(own) == [True]
        tell(other[:1], do.start, 4)
        assert blocked(pool, SOON_S) == [False, False]
        pool[0].start(do.send, 5, 1, 1)
        pool[1].start(do.recv, 5, 0)
        assert [rank.result() for rank in pool] == [None, None]
        assert blocked(pool, SOON_S) == [False, False]
        tell(pool, do.destroy)
    lines = log.read_text().splitlines()
    groups = [line for line in lines if line in ("stop 1", "stop 4")]  # at the same time as the kernels
    assert groups == ["stop 1", "stop 4"]
    assert [line for line in lines if line not in groups] == [
        f"init tp {digest([uid]):016x} 1 2 0",
        "start 1 type 1 parent 0 rank 0",
        "start 2 type 2 parent 1 rank 0 AllReduce 4 ncclFloat32 0", "stop 2",
        "start 3 type 64 parent 2 rank 0", "state 3 22 1", "stop 3",
        "start 4 type 1 parent 0 rank 0",
        "start 5 type 4 parent 4 rank 0 Send 5 ncclInt32 1", "stop 5",
        "start 6 type 64 parent 5 rank 0", "state 6 22 1", "stop 6",
        "finalize",
    ]  # fmt: skip


# sanitizers, other ways to the driver, speed


@pytest.mark.parametrize("sanitizer", ["", "address,undefined", "thread"])
def test_stress_under_sanitizers(_built_nccl: None, tmp_path: Path, sanitizer: str) -> None:
    libraries, program = SIM, tmp_path / "nccl_stress"
    flags = ["-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-pthread", "-g", "-O1"]
    if sanitizer:
        libraries = tmp_path / "lib"
        made = [str(libraries / name) for name in ("libcudart.so", "libcuda.so.1", "libnccl.so")]
        make = ["make", "-s", "-j2", "-C", str(ROOT / "native/sim"), f"OUT={tmp_path}", f"SAN={sanitizer}"]
        subprocess.run([*make, *made], check=True, capture_output=True)
        flags.append(f"-fsanitize={sanitizer}")
    source = str(Path(__file__).parent / "nccl_stress.c")
    link = [f"-I{ROOT}/native/sim/include", "-o", str(program), source, f"-L{libraries}", "-lcudart", "-lnccl"]
    subprocess.run(["gcc", *flags, *link, f"-Wl,-rpath,{libraries}"], check=True)
    done = subprocess.run([str(program), "20"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


@pytest.mark.parametrize("way", ["exported", "private", "inside"])
def test_every_way_to_the_driver(nccl: Nccl, way: str) -> None:
    with ranks(2, STALLSCOPE_SIM_DRIVER=way) as pool:
        joined(nccl, pool)
        tell(pool, do.start, 4)
        assert blocked(pool, SOON_S) == [False, False]
        tell(pool, do.destroy)


def test_speed_is_printed(nccl: Nccl, eight: list[Rank]) -> None:
    import nccl_bench

    for count in (1, 1 << 18):
        (median, *_) = everywhere(eight, nccl_bench.all_reduces, nccl.unique_id(), count, 30)
        print(f"all-reduce of {4 * count} bytes over 8 ranks: {median * 1e3:.2f} ms")
