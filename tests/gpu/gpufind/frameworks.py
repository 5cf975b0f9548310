"""Steps through PyTorch, Triton, CuPy and JAX. Each runs in a process of its own."""

from __future__ import annotations

import os
import shutil
from functools import partial
from typing import Any

from gpufind.channel import (
    COPY,
    DEVICE_WAIT,
    EVENT,
    EVENT_WAIT,
    GRAPH,
    LAUNCH,
    STREAM_WAIT,
    Channel,
    Unavailable,
)


def _import(name: str) -> Any:
    try:
        return __import__(name, fromlist=["_"])
    except ImportError as error:
        raise Unavailable(f"no {name}: {error}") from error


def torch_on_gpu() -> Any:
    """The torch module. Raises Unavailable."""
    torch = _import("torch")
    if not torch.cuda.is_available():
        raise Unavailable("torch is here but finds no GPU")
    torch.zeros(1, device="cuda")
    return torch


def libraries(channel: Channel) -> None:
    """Map what torch maps; `finish` tells the paths."""
    torch = torch_on_gpu()
    channel.fact("torch", f"{torch.__version__} (CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()})")
    channel.fact("gpus", torch.cuda.device_count())


def torch_elementwise(channel: Channel) -> None:
    """The runtime that torch links, on the plain path."""
    torch = torch_on_gpu()
    x, event, stream = torch.ones(1024, device="cuda"), torch.cuda.Event(), torch.cuda.current_stream()
    x.add_(1)
    event.record()
    torch.cuda.synchronize()
    channel.count("x.add_(1)", 1000, lambda: x.add_(1), LAUNCH)
    channel.count("torch.cuda.synchronize()", 100, torch.cuda.synchronize, DEVICE_WAIT)
    channel.count("stream.synchronize()", 100, stream.synchronize, STREAM_WAIT)
    channel.count("event.record()", 100, event.record, EVENT)
    channel.count("event.synchronize()", 100, event.synchronize, EVENT_WAIT)
    channel.count("x.item()", 100, x[0].item, COPY, STREAM_WAIT)


def torch_copies(channel: Channel) -> None:
    """Pageable copies wait, pinned ones need not."""
    torch = torch_on_gpu()
    pageable, device = torch.ones(1 << 16), torch.ones(1 << 16, device="cuda")
    pinned = torch.ones(1 << 16).pin_memory()
    channel.count("pageable host to device", 100, lambda: device.copy_(pageable), COPY, STREAM_WAIT)
    channel.count("pinned host to device", 100, lambda: device.copy_(pinned, non_blocking=True), COPY)
    channel.count("device to pinned host", 100, lambda: pinned.copy_(device, non_blocking=True), COPY)
    channel.count("device to pageable host", 100, lambda: pageable.copy_(device), COPY, STREAM_WAIT)


def torch_matmul(channel: Channel) -> None:
    """cuBLAS carries its own static runtime."""
    torch = torch_on_gpu()
    for dtype in (torch.float32, torch.float16):
        a = torch.ones(512, 512, device="cuda", dtype=dtype)
        out = a @ a
        torch.cuda.synchronize()
        channel.count(f"matmul {str(dtype)[6:]}", 1000, partial(torch.mm, a, a, out=out), LAUNCH)
    torch.cuda.synchronize()


def torch_conv(channel: Channel) -> None:
    """So does cuDNN."""
    torch = torch_on_gpu()
    x, w = torch.ones(4, 8, 32, 32, device="cuda"), torch.ones(8, 8, 3, 3, device="cuda")
    with torch.no_grad():
        for _ in range(5):
            torch.nn.functional.conv2d(x, w)
        channel.count("conv2d", 200, lambda: torch.nn.functional.conv2d(x, w), LAUNCH)


def torch_graph(channel: Channel) -> None:
    """A graph of ten kernels, replayed."""
    torch = torch_on_gpu()
    x, graph = torch.ones(1024, device="cuda"), torch.cuda.CUDAGraph()
    x.add_(1)
    torch.cuda.synchronize()

    def capture() -> None:
        with torch.cuda.graph(graph):
            for _ in range(10):
                x.add_(1)

    channel.count("capture of 10 kernels", 1, capture, LAUNCH, total=10)
    channel.count("graph.replay()", 100, graph.replay, GRAPH)
    torch.cuda.synchronize()


def torch_compile(channel: Channel) -> None:
    """Code that Inductor writes: Triton kernels behind its own launcher."""
    torch = torch_on_gpu()
    _needs_compiler()
    x = torch.ones(1 << 14, device="cuda")
    function = torch.compile(lambda t: torch.sin(t) * 2 + torch.cos(t))
    for _ in range(3):
        function(x)
    torch.cuda.synchronize()
    channel.count("compiled function", 200, lambda: function(x), LAUNCH)


def _needs_compiler() -> None:
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc") or shutil.which("clang")):
        raise Unavailable("no C compiler, which Triton needs")


def triton_step(channel: Channel) -> None:
    """Triton looks up libcuda's symbols by dlsym."""
    torch, triton = torch_on_gpu(), _import("triton")
    _needs_compiler()
    kernel, x = _import("gpufind.triton_kernel").add_one, torch.ones(1024, device="cuda")
    kernel[(1,)](x, 1024, block=1024)
    torch.cuda.synchronize()
    channel.fact("triton", triton.__version__)
    channel.count("kernel[(1,)](...)", 1000, lambda: kernel[(1,)](x, 1024, block=1024), LAUNCH)


def cupy_step(channel: Channel) -> None:
    """CuPy carries a static runtime."""
    cupy = _import("cupy")
    x = cupy.ones(1024)
    cupy.add(x, 1, out=x)
    cupy.cuda.Device().synchronize()
    channel.count("cupy.add", 1000, lambda: cupy.add(x, 1, out=x), LAUNCH)
    channel.count("Device().synchronize()", 100, cupy.cuda.Device().synchronize, DEVICE_WAIT)
    channel.count("stream.synchronize()", 100, cupy.cuda.Stream.null.synchronize, STREAM_WAIT)


def jax_step(channel: Channel) -> None:
    """XLA opens libcuda by dlopen."""
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    jax = _import("jax")
    if jax.default_backend() not in ("gpu", "cuda"):
        raise Unavailable(f"jax runs on {jax.default_backend()}")
    function, x = jax.jit(lambda t: t + 1), jax.numpy.ones(1024)
    function(x).block_until_ready()
    channel.count("jitted x + 1", 200, lambda: function(x).block_until_ready(), LAUNCH)
