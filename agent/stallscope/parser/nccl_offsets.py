"""Where NCCL's wheels (nvidia-nccl-cu12, x86-64) have what we read of ncclComm; from their own DWARF."""

from __future__ import annotations

__all__ = ["BY_BUILD_ID", "FUNCTIONS", "SEQUENCES_KEPT"]

# seqNumber is counted in every process from 2.26 on; before, only with a profiler.
SEQUENCES_KEPT = (2, 26, 0)
# Length of seqNumber: broadcast, reduce, all-gather, reduce-scatter, all-reduce (NCCL_NUM_FUNCTIONS).
FUNCTIONS = 5

# build id -> (version, offset of rank, offset of seqNumber or None where it is not kept)
BY_BUILD_ID: dict[str, tuple[str, int, int | None]] = {
    "1049e7484b7d4d97bb2ff5f05503f53023c74b2a": ("2.16.5", 0x17B8, None),
    "dc6936755a0218258015aabb6e677d1709a8fdfc": ("2.17.1", 0x1DB8, None),
    "55c87fca1d9f74d7e92f74e81eb04555219c8e3c": ("2.18.3", 0x23D8, None),
    "466b18565ce024026b79a3c426714b8ebdd62cd8": ("2.19.3", 0x24D8, None),
    "0aa8317d81ac9d1a3a1dd8bb5c902a95b69ad91c": ("2.20.5", 0x28D8, None),
    "2e87d0e7f2a98a3fc40945c13c095f8b7e5ef72b": ("2.21.5", 0x34E0, None),
    "fefdad6cbb9a572e9c57bbf211c22701173eefc5": ("2.22.3", 0x34250, None),
    "edadae13fd6ddf2d2ebb53938f3bcf47edb4690c": ("2.23.4", 0x3C4A8, None),
    "ccdf5fe9c23cc9452c582d12a14245e907276193": ("2.24.3", 0x3C4A8, None),
    "d2902f420436a457bfe41444ff46182810cb495d": ("2.25.1", 0x784A8, None),
    "5c9b4531233f157f885a9fca7580bca6dea2c0fe": ("2.26.5", 0x784B8, 0x7A510),
    "3c098e0640c8b4936323d594852079dac2cde793": ("2.27.5", 0x1044B8, 0x106550),
    "6a77e2593a48cfad8fd78319beec87a40fd812fb": ("2.28.9", 0x1044D0, 0x106A10),
    "51943fef80521fbce0dafcd0e685cabf68fbd538": ("2.29.7", 0x1206D8, 0x122E78),
    "e72c1a084255ed2eb11239c6cfb62d5716d2caf4": ("2.30.7", 0x1206F0, 0x122E98),
    "3ec218307fcb58c834fb5bcba646ced2a1fbf581": ("2.31.2", 0x1206E8, 0x123730),
    "855c15bcfbac035d484e5b6c3348bffa19387e0e": ("2.32.3", 0x1206E8, 0x123748),
}
