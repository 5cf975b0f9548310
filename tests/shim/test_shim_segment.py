"""The memory itself: where it lies, who may read it, what it does when there is no room."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from shim_kit import Agent, Read, environment, run

from stallscope.capture.folder import holder_of
from stallscope.capture.segment import BadSegment, Clock, Segment


def in_folder(stubs: Path, folder: Path, **more: str) -> dict[str, str]:
    return environment(stubs, STALLSCOPE_SHIM=f"dir:{folder}", **more)


def opened(path: Path) -> Read:
    fd = os.open(path, os.O_RDWR)
    try:
        return Read(Segment(fd), Clock())
    finally:
        os.close(fd)


def test_a_file_in_a_folder(stubs: Path, tmp_path: Path) -> None:
    """PID.STARTTIME.seg, for its owner only; read piece by piece, because it could be cut."""
    truth = run([stubs / "program", "calls", "3000"], in_folder(stubs, tmp_path))
    (path,) = tmp_path.glob("*.seg")
    pid, start, _ = path.name.split(".")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    read = opened(path)
    header = read.segment.header
    assert (header.pid, header.start_ticks, header.is_mapped) == (int(pid), int(start), False)
    assert read.conserved() == truth
    read.segment.close()


def test_a_folder_with_a_group_of_its_own(stubs: Path, tmp_path: Path) -> None:
    """What is in it is that group's, as far as the folder is: that is how a sidecar of another user reads it."""
    modes = {}
    for folder_mode in (0o777, 0o2770, 0o2750, 0o2777):
        folder = tmp_path / oct(folder_mode)
        folder.mkdir()
        folder.chmod(folder_mode)
        run([stubs / "program", "calls", "10"], in_folder(stubs, folder))
        (path,) = folder.glob("*.seg")
        modes[folder_mode] = stat.S_IMODE(path.stat().st_mode)
    assert modes == {0o777: 0o600, 0o2770: 0o660, 0o2750: 0o640, 0o2777: 0o660}


def test_a_name_that_is_taken(stubs: Path, tmp_path: Path) -> None:
    """By its like of another pid namespace, say: the next free one, and whoever was there is left alone."""
    code = (
        "import os, sys\n"
        "ticks = open('/proc/self/stat').read().rpartition(')')[2].split()[19]\n"
        "for end in ('', '.1'): open(f'{sys.argv[1]}/{os.getpid()}.{ticks}{end}.seg', 'x').close()\n"
        "os.execv(sys.argv[2], sys.argv[2:])\n"
    )
    words = [sys.executable, "-c", code, str(tmp_path), str(stubs / "program"), "calls", "10"]
    truth = run(words, in_folder(stubs, tmp_path))
    sizes = {path.name.split(".")[2]: path.stat().st_size for path in tmp_path.glob("*.seg")}
    assert sizes["seg"] == sizes["1"] == 0 and sizes["2"] > 0
    read = opened(next(tmp_path.glob("*.2.seg")))
    assert read.conserved() == truth
    read.segment.close()


def test_who_made_it(stubs: Path, tmp_path: Path) -> None:
    """Enough for who can't see the process: name, command line, rank, pid namespace, and a lock while it lives."""
    env = in_folder(stubs, tmp_path, RANK="5", WORLD_SIZE="8", LOCAL_RANK="x", SLURM_PROCID="1" * 40)
    words = [str(stubs / "program"), "obeys"]
    with subprocess.Popen(words, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdin is not None
        process.stdout.readline()
        (path,) = tmp_path.glob("*.seg")
        with open(path, "r+b") as file, Segment(file.fileno()) as segment:
            who = segment.header.who
            assert (who.name, who.cmdline, who.ranks) == ("program", words, {"RANK": "5", "WORLD_SIZE": "8"})
            assert who.is_locked and who.ppid == os.getpid()
            assert who.pid_ns == os.stat("/proc/self/ns/pid").st_ino
            assert holder_of(file.fileno()) == process.pid
            process.kill()
            process.wait()
            assert holder_of(file.fileno()) is None


def test_the_descriptor(agent: Agent, stubs: Path) -> None:
    """The memfd is sealed, closed on exec, and out of the way; its header says whose it is."""
    words = [str(stubs / "program"), "obeys"]
    env = environment(stubs, STALLSCOPE_SHIM=f"socket:{agent.path}")
    with subprocess.Popen(words, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdin is not None
        process.stdout.readline()
        (read,) = agent.wait_for(1)
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        assert read.segment.header.start_ticks == int(fields[19])
        assert read.segment.header.pid == process.pid
        assert read.segment.header.is_mapped
        (name,) = [
            fd for fd in os.listdir(f"/proc/{process.pid}/fd")
            if "stallscope" in os.readlink(f"/proc/{process.pid}/fd/{fd}")
        ]  # fmt: skip
        flags = Path(f"/proc/{process.pid}/fdinfo/{name}").read_text().split("flags:")[1].split()[0]
        assert int(flags, 8) & os.O_CLOEXEC
        process.stdin.close()
    size = int.from_bytes(agent.said[0][8:12], "little")
    assert (len(agent.said[0]), size) == (24, 3)


@pytest.fixture
def small_tmpfs(tmp_path: Path, needs_root: None) -> Iterator[Path]:
    """2 MiB: the header and a few rings."""
    place = tmp_path / "small"
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(place)], capture_output=True)
    if done.returncode:
        pytest.skip("mount is not permitted")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_file_system(stubs: Path, small_tmpfs: Path) -> None:
    """Threads that find no room are counted; without room for the header there is no segment. Nobody is killed."""
    truth = run([stubs / "program", "threads", "40", "1", "100"], in_folder(stubs, small_tmpfs))
    (path,) = small_tmpfs.glob("*.seg")
    read = opened(path)
    assert read.conserved() == truth == {"cudaLaunchKernel": 4000}
    assert 0 < read.segment.losses()["no_ring"] < 4000
    read.segment.close()
    path.unlink()
    (small_tmpfs / "filler").write_bytes(bytes((2 << 20) - 65536))
    run([stubs / "program", "calls", "100"], in_folder(stubs, small_tmpfs))
    assert not list(small_tmpfs.glob("*.seg"))


@pytest.mark.parametrize(
    "way", ["dir:/nowhere/at/all", "dir:" + "x" * 400, "socket:/nowhere/agent.sock", "off", "nonsense"]
)
def test_where_nothing_can_be_made(stubs: Path, way: str) -> None:
    """The program runs on."""
    assert run([stubs / "program", "calls", "100"], environment(stubs, STALLSCOPE_SHIM=way)) == {
        "cudaLaunchKernel": 100
    }


def test_a_read_only_home(agent: Agent, stubs: Path) -> None:
    """Nothing is written anywhere but to the segment."""
    env = environment(stubs, STALLSCOPE_SHIM=f"socket:{agent.path}", HOME="/proc", TMPDIR="/proc")
    assert run([stubs / "program", "calls", "5"], env)
    (read,) = agent.wait_for(1)
    assert read.conserved() == {"cudaLaunchKernel": 5}


@pytest.mark.parametrize(("limit", "value"), [(resource.RLIMIT_FSIZE, 40 << 20), (resource.RLIMIT_FSIZE, 0),
                                              (resource.RLIMIT_AS, 200 << 20), (resource.RLIMIT_NOFILE, 16)])  # fmt: skip
def test_limits_of_the_program(agent: Agent, stubs: Path, limit: int, value: int) -> None:
    """Fewer rings, or none, and no SIGXFSZ."""
    env = environment(stubs, STALLSCOPE_SHIM=f"socket:{agent.path}")
    done = subprocess.run(
        [str(stubs / "program"), "calls", "50"],
        env=env,
        stdout=subprocess.DEVNULL,
        preexec_fn=lambda: resource.setrlimit(limit, (value, value)),
    )
    assert done.returncode == 0
    if value:
        (read,) = agent.wait_for(1)
        assert read.conserved() == {"cudaLaunchKernel": 50}


def test_an_exec_is_a_new_process(agent: Agent, stubs: Path) -> None:
    """With a segment of its own; what was told before it stays readable."""
    script = (
        f"import ctypes, os; c = ctypes.CDLL('{stubs}/libcudart.so.12'); [c.cudaFree(1) for _ in range(9)]; "
        f"os.execv('{stubs}/program', ['program', 'calls', '4'])"
    )
    run(["/usr/bin/python3", "-c", script], environment(stubs, STALLSCOPE_SHIM=f"socket:{agent.path}"))
    first, second = agent.wait_for(2)
    assert first.conserved() == {"cudaFree": 9}
    assert second.conserved() == {"cudaLaunchKernel": 4}
    assert first.segment.header.pid == second.segment.header.pid


def test_a_program_that_closes_every_descriptor(agent: Agent, stubs: Path) -> None:
    """The mapping stays; what stands under the old number is not touched."""
    script = (
        f"import ctypes, os; c = ctypes.CDLL('{stubs}/libcudart.so.12'); c.cudaFree(1); os.closerange(3, 4096); "
        f"fds = [os.open('/dev/null', os.O_WRONLY) for _ in range(800)]; [c.cudaFree(1) for _ in range(9)]; "
        "import threading; t = threading.Thread(target=c.cudaFree, args=(1,)); t.start(); t.join(); "
        "pid = os.fork(); c.cudaFree(1); pid or os._exit(0 if len([os.fstat(f) for f in fds]) == 800 else 1); "
        "assert os.waitpid(pid, 0)[1] == 0"
    )
    run(["/usr/bin/python3", "-c", script], environment(stubs, STALLSCOPE_SHIM=f"socket:{agent.path}"))
    first, second = agent.wait_for(2)
    assert first.conserved() == {"cudaFree": 12}
    assert second.conserved() == {"cudaFree": 1}


def test_a_dead_agent(agent: Agent, stubs: Path) -> None:
    """Nobody reads: the newest records are there, the counts are exact, the program never noticed."""
    words = [str(stubs / "program"), "obeys"]
    env = environment(stubs, STALLSCOPE_SHIM=f"socket:{agent.path}")
    with subprocess.Popen(words, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()
        (read,) = agent.wait_for(1)
        read.drain()
        read.segment.close()
        process.stdin.write("200000\n")
        process.stdin.flush()
        process.stdout.readline()
        after = Read(Segment(agent.fds[0]), agent.clock)  # the next agent
        assert after.segment.header.readers == 1
        assert after.conserved()["cudaLaunchKernel"] == 32767
        process.stdin.write("1000\n")
        process.stdin.flush()
        process.stdout.readline()
        assert after.conserved()["cudaLaunchKernel"] == 33767
        assert sum(after.events.values()) == 33767
        after.segment.close()
        process.stdin.close()


@pytest.mark.parametrize("quiet", [True, False])
def test_one_agent_after_the_other(agent: Agent, stubs: Path, quiet: bool) -> None:
    """Each call is told to one of them, also when they change in the middle of it all."""
    words = [str(stubs / "program"), "threads", "3", "1", "100" if quiet else "5000000"]
    env = environment(stubs, STALLSCOPE_SHIM=f"socket:{agent.path}")
    with subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True) as process:
        (first,) = agent.wait_for(1)
        if quiet:
            process.wait()
            first.drain()
        else:
            first.segment.drain(1, 1, agent.clock, 4096)
        first.segment.close()
        second = Read(Segment(agent.fds[0]), agent.clock)
        process.wait()
        second.drain().counts()
    row = second.latest.get("cudaLaunchKernel", {"calls": 0, "lost": 0, "filtered": 0})
    told = second.events["cudaLaunchKernel"] + int(row["lost"]) + int(row["filtered"])
    made = int(row["calls"])
    assert bool(made) != quiet
    assert abs(told - made) <= (0 if quiet else 3)  # a call a thread, where it never stood still for a look
    second.segment.close()


def test_times_are_the_systems(agent: Agent, stubs: Path) -> None:
    """Records lie between the instants before and after the run, on CLOCK_MONOTONIC, in order."""
    before_ns = time.monotonic_ns()
    run([stubs / "program", "calls", "1000"], environment(stubs, STALLSCOPE_SHIM=f"socket:{agent.path}"))
    after_ns = time.monotonic_ns()
    (read,) = agent.wait_for(1)
    agent.clock.recalibrate()
    stamps = read.drain().recs["ts_ns"].astype("i8")
    assert (stamps[1:] >= stamps[:-1]).all()
    assert before_ns < stamps[0]
    assert stamps[-1] < after_ns


def test_what_is_no_segment(tmp_path: Path) -> None:
    """Each is refused with its reason."""
    for data in (b"", b"x" * 100, b"x" * 10_000):
        path = tmp_path / "file"
        path.write_bytes(data)
        with pytest.raises(BadSegment):
            opened(path)
    fd = os.open("/dev/zero", os.O_RDWR)
    with pytest.raises(BadSegment, match="regular"):
        Segment(fd)
    os.close(fd)


def test_a_file_that_is_cut_while_it_is_read(stubs: Path, tmp_path: Path) -> None:
    """No SIGBUS: it reads as if nothing were there."""
    run([stubs / "program", "calls", "3000"], in_folder(stubs, tmp_path))
    (path,) = tmp_path.glob("*.seg")
    copy = Path(shutil.copy(path, tmp_path / "copy"))
    read = opened(copy)
    os.truncate(copy, 5000)
    read.drain()
    read.segment.inflight(read.clock)
    read.counts()
    read.segment.close()
    assert signal.getsignal(signal.SIGBUS) == signal.SIG_DFL
