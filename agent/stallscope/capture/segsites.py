"""The table of call sites in a segment (native/shim/segment.h): Python stacks under which threads waited long."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from stallscope.capture._drain import ffi, lib

__all__ = ["SiteFacts", "SiteRows"]

_MAX_SITES, _HOOK_WORDS = 1024, 7


class SiteFacts(NamedTuple):
    """`taken`: rows so far; `turned_away`: long waits without one; `is_walked`: it has been told how to walk frames."""

    taken: int
    turned_away: int
    has_table: bool
    is_walked: bool


class SiteRows:
    """The part of `Segment` that reads and sets it. The memory is the target's: anything may stand there."""

    @property
    def _c(self) -> Any:
        raise NotImplementedError

    def sites(self) -> SiteFacts:
        """Of the table of call sites; one that is not there has no rows."""
        out = ffi.new("struct segment_sites *")
        lib.segment__sites(self._c, out)
        return SiteFacts(int(out.taken), int(out.turned_away), bool(out.has_table), bool(out.is_walked))

    def site_rows(self) -> list[int]:
        """Rows in use."""
        out = ffi.new("uint16_t[]", _MAX_SITES)
        return list(out[0 : lib.segment__site_rows(self._c, out, _MAX_SITES)])

    def site(self, clock: Any, row: int) -> bytes | None:
        """A struct wire_site, None while it is being written."""
        out = ffi.new("struct wire_site *")
        found = lib.segment__site(self._c, clock.c, row, out)
        return bytes(ffi.buffer(out)) if found else None

    def walk(self, python: bytes, hooks: Iterable[int], least_ns: int) -> None:
        """Have the process look up the Python stacks of calls of these hooks that took so long or longer.

        Args:
            python: a struct wire_python, with the process's pid as its own namespace numbers it.
        """
        words = ffi.new("uint64_t[]", _HOOK_WORDS)
        for hook in hooks:
            words[hook // 64] |= 1 << hook % 64
        lib.segment__walk(self._c, ffi.from_buffer("struct wire_python *", python), words, least_ns)

    def stop_walking(self) -> None:
        """Have it look up none any more."""
        lib.segment__walk(self._c, ffi.NULL, ffi.NULL, 0)
