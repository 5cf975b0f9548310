"""Frames: the one encoding between capture and aggregate, on a socket and in a recording.

A frame on the wire (little endian)::

     0        4      6      8              8 + size
    +--------+------+------+--- ... ------+
    | size   | kind | 0    | msgpack map  |        size counts the msgpack bytes only
    +--------+------+------+--- ... ------+

A recording is a file header followed by frames::

     0          8         10           12            16              24            32
    +----------+---------+------------+-------------+---------------+-------------+
    |"STALLSCP"| version | min_reader | header_size | feature_bits  | info_bits   |
    +----------+---------+------------+-------------+---------------+-------------+

A reader accepts a file when its own version is at least `min_reader`; it skips and counts frames of a kind it does not
know. Example, a tick at 5 ns: ``08000000 0e00 0000 81 a5 61745f6e73 05`` (tests/unit/test_frames.py).

The bodies, all instants `*_ns` on CLOCK_MONOTONIC of the capturing host:

========== ====================================================================================================
kind       body
========== ====================================================================================================
HELLO      version, start_mono_ns, start_unix_ns, host, kernel, backend ("bcc" or "object"), sources [..],
           targets [pid..], sample_one_in, long_ns, hooks [[id, library, name, kind, timed]..],
           limits {name: n}
PROCESS    proc, pid, ns_pid or nil, ppid, parent (proc) or nil, name, cmdline [..], container_id or nil, start_ns,
           at_ns, env {NAME: value}: RANK and its like, as they were at the exec, traced: false for an ancestor of
           what is traced
IMAGE      proc, at_ns, name, cmdline [..], env as in PROCESS: the process execed
EXIT       proc, at_ns, code or nil, signal or nil; sender nil or [signal, at_ns, pid, name] of the signal that it died
           of, else of the newest that asked it to end; pid 0: not visible, nil: the kernel; exiting_ns: since when it
           was ending, or nil; oom: whether the kernel ended it for want of memory, nil where that is not known
LINK       proc, library, path, build_id or nil, hooks [id..], at_ns, appeared_ns, method, missing [name..],
           untimed: only entries are probed, version: of an NCCL, "2.27.5" or nil
EVENTS     count, data: `wire_rec` back to back
UIDS       count, data: `wire_uid_rec` back to back
SLOT       slot, proc, at_ns: from now on records with this slot belong to this process
COUNTS     proc, at_ns, hooks [id..], counts: `wire_count` back to back, times [time id..], timed: `wire_time` back
           to back. Cumulative; only rows that changed.
INFLIGHT   at_ns, final, rows [[proc, tid, [[hook, ts_ns, n, flags, [a0..a7]]..]]..]: outermost call first. The final
           one, after the links are gone, names the calls that will never be recorded. sites [[proc, tid, id]..]: call
           sites of the outermost ones, where they are known
INFERRED   proc, tid, hook, since_ns, at_ns, ended nil or reason: a call that began before the link
GAP        source, proc or nil, count or nil, from_ns, to_ns, reason
LOST       at_ns, places {name: n}: cumulative
NOTE       at_ns, proc or nil, text
TICK       at_ns: every earlier event of this capture has been sent
SUSPECT    at_ns, since_ns, on: capture's local rule: something has been in flight since then for over 1 s. While it is
           on, HOST and STACK frames come, and the completion tap is open; after the off come the last HOST frames
HOST       at_ns, proc, calls: entries into hooks so far, over its threads, threads [[tid, name, state, syscall or nil,
           wchan or nil, file or nil, cpu_ns]..]: at most 16, the main thread first, state as in /proc/PID/stat;
           writing nil or [path, bytes since the last look]
STACK      at_ns, proc, tid, by, frames [[file or nil, line or nil, function, "python" or "native"]..] innermost first,
           why nil or why there is none
COMM       at_ns, proc, pointer, by "table", "dwarf", "code" or nil (no offsets known), rank_at: offset of the rank,
           start: the communicator's first 8 bytes, data: 64 bytes from rank_at - 24 on, both empty where unreadable,
           version: of the NCCL whose offsets were used, as in LINK, samples [[n, seq..]..]: operations that we
           numbered in it, and NCCL's own seqNumber by function, while no call on it was under way. A later frame about
           the same pointer replaces an earlier one
COMMS      at_ns, proc, comms [[pointer, next, hook, elements, dtype, redop, rank or nil, nranks or nil, uid]..]: what
           the table of a shim says that was met late, so that not all was recorded: operations numbered so far, the
           newest of them, and of the creation what it told; uid: 128 bytes, or none
CONTEXT    at_ns, proc, env {NAME: value} or nil: the wanted variables (wire/environment.py) at its exec, nil where they
           can't be read; like: proc whose env it is to the letter, in place of env; overwritten: the process wrote
           something else over that block; seen: whether libc's own `environ` could be read, and then of the wanted
           names gone [NAME..]: in env and no longer there, own {NAME: value}: there and not, or otherwise, in env. A
           later frame replaces an earlier one
PLACE      at_ns, proc, last_ns or nil, thread as in HOST: where the main thread of a program that has just begun is, in
           another place than at the look before, which was at last_ns
SITE       at_ns, proc, id: of this capture's sites, hook, tid: of the thread that came first, frames as in STACK, with
           function "?" and without file where it could not be resolved, cut: outer frames are missing, why nil or why
           the innermost one is not known: a Python stack that waits in calls of that hook; what: enum wire_class
           (native/wire.h), the copy that these calls are or wait for, 0 or missing where there is none
SITES      at_ns, proc, rows [[id, calls, total_ns, max_ns, max_at_ns, [bucket, count..], idle, idle_ns]..]: outermost
           calls at that site that returned; buckets as in `wire_time`, without empty ones; after how many of them
           nothing was queued, and for how long until something was (both missing in old recordings). Cumulative; only
           rows that changed, and before the COUNTS of the same time, so that sites never add up to more than their
           hook. unknown: why the process as a whole has no sites; least_ns: shorter calls have none
SITE_STACK at_ns, proc, id: of a SITE, frames: its stack again, with native frames between those of Python; of the first
           call there. Where native frames are not known from somewhere on, one with function "[truncated]" and no file
THREADS    at_ns, proc, rows [[tid, name, python: whether it is one of Python's or nil, since_ns: first seen, wait_ns,
           [count of each enum wire_deed (native/wire.h)..]]..]: what each thread did, outermost calls; cumulative; only
           rows that changed. A thread that ends within a second may be missing, and so may its last second
PIPELINE   at_ns, proc, looks, watched_ns, rows [[frames as in STACK, ns, waits, longest_ns]..]: where the main thread
           was when looks found it waiting for another thread (in futex(2), without a time limit, in no call of CUDA)
           while threads that are none of Python's fed the device; cumulative
WITNESS    at_ns, source "ras", "nvml" or "async_error", says, detail {name: value}
GPU        at_ns, note nil or text, devices [[index, uuid, util_percent, power_mw, power_limit_mw, sm_mhz, sm_max_mhz,
           memory_used_bytes, throttle mask, [pid..]]..], numbers nil where NVML did not say
OOM        at_ns, proc or nil, pid or nil, name or nil, kills, cgroup or nil, ours: the kernel ended so many processes
           for want of memory; ours: whether in a cgroup of the traced processes, nil where not known
CREW       at_ns, sums over looks so far: trainers [[proc, looks, watched_ns, starved_ns, waits, longest_ns, since when
           it waits now or nil, [proc of a worker that held the pipe that it waits in..], by_thread: another thread
           than the main one is in that pipe, syscall or nil, file or nil]..], workers [[proc, trainer, looks, busy_ns,
           idle_ns, blocked_ns, charged_ns: not idle while its trainer starved, state "busy", "idle" or "blocked",
           since when, and where it was while it was charged: syscall or nil, file or nil]..]: of workers only rows
           that changed
COST       at_ns, cpu_ns, rss_bytes, processes {name: [cpu_ns, rss_bytes]}
BYE        at_ns, reason
========== ====================================================================================================
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import Any, NamedTuple

import msgpack

__all__ = ["FILE_HEADER_BYTES", "MAX_FRAME_BYTES", "VERSION", "BadFrame", "Decoder", "Frame", "Kind", "encode",
           "file_header", "read_file_header"]  # fmt: skip

MAGIC = b"STALLSCP"
VERSION = 1
MIN_READER = 1
MAX_FRAME_BYTES = 16 << 20
MAX_CONTAINERS = 100_000
_HEAD = struct.Struct("<IHH")
_FILE = struct.Struct("<8sHHIQQ")
FILE_HEADER_BYTES = _FILE.size

Body = dict[str, Any]


class Kind(IntEnum):
    """Frame kinds; never reused."""

    HELLO = 1
    PROCESS = 2
    IMAGE = 3
    EXIT = 4
    LINK = 5
    EVENTS = 6
    UIDS = 7
    SLOT = 8
    COUNTS = 9
    INFLIGHT = 10
    INFERRED = 11
    GAP = 12
    LOST = 13
    TICK = 14
    NOTE = 15
    COST = 16
    BYE = 17
    SUSPECT = 18
    HOST = 19
    STACK = 20
    COMM = 21
    WITNESS = 22
    GPU = 23
    COMMS = 24
    CONTEXT = 29
    PLACE = 31
    OOM = 33
    CREW = 34
    SITE = 30
    SITES = 35
    SITE_STACK = 40
    THREADS = 41
    PIPELINE = 42


class Frame(NamedTuple):
    """One decoded frame; `kind` is a plain int because newer kinds may come."""

    kind: int
    body: Body


class BadFrame(ValueError):
    """Bytes that are no frame; `offset` is where the bad frame begins."""

    def __init__(self, why: str, offset: int) -> None:
        super().__init__(f"{why} at byte {offset}")
        self.why = why
        self.offset = offset


def encode(kind: Kind, body: Body) -> bytes:
    """One frame. Raises ValueError when it would exceed MAX_FRAME_BYTES."""
    payload: bytes = msgpack.packb(body, use_bin_type=True)
    if len(payload) > MAX_FRAME_BYTES:
        raise ValueError(f"frame of {len(payload)} bytes")
    return _HEAD.pack(len(payload), kind, 0) + payload


def file_header(feature_bits: int = 0, info_bits: int = 0) -> bytes:
    """The first bytes of a recording."""
    return _FILE.pack(MAGIC, VERSION, MIN_READER, FILE_HEADER_BYTES, feature_bits, info_bits)


def read_file_header(data: bytes) -> tuple[int, int, int]:
    """(version, min_reader, header_size) of a recording's first bytes. Raises BadFrame when they are no header."""
    if len(data) < FILE_HEADER_BYTES:
        raise BadFrame("shorter than a file header", 0)
    magic, version, min_reader, size, _features, _info = _FILE.unpack_from(data)
    if magic != MAGIC:
        raise BadFrame("not a stallscope recording (magic)", 0)
    if size < FILE_HEADER_BYTES or size > 4096:
        raise BadFrame(f"header size {size}", 0)
    return version, min_reader, size


class _Containers:
    """Counts lists and maps while they are unpacked: 16 MiB of empty maps would be a gigabyte of objects."""

    def __init__(self) -> None:
        self._left = MAX_CONTAINERS

    def _count(self, container: Any) -> Any:
        self._left -= 1
        if self._left < 0:
            raise ValueError(f"more than {MAX_CONTAINERS} lists and maps")
        return container

    def limits(self) -> dict[str, Any]:
        """Arguments for `msgpack.unpackb`."""
        return {
            "strict_map_key": True, "list_hook": self._count, "object_hook": self._count,
            "max_array_len": 1 << 16, "max_map_len": 1 << 12, "max_str_len": 1 << 16, "max_ext_len": 0,
        }  # fmt: skip


class Decoder:
    """Splits a byte stream into frames; holds at most one incomplete frame.

    Args:
        offset: position of the first byte in its file, for messages.
    """

    def __init__(self, offset: int = 0) -> None:
        self._data = bytearray()
        self.offset = offset

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames that `data` completes. Raises BadFrame; the stream can't be read on after that."""
        self._data += data
        start = 0
        while len(self._data) - start >= _HEAD.size:
            size, kind, zero = _HEAD.unpack_from(self._data, start)
            if size > MAX_FRAME_BYTES or zero:
                raise BadFrame(f"impossible frame head (size {size})", self.offset)
            end = start + _HEAD.size + size
            if len(self._data) < end:
                break
            body = self._body(bytes(self._data[start + _HEAD.size : end]))
            start = end
            self.offset += _HEAD.size + size
            yield Frame(kind, body)
        del self._data[:start]

    def _body(self, payload: bytes) -> Body:
        try:
            body = msgpack.unpackb(payload, raw=False, use_list=True, **_Containers().limits())
        except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
            raise BadFrame(f"body is no msgpack ({error})", self.offset) from error
        if not isinstance(body, dict):
            raise BadFrame("body is no map", self.offset)
        return body

    @property
    def pending(self) -> int:
        """Bytes of an incomplete frame at the end."""
        return len(self._data)
