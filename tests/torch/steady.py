"""Trains a small network on the CPU, beside launches on the device, until a line comes; every step's loss is compared
with that of a second network in lockstep: {"steps": n, "wrong": n}."""

from __future__ import annotations

import json
import os
import select
import sys

import torch


def network() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    layers = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    return layers, torch.optim.SGD(layers.parameters(), lr=0.01)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> float:
    optimizer.zero_grad()
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


def main() -> None:
    torch.set_num_threads(2)
    twins = network(), network()
    device = torch.zeros(1000).cuda()
    steps = wrong = 0
    print("ready", flush=True)
    while not select.select([sys.stdin], [], [], 0)[0]:
        x = torch.randn(64, 32)
        one, other = (step(*twin, x) for twin in twins)
        wrong += one != other
        for _ in range(20):
            device.add_(1)
        torch.cuda.synchronize()
        steps += 1
    print(json.dumps({"steps": steps, "wrong": wrong}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
