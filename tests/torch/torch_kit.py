"""How a program with PyTorch is started on the simulated stack."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIB = ROOT / "build/sim/lib"
NCCL = LIB / "newer/libnccl.so.2"  # with the names of 2.28 and later, which PyTorch 2.14 links to
CHECKS = Path(__file__).parent / "checks.py"
# In this order: torch's DT_RPATH beats LD_LIBRARY_PATH, a preloaded library beats both.
PRELOADED = ("libcuda.so.1", "libcudart.so.13", "libcublas.so.13", "libcublasLt.so.13", "libnvidia-ml.so.1")


def python_command() -> list[str]:
    """Of the venv that `make test-torch` fills."""
    return [os.environ.get("STALLSCOPE_TORCH_PYTHON", str(ROOT / "build/torch-venv/bin/python")), "-u"]


def torch_environment(**settings: str) -> dict[str, str]:
    """With the stack preloaded and four devices, where `settings` say nothing else."""
    libraries = [LIB / name for name in PRELOADED]
    if NCCL.exists():
        libraries.append(NCCL)
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(("STALLSCOPE_SIM", "PYTHON"))},
        "LD_PRELOAD": ":".join(map(str, libraries)),
        "TRITON_LIBCUDA_PATH": str(LIB),
        "STALLSCOPE_SIM_DEVICES": "4",
        **settings,
    }
