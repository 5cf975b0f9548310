"""Stragglers over time: when one is told, and that those who wait for it are not told as well."""

from __future__ import annotations

from test_episodes import MS, Timed

from stallscope.diagnose.follow import Follower
from stallscope.diagnose.incident import Incident
from stallscope.wire.frames import Frame

SECOND = 1_000_000_000
TICK_NS = 250 * MS


class Slow(Timed):
    """Two ranks that wait for their GPUs; frames go to a follower as they are made."""

    def __init__(self) -> None:
        super().__init__()
        self.follower, self.sent, self.next_tick = Follower(), 0, self.clock + TICK_NS

    def run(self, seconds: float, lateness_ns: int, gap_ns: int, late: int = 2) -> list[Incident]:
        """Steps for so long."""
        end = self.clock + int(seconds * SECOND)
        while self.clock < end:
            self.step(lateness_ns, late, gap_ns)
            for proc in (1, 2):
                self.waited(proc, self.clock - 2 * MS, MS)
            if self.clock >= self.next_tick:
                self.next_tick += TICK_NS
                self.tick()
                for kind, body in self.frames[self.sent :]:
                    self.follower.apply(Frame(kind, body))
                self.sent = len(self.frames)
        return self.follower.watch.incidents


def told(incidents: list[Incident]) -> list[tuple[str, int | None]]:
    return [(incident.kind, incident.culprits[0].place.rank) for incident in incidents]


def test_one_that_costs_much_is_told_within_200_operations() -> None:
    job = Slow()
    assert told(job.run(200 * 0.018, 10 * MS, 8 * MS)) == [("STRAGGLER", 1)]


def test_one_that_costs_little_is_told_when_it_stays_one() -> None:
    job = Slow()
    assert job.run(4, 3 * MS // 2, 10 * MS) == []
    assert told(job.run(4, 3 * MS // 2, 10 * MS)) == [("STRAGGLER", 1)]


def test_its_partner_is_not_told_as_well_until_it_is_quick_again() -> None:
    job = Slow()
    job.run(3, 10 * MS, 8 * MS)
    assert told(job.run(20, 10 * MS, 8 * MS, late=1)) == [("STRAGGLER", 1)]
    assert told(job.run(20, 10 * MS, 8 * MS, late=1)) == [("STRAGGLER", 1), ("STRAGGLER", 0)]
