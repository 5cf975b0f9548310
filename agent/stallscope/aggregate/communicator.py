"""One communicator and its members."""

from __future__ import annotations

import ipaddress
import struct
from dataclasses import dataclass, field

from stallscope.aggregate.commdata import CommData
from stallscope.aggregate.identity import Version, child_hash, comm_hash, log_comm_id

__all__ = ["IN_PROGRESS", "SUCCESS", "Communicator", "Member", "root_address"]

SUCCESS, IN_PROGRESS = 0, 7
AF_INET, AF_INET6 = 2, 10
SAME_IN_LOG: Version = (2, 26, 0)


@dataclass(eq=False)
class Member:
    """One rank's part in a communicator.

    Attributes:
        rank: None where nothing tells it (yet): it is not among the arguments of a split.
        pointer: the rank's ncclComm_t, None until it is known.
        status: what the creation returned, None while it has not, and where it was not seen.
        next_seq: how many operations it numbered, once another communicator lies at its address.
        made_ns: when the creation returned.
        read: what stands in the rank's memory.
        doubt: in what that differs from what the creation told.
    """

    proc: int
    pid: int
    tid: int
    rank: int | None
    device: int | None = None
    pointer: int | None = None
    status: int | None = None
    abandoned: bool = False
    next_seq: int | None = None
    made_ns: int = 0
    read: CommData | None = None
    doubt: str | None = None


@dataclass(eq=False)
class Communicator:
    """One communicator; `id` is a hash of how it came to be, or of NCCL's hash, so that all ranks of it get the same.

    Attributes:
        exact: its creation was seen, and that of what it was split from.
        late: none of its members' creations were seen.
        matched: whether its ranks can be told to be the same one's.
        ambiguous: another one has the same hash and size, and nothing else tells them apart.
        hash: NCCL's commHash, by its rule or as read; magic: the id's first 8 bytes, as read.
        at_rank: its members by rank.
    """

    id: str
    unique_id: bytes | None
    nranks: int | None
    parent: str | None
    has_uid: bool
    at_ns: int
    matched: bool = True
    members: list[Member] = field(default_factory=list)
    exact: bool = False
    late: bool = False
    ambiguous: bool = False
    version: Version | None = None
    hash: int | None = None
    magic: bytes | None = None
    at_rank: dict[int, Member] = field(default_factory=dict)

    def learn_version(self, version: Version | None) -> None:
        """Which NCCL made it, and with that what the id's hash is; the first one told counts."""
        if self.version is None and version is not None:
            self.version = version
            if self.hash is None and self.unique_id:
                self.hash = comm_hash(self.unique_id, version)

    def hash_of_child(self, split_count: int, color: int) -> int | None:
        """NCCL's hash of what is split from it; None where it does not follow from what is known."""
        return child_hash(self.hash, split_count, color, self.version) if self.exact and self.hash is not None else None

    @property
    def uid(self) -> str | None:
        """The first 8 bytes of the ncclUniqueId in memory order."""
        if self.unique_id:
            return self.unique_id[:8].hex()
        return self.magic.hex() if self.magic else None

    @property
    def log_comm_id(self) -> int | None:
        """The number that NCCL's own log prints for it."""
        if self.unique_id:
            return log_comm_id(self.unique_id, self.version)
        return self.hash if self.version is not None and self.version >= SAME_IN_LOG else None

    @property
    def status(self) -> int | None:
        """The first failure among the members, else what they returned; None while nobody has."""
        seen = [m.status for m in self.members if m.status is not None]
        return next((s for s in seen if s not in (SUCCESS, IN_PROGRESS)), max(seen, default=None))

    @property
    def verified(self) -> bool:
        """Whether it exists, its ranks can be told to be the same one's, and nothing speaks against it."""
        if not self.matched or self.ambiguous or any(m.doubt for m in self.members):
            return False
        return self.late or any(m.status == SUCCESS for m in self.members)


def root_address(unique_id: bytes) -> str | None:
    """Where the communicator's bootstrap root listens, e.g. "10.0.0.7:41833"; None for no socket address."""
    family, port = struct.unpack_from("<H", unique_id, 8)[0], struct.unpack_from(">H", unique_id, 10)[0]
    if family == AF_INET:
        return f"{ipaddress.IPv4Address(unique_id[12:16])}:{port}"
    if family == AF_INET6:
        return f"[{ipaddress.IPv6Address(unique_id[16:32])}]:{port}"
    return None
