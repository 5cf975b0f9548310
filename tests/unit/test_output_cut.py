"""The head of the report of a recording that is cut: its numbers agree with each other."""

from __future__ import annotations

from aggregate_kit import Kit

from stallscope.diagnose.incident import Found
from stallscope.output.header import counted
from stallscope.output.report import build_report
from stallscope.wire.recording import Ending


def test_no_fewer_calls_made_than_recorded() -> None:
    kit = Kit()
    kit.process()
    kit.link("CUDART")
    kit.launch(times=30)
    state = kit.state()  # the counters have not come
    state.finish(Ending(1000, 7))
    assert counted(build_report(state, Found())).startswith("calls made: ≥30 (≥30 recorded")
