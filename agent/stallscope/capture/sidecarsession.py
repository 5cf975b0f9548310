"""A capture of what shims leave in a folder, by who has no rights over their processes."""

from __future__ import annotations

from collections.abc import Callable

from stallscope.capture.costs import Costs
from stallscope.capture.folder import Folder
from stallscope.capture.guests import Guests
from stallscope.capture.outbox import Outbox
from stallscope.capture.parser_client import ParserClient
from stallscope.capture.shims import Shims
from stallscope.capture.shimsession import ShimSession

__all__ = ["SidecarSession"]


class SidecarSession(ShimSession):
    """Use `watch`, then `run`, then `finish`, and always `close`.

    Args:
        folder: where the segments are made.
        end_after_ns: see Guests.
    """

    population: Guests

    def __init__(
        self, folder: Folder, end_after_ns: int | None, outbox: Outbox, shims: Shims, parser: ParserClient,
        costs: Costs, helpers: Callable[[], set[int]],
    ) -> None:  # fmt: skip
        self._folder, self._end_after_ns = folder, end_after_ns
        super().__init__(outbox, shims, parser, costs, helpers)

    def _population(self, helpers: Callable[[], set[int]], follow: bool) -> Guests:
        return Guests(self._folder, self._end_after_ns, self.shims, self.outbox.send, self._clock, helpers)

    def watch(self) -> None:
        """Begin with whoever is there."""
        self._begin()

    def bring_up_to_date(self) -> None:
        """Send what a report of this moment needs."""
        now = self._clock()
        self._pump()
        for target in self.population.live():
            self.population.send_counts(target, now)
        self._send_inflight(now, final=False)
        self.outbox.flush()

    def _oddities(self) -> dict[str, int]:
        return {**super()._oddities(), "files of the folder were not read": self._folder.refused}

    def close(self) -> None:
        """Give every descriptor back; the processes go on, and their files stay."""
        super().close()
        self.population.close()
