"""Where the parts that are not Python lie: probes, the compiled BPF object, the simulated CUDA stack."""

from __future__ import annotations

from pathlib import Path

__all__ = ["BPF_OBJECT", "BUILD", "NO_COOKIES_OBJECT", "PROBES", "SHIM", "SHIM_INJECT", "SIM_LIB", "WIRE_HEADER"]

_SHIPPED = Path(__file__).resolve().parent / "_data"  # in a wheel; setup.py puts it there
ROOT = _SHIPPED if _SHIPPED.is_dir() else Path(__file__).resolve().parents[2]
PROBES = ROOT / "probes"
WIRE_HEADER = ROOT / "native" / "wire.h"
BUILD = ROOT / "build"
BPF_OBJECT = BUILD / "probes" / "stallscope.bpf.o"
NO_COOKIES_OBJECT = BUILD / "probes" / "stallscope.nocookies.bpf.o"
SIM_LIB = BUILD / "sim" / "lib"
SHIM = BUILD / "shim" / "libstallscope.so"
SHIM_INJECT = BUILD / "shim" / "libstallscope-inject.so"
