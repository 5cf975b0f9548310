"""What real PyTorch does on the simulated stack: one function a check, run by test_torch.py in the torch venv.

`python checks.py NAME...` runs the named ones and prints one line of JSON each: {"name", "ok", "why", "seconds"}.
Kernels compute nothing there, so values are checked only where they come from the host by copies.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
import traceback

import torch
from torch import nn

MS = 1_000_000
torch.backends.cudnn.enabled = False


def next_kernel_ns(length_ns: int) -> None:
    """The next kernel of this thread lasts that long."""
    runtime = ctypes.CDLL("libcudart.so.13")
    assert runtime.stallscope_sim_set_next_kernel_ns(ctypes.c_uint64(length_ns)) == 0


def host_values(count: int = 1000) -> torch.Tensor:
    return torch.arange(count, dtype=torch.int64) * 7 - 300


def check_device() -> None:
    assert torch.cuda.is_available()
    assert torch.cuda.device_count() == 4
    assert "simulated" in torch.cuda.get_device_name(0)
    properties = torch.cuda.get_device_properties(1)
    assert properties.major == 8
    assert properties.total_memory == 16384 << 20
    assert properties.multi_processor_count == 108
    assert str(properties.uuid).endswith("01")
    assert torch.version.cuda == "13.0"


def check_nvml_through_torch() -> None:
    block = torch.zeros(32 << 20, device="cuda:2")
    assert torch.cuda.device_memory_used(2) >= block.numel() * 4
    assert 0 <= torch.cuda.utilization(2) <= 100
    assert 60_000 <= torch.cuda.power_draw(2) <= 400_000
    assert torch.cuda.clock_rate(2) in (210, 1410)
    assert f"process {os.getpid():>10d}" in torch.cuda.list_gpu_processes(2)


def check_copies() -> None:
    values = host_values()
    assert torch.equal(values.cuda().cpu(), values)
    pinned = values.pin_memory()
    assert pinned.is_pinned()
    assert not values.is_pinned()
    device = pinned.to("cuda", non_blocking=True)
    back = torch.empty_like(values, pin_memory=True)
    back.copy_(device, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(back, values)
    assert torch.equal(device.clone().cpu(), values)
    assert torch.equal(values.cuda(1).to("cuda:0").cpu(), values)


def check_pageable_copy_waits() -> None:
    device = torch.empty(10, device="cuda")
    torch.cuda.synchronize()
    next_kernel_ns(100 * MS)
    device.add_(1)
    start = time.monotonic()
    device.cpu()
    assert time.monotonic() - start >= 0.09


def check_item() -> None:
    for value in (3.5, -2.0):
        assert torch.tensor([value]).cuda().item() == value
    assert bool(torch.tensor([True]).cuda())


def check_tensor_operations() -> None:
    a, b = torch.randn(64, 64, device="cuda"), torch.randn(64, 64, device="cuda")
    shapes = [
        (a + b).shape,
        (a @ b).shape,
        torch.softmax(a, -1).shape,
        torch.cat([a, b])[:64].shape,
        torch.sort(a)[0].shape,
        torch.cumsum(a, 0).shape,
        torch.where(a > 0, a, b).shape,
        torch.bmm(a[None], b[None])[0].shape,
    ]
    assert shapes == [torch.Size([64, 64])] * len(shapes)
    assert a.sum().shape == torch.Size([])
    torch.cuda.synchronize()


def check_autograd() -> None:
    layers = [nn.Linear(16, 32), nn.LayerNorm(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 10)]
    model = nn.Sequential(*layers).cuda()
    for optimizer in (torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.AdamW(model.parameters(), fused=True)):
        for _ in range(3):
            loss = nn.functional.cross_entropy(model(torch.randn(8, 16, device="cuda")), torch.zeros(8).long().cuda())
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())
    torch.cuda.synchronize()


def check_models() -> None:
    image = torch.randn(1, 3, 8, 8, device="cuda", requires_grad=True)
    nn.Conv2d(3, 4, 3).cuda()(image).sum().backward()
    assert image.grad is not None
    nn.TransformerEncoderLayer(32, 4, 64).cuda()(torch.randn(5, 2, 32, device="cuda")).sum().backward()
    nn.Embedding(10, 8).cuda()(torch.zeros(4, dtype=torch.long, device="cuda")).sum().backward()
    half = [torch.randn(1, 2, 16, 32, device="cuda", dtype=torch.float16) for _ in range(3)]
    assert nn.functional.scaled_dot_product_attention(*half).shape == torch.Size([1, 2, 16, 32])
    model, scaler = nn.Linear(32, 32).cuda(), torch.amp.GradScaler("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(torch.randn(8, 32, device="cuda")).sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


def check_streams() -> None:
    side, x = torch.cuda.Stream(), torch.zeros(8, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    torch.cuda.synchronize()
    start = time.monotonic()
    with torch.cuda.stream(side):
        next_kernel_ns(200 * MS)
        x.add_(1)
    assert time.monotonic() - start < 0.15
    assert not side.query()
    torch.cuda.current_stream().synchronize()
    assert time.monotonic() - start < 0.15
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.current_stream().synchronize()
    assert time.monotonic() - start >= 0.2
    assert side.query()


def check_events() -> None:
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    x = torch.zeros(8, device="cuda")
    torch.cuda.synchronize()
    before.record()
    next_kernel_ns(50 * MS)
    x.add_(1)
    after.record()
    assert not after.query()
    after.synchronize()
    assert 50 <= before.elapsed_time(after) < 60


def check_graph() -> None:
    model, x = nn.Linear(32, 32).cuda(), torch.randn(8, 32, device="cuda")
    source, target = host_values().cuda(), torch.zeros(1000, dtype=torch.int64).cuda()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        model(x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            y = model(x).relu()
        target.copy_(source)
    assert y.shape == torch.Size([8, 32])
    torch.cuda.synchronize()
    assert torch.equal(target.cpu(), torch.zeros(1000, dtype=torch.int64))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(target.cpu(), host_values())


def check_graphed_callable() -> None:
    model = nn.Linear(8, 8).cuda()
    graphed = torch.cuda.make_graphed_callables(model, (torch.randn(4, 8, device="cuda", requires_grad=True),))
    for _ in range(3):
        graphed(torch.randn(4, 8, device="cuda", requires_grad=True)).sum().backward()
    torch.cuda.synchronize()


def loader_is_right(workers: int) -> None:
    inputs, labels = torch.arange(64 * 4).reshape(64, 4), torch.arange(64)
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(inputs, labels), batch_size=8, pin_memory=True, num_workers=workers
    )
    seen = []
    for x, y in loader:
        assert x.is_pinned()
        assert torch.equal(x.cuda(non_blocking=True).cpu(), inputs[y])
        seen += y.tolist()
    assert seen == list(range(64))


def check_dataloader() -> None:
    torch.zeros(1, device="cuda")
    loader_is_right(workers=0)


def check_dataloader_workers() -> None:
    torch.zeros(1, device="cuda")
    loader_is_right(workers=2)


def check_out_of_memory() -> None:
    try:
        torch.empty(17 << 30, dtype=torch.uint8, device="cuda:3")
    except torch.OutOfMemoryError as error:
        assert "16.00 GiB" in str(error)
    else:
        raise AssertionError("17 GiB fitted into 16")
    torch.empty(15 << 30, dtype=torch.uint8, device="cuda:3")
    torch.cuda.empty_cache()


def check_triton() -> None:
    import triton_add

    triton_add.run()


def child_of_ipc(queue: object, results: object) -> None:
    tensor = queue.get()
    results.put(tensor.cpu().tolist())
    tensor.copy_(torch.arange(5).cuda())
    torch.cuda.synchronize()
    results.put("done")
    queue.get()


def check_ipc() -> None:
    """A tensor given to another process is the same memory there."""
    context = torch.multiprocessing.get_context("spawn")
    queue, results = context.Queue(), context.Queue()
    child = context.Process(target=child_of_ipc, args=(queue, results))
    child.start()
    tensor = torch.tensor([5, 4, 3, 2, 1]).cuda()
    queue.put(tensor)
    assert results.get(timeout=60) == [5, 4, 3, 2, 1]
    assert results.get(timeout=60) == "done"
    assert tensor.cpu().tolist() == [0, 1, 2, 3, 4]
    queue.put(None)
    child.join(60)
    assert child.exitcode == 0


def check_allocator() -> None:
    """Run once a setting of PYTORCH_ALLOC_CONF."""
    values = host_values(1 << 20)
    blocks = [values.cuda() for _ in range(8)]
    assert all(torch.equal(block.cpu(), values) for block in blocks)
    del blocks
    torch.cuda.empty_cache()
    big = torch.empty(64 << 20, device="cuda")
    big[:1000].copy_(torch.ones(1000))
    assert torch.equal(big[:1000].cpu(), torch.ones(1000))
    assert torch.cuda.memory_reserved() >= 256 << 20
    free, total = torch.cuda.mem_get_info()
    assert total - free >= 256 << 20


ALONE = {"check_allocator", "check_ipc"}  # need a process of their own


def main(names: list[str]) -> int:
    for name in names:
        start, why = time.monotonic(), ""
        try:
            globals()[name]()
        except BaseException:
            why = traceback.format_exc()
        print(json.dumps({"name": name, "ok": not why, "why": why, "seconds": round(time.monotonic() - start, 3)}))
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
