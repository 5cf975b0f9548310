"""`make test-gpu`: counts what uprobes on libcuda, libcudart and libnccl see of real jobs. Needs only the stdlib.

Exit codes: 0 done, 1 the control failed or the script did, 3 no GPU here (run.sh decides what that means).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpufind import machine, steps
from gpufind.channel import Channel, Unavailable
from gpufind.conductor import Conductor, Result
from gpufind.hooks import ROOT, library_of
from gpufind.nccl import peer_main
from gpufind.report import fact, markdown
from gpufind.verdict import lines

NO_GPU = 3
_RUNTIMES = ("nvidia/cuda_runtime/lib", "nvidia/cu13/lib", "nvidia/cu12/lib")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dry", action="store_true", help="prove the counting without a GPU; writes no docs/")
    parser.add_argument("--libcuda", help="a libcuda to use instead of the system's")
    parser.add_argument("--libcudart", help="a libcudart to use instead of torch's")
    parser.add_argument("--out", type=Path, help="folder for the page and the data instead of docs/ and build/")
    parser.add_argument("--seconds", type=float, default=420, help="for all steps; taking the probes away comes on top")
    parser.add_argument("--steps", help="only these, with commas between")
    parser.add_argument("--match", help="count only hooks whose whole name matches this regular expression")
    for hidden in ("--worker", "--pipes", "--options", "--nccl-peer"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--cpu", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def work(args: argparse.Namespace) -> int:
    """A worker: pinned to the counted CPU before anything of CUDA is loaded."""
    os.sched_setaffinity(0, {args.cpu})
    read_fd, write_fd = (int(fd) for fd in args.pipes.split(","))
    channel = Channel(read_fd, write_fd, json.loads(args.options))
    try:
        steps.BY_NAME[args.worker].run(channel)
    except Unavailable as why:
        print(why, flush=True)
        return 4
    channel.finish()
    sys.stdout.flush()
    os._exit(0)  # not through the exit handlers of frameworks: they may hang


def _own_copies(args: argparse.Namespace) -> None:
    """Copy the named libraries: other processes' calls into a file of our own don't count."""
    folder = _places(args)[0].parent / "lib"
    # The simulated runtime finds the simulated driver; NVIDIA's runtime is never led to it.
    if args.libcuda and args.libcudart and Path(args.libcuda).parent == Path(args.libcudart).parent:
        os.environ["LD_LIBRARY_PATH"] = str((folder / "libcuda").resolve())
    for name in ("libcuda", "libcudart"):
        path = getattr(args, name)
        if path and Path(path).exists():
            copy = folder / name / Path(path).name
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.unlink(missing_ok=True)
            shutil.copy(path, copy)
            setattr(args, name, str(copy.resolve()))


def _libraries(conductor: Conductor, args: argparse.Namespace, found: list[Result]) -> dict[str, str]:
    """Files to count in: what the first steps mapped, and the runtime that is named or lies beside torch."""
    files = {path: kind for result in found for path, kind in result.get("libraries", {}).items()}
    named = [os.path.realpath(path) for path in (args.libcuda, args.libcudart) if path]
    files |= {path: kind for path in named if (kind := library_of(path))}
    if "CUDART" not in files.values():
        files |= dict.fromkeys(_runtimes(), "CUDART")
    runtime = next((path for path, kind in files.items() if kind == "CUDART"), None)
    conductor.options["libcudart"] = args.libcudart or runtime
    return files


def _runtimes() -> list[str]:
    folders = [Path(entry, folder) for entry in sys.path for folder in _RUNTIMES]
    folders += [Path("/usr/local/cuda/lib64")]
    return [os.path.realpath(path) for folder in folders for path in sorted(folder.glob("libcudart.so.1?"))][:1]


def collect(args: argparse.Namespace) -> int:
    """Run the steps; the page is written anew after each, so that a late kill loses little."""
    if args.dry:
        _own_copies(args)
    options = {"libcuda": args.libcuda, "libcudart": args.libcudart, "match": args.match or ".*"}
    conductor = Conductor(options, time.monotonic() + args.seconds)
    first = conductor.run(steps.GPU)
    if first["state"] != "ran" and not args.dry:
        print(f"no GPU: {first['reason']}")
        return NO_GPU
    results = [first] if args.dry else [first, conductor.run(steps.LIBRARIES)]
    for path, kind in _libraries(conductor, args, results).items():
        conductor.count_in(path, kind)
    for step in _chosen(args):
        results.append(conductor.run(step))
        if step.name == "addresses":
            conductor.count_looked_up(results[-1]["facts"].get("addresses", []))
        _say(results[-1])
        write(args, conductor, results)
    return _finish(conductor, results)


def _chosen(args: argparse.Namespace) -> list[steps.Step]:
    order = steps.DRY if args.dry else (*steps.BEFORE, *steps.COUNTED)
    return [step for step in order if not args.steps or step.name in args.steps.split(",")]


def _say(result: Result) -> None:
    seconds = result.get("seconds", 0)
    print(f"  {result['step']:18} {result['state']:8} {seconds:6} s  {result['reason'][:200]}", flush=True)


def _finish(conductor: Conductor, results: list[Result]) -> int:
    counted = _counted(conductor)
    control = [x for x in lines(results, counted) if x.step == "raw_driver" and x.driver is not None]
    wrong = [x for x in control if x.driver != x.calls]
    print(f"  {len(conductor.counters)} probes are taken away (0.1 s each)", flush=True)
    conductor.counters.close()
    for line in wrong:
        print(f"the control is wrong: {line.what}: {line.driver} hits in {line.calls} calls")
    return 1 if wrong else 0


def _counted(conductor: Conductor) -> set[str]:
    return set(conductor.counters.read())


def write(args: argparse.Namespace, conductor: Conductor, results: list[Result]) -> None:
    """The page and the data, and copies of both in $OUT."""
    data: dict[str, Any] = {
        "when": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "dry": args.dry,
        "machine": machine.facts() | _gpu_facts(results),
        "results": results,
        "counted": sorted(_counted(conductor)),
        "places": len(conductor.counters),
        "refused": conductor.counters.refused,
        "errors": conductor.counters.errors,
        **{name: getattr(conductor, name) for name in ("files", "missing", "instructions", "problems")},
    }
    page, raw = _places(args)
    for path, text in ((page, markdown(data)), (raw, json.dumps(data, indent=1))):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        if os.environ.get("OUT"):
            shutil.copy(path, os.environ["OUT"])


def _gpu_facts(results: list[Result]) -> dict[str, str]:
    names = ("GPU", "CUDA driver API", "torch", "nccl", "triton")
    return {name: str(value) for name in names if (value := fact(results, name))}


def _places(args: argparse.Namespace) -> tuple[Path, Path]:
    if args.out or args.dry:
        folder = args.out or ROOT / "build" / "gpu-dry"
        return folder / "gpu-findings.md", folder / "gpu-findings.json"
    return ROOT / "docs" / "gpu-findings.md", ROOT / "build" / "gpu-findings.json"


def main() -> int:
    """The conductor, or one of its workers."""
    args = arguments()
    if args.nccl_peer:
        peer_main(args.nccl_peer)
        return 0
    return work(args) if args.worker else collect(args)


if __name__ == "__main__":
    sys.exit(main())
