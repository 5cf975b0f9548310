"""The cases: a program (bash, or Python where it begins with "from programs"), the truth, what of the report to look at."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

TP = "00-4bf92f"
Row = dict[str, Any]


class Seen:
    """A report, asked by the names that the program gave with `say`."""

    def __init__(self, report: Row, out: str, text: str, recording: bytes) -> None:
        self.report, self.text, self.recording = report, text, recording
        self.by_proc = {p["proc"]: p for p in report["processes"]}
        self.pids = {words[1]: int(words[2]) for line in out.splitlines() if len(words := line.split()) == 3}

    def row(self, name: str) -> Row:
        return next((p for p in self.report["processes"] if p["pid"] == self.pids.get(name)), {})

    def context(self, name: str = "trainer") -> tuple[Any, ...]:
        """TRACEPARENT: (its first letters, whose, lost, now)."""
        told = self.row(name).get("trace_context", {}).get("TRACEPARENT")
        if told is None:
            return ()
        whose = "own" if told["from"] == self.row(name)["proc"] else self.by_proc[told["from"]]["name"]
        return told["value"][:9], whose, told["lost"], told.get("now", "")[:9]

    def largest(self) -> tuple[Any, ...]:
        """(first word of the command, together in seconds, system call, file, code, signal)."""
        for row in self.report["startup"]:
            if row.get("largest"):
                waited, ended = row["waited_for"] or {}, row["exit"] or {}
                name = row["command"].partition(" ")[0].rpartition("/")[2]
                return (name, round(row["together_ns"] / 1e9, 1), waited.get("syscall"), waited.get("file"),
                        ended.get("code"), ended.get("signal"))  # fmt: skip
        return ()

    def end(self, name: str = "trainer") -> tuple[Any, ...]:
        """(code, signal, sender)."""
        end = self.row(name).get("exit") or {}
        return end.get("code"), end.get("signal"), (end.get("sender") or {}).get("name")

    def steps(self) -> tuple[Any, ...]:
        found = self.report["steps"] or {}
        return found.get("count"), [(r["first"], r["last"], r["says"]) for r in found.get("ranges", [])]

    def incidents(self) -> list[str]:
        return [one["class"] for one in self.report["incidents"]]


class Case(NamedTuple):
    """`right`: what is to be said, or whether it is right."""

    name: str
    truth: str
    text: str
    said: Callable[[Seen], Any]
    right: Any
    via: str = "attach"
    env: dict[str, str] = {}  # noqa: RUF012


def waits(name: str, seconds: float, syscall: str, file: str = "") -> Callable[[tuple[Any, ...]], bool]:
    return lambda said: bool(said) and (said[0], said[2]) == (name, syscall) and abs(said[1] - seconds) < 1 and file in (said[3] or "")  # fmt: skip


PY = "from programs import *\n"
TRAIN = '$PY -c "from programs import *; train(3)"\n'
NCCL = (
    PY
    + r"""
n = nccl(); n.sync(); time.sleep(1.5)
def step(reduce=True, micro=1):
    for _ in range(micro): n.launch(); n.launch(6_000_000 // micro)
    if reduce: n.reduce(65536)
    n.launch(); n.sync()
"""
)
LOADER = (
    PY
    + r"""
def worker(q, orders, what):
    say("worker"); q.put(0)
    for o in iter(orders.get, None): exec(what); q.put(o)
def main(what, during="pass"):
    c = mp.get_context("spawn"); q, orders = c.Queue(), c.Queue()
    p = c.Process(target=worker, args=(q, orders, what)); p.start(); q.get()
    say("trainer"); cuda().cudaDeviceSynchronize(); time.sleep(1)
    for i in range(4):
        orders.put(i + 1); exec(during)
        try: q.get(timeout=7)
        except Exception: os._exit(0)
        cuda().cudaDeviceSynchronize()
    orders.put(None); p.join()
if __name__ == "__main__":
"""
)
SECRET = {"OTEL_RESOURCE_ATTRIBUTES": "a=b,args=--password=hunter2,c=Server%3Dx%3BPassword%3Dhunter2,s=https://x/?sig=hunter2",
          "NCCL_FOO": '{"api_key": "hunter2"}', "OTEL_X": "me:hunter2@host:4317", "WANDB_API_KEY": "hunter2"}  # fmt: skip

CASES = [
    Case("replaced", "another TRACEPARENT by putenv: the first one is lost, the other one is told",
         PY + 'os.environ["TRACEPARENT"] = "00-" + "f" * 32 + "-00f067aa0ba902b7-01"; train(3)',
         lambda s: s.context(), (TP, "own", True, "00-ffffff")),
    Case("huge", "1.9 MB of environment, TRACEPARENT last and taken away", PY + r"""
if len(sys.argv) == 1:
    big = {f"A{i}": "x" * 100000 for i in range(18)}; tp = os.environ.pop("TRACEPARENT")
    os.execve(sys.executable, [sys.executable, __file__, "go"], {**os.environ, **big, "TRACEPARENT": tp})
del os.environ["TRACEPARENT"]; train(3)
""", lambda s: s.context(), (TP, "own", True, "")),
    Case("secrets", "in values and in command lines: nowhere in recording or report",
         "sh -c 'sleep 1; true' x --api-key hunter2 --password=hunter2 -H 'Authorization: Bearer hunter2' https://me:hunter2@h/\n" + TRAIN,
         lambda s: b"hunter2" in s.recording or "hunter2" in json.dumps(s.report), False, "attach", SECRET),
    Case("flock", "a lock that a process in the background holds",
         "( flock 9; exec sleep 2.8 ) 9>$D/lock &\nsleep 0.3; flock $D/lock true\n" + TRAIN,
         lambda s: s.largest(), waits("flock", 2.5, "flock", "/lock")),
    Case("polling", "a loop with sleep 0.5 in it, 3 s in all", "for i in 1 2 3 4 5 6; do sleep 0.5; done\n" + TRAIN,
         lambda s: s.largest(), waits("sleep", 3, "clock_nanosleep")),
    Case("brief", "yes | head -1: the end of one that is gone at once, by its name", "yes | head -1 >$D/x\n" + TRAIN,
         lambda s: [r["exit"] for r in s.report["startup"] if r.get("command") == "yes"], [{"code": None, "signal": 13}]),
    Case("evaluate", "200 steps; evaluations without operations behind every 50th, also the last", NCCL + r"""
for i in range(1, 201):
    step()
    for _ in range(10 if i % 50 == 0 else 0): n.launch(2_000_000); n.sync()
""", lambda s: s.steps(), (200, [])),
    Case("curriculum", "150 steps, one more operation in the first 60",
         NCCL + "for i in range(150):\n    if i < 60: n.reduce(16)\n    step()\n",
         lambda s: s.steps(), lambda said: said[0] == 150 and said[1][0][0] in (1, 2) and said[1][0][1:] == (60, "1 more ncclAllReduce of 16 float32")),
    Case("worker-fifo", "a worker opens a named pipe that nobody writes", LOADER + r"""
    f = os.environ["D"] + "/fifo"; os.mkfifo(f); threading.Timer(4.5, lambda: open(f, "w").close()).start()
    main(f"open('{f}').close() if o == 2 else 0")
""", lambda s: [w["waiting_in"] for w in s.report["workers"]], lambda said: said and str((said[0] or {}).get("file")).endswith("/fifo")),
    Case("worker-quiet", "the only worker ends by os._exit(0) while it is waited for", LOADER + '    main("os._exit(0) if o == 2 else 0")\n',
         lambda s: (s.incidents(), s.end("worker")[0]), (["WORKER_DIED"], 0), "run"),
    Case("killer", "a third process kills the worker", LOADER + r"""
    main("time.sleep(5) if o == 2 else 0", 'subprocess.Popen(["sh", "-c", f"sleep .5; kill -9 {p.pid}; sleep 1"]) if i == 1 else 0')
""", lambda s: (s.incidents(), s.end("worker")), (["WORKER_DIED"], (None, 9, "sh"))),
]  # fmt: skip
