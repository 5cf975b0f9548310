"""A communicator at the address of a destroyed one: its operations are numbered from 0, as those of its peers are."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import Program, Tracer

pytestmark = pytest.mark.usefixtures("needs_bpf")

LIBRARY = """
typedef struct { char bytes[128]; } Id;
static long place[64];
int ncclCommInitRank(void **comm, int nranks, Id id, int rank) { *comm = place; return 0; }
int ncclAllReduce(void *s, void *r, long n, int type, int op, void *comm, void *stream) { return 0; }
int ncclCommDestroy(void *comm) { return 0; }
"""
PROGRAM = """
#include <stdio.h>
typedef struct { char bytes[128]; } Id;
int ncclCommInitRank(void **, int, Id, int);
int ncclAllReduce(void *, void *, long, int, int, void *, void *);
int ncclCommDestroy(void *);
static void life(int number, int operations) {
  void *comm;
  Id id = {{(char)number}};
  ncclCommInitRank(&comm, 2, id, 1);
  for (int i = 0; i < operations; i++) ncclAllReduce(0, 0, 1, 0, 0, comm, 0);
  ncclCommDestroy(comm);
  getchar(); /* the capture ships what it has */
}
int main(void) {
  puts("ready");
  fflush(stdout);
  getchar();
  life(1, 3);
  life(2, 2);
  return 0;
}
"""


def test_numbers_begin_again(tmp_path: Path, needs_tool: Callable[[str], str]) -> None:
    """3 operations on the first one, 2 on the second."""
    import time

    cc = needs_tool("cc")
    (tmp_path / "library.c").write_text(LIBRARY)
    (tmp_path / "program.c").write_text(PROGRAM)
    library = tmp_path / "libnccl.so.2"
    subprocess.run([cc, "-shared", "-fPIC", "-w", tmp_path / "library.c", "-o", library], check=True)
    subprocess.run(
        [cc, tmp_path / "program.c", library, f"-Wl,-rpath,{tmp_path}", "-o", tmp_path / "program"], check=True
    )
    with Program([tmp_path / "program"], sim=False) as program:
        program.wait_for("ready")
        with Tracer([program.pid]).attached() as tracer:
            for line in ("", "", ""):
                program.say(line)
                time.sleep(0.2)
            report = tracer.report()
    assert [comm["uid"] for comm in report["communicators"]] == ["01" + "00" * 7, "02" + "00" * 7]
    assert [comm["members"][0]["next_seq"] for comm in report["communicators"]] == [3, 2]
