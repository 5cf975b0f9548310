"""What injections cost the threads that were borrowed."""

from __future__ import annotations

from collections import Counter

from stallscope.capture._drain import lib

from stallscope.capture.injection import Injection

NAMES = {getattr(lib, name): name.removeprefix("INJECT_").lower() for name in dir(lib) if name.startswith("INJECT_")
         and name not in ("INJECT_MARK",)}  # fmt: skip


class Worst:
    """The longest of several: stopped at a stretch, and away from what it did, of all threads that were asked."""

    def __init__(self) -> None:
        self.stopped_ns = self.away_ns = self.slots = 0
        self.tries: Counter[str] = Counter()

    def add(self, injection: Injection) -> None:
        for one in injection.tries:
            self.stopped_ns = max(self.stopped_ns, one.stopped_ns)
            self.away_ns = max(self.away_ns, one.away_ns)
            self.tries[NAMES[one.code]] += 1
        self.slots = max(self.slots, injection.slots)

    def __str__(self) -> str:
        tries = ", ".join(f"{count} {name}" for name, count in self.tries.items())
        return (f"stopped for {self.stopped_ns / 1e6:.2f} ms at most, away for {self.away_ns / 1e6:.2f} ms, "
                f"{self.slots} slots; {tries}")  # fmt: skip
