"""The library built for aarch64 and run by qemu: another counter, another calling convention, another dlsym."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from shim_kit import ROOT, Read, build_stubs
from variants import FEW

from stallscope.capture.segment import Clock, Segment
from stallscope.wire.hook_table import BY_NAME

GCC, QEMU = shutil.which("aarch64-linux-gnu-gcc"), shutil.which("qemu-aarch64")
pytestmark = pytest.mark.skipif(not GCC or not QEMU, reason="apt install gcc-aarch64-linux-gnu qemu-user")
SCRIPT = """
#include <dlfcn.h>
#include <string.h>
struct id { char b[128]; };
int main(int n, char **v) {
  void *h = dlopen(v[n - 1], RTLD_NOW);
  struct id id;
  unsigned long comm = 0;
  int (*get)(struct id *) = dlsym(h, "ncclGetUniqueId");
  int (*init)(unsigned long *, int, struct id, int) = dlsym(h, "ncclCommInitRank");
  int (*init2)(unsigned long *, int, struct id, int, void *) = dlsym(h, "ncclCommInitRankConfig");
  return dlsym(h, "nothing") || !dlerror() || get(&id) || init(&comm, 4, id, 3) || init2(&comm, 4, id, 2, v);
}
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library, the stubs, and two programs."""
    folder = tmp_path_factory.mktemp("aarch64")
    words = ["make", "-s", "-C", str(ROOT / "native/shim"), f"OUT={folder}", f"ONLY={FEW}", f"CC={GCC}"]
    subprocess.run(words, check=True)
    build_stubs(folder, str(GCC))
    (folder / "ids.c").write_text(SCRIPT)
    subprocess.run([str(GCC), str(folder / "ids.c"), "-o", str(folder / "ids")], check=True)
    return folder


def run(folder: Path, place: Path, *words: str) -> list[Read]:
    env = f"LD_PRELOAD={folder}/libstallscope.so,STALLSCOPE_SHIM=dir:{place},LD_LIBRARY_PATH={folder}"
    command = [str(QEMU), "-L", "/usr/aarch64-linux-gnu", "-E", env, str(folder / words[0]), *words[1:]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, (done.stdout, done.stderr)
    reads = []
    for path in sorted(place.glob("*.seg")):
        fd = os.open(path, os.O_RDWR)
        reads.append(Read(Segment(fd), Clock()))
        os.close(fd)
    return reads


@pytest.mark.parametrize(
    "words", ["calls 5000", "errno", "jumps 20", "ends", "threads 20 2 10", "forks 3 10", "fails 700"]
)
def test_no_call_is_lost(built: Path, tmp_path: Path, words: str) -> None:
    """As on x86."""
    reads = run(built, tmp_path, "program", *words.split())
    assert len(reads) == (4 if words.startswith("forks") else 1)
    for read in reads:
        assert read.conserved()
        launches = read.recs[read.recs["hook"] == BY_NAME["cudaLaunchKernel"].id]
        assert words == "errno" or (launches["a"][:, [0, 7]] == [0x1234, 0x5678]).all()


def test_ids_by_value(built: Path, tmp_path: Path) -> None:
    """There a structure of 128 bytes is passed by its address."""
    (read,) = run(built, tmp_path, "ids", str(built / "libnccl.so.2"))
    read.drain()
    uid = bytes(range(1, 129))
    created = [("ncclCommInitRank", 1, uid), ("ncclCommInitRankConfig", 1, uid)]
    assert read.uids == [("ncclGetUniqueId", 2, uid), *created]
    assert sorted((c.rank, c.nranks) for c in read.segment.comms()) == [(2, 4), (3, 4)]
