"""NCCL's profiler interface: which of our calls is meant by what NCCL tells, in each version of it."""

from __future__ import annotations

import ctypes
import random
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_kit import FINISHED, QUEUED, ROOT, STARTED, Event, Nccl, Witness, build

SLOTS = 4096
VERSIONS = (3, 4, 5, 6)
SIM = ROOT / "build/sim/lib/libnccl.so.2"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("witness"))


@pytest.fixture
def witness(library: Path, tmp_path: Path) -> Witness:
    """A fresh one: its state belongs to the library, so each test loads a copy."""
    copy = tmp_path / library.name
    copy.write_bytes(library.read_bytes())
    return Witness(copy)


def kinds(told: list[Event]) -> list[tuple[int, int]]:
    return [(event.kind, event.n) for event in told]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_collective_from_its_queue_to_its_end(witness: Witness, version: int) -> None:
    nccl = Nccl(witness, version)
    assert nccl.mask.value == 2 | 4 | 64
    for n in range(3):
        witness.enter("ncclAllReduce", send=0x1000, recv=0x2000, count=8, comm=nccl.comm)
        event = nccl.queue("AllReduce", 0x1000, 0x2000, channels=2)
        nccl.stop(event)
        witness.leave("ncclAllReduce", n)
        assert witness.told() == [Event(QUEUED, "ncclAllReduce", n, nccl.comm)]
        channels = [nccl.begin(event), nccl.begin(event)]
        assert kinds(witness.told()) == [(STARTED, n)]
        nccl.stop(channels[0])
        assert witness.told() == []
        nccl.stop(channels[1])
        # Version 3 does not tell how many channels there are.
        assert kinds(witness.told()) == ([] if version == 3 else [(FINISHED, n)])
    assert witness.figures == {}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("name", "function"), [("ncclSend", "Send"), ("ncclRecv", "Recv")])
def test_a_transfer(witness: Witness, version: int, name: str, function: str) -> None:
    nccl = Nccl(witness, version)
    witness.call(name, buffer=0x1000, count=0, peer=1, comm=nccl.comm)
    assert nccl.transfer(function, 0x1000, peer=0) == 0, "another peer"
    nccl.run(nccl.transfer(function, 0x1000, peer=1))
    expected = [(QUEUED, 0), (STARTED, 0), (FINISHED, 0)]
    assert kinds(witness.told()) == (expected[:2] if version == 3 else expected)


ALIKE = {
    "ncclAllReduce": "AllReduce", "ncclReduceScatter": "ReduceScatter", "ncclReduce": "Reduce", "ncclBroadcast": "Broadcast",
    "ncclAllGather": "AllGather",
}  # fmt: skip


@pytest.mark.parametrize("config", ["", "Config"])
@pytest.mark.parametrize("name", ALIKE)
def test_every_collective(witness: Witness, name: str, config: str) -> None:
    nccl = Nccl(witness)
    witness.call(name + config, send=0x1000, recv=0x2000, count=8, comm=nccl.comm)
    nccl.queue(ALIKE[name], 0x1000, 0x2000)
    assert witness.told() == [Event(QUEUED, name + config, 0, nccl.comm)]


def test_bcast_is_a_broadcast_in_place(witness: Witness) -> None:
    nccl = Nccl(witness)
    witness.call("ncclBcast", buffer=0x1000, count=8, comm=nccl.comm)
    nccl.queue("Broadcast", 0x1000, 0x1000)
    assert witness.told() == [Event(QUEUED, "ncclBcast", 0, nccl.comm)]


def test_a_group_is_queued_in_any_order(witness: Witness) -> None:
    nccl, rng = Nccl(witness), random.Random(1)
    for _ in range(20):
        witness.call("ncclGroupStart")
        made = []
        for i in range(rng.randint(1, 60)):
            if rng.random() < 0.5:
                n = witness.call("ncclSend", buffer=i % 3, count=1, peer=i, comm=nccl.comm)
                made.append((n, lambda i=i: nccl.transfer("Send", i % 3, i)))
            else:
                n = witness.call("ncclAllReduce", send=i, recv=i, count=1, comm=nccl.comm)
                made.append((n, lambda i=i: nccl.queue("AllReduce", i, i)))
        rng.shuffle(made)
        for n, queue in made:
            assert queue()
            assert kinds(witness.told()) == [(QUEUED, n)]
        witness.leave("ncclGroupEnd")
    assert witness.figures == {}


def test_the_same_buffers_again_and_again_are_told_in_order(witness: Witness) -> None:
    nccl = Nccl(witness)
    for _ in range(5):
        witness.call("ncclAllReduce", send=1, recv=2, count=8, comm=nccl.comm)
    for _ in range(5):
        nccl.queue("AllReduce", 1, 2)
    assert kinds(witness.told()) == [(QUEUED, n) for n in range(5)]


def test_what_nccl_does_not_run_is_not_expected(witness: Witness) -> None:
    """Collectives of nothing, and those of a single rank: the next call with these buffers is another one."""
    nccl, alone = Nccl(witness), Nccl(witness, ranks=1)
    witness.call("ncclAllReduce", send=1, recv=2, count=0, comm=nccl.comm)
    witness.call("ncclAllReduce", send=1, recv=2, count=8, comm=nccl.comm)
    witness.call("ncclAllReduce", send=1, recv=2, count=8, comm=alone.comm)
    nccl.queue("AllReduce", 1, 2)
    assert witness.told() == [Event(QUEUED, "ncclAllReduce", 1, nccl.comm)]
    assert nccl.queue("AllReduce", 1, 2) == alone.queue("AllReduce", 1, 2) == 0


def test_a_refused_call_is_forgotten_an_accepted_one_is_not(witness: Witness) -> None:
    nccl = Nccl(witness)
    for status in (5, 7):
        n = witness.enter("ncclAllReduce", send=1, recv=2, count=8, comm=nccl.comm)
        witness.leave("ncclAllReduce", n, status, send=1, recv=2, count=8, comm=nccl.comm)
    nccl.queue("AllReduce", 1, 2)
    assert kinds(witness.told()) == [(QUEUED, 1)]


def test_a_refused_group_is_forgotten_as_a_whole(witness: Witness) -> None:
    nccl, other = Nccl(witness), Nccl(witness)
    witness.call("ncclAllReduce", send=1, recv=2, count=8, comm=nccl.comm)
    witness.call("ncclGroupStart")
    for of in (nccl, other):
        witness.call("ncclAllReduce", send=1, recv=2, count=8, comm=of.comm)
    witness.leave("ncclGroupEnd", status=3)
    witness.call("ncclAllReduce", send=1, recv=2, count=8, comm=other.comm)
    nccl.queue("AllReduce", 1, 2)
    other.queue("AllReduce", 1, 2)
    assert nccl.queue("AllReduce", 1, 2) == 0
    assert [(e.n, e.comm) for e in witness.told()] == [(0, nccl.comm), (1, other.comm)]


def test_what_nccl_passed_over_does_not_take_later_places(witness: Witness) -> None:
    nccl = Nccl(witness)
    witness.call("ncclAllReduce", send=1, recv=2, count=8, comm=nccl.comm)
    witness.call("ncclAllGather", send=3, recv=4, count=8, comm=nccl.comm)
    nccl.queue("AllGather", 3, 4)
    assert nccl.queue("AllReduce", 1, 2) == 0
    assert (kinds(witness.told()), witness.figures) == ([(QUEUED, 1)], {"untold": 1, "unmatched": 1})


def test_what_no_call_explains_is_counted_and_its_kernel_ignored(witness: Witness) -> None:
    """A replayed graph, or a send that is part of an all-to-all."""
    nccl = Nccl(witness)
    witness.call("ncclAlltoAll", send=1, recv=2, count=8, comm=nccl.comm)
    event = nccl.transfer("Send", 1, 1)
    nccl.run(event)
    nccl.run(0)
    assert (event, witness.told(), witness.figures) == (0, [], {"unmatched": 1})


def test_communicators_are_told_apart_by_where_their_contexts_lie(witness: Witness) -> None:
    made = [Nccl(witness, ranks=2 + i) for i in range(20)]
    random.Random(3).shuffle(made)
    for nccl in made:
        witness.call("ncclAllReduce", send=1, recv=2, count=8, comm=nccl.comm)
    for nccl in made:
        nccl.queue("AllReduce", 1, 2)
        assert [e.comm for e in witness.told()] == [nccl.comm]


def test_another_communicator_at_the_same_address(witness: Witness) -> None:
    """Late events of the one before are not taken for its own."""
    nccl = Nccl(witness)
    witness.call("ncclAllReduce", send=1, recv=2, count=8, comm=nccl.comm)
    event = nccl.queue("AllReduce", 1, 2)
    kernel = nccl.begin(event)
    nccl.finalize()
    nccl._init(2)
    witness.numbers.clear()
    witness.call("ncclAllReduce", send=1, recv=2, count=8, comm=nccl.comm)
    again = nccl.queue("AllReduce", 1, 2)
    witness.told()
    nccl.stop(kernel)
    nccl.begin(event)
    assert [e for e in witness.told() if e.kind == STARTED] == []
    nccl.begin(again)
    assert kinds(witness.told()) == [(STARTED, 0)]


def test_one_freed_without_a_word_leaves_its_place(witness: Witness) -> None:
    nccl = Nccl(witness)
    for _ in range(1000):
        nccl._init(2)
    witness.call("ncclAllReduce", send=1, recv=2, count=8, comm=nccl.comm)
    assert nccl.queue("AllReduce", 1, 2) and witness.figures == {}


def test_more_communicators_than_places(witness: Witness) -> None:
    made = [Nccl(witness) for _ in range(260)]
    assert witness.figures == {"unbound": 5}
    assert [bool(nccl.context.value) for nccl in made] == [True] * 255 + [False] * 5
    for nccl in made:
        witness.call("ncclAllReduce", send=1, recv=2, count=8, comm=nccl.comm)
        nccl.queue("AllReduce", 1, 2)
    assert len(witness.told()) == 255
    for nccl in made:
        nccl.finalize()
    Nccl(witness)
    assert witness.figures["unbound"] == 5


def test_an_operation_keeps_its_place_until_it_begins(witness: Witness) -> None:
    """That it did not begin would be believed, if its begin were lost. What comes then is not expected, and counted."""
    nccl = Nccl(witness)
    events = []
    for _ in range(SLOTS + 10):
        witness.call("ncclAllReduce", send=1, recv=2, count=8, comm=nccl.comm)
        events.append(nccl.queue("AllReduce", 1, 2))
    assert witness.figures == {"exhausted": 10, "unmatched": 10}
    witness.told()
    nccl.run(events[0])
    nccl.run(events[1])
    witness.call("ncclAllReduce", send=1, recv=2, count=8, comm=nccl.comm)
    assert nccl.queue("AllReduce", 1, 2)
    assert kinds(witness.told()) == [(STARTED, 0), (FINISHED, 0), (STARTED, 1), (FINISHED, 1), (QUEUED, SLOTS + 10)]


def test_a_kind_of_kernel_that_nccl_does_not_tell_of_does_not_fill_the_places(witness: Witness) -> None:
    nccl = Nccl(witness)
    for _ in range(3 * SLOTS):
        witness.call("ncclAllGather", send=1, recv=2, count=8, comm=nccl.comm)
        nccl.queue("AllGather", 1, 2)
        witness.call("ncclAllReduce", send=1, recv=2, count=8, comm=nccl.comm)
        nccl.run(nccl.queue("AllReduce", 1, 2))
    assert witness.figures == {}


def test_expected_ones_that_never_come_are_dropped(witness: Witness) -> None:
    nccl = Nccl(witness)
    for _ in range(3 * SLOTS):
        witness.call("ncclAllReduce", send=1, recv=2, count=8, comm=nccl.comm)
    nccl.queue("AllReduce", 1, 2)
    assert kinds(witness.told()) == [(QUEUED, 2 * SLOTS)]
    assert witness.figures == {"untold": 2 * SLOTS}


def test_garbage_is_no_event(witness: Witness) -> None:
    nccl = Nccl(witness)
    for event in (1, 5, 6, 0xFFFF, 1 << 40, (1 << 63) | 5, 3 << 16 | 5, 3 << 16 | 1023 << 2 | 1):
        nccl.run(event)
        nccl.stop(event)
    assert nccl.queue("Nonsense", 1, 2) == 0 and nccl.queue("", 1, 2) == 0
    assert Nccl(witness, 5)._start(0x140, 0, bytes(64)) == 0, "another event, not the kernel's"
    assert witness.told() == []


def test_an_old_nccl_is_asked_about_one_transfer_of_a_group(witness: Witness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through its proxy, which an all-to-all with a plugin brings down."""
    monkeypatch.setenv("NCCL_PROFILER_PLUGIN", "none")  # this process keeps its environment
    lib = ctypes.CDLL(str(SIM))  # 2.27.5
    witness.lib.kit_before_creation(ctypes.cast(lib.ncclGetUniqueId, ctypes.c_void_p))
    nccl = Nccl(witness)
    assert nccl.mask.value == 70

    def mask_inside(name: str) -> int:
        n = witness.enter(name, comm=nccl.comm, count=1)
        inside = nccl.mask.value
        witness.leave(name, n)
        assert nccl.mask.value == 70
        return inside

    names = ("ncclSend", "ncclRecv", "ncclAllReduce", "ncclSend")
    assert [mask_inside(name) for name in (*names, "ncclAlltoAll")] == [70, 70, 70, 70, 0]
    for _ in range(2):
        witness.call("ncclGroupStart")
        assert [mask_inside(name) for name in names] == [70, 0, 70, 0], "of a group the first transfer"
        witness.leave("ncclGroupEnd")
    witness.call("ncclAllReduce", send=1, recv=2, count=8, comm=nccl.comm)
    assert nccl.queue("AllReduce", 1, 2) and nccl.mask.value == 70


PROGRAM = """
import sys, threading
sys.path.insert(0, {here!r})
from gpu_kit import Nccl, Witness
from pathlib import Path
witness = Witness(Path({library!r}))
made = [Nccl(witness) for _ in range(4)]
def work(nccl):
    for _ in range(2000):
        n = witness.enter("ncclAllReduce", send=1, recv=2, count=8, comm=nccl.comm)
        event = nccl.queue("AllReduce", 1, 2, channels=2)
        channels = [nccl.begin(event), nccl.begin(event)]
        other = threading.Thread(target=nccl.stop, args=(channels[0],)) if n % 50 == 0 else None
        if other: other.start()
        else: nccl.stop(channels[0])
        nccl.stop(channels[1])
        if other: other.join()
threads = [threading.Thread(target=work, args=(nccl,)) for nccl in made]
for t in threads: t.start()
for t in threads: t.join()
told, lost = witness.told(), witness.figures
queued = sum(1 for e in told if e.kind == 9)
assert queued + lost.get("busy", 0) >= 8000, (queued, lost)
for kind in (7, 8): assert sum(1 for e in told if e.kind == kind) == queued
print("done")
"""


def test_many_threads(library: Path) -> None:
    program = PROGRAM.format(here=str(Path(__file__).parent), library=str(library))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_stress_under_sanitizers(tmp_path: Path, sanitizer: str) -> None:
    shim, program = ROOT / "native/shim", tmp_path / "stress"
    sources = [str(Path(__file__).parent / "gpu_stress.c"), *map(str, sorted(shim.glob("gpu_*.c")))]
    flags = [
        "-std=c11",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-O1",
        "-g",
        "-pthread",
        f"-fsanitize={sanitizer}",
    ]
    subprocess.run(["gcc", *flags, f"-I{shim}", f"-I{ROOT}/native", "-o", str(program), *sources, "-ldl"], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
