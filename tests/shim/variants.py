"""Variants of the library with few functions: other ring sizes, another counter, sanitizers."""

from __future__ import annotations

import subprocess
from pathlib import Path

from shim_kit import HERE, ROOT

FEW = ("cudaLaunchKernel,cudaStreamSynchronize,cudaDeviceSynchronize,cudaMemcpyAsync,cudaEventQuery,cudaFree,cudaMalloc,"
       "ncclAllReduce,ncclGroupStart,ncclGroupEnd,ncclBcast,ncclBroadcast,ncclGetUniqueId,ncclCommInitRank,"
       "ncclCommInitRankConfig,ncclCommDestroy")  # fmt: skip


def variant(folder: Path, *, san: str = "", defines: str = "") -> Path:
    """The library, built into `folder`."""
    words = ["make", "-s", "-C", str(ROOT / "native/shim"), f"OUT={folder}", f"ONLY={FEW}", f"SAN={san}",
             f"DEFINES={defines}"]  # fmt: skip
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "libstallscope.so"


def program(folder: Path, stubs: Path, source: str, *more: str, library: Path | None = None) -> Path:
    """A program linked to the stubs, and to a variant of the library before them."""
    out = folder / Path(source).stem
    made = [str(stubs / name) for name in ("libcudart.so.12", "libcuda.so.1", "libnccl.so.2")]
    words = ["gcc", "-std=gnu11", "-O1", "-g", "-pthread", *more, str(HERE / source), "-o", str(out)]
    words += ["-Wl,--no-as-needed", *([str(library), f"-Wl,-rpath,{library.parent}"] if library else []), *made]
    done = subprocess.run([*words, f"-Wl,-rpath,{stubs}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out
