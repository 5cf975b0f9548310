"""The command line, of the launcher and of a rank."""

from __future__ import annotations

import argparse

from stallscope.sim.job.faults import KINDS, parse_fault, settle
from stallscope.sim.job.layout import Layout, derive

PASSED_ON = (
    "steps",
    "seed",
    "ahead",
    "slow_rank",
    "slowness",
    "checkpoint_every",
    "checkpoint_write",
    "load_time",
    "loaders",
    "warm_up",
    "host_jitter",
    "flat",
    "eval_every",
)
NOT_NEGATIVE = ("ahead", "steps", "checkpoint_write", "load_time", "loaders", "warm_up", "host_jitter", "flat",
                "eval_every")  # fmt: skip
SWITCHES = ("uneven",)  # passed on, too


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="stallscope.sim.job", description="a simulated training job")
    parser.add_argument("--ranks", type=int, help="default 2, or TP x PP x DP")
    for name, what in (("tp", "tensor"), ("pp", "pipeline"), ("dp", "data")):
        parser.add_argument(f"--{name}", type=int, help=f"{what} parallel; what is not given follows from --ranks")
    parser.add_argument("--duration", type=float, default=10.0, help="seconds; a job that hangs is ended then")
    parser.add_argument("--steps", type=int, default=0, help="end after that many (0: by --duration alone)")
    parser.add_argument("--seed", type=int, default=0, help="of the jitter")
    parser.add_argument("--ahead", type=int, default=0, help="operations a host may be ahead (0: in step)")
    parser.add_argument("--fault", help=f"KIND[:rank=R,step=S,...], one of {', '.join(KINDS)}")
    parser.add_argument("--truth", help="where to write what every rank did and who was at fault (JSON)")
    parser.add_argument("--slow-rank", type=int, default=-1, help="-1: none")
    parser.add_argument("--slowness", type=float, default=1.6, help="how many times longer its kernels take")
    parser.add_argument("--checkpoint-every", type=float, default=3.0, help="seconds; rank 0 writes")
    parser.add_argument("--checkpoint-write", type=float, default=0.0, help="seconds that writing takes at least")
    parser.add_argument(
        "--warm-up", type=float, default=0.0, help="seconds that the last rank's first steps take longer (lazy init)"
    )
    parser.add_argument(
        "--host-jitter",
        type=float,
        default=0.0,
        help="ms that a host is busy before each NCCL call (mean, exponential)",
    )
    parser.add_argument("--flat", type=int, default=0, help="first steps that exchange no gradients and don't optimise")
    parser.add_argument("--eval-every", type=int, default=0, help="steps after which a forward pass is made (0: never)")
    parser.add_argument("--uneven", action="store_true", help="the last batch of the last data parallel ranks is short")
    parser.add_argument(
        "--load-time", type=float, default=0.0, help="seconds a rank takes after it loaded the libraries"
    )
    parser.add_argument("--loaders", type=int, default=0, help="processes of each rank that load batches")
    parser.add_argument("--hold", action="store_true", help="start the ranks when a line comes on stdin")
    parser.add_argument("--check", action="store_true", help="only say whether these options are right")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    return parser


def _layout(args: argparse.Namespace, pipeline: bool) -> Layout:
    given = [args.tp, args.pp, args.dp]
    if given == [None] * 3:
        return derive(2 if args.ranks is None else args.ranks, pipeline)
    known = 1
    for size in given:
        known *= size or 1
    if args.ranks is not None and None in given and known > 0 and args.ranks % known == 0:
        given[2 if args.dp is None else given.index(None)] = args.ranks // known
    return Layout(*(1 if size is None else size for size in given))


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Options, with `layout` and `plan` (the fault, settled, or None)."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.duration <= 0 or args.checkpoint_every <= 0 or args.slowness <= 0:
        parser.error("--duration, --slowness and --checkpoint-every must be greater than 0")
    if min(1 if size is None else size for size in (args.ranks, args.tp, args.pp, args.dp)) < 1:
        parser.error("--ranks, --tp, --pp and --dp must be greater than 0")
    for name in NOT_NEGATIVE:
        if getattr(args, name) < 0:
            parser.error(f"--{name.replace('_', '-')} must not be negative")
    try:
        plan = parse_fault(args.fault) if args.fault else None
        args.layout = _layout(args, plan is not None and plan.kind == "send-send")
        args.plan = settle(plan, args.layout) if plan else None
    except ValueError as error:
        parser.error(str(error))
    if args.ranks not in (None, args.layout.ranks):
        parser.error(f"--tp x --pp x --dp is {args.layout.ranks}, not --ranks {args.ranks}")
    return args
