"""What NVML and RAS said, behind the socket: the history, the report, the sentence on power."""

from __future__ import annotations

from typing import Any

import pytest
from aggregate_kit import START, Kit

from stallscope.diagnose.power import power_groups, power_sentence
from stallscope.output.gpu import throttle_names
from stallscope.output.terminal import render
from stallscope.wire.frames import Frame, Kind

SECOND = 1_000_000_000
BLOCK = START + 20 * SECOND


def device(index: int, util: int | None, watts: int | None, *, limit: int | None = 700, pids: list[int] | None = None,
           throttle: int | None = 0) -> list[Any]:  # fmt: skip
    """A row of a GPU frame; process 100 + index is on it."""
    power, most = (None if w is None else w * 1000 for w in (watts, limit))
    found = [100 + index] if pids is None else pids
    return [index, f"GPU-{index}", util, power, most, 1755, 1980, 5 << 30, throttle, found]


def look(kit: Kit, at_s: float, *devices: list[Any], note: str | None = None) -> None:
    kit.add(Kind.GPU, at_ns=START + int(at_s * SECOND), note=note, devices=list(devices))


def block(*devices: list[Any], before: list[list[Any]] | None = None) -> Kit:
    """Twenty seconds of work, where it is told, then ten of a block in which the devices do what is given."""
    kit = Kit()
    for number in range(8):
        kit.process(number + 1, pid=100 + number)
    for second in range(20):
        look(kit, second, *(before or []))
    look(kit, 20, *[device(n, 100, 690) for n in range(8)])  # still a mean over what was before
    for second in range(22, 30):
        look(kit, second, *devices)
    return kit


def sentence(kit: Kit, pids: range = range(100, 108)) -> str | None:
    return power_sentence(kit.state(), pids, BLOCK, BLOCK + 10 * SECOND)


# the sentence


def test_spinning() -> None:
    kit = block(*[device(n, 99, 78) for n in range(7)], device(7, 0, 71))
    assert sentence(kit) == (
        "utilisation 99 %, power 78 W of 700 W on 7 of 8 GPUs: spinning in NCCL, not computing; "
        "utilisation 0 %, power 71 W of 700 W on 1 of 8 GPUs: idle, no kernel runs"
    )


def test_computing() -> None:
    kit = block(*[device(n, 100, 640) for n in range(8)])
    assert sentence(kit) == "utilisation 100 %, power 640 W of 700 W on 8 of 8 GPUs: computing"


def test_one_process_on_one_gpu() -> None:
    kit = block(device(0, 100, 90))
    assert sentence(kit, range(100, 101)) == (
        "utilisation 100 %, power 90 W of 700 W on the GPU: spinning in NCCL, not computing"
    )


@pytest.mark.parametrize(("watts", "limit", "before", "doing"), [
    (270, 700, None, "spinning"), (300, 700, None, "unclear"), (350, 700, None, "computing"),
    (270, 700, 600, "spinning"), (300, 700, 350, "computing"), (300, 700, 600, "unclear"),
    (150, 700, 160, "unclear"), (100, 700, 160, "spinning"), (350, 700, 690, "computing"),
    (80, None, None, "unclear"), (80, None, 300, "spinning"), (290, None, 300, "computing"), (None, 700, 600, "unclear"),
])  # fmt: skip
def test_against_the_limit_and_against_its_own_work(
    watts: int | None, limit: int | None, before: int | None, doing: str
) -> None:
    """Little power means spinning only below the limit's 40 % and clearly below what the device draws at work."""
    earlier = [device(0, 97, before, limit=limit)] if before else None
    kit = block(device(0, 99, watts, limit=limit), before=earlier)
    (group,) = power_groups(kit.state(), [100], BLOCK, BLOCK + 10 * SECOND)
    assert (group.doing, group.devices, group.util_percent) == (doing, 1, 99)
    assert (group.power_w, group.power_limit_w) == (watts, limit)


def test_what_it_drew_between_steps_is_not_its_work() -> None:
    """Half of its seconds before the block it waited for its peers."""
    kit = Kit()
    for second in range(20):
        look(kit, second, device(0, 99, 600 if second % 2 else 110))
    for second in range(22, 30):
        look(kit, second, device(0, 99, 110))
    assert power_groups(kit.state(), [100], BLOCK, BLOCK + 10 * SECOND)[0].doing == "spinning"


def test_silence() -> None:
    """No NVML; a device nobody asks for; a block that nobody looked at; a device that gives no utilisation."""
    assert sentence(Kit()) is None
    assert sentence(block(device(0, 99, 78)), range(500, 501)) is None
    assert power_sentence(block(device(0, 99, 78)).state(), [100], BLOCK + 60 * SECOND, BLOCK + 61 * SECOND) is None
    assert sentence(block(device(0, None, 78)), range(100, 101)) is None
    only = Kit()
    look(only, 25, device(0, None, None))
    assert sentence(only, range(100, 101)) is None


def test_a_short_block_takes_what_there_is() -> None:
    kit = Kit()
    look(kit, 21, device(0, 99, 78))
    assert power_groups(kit.state(), [100], BLOCK, BLOCK + 2 * SECOND)[0].doing == "spinning"


@pytest.mark.parametrize(("util", "watts", "doing"), [(60, 400, "computing"), (60, 90, "unclear"), (9, 90, "idle")])
def test_partly_busy(util: int, watts: int, doing: str) -> None:
    kit = block(device(0, util, watts))
    assert power_groups(kit.state(), [100], BLOCK, BLOCK + 10 * SECOND)[0].doing == doing


# the report


def test_gpu_rows() -> None:
    kit = Kit()
    kit.process(pid=100)
    look(kit, 1, device(0, 99, 78, throttle=0x24), device(1, 5, 60))
    look(kit, 2, device(0, 0, 60, pids=[]), device(1, 6, 61))
    report = kit.bye().report()
    assert report["gpu"] == [
        {"host": "node7", "index": 0, "uuid": "GPU-0", "util_percent": 99, "power_w": 78.0, "power_limit_w": 700.0,
         "sm_clock_mhz": 1755, "memory_used_bytes": 5 << 30, "throttle": ["sw_power_cap", "sw_thermal_slowdown"],
         "at_ns": SECOND, "traced": True},
        {"host": "node7", "index": 1, "uuid": "GPU-1", "util_percent": 6, "power_w": 61.0, "power_limit_w": 700.0,
         "sm_clock_mhz": 1755, "memory_used_bytes": 5 << 30, "throttle": [], "at_ns": 2 * SECOND, "traced": False},
    ]  # fmt: skip
    text = render(report, 80, tty=False)
    assert "NVML, 1 GPU at the end: utilisation 99 %, power 78 of 700 W, 1 throttled\n" in text


def test_what_is_not_known_is_null() -> None:
    kit = Kit()
    kit.process(pid=100)
    look(kit, 1, [3, *[None] * 8, [100]], note="NVML: GPU 3: NVML_ERROR_GPU_IS_LOST")
    report = kit.bye().report()
    (row,) = report["gpu"]
    names = ("uuid", "util_percent", "power_w", "power_limit_w", "sm_clock_mhz", "memory_used_bytes", "throttle")
    assert [row[name] for name in names] == [None] * 7 and row["index"] == 3
    assert "NVML: GPU 3: NVML_ERROR_GPU_IS_LOST" in report["capture"]["notes"]
    assert "utilisation ? %, power ? W" in render(report, 80, tty=False)


def test_throttle_names() -> None:
    assert throttle_names(None) is None and throttle_names(0) == []
    assert throttle_names(0x1001) == ["gpu_idle", "0x1000"]


@pytest.mark.parametrize(("pids", "told"), [
    ([4242, 7], ""), ([7, 4242, 99], "\n2 of the 3 processes that it names are traced here"),
    ([98, 99], "\nnone of the processes that it names is traced here: it may be about another job"), ([], ""),
])  # fmt: skip
def test_witnesses(pids: list[int], told: str) -> None:
    """4242 is a process as the host sees it, 7 one as it sees itself."""
    kit = Kit()
    kit.process(1, pid=4242)
    kit.process(2, pid=4243, ns_pid=7)
    kit.add(
        Kind.WITNESS,
        at_ns=START + SECOND,
        source="ras",
        says="NCCL 2.28.9: 1 communicator\nthis",
        detail={"pids": pids},
    )
    report = kit.bye().report()
    says = "NCCL 2.28.9: 1 communicator\nthis" + told
    assert report["witnesses"] == [{"source": "ras", "at_ns": SECOND, "incident": None, "says": says}]
    assert "RAS at 1.00 s: NCCL 2.28.9: 1 communicator\n  this\n" in render(report, 80, tty=False)


# bounds


def test_history_is_of_two_minutes() -> None:
    kit = Kit()
    for second in range(300):
        look(kit, second, device(0, 1, 1))
    samples = kit.state().witnesses.gpus[0].samples
    assert (samples[0].at_ns - START) // SECOND == 179 and len(samples) == 121
    kit = Kit()
    for _ in range(1000):
        look(kit, 1, device(0, 1, 1))
    assert len(kit.state().witnesses.gpus[0].samples) == 256


def test_tables_have_an_end() -> None:
    kit = Kit()
    for n in range(100):
        look(kit, n, *[device(index, 1, 1) for index in range(n, n + 2)], note=f"note {n}")
        kit.add(Kind.WITNESS, at_ns=START + n, source="ras", says="x" * 5000, detail={})
    report = kit.bye().report()
    assert len(report["gpu"]) == 64 and len(report["witnesses"]) == 64
    assert {len(row["says"]) for row in report["witnesses"]} == {1024}
    notes = report["capture"]["notes"]
    assert [note for note in notes if note.startswith("note ")] == [f"note {n}" for n in range(16)]
    assert "witnesses: 36 turned away (limit 64)" in notes


@pytest.mark.parametrize("body", [
    {"devices": 5}, {"devices": [5]}, {"devices": [[]]}, {"devices": [device(0, 1, 1)[:-1]]}, {"devices": [[]] * 300},
    {"devices": [device(-1, 1, 1)]}, {"devices": [device(256, 1, 1)]}, {"devices": [[0, 5, *[1] * 7, []]]},
    {"devices": [[0, "x" * 200, *[1] * 7, []]]}, {"devices": [[0, "x", True, *[1] * 6, []]]},
    {"devices": [[0, "x", -1, *[1] * 6, []]]}, {"devices": [[0, "x", 1.5, *[1] * 6, []]]},
    {"devices": [[0, "x", *[1] * 7, [None]]]}, {"devices": [[0, "x", *[1] * 7, [1] * 2000]]}, {"note": 5},
])  # fmt: skip
def test_hostile_looks_end_the_witnesses_not_the_report(body: dict[str, Any]) -> None:
    kit = Kit()
    kit.process(pid=100)
    look(kit, 1, device(0, 50, 50))
    kit.add(Kind.GPU, **({"at_ns": START + 2 * SECOND, "note": None, "devices": []} | body))
    look(kit, 3, device(0, 70, 70))
    kit.launch(times=3)
    state = kit.bye().state()
    assert state.dropped is None and state.complete
    assert [sample.util_percent for sample in state.witnesses.gpus[0].samples] == [50]
    (note,) = state.witnesses.notes
    assert note.startswith("what was said of GPUs and by NCCL's RAS makes no sense, the rest of it is left out: ")


@pytest.mark.parametrize("body", [
    {"says": 5}, {"source": None}, {"detail": 5}, {"detail": {"pids": 5}}, {"detail": {"pids": [None]}},
    {"detail": {"pids": [1] * 2000}},
])  # fmt: skip
def test_hostile_testimony(body: dict[str, Any]) -> None:
    kit = Kit()
    state = kit.state()
    state.apply(Frame(Kind.WITNESS, {"at_ns": START, "source": "ras", "says": "x", "detail": {}} | body))
    assert state.dropped is None and state.witnesses.refused and state.witnesses.table == []
