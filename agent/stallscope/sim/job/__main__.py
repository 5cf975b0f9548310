"""``python -m stallscope.sim.job --ranks 8 --duration 10 --fault never:rank=5,step=40 --truth truth.json``

A step loads a batch (a pageable copy, which waits), launches forward, backward and optimizer kernels between the
collectives of its tensor, pipeline and data parallel groups, and reads the loss back the way ``.item()`` does. With
``--ahead 100`` the host never reads it, and runs up to 100 operations ahead of its device. The launcher writes the
truth: what every rank did by its own count, and who was at fault for what.
"""

from __future__ import annotations

import sys

from stallscope.sim.job.cuda import JobError
from stallscope.sim.job.launcher import run_launcher
from stallscope.sim.job.options import parse
from stallscope.sim.job.rank import run_rank


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.check:
        return 0
    try:
        return run_launcher(args) if args.rank is None else run_rank(args)
    except JobError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
