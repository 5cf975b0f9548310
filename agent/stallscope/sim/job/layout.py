"""Who works with whom: tensor, pipeline and data parallel groups, as Megatron numbers them (tensor ranks adjacent)."""

from __future__ import annotations

from dataclasses import dataclass

TENSOR, PIPELINE, DATA, WORLD = "tp", "pp", "dp", "world"


@dataclass(frozen=True)
class Group:
    """One communicator: its kind, its number among those of its kind, its global ranks in order."""

    kind: str
    number: int
    ranks: tuple[int, ...]

    @property
    def name(self) -> str:
        return WORLD if self.kind == WORLD else f"{self.kind}{self.number}"


@dataclass(frozen=True)
class Layout:
    tp: int
    pp: int
    dp: int

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def split_kind(self) -> str | None:
        """The kind whose communicators come from ncclCommSplit of the world's."""
        return next((kind for kind in (TENSOR, DATA, PIPELINE) if self.size(kind) > 1), None)

    def size(self, kind: str) -> int:
        return {TENSOR: self.tp, PIPELINE: self.pp, DATA: self.dp, WORLD: self.ranks}[kind]

    def place(self, rank: int) -> tuple[int, int, int]:
        """Its tensor, data and pipeline coordinate."""
        return rank % self.tp, rank // self.tp % self.dp, rank // (self.tp * self.dp)

    def _key(self, kind: str, rank: int) -> tuple[int, ...]:
        t, d, p = self.place(rank)
        return {TENSOR: (p, d), DATA: (p, t), PIPELINE: (d, t), WORLD: ()}[kind]

    def groups(self, kind: str) -> list[Group]:
        members: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.ranks):
            members.setdefault(self._key(kind, rank), []).append(rank)
        return [Group(kind, number, tuple(ranks)) for number, (_, ranks) in enumerate(sorted(members.items()))]

    def group_of(self, kind: str, rank: int) -> Group:
        return next(group for group in self.groups(kind) if rank in group.ranks)

    def kinds(self) -> list[str]:
        """Those with communicators, in the order in which these are made; the split ones last."""
        plain = [kind for kind in (WORLD, PIPELINE, DATA, TENSOR) if self.size(kind) > 1 and kind != self.split_kind]
        return plain + ([self.split_kind] if self.split_kind else [])

    def inner(self) -> str:
        """The kind whose collectives a step begins with."""
        return next((kind for kind in (TENSOR, DATA) if self.size(kind) > 1), WORLD)


def smallest_factor(number: int) -> int:
    return next((n for n in range(2, number + 1) if number % n == 0), 1)


def derive(ranks: int, pipeline: bool) -> Layout:
    """A layout for that many: data parallel first, then tensor, then pipeline; pipeline first where it is needed."""
    pp = smallest_factor(ranks) if pipeline else 1
    rest = ranks // pp
    tp = 2 if rest % 2 == 0 and rest >= 4 else 1
    rest //= tp
    if not pipeline and rest % 2 == 0 and rest >= 4:
        pp, rest = 2, rest // 2
    return Layout(tp, pp, rest)
