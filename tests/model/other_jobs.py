"""Jobs whose layouts the diagnosis was not written against; see unseen.py."""

from __future__ import annotations

from collections.abc import Callable

from .program import (
    FLOAT,
    MAIN,
    SIDE,
    Call,
    End,
    Instruction,
    Job,
    Launch,
    Layout,
    Sync,
    call,
    gpipe,
    prologue,
    receive,
    send,
)

__all__ = ["exchange_ring", "experts", "hybrid_sharded", "one_forward_one_backward", "training", "with_evaluation"]

STEPS = 6
Step = Callable[[int, int], list[Instruction]]


def _job(groups: dict[str, list[int]], size: int, step: Step) -> Job:
    """All ranks, the named groups of them, and what `step(rank, number)` gives."""
    job = Job(["world", *groups], [list(range(size)), *groups.values()], [])
    for rank in range(size):
        children = [c for c, ranks in enumerate(job.members) if c and rank in ranks]
        program = prologue(job, rank, children, split=False)
        begins = []
        for number in range(STEPS):
            begins.append(len(program))
            program += step(rank, number)
        job.steps.append([*begins, len(program)])
        job.programs.append([*program, Sync(), *(End(c) for c in [*children, 0])])
    return job


def _loss() -> list[Instruction]:
    return [Launch((call(0, "ncclAllReduce", 1, FLOAT),), MAIN, SIDE), Sync()]


def experts(size: int = 16, group: int = 4, layers: int = 3) -> Job:
    """Expert parallel: each layer exchanges tokens by one group of sends and receives before and after its experts."""
    groups = {f"ep-{g}": list(range(g * group, (g + 1) * group)) for g in range(size // group)}
    groups |= {f"edp-{i}": list(range(i, size, group)) for i in range(group)}
    comm = {name: 1 + i for i, name in enumerate(groups)}

    def all_to_all(rank: int) -> Launch:
        mine, peers = comm[f"ep-{rank // group}"], [p for p in range(group) if p != rank % group]
        calls: list[Call] = []
        for peer in peers:
            calls += [send(mine, peer, 256), receive(mine, peer, 256)]
        return Launch(tuple(calls))

    def step(rank: int, number: int) -> list[Instruction]:
        replicas = comm[f"edp-{rank % group}"]
        forward: list[Instruction] = [all_to_all(rank)] * (2 * layers)
        reduce = Launch((call(replicas, "ncclReduceScatter", 7000),), SIDE, MAIN)
        return [*forward, *forward, reduce, *_loss(), Launch((call(replicas, "ncclAllGather", 7000),))]

    return _job(groups, size, step)


def hybrid_sharded(shards: int = 4, replicas: int = 4, layers: int = 4) -> Job:
    """Parameters are gathered within a group of shards, ahead on a side stream; gradients are scattered there and summed
    over the replicas."""
    size = shards * replicas
    groups = {f"shard-{r}": list(range(r * shards, (r + 1) * shards)) for r in range(replicas)}
    groups |= {f"replicate-{s}": list(range(s, size, shards)) for s in range(shards)}
    comm = {name: 1 + i for i, name in enumerate(groups)}

    def step(rank: int, number: int) -> list[Instruction]:
        shard, replicate = comm[f"shard-{rank // shards}"], comm[f"replicate-{rank % shards}"]
        gather = [Launch((call(shard, "ncclAllGather", 4000 + n),), SIDE) for n in range(layers)]
        backward: list[Instruction] = []
        for n in reversed(range(layers)):
            backward += [gather[n], Launch((call(shard, "ncclReduceScatter", 4000 + n),), MAIN, SIDE)]
            backward.append(Launch((call(replicate, "ncclAllReduce", 4000 + n),), MAIN))
        return [*gather, *backward, *_loss()]

    return _job(groups, size, step)


def one_forward_one_backward(stages: int = 4, replicas: int = 2, micro_batches: int = 6) -> Job:
    """A pipeline where stages alternate; neighbours exchange an activation and a gradient in one group."""
    size = stages * replicas
    groups = {f"pp-{d}": list(range(d * stages, (d + 1) * stages)) for d in range(replicas)}
    groups |= {f"dp-{p}": list(range(p, size, stages)) for p in range(stages)}
    comm = {name: 1 + i for i, name in enumerate(groups)}

    def both(calls: list[Call]) -> list[Instruction]:
        return [Launch(tuple(calls))] if calls else []

    def step(rank: int, number: int) -> list[Instruction]:
        stage, pp = rank % stages, comm[f"pp-{rank // stages}"]
        before, after = stage > 0, stage < stages - 1
        take = [receive(pp, stage - 1, 900)] if before else []
        give = [send(pp, stage + 1, 900)] if after else []
        take_back = [receive(pp, stage + 1, 900)] if after else []
        give_back = [send(pp, stage - 1, 900)] if before else []
        warm = stages - 1 - stage
        out: list[Instruction] = []
        for _ in range(warm):
            out += both(take) + both(give)
        out += both(take)
        for i in range(micro_batches - warm):
            out += both(give + take_back)
            out += both(give_back + (take if i < micro_batches - warm - 1 else []))
        for _ in range(warm):
            out += both(take_back) + both(give_back)
        reduce = Launch((call(comm[f"dp-{stage}"], "ncclAllReduce", 5000),), SIDE, MAIN)
        return [*out, reduce, *_loss()]

    return _job(groups, size, step)


def with_evaluation() -> Job:
    """Tensor and data parallel; every third step evaluates: other calls than in training, and more of them."""
    groups = {f"tp-{d}": [2 * d, 2 * d + 1] for d in range(4)} | {f"dp-{t}": list(range(t, 8, 2)) for t in range(2)}
    comm = {name: 1 + i for i, name in enumerate(groups)}

    def step(rank: int, number: int) -> list[Instruction]:
        tp, dp = comm[f"tp-{rank // 2}"], comm[f"dp-{rank % 2}"]
        layer: Instruction = Launch((call(tp, "ncclAllReduce", 500),))
        if number % 3 == 2:
            scores: Instruction = Launch((call(0, "ncclAllGather", 64, FLOAT),))
            return [*[layer, layer, scores, Sync()] * 3, *_loss()]
        return [*[layer] * 8, Launch((call(dp, "ncclReduceScatter", 9000),), SIDE, MAIN), *_loss()]

    return _job(groups, 8, step)


def exchange_ring(size: int = 3, together: bool = True) -> Job:
    """Each rank passes a block to the next one and takes one from the previous one, in one group. With `together` false,
    all receive before they send in the last step: nobody is the first."""

    def step(rank: int, number: int) -> list[Instruction]:
        take, give = receive(0, (rank - 1) % size, 300), send(0, (rank + 1) % size, 300)
        if together or number < STEPS - 1:
            passes: list[Instruction] = [Launch((give, take))] * 4
        else:
            passes = [Launch((take,)), Launch((give,))]
        return [*passes, *_loss()]

    return _job({}, size, step)


def training() -> Job:
    """A job of the known kind, for unknown faults."""
    return gpipe(Layout(2, 4, 2, 4, 2, False, False), STEPS)
