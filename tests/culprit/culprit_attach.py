"""``python culprit_attach.py FIGURES PID OPTION..``: `stallscope attach`, with the simulated NVML that a job feeds.

A program of the tests, not an option: the library is loaded before the poller has dropped its rights.
"""

from __future__ import annotations

import argparse
import sys

from stallscope.capture.forward import StandIn
from stallscope.cli import attach
from stallscope.cli.caller import caller
from stallscope.paths import SIM_LIB

RANKS = 8


def main() -> int:
    figures, *words = sys.argv[1:]
    parser = argparse.ArgumentParser()
    attach.add_parser(parser.add_subparsers())
    settings = {"STALLSCOPE_SIM_STATS": figures, "STALLSCOPE_SIM_DEVICES": str(RANKS)}
    nvml = StandIn(SIM_LIB / "libnvidia-ml.so.1", settings)
    return attach.Attach(parser.parse_args(["attach", *words]), caller(), nvml=nvml).run()


if __name__ == "__main__":
    sys.exit(main())
