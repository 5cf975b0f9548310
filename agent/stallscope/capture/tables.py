"""The BPF maps of one session, opened and set up."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from stallscope.capture.blocked import read_memory
from stallscope.capture.bpfmaps import Comms, ProcsMap
from stallscope.capture.endings import Endings
from stallscope.capture.kernel import bpf, btf_offsets
from stallscope.capture.loader import BULK_BYTES, VITAL_BYTES
from stallscope.capture.procfs import probe_area
from stallscope.capture.rings import Conf, Ctl, InflightRow, Ranges, Ring, Rows, SlotCounters, Slots, Spans
from stallscope.capture.sitetable import FSBASE, SiteTable
from stallscope.errors import CaptureProblem
from stallscope.wire.hook_table import BY_NAME, HOOKS

if TYPE_CHECKING:
    from stallscope.capture.session import Settings

__all__ = ["BULK_BYTES", "LEFT", "VITAL_BYTES", "CommRows", "Tables"]

LIFE_BYTES = 1 << 18
SITE_KINDS = ("wait", "copy", "alloc", "collective", "p2p", "group", "comm")
SAMPLED_KINDS = ("launch", "graph", "event", "copy", "wait", "alloc")
# What tells that an operation is done when nothing waits for it (torch records an event behind each and asks for it).
TAP = ("cudaEventRecord", "cudaEventRecord_ptsz", "cudaEventRecordWithFlags", "cudaEventRecordWithFlags_ptsz",
       "cudaEventQuery")  # fmt: skip
_OFFSETS = {16: ("task_struct", "tgid"), 17: ("task_struct", "signal"), 18: ("signal_struct", "live"),
            19: ("task_struct", "exit_code"), 23: ("task_struct", "thread_pid"), 24: ("task_struct", "group_leader"),
            25: ("pid", "level"), 26: ("pid", "numbers"), 27: ("task_struct", "comm")}  # fmt: skip
# Where a thread's thread-specific storage begins; x86-64 only.
_FSBASE = (("task_struct", "thread"), ("thread_struct", "fsbase"))
_CONF_LONG_NS = 20
_CONF_SHARED = 21
_PROG_TEST_RUN = 10
LEFT = 64
MAX_AREAS = 128
_LOOK_AFTER_NS = 100_000_000
_ALL = 0xFFFFFFFF


def threshold(one_in: float) -> int:
    """The largest mixed value that is recorded (native/wire.h, wire_conf). 1 in 1 = all."""
    return _ALL if one_in <= 1 else max(1, round((1 << 32) / one_in) - 1)


class CommRows:
    """The table of communicators and what belongs to it, as CommReader wants them."""

    def __init__(self, tables: Tables) -> None:
        self.ctl: Callable[[int], int] = tables.ctl.get
        self.keys: Callable[[], list[int]] = tables.comms.keys
        self.next: Callable[[int], int] = tables.comms.next
        self.inflight: Callable[[], list[InflightRow]] = tables.rows.inflight


class Tables:
    """Every map of native/wire.h with its typed view.

    Args:
        maps: map name -> descriptor; stays owned by who loaded them.
        settings: the sampling rate and the duration from which waits are always recorded.
    """

    def __init__(self, maps: dict[str, int], settings: Settings) -> None:
        self._areas: dict[int, tuple[int, int]] = {}
        self.vital = Ring(maps["vital"], VITAL_BYTES)
        self.bulk = Ring(maps["bulk"], BULK_BYTES)
        self.life = Ring(maps["life"], LIFE_BYTES)
        self.rows = Rows(maps["rows"])
        self.counters = SlotCounters(maps["counts"], maps["times"])
        self.ctl = Ctl(maps["ctl"])
        self.conf = Conf(maps["conf"])
        self.ranges = Ranges(maps["ranges"])
        self.spans = Spans(maps["spans"])
        self.slots = Slots(maps["slots"])
        self.comms = Comms(maps["comms"])
        self.procs = ProcsMap(maps["procs"])
        self.endings = Endings(maps["endings"])
        self.sites = SiteTable(maps["site_keys"], maps["sites"], maps["pythons"], maps["stacks"], self.ctl)
        self._usual = threshold(settings.one_in)
        self._set_up(settings)

    def _set_up(self, settings: Settings) -> None:
        found = btf_offsets([*_OFFSETS.values(), *_FSBASE])
        for index, key in _OFFSETS.items():
            offset = found[key]
            if offset is None:
                raise CaptureProblem(
                    "cannot follow processes",
                    why=f"the kernel's type information has no {key[0]}.{key[1]}",
                    hint="run `stallscope doctor`; a kernel with CONFIG_DEBUG_INFO_BTF=y is needed",
                )
            self.ctl.set(index, offset)
        thread, base = (found[key] for key in _FSBASE)
        self.ctl.set(FSBASE, 0 if thread is None or base is None else thread + base)
        self.ctl.set(_CONF_LONG_NS, settings.long_ns)
        for hook in HOOKS:
            self.conf.set(hook.id, self._usual if hook.kind in SAMPLED_KINDS else _ALL)
            if hook.kind in SITE_KINDS:
                self.conf.look_up_sites(hook.id)

    def find_namespace(self, who_am_i: int) -> None:
        """Let BPF number processes as this process's pid namespace does. Raises OSError.

        Args:
            who_am_i: the program of that name.
        """
        context = ctypes.create_string_buffer(16)
        # struct bpf_attr, test: prog_fd, retval, 2 sizes, 2 pointers, repeat, duration, ctx_size_in, _out, ctx_in, _out
        bpf(_PROG_TEST_RUN, struct.pack("<IIIIQQIIIIQQ", who_am_i, 0, 0, 0, 0, 0, 0, 0, 16, 0,
                                        ctypes.addressof(context), 0) + bytes(16))  # fmt: skip

    def share(self, file_number: int) -> None:
        """From now on the unfiltered link of this file counts (native/wire.h, WIRE_CONF_SHARED)."""
        self.ctl.set(_CONF_SHARED, self.ctl.get(_CONF_SHARED) | 1 << file_number)

    def open_tap(self, on: bool) -> None:
        """Record every call that tells of completion, or as many as of other calls again."""
        for name in TAP:
            self.conf.set(BY_NAME[name].id, _ALL if on else self._usual)

    def newest(self) -> tuple[int, int]:
        """Positions in vital and bulk ring before which every record written so far lies."""
        vital, bulk = (ring.consumed_bytes + ring.pending_bytes for ring in (self.vital, self.bulk))
        return vital, bulk

    def read_up_to(self, positions: tuple[int, int]) -> bool:
        """Whether both rings have been drained that far."""
        return self.vital.consumed_bytes >= positions[0] and self.bulk.consumed_bytes >= positions[1]

    def inflight(
        self, min_age_ns: int, now_ns: int, proc_of_slot: Callable[[int], int | None]
    ) -> tuple[list[Any], list[tuple[int, int, int]]]:
        """Calls that have not returned and are at least so old, as INFLIGHT frames want them; and of the outermost ones
        (proc, tid, row of the call site)."""
        out, sites = [], []
        for row in self.rows.inflight():
            proc = proc_of_slot(row.slot)
            left = self._left(row, now_ns)
            frames: list[list[Any]] = [
                [f.hook, f.ts_ns, f.n, f.flags | (LEFT if gone else 0), list(f.a)]
                for f, gone in zip(row.frames, left, strict=True)
            ]
            if proc is not None and frames and now_ns - frames[0][1] >= min_age_ns:
                out.append([proc, row.tid, frames])
                if row.frames[0].site:
                    sites.append((proc, row.tid, row.frames[0].site - 1))
        return out, sites

    def _left(self, row: InflightRow, now_ns: int) -> list[bool]:
        """Of each frame whether the thread has left it without a return (longjmp): it stays in the table then.

        While a return probe waits for a call, the call's return address on the stack is the kernel's trampoline, in the
        area that maps calls [uprobes]. Any other word there has been written by later calls.
        """
        if not row.frames or now_ns - row.frames[0].ts_ns < _LOOK_AFTER_NS:
            return [False] * len(row.frames)
        words = [int.from_bytes(w, "little") for w in read_memory(row.tgid, [(f.sp, 8) for f in row.frames])]
        for _ in range(2):  # the area is another one after an exec
            area = self._areas.get(row.tgid)
            if area and all(area[0] <= word < area[1] for word in words):
                return [False] * len(words)
            self._areas.pop(row.tgid, None)
            if len(self._areas) >= MAX_AREAS:
                self._areas.clear()
            if found := probe_area(row.tgid):
                self._areas[row.tgid] = found
        return [bool(word and area and not area[0] <= word < area[1]) for word in words]

    def close(self) -> None:
        """Unmap everything."""
        for ring in (self.vital, self.bulk, self.life):
            ring.close()
        views = (self.rows, self.counters, self.ctl, self.conf, self.ranges, self.spans, self.slots)
        for view in views:
            view.close()
        self.comms.close()
        self.endings.close()
        self.sites.close()
