"""``python culprit_shim.py FIGURES OPTION.. -- CMD..``: `stallscope run`, with the simulated NVML that a job feeds.

A program of the tests, not an option, as culprit_attach.py.
"""

from __future__ import annotations

import argparse
import sys

from culprit_attach import RANKS

from stallscope.capture.forward import StandIn
from stallscope.cli import run
from stallscope.cli.caller import caller
from stallscope.paths import SIM_LIB


def main() -> int:
    figures, *words = sys.argv[1:]
    parser = argparse.ArgumentParser()
    run.add_parser(parser.add_subparsers())
    settings = {"STALLSCOPE_SIM_STATS": figures, "STALLSCOPE_SIM_DEVICES": str(RANKS)}
    nvml = StandIn(SIM_LIB / "libnvidia-ml.so.1", settings)
    args = parser.parse_args(["run", *words])
    return run.Run(args, args.words[1:], caller(), nvml=nvml).run()


if __name__ == "__main__":
    sys.exit(main())
