"""Every function of the table: its wrappers pass on every argument, and its records hold the words that BPF's would."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from shim_kit import FLAGS, HERE, Agent, Read, environment, run

from stallscope.wire.hook_table import BY_NAME, HOOKS, Hook

SONAMES = {"CUDART": "libcudart.so.12", "CUDA": "libcuda.so.1", "NCCL": "libnccl.so.2"}
HEAD = """
#include <stdint.h>
struct id { uint8_t bytes[128]; };
uint64_t got[12];
"""


def source(hook: Hook) -> str:
    """A function that keeps its arguments."""
    words = [w for w in hook.arguments.split() if w != "uid[128]"]
    params = [f"uint64_t a{i}" for i in range(len(words))]
    if "uid[128]" in hook.arguments:
        params.insert(2, "struct id id")
    body = "".join(f"got[{i}] = a{i};" for i in range(len(words)))
    body += "if (id.bytes[127] != 128) return 1;" if "uid[128]" in hook.arguments else ""
    return f"int {hook.name}({', '.join(params) or 'void'}) {{ {body} return 0; }}\n"


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Libraries with all the names, and no others."""
    folder = tmp_path_factory.mktemp("every")
    for library, soname in SONAMES.items():
        text = HEAD + "".join(source(hook) for hook in HOOKS if hook.library == library)
        (folder / "every.c").write_text(text)
        words = ["-shared", "-Wl,-Bsymbolic", f"-Wl,-soname,{soname}", "-fPIC", str(folder / "every.c")]
        subprocess.run(["gcc", *FLAGS, *words, "-o", str(folder / soname)], check=True)
    return folder


@pytest.fixture(scope="module")
def read(everything: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Read]:
    """All calls, made and read."""
    with Agent(tmp_path_factory.mktemp("agent")) as agent:
        table = [[SONAMES[h.library], h.name, h.arguments.split()] for h in HOOKS]
        words = [sys.executable, HERE / "every.py", everything, json.dumps(table)]
        found = run(words, environment(everything, STALLSCOPE_SHIM=f"socket:{agent.path}"))
        assert found == {"wrong": []}
        (read,) = agent.wait_for(1)
        read.conserved()
        yield read


def test_every_call_is_counted(read: Read) -> None:
    """Twice each; `__cudaLaunchKernel` as the function it jumps into."""
    expected = {hook.name: 4 if f"__{hook.name}" in BY_NAME else 2 for hook in HOOKS if hook.mode != "SHIM"}
    assert {api: int(row["calls"]) for api, row in read.latest.items()} == expected


@pytest.mark.parametrize("hook", [h for h in HOOKS if h.mode != "SHIM"], ids=lambda h: h.name)
def test_words(read: Read, hook: Hook) -> None:
    """A word is right or, in the short records, 0; stream and communicator, bytes and kind of a copy are never left out."""
    words = [w for w in hook.arguments.split() if w != "uid[128]"]
    rows = read.recs[read.recs["hook"] == hook.id]
    assert len(rows)
    expected = [0x1000 + i for i in range(len(words))]
    for row in rows:
        a = [int(word) for word in row["a"]]
        if "*config" in words:
            assert (a[0], a[7]) == (0x1001, 0x5678)
            continue
        for i, word in enumerate(words):
            if word.startswith("*"):
                continue
            value = stack_word(hook, i, a)
            needed = hook.library == "NCCL" or word in ("stream", "comm", "copy_kind", "event")
            if value is not None:
                assert value == expected[i] or (value == 0 and not needed), (word, a)


def stack_word(hook: Hook, index: int, a: list[int]) -> int | None:
    """Argument `index` among the recorded words (native/wire.h), None when it is not among them or not alone."""
    count = hook.cookie >> 44 & 15
    if index < 6:
        return a[index]
    if count == 3:
        return a[7] if index == 8 else None
    return a[index] if index - 6 < count else None
