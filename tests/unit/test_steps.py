"""Steps without instrumentation: how many, how long, and which were different."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from steps_kit import GRADIENTS, METRIC, MS, NORM, SCATTER, TP, Host, Operation

from stallscope.aggregate.tape import TOKEN
from stallscope.diagnose import steptrack
from stallscope.diagnose.steps import StepsFound
from stallscope.output.report import report_json

SECOND = 1_000_000_000


def exact(found: StepsFound) -> int:
    """The number of steps, which is said to be exact."""
    assert found.parts[0].number_is is None
    return found.parts[0].number


def ranges(found: StepsFound) -> list[tuple[int, int, int | None, str]]:
    assert all(part.edges_sure for part in found.parts)
    return [(one.first, one.last, one.every, one.says) for one in found.ranges]


def test_a_plain_loop() -> None:
    host = Host()
    for _ in range(40):
        host.step()
    found = host.over().found()
    assert exact(found) == 40 and ranges(found) == []
    part = found.parts[0]
    assert part.from_start and part.mark == "ncclAllReduce of 1 float32"
    assert part.p50_ns == pytest.approx(8.32 * MS, rel=0.125)


def test_first_steps_with_another_signature_are_found_exactly() -> None:
    host = Host()
    for number in range(200):
        host.step(() if number < 50 else (SCATTER, GRADIENTS, NORM))
    found = host.over().found()
    assert exact(found) == 200
    assert ranges(found) == [(1, 50, None, "no ncclAllReduce, no ncclReduceScatter")]


def test_where_some_operations_stay_those_missing_are_named() -> None:
    host = Host()
    for number in range(120):
        host.step(() if number < 50 else (SCATTER, GRADIENTS, NORM), before=[TP] * 4)
    found = host.over().found()
    assert exact(found) == 120
    says = "no ncclAllReduce of 1 float32, no ncclAllReduce of 65536 float32, no ncclReduceScatter"
    assert ranges(found) == [(1, 50, None, says)]


@pytest.mark.parametrize(("short", "is_exact"), [((20,), True), ((3, 4, 30), True), ((0,), False)])
def test_short_waits_among_the_first_steps(short: Sequence[int], is_exact: bool) -> None:
    """What was not recorded stands in the numbers; of the very first ones nobody knows what they were."""
    host = Host()
    for number in range(120):
        host.step(() if number < 50 else (SCATTER, NORM), wait_ns=50_000 if number in short else 6 * MS)
    part = host.over().found().parts[0]
    assert (part.number, part.number_is) == ((120, None) if is_exact else (119, "estimated"))


def test_kernels_of_a_long_range_are_compared() -> None:
    host = Host()
    for number in range(1000):
        host.step(() if number < 370 else (SCATTER, GRADIENTS, NORM))
        if number < 370:
            host.count("cudaLaunchKernel", calls=2)
            host.counts[1, 1]["calls"] -= 6
            host.counts[1, 1]["sampled_out"] -= 4
    found = host.over().found()
    assert exact(found) == 1000 and (found.ranges[0].first, found.ranges[0].last) == (1, 370)
    assert found.ranges[0].says.endswith("about 20 kernels launched a step instead of 24")


def test_a_change_in_the_middle_and_back() -> None:
    host = Host()
    for number in range(150):
        host.step(() if 60 <= number < 90 else (SCATTER, GRADIENTS, NORM), before=[TP] * 4)
    found = host.over().found()
    assert exact(found) == 150 and [(one.first, one.last) for one in found.ranges] == [(61, 90)]


def evaluate(host: Host) -> None:
    host.batch()
    host.operation(METRIC)
    host.item()


@pytest.mark.parametrize("every", [10, 17, 50])
def test_evaluations_are_no_steps_and_are_told(every: int) -> None:
    host = Host()
    for number in range(160):
        host.step(before=[TP] * 2)
        if (number + 1) % every == 0 and number < 159:
            evaluate(host)
    found = host.over().found()
    assert exact(found) == 160
    firsts = [number + 1 for number in range(1, 160) if number % every == 0]
    says = "1 more ncclAllReduce of 2 float32"
    if len(firsts) >= 3:
        assert ranges(found) == [(firsts[0], firsts[-1], every, says)]
    assert sum(one.number for one in found.ranges) == len(firsts)


@pytest.mark.parametrize("item_first", [True, False])
def test_an_evaluation_without_operations_is_none_at_the_end_either(item_first: bool) -> None:
    host = Host()
    for number in range(120):
        if item_first:
            host.step()
        else:
            host.operation(NORM)
            host.item()
            host.tick()
        if number in (49, 119):
            for _ in range(10):
                host.item()
    found = host.over().found()
    assert found.parts[0].number == 120 and found.ranges == []


def test_first_steps_that_are_others_in_an_attach_are_told_against_the_usual_ones() -> None:
    """The first one counts as usual, since its begin was not seen: what is usual is not what is left of it."""
    host = Host(created=False)
    for number in range(150):
        host.step((METRIC, NORM) if number < 60 else (NORM,))
    (one,) = host.over(exits=False).found().ranges
    assert (one.first, one.last, one.says) == (2, 60, "1 more ncclAllReduce of 2 float32")


@pytest.mark.parametrize("micro", [2, 4, 8])
def test_gradient_accumulation_is_part_of_a_step(micro: int) -> None:
    """The optimizer's step counts, whether or not the micro steps exchange anything."""
    for inside in ((), (TP, TP), (GRADIENTS,)):
        host = Host()
        for _ in range(60):
            for _ in range(micro):
                host.batch()
                for what in inside:
                    host.operation(what)
                host.item()
            host.operation(SCATTER)
            host.operation(NORM)
            host.work()
            host.tick()
        assert exact(host.over().found()) == 60, inside


def test_layers_are_no_steps() -> None:
    """Most of what is called is called in each layer; hosts copy a batch less often than that."""
    host = Host()
    for number in range(80):
        host.step([GRADIENTS, SCATTER] * 40 + [NORM], before=[SCATTER] * 40)
        if number % 20 == 19 and number < 79:
            evaluate(host)
    assert exact(host.over().found()) == 80


def test_copies_on_the_device_are_no_batches() -> None:
    """Each layer copies its result: as often as it exchanges something, but not from or to the host."""
    host = Host()
    for _ in range(150):
        host.batch()
        for _ in range(40):
            host.operation(SCATTER)
            host.waits("cudaMemcpyAsync", 5000, 1 << 20, 3, one_in=7)
        host.item()
        host.operation(NORM)
        host.tick()
    assert exact(host.over().found()) == 150


def test_one_gpu_goes_by_its_waits() -> None:
    host = Host()
    for _ in range(90):
        host.batch()
        host.item()
        host.work()
        host.item(300_000)
        host.tick()
    found = host.over().found()
    assert exact(found) == 90 and found.parts[0].mark == "cudaMemcpyAsync of 4 bytes"


def test_waits_that_were_too_short_to_be_recorded_are_counted_all_the_same() -> None:
    """Their number in the process stands in the next one that is recorded."""
    host, chance = Host(), random.Random(7)
    for _ in range(300):
        host.batch()
        host.item(6 * MS if chance.random() < 0.9 else 50_000)
        host.work()
        host.tick()
    host.item()  # so that the last ones are told
    assert host.over().found().parts[0].number in (300, 301)


def test_an_attach_in_the_middle_counts_from_there() -> None:
    host = Host(created=False)
    host.operation(NORM)
    for _ in range(70):
        host.step()
    found = host.over(exits=False).found()
    assert exact(found) == 71 and not found.parts[0].from_start
    assert found.ranges == []  # of the first step only the end was seen: it is not said to be different


def test_lost_records_make_a_lower_bound() -> None:
    host = Host()
    for number in range(60):
        host.step()
        if number == 30:
            host.operation(NORM, lost=True)
    part = host.over().found().parts[0]
    assert part.number == 60 and part.number_is == "lower_bound"


def test_a_stream_that_is_cut_off_makes_a_lower_bound() -> None:
    host = Host()
    for _ in range(60):
        host.step()
    host.tick()
    assert host.row()["count_is"] == "lower_bound"


def test_nothing_repeats() -> None:
    host, chance = Host(), random.Random(3)
    for _ in range(200):
        host.operation(chance.choice([TP, SCATTER, GRADIENTS, NORM, METRIC]))
        host.work()
    assert host.over().row() is None
    assert Host().over().row() is None


def test_sizes_that_always_change_do_not_hide_the_rhythm() -> None:
    host, chance = Host(), random.Random(5)
    for _ in range(200):
        host.step(((SCATTER[0], "dp", chance.randrange(1, 1 << 20)), NORM))
    assert exact(host.over().found()) == 200


def test_slow_steps_say_what_was_different() -> None:
    host = Host()
    for number in range(60):
        if number == 20:
            host.work(50 * MS)
        host.step(wait_ns=90 * MS if number == 40 else 6 * MS)
        if number == 49:
            host.waits("cudaMemcpy", 70 * MS, 1 << 22, 2)
    slow = {one.step: one.says for one in host.over().found().slow}
    assert slow == {
        21: "50.0 ms more outside of waits for the device",
        41: "90.0 ms in cudaMemcpyAsync of 4 bytes instead of 6.0 ms",
        51: "70.0 ms in cudaMemcpy of 4194304 bytes, which others do not wait in",
    }


def test_a_long_run_needs_little_memory_and_forgets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is counted is forgotten; the numbers are those of one look at all."""
    monkeypatch.setattr(steptrack, "LOG", 512)
    monkeypatch.setattr("stallscope.diagnose.steps.LOG", 512)
    host = Host()
    for number in range(3000):
        host.step(() if number < 50 else (SCATTER, GRADIENTS, NORM), before=[TP] * 2)
    follower = host.over().follower()
    tracks = follower.watch._steps._tracks
    assert all(len(track) < 1200 for track in tracks.values())
    found = follower.watch.steps
    assert found is not None and exact(found) == 3000
    assert [(one.first, one.last) for one in found.ranges] == [(1, 50)]


def test_a_job_that_becomes_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long after the steps of the first kind were forgotten."""
    monkeypatch.setattr(steptrack, "LOG", 512)
    monkeypatch.setattr("stallscope.diagnose.steps.LOG", 512)
    host = Host()
    for _ in range(600):
        host.step([GRADIENTS, NORM])
    for _ in range(900):
        host.step([SCATTER, TP])
    part, (one,) = (found := host.over().found()).parts[0], found.ranges
    assert part.number == 1500 and not part.edges_sure
    assert one.first == 1 and one.last in (600, 601)


def test_the_report_of_two_ranks_joins_what_is_equal() -> None:
    host = Host()
    for _ in range(50):
        host.step()
    row = host.over().row()
    assert row["count"] == 50 and "count_is" not in row and row["p50_ns_is"] == "estimated"
    assert [part["proc"] for part in row["processes"]] == [1]
    json.dumps(row)


OPERATIONS = [TP, SCATTER, GRADIENTS, NORM, METRIC]
STEP = st.lists(st.sampled_from(OPERATIONS), min_size=1, max_size=12)


def _is_one_step(step: Sequence[Operation]) -> bool:
    """Whether a list is not itself a shorter one several times."""
    return all(list(step) != [*step[part:], *step[:part]] for part in range(1, len(step)))


@settings(max_examples=40, deadline=None)
@example([SCATTER, TP, SCATTER, SCATTER, TP, SCATTER, SCATTER, SCATTER], 41, 0, 0)
@example([SCATTER, TP, SCATTER, SCATTER, TP, SCATTER, SCATTER, SCATTER], 41, 27, 0)
@example([SCATTER, TP, SCATTER, TP, SCATTER], 41, 1, 0)
@example([SCATTER, TP, SCATTER, TP, SCATTER], 41, 2, 0)
@given(STEP.filter(_is_one_step), st.integers(41, 60), st.integers(0, 40), st.integers(0, 2**32))
def test_any_step_is_counted(step: list[Operation], usual: int, flat: int, seed: int) -> None:
    """Whatever a step consists of, and however many came before without operations: the count and the range."""
    host, chance = Host(), random.Random(seed)
    for number in range(flat + usual):
        host.step(() if number < flat else step, wait_ns=chance.randrange(5 * MS, 7 * MS))
    found = host.over().found()
    if flat == 1 and found.parts[0].edges_sure:
        assert found.parts[0].number_is == "estimated"  # one alone has no rhythm
        return
    part = found.parts[0]
    assert abs(part.number - flat - usual) <= (part.number_is == "estimated")
    wanted = [(1, flat)] if flat else []
    assert not part.edges_sure or [(one.first, one.last) for one in found.ranges] == wanted


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 2000), min_size=1, max_size=8), st.integers(0, 2**32))
def test_the_rhythm_of_frames_changes_nothing(sizes: list[int], seed: int) -> None:
    """The same records in other frames, with ticks in other places, give the same report."""
    reports = set()
    for cut in (None, sizes):
        host, chance = Host(), random.Random(seed)
        for number in range(80):
            host.step(() if number < 20 else (SCATTER, NORM), before=[TP] * chance.randrange(1, 2))
            if cut and number % cut[number % len(cut)] == 0:
                host.ticks = 0
        found = host.over().found()
        reports.add(repr((found.parts[0].number, found.ranges and found.ranges[0][:3], found.parts[0].p50_ns)))
    assert len(reports) == 1


def test_replaying_gives_the_same_bytes() -> None:
    host = Host()
    for _ in range(50):
        host.step()
    host.over()
    one, other = host.follower(), host.follower()
    assert report_json(one.state, one.watch) == report_json(other.state, other.watch)


WORD = st.integers(0, 2**64 - 1) | st.integers(0, 3)
ROW = st.tuples(WORD, WORD, WORD, WORD, st.integers(0, 2**32 - 1), st.integers(0, 399), st.integers(0, 2))


@settings(max_examples=40, deadline=None)
@given(st.lists(ROW, max_size=40), st.integers(1, 8), st.integers(0, 2**40))
def test_whatever_a_recording_holds_is_survived(rows: list[tuple[int, ...]], times: int, host_calls: int) -> None:
    """Instants that overflow, numbers that jump, keys that never come again."""
    tokens = np.zeros(len(rows) * times, TOKEN)
    for name, column in zip(TOKEN.names or (), zip(*rows, strict=True) if rows else (), strict=False):
        tokens[name] = np.tile(np.array(column, np.uint64), times).astype(TOKEN[name])
    track = steptrack.Track()
    for part in np.array_split(tokens, 3):
        track.add(part.copy())
        if len(track):
            track.fold(host_calls)
    closed = track.closed(host_calls, is_end=True)
    assert closed.ledger.count <= 64 * len(tokens)
