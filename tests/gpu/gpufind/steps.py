"""The steps, in the order of their worth: the time may run out."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from gpufind import addresses, frameworks, machine, nccl, raw
from gpufind.channel import Channel


class Step(NamedTuple):
    """One worker process.

    Attributes:
        origin: who calls libcuda, in the words of the conclusion.
        seconds: time limit.
    """

    name: str
    origin: str
    run: Callable[[Channel], None]
    seconds: float


# Before anything is counted: what is here, and which files to count in.
GPU = Step("gpu", "", machine.gpu, 60)
LIBRARIES = Step("libraries", "", frameworks.libraries, 120)
BEFORE = (
    Step("bpf", "", machine.bpf, 30),
    Step("addresses", "", addresses.addresses, 60),
    Step("cost", "", raw.cost, 60),
)
COUNTED = (
    Step("raw_driver", "libcuda called by name (the control)", raw.raw_driver, 60),
    Step("raw_runtime", "libcudart", raw.raw_runtime, 60),
    Step("torch_elementwise", "PyTorch", frameworks.torch_elementwise, 90),
    Step("torch_matmul", "cuBLAS", frameworks.torch_matmul, 90),
    Step("torch_copies", "PyTorch copies", frameworks.torch_copies, 90),
    Step("nccl_alone", "NCCL", nccl.nccl_alone, 90),
    Step("nccl_pair", "NCCL on 2 GPUs", nccl.nccl_pair, 120),
    Step("triton", "Triton", frameworks.triton_step, 90),
    Step("torch_graph", "CUDA graphs of PyTorch", frameworks.torch_graph, 90),
    Step("torch_conv", "cuDNN", frameworks.torch_conv, 90),
    Step("torch_compile", "torch.compile", frameworks.torch_compile, 120),
    Step("cupy", "CuPy", frameworks.cupy_step, 90),
    Step("jax", "JAX", frameworks.jax_step, 90),
)
DRY = (*BEFORE, *COUNTED[:2])
BY_NAME = {step.name: step for step in (GPU, LIBRARIES, *BEFORE, *COUNTED)}
