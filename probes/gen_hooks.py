"""Write agent/stallscope/wire/hook_table.py and probes/per_hook.h from probes/hooks.def and probes/few.def.

Run by `make generate`; `make lint` runs it with --check, which fails when a committed file is stale.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
TARGET = HERE.parent / "agent" / "stallscope" / "wire" / "hook_table.py"
PER_HOOK = HERE / "per_hook.h"
LINE = re.compile(
    r'^(HOOK|HOOK_PTSZ|HOOK_PTDS)\((\d+), (\w+), (\w+), (\w+), (ENTRY|PAIR|SHIM), "([^"]*)", "([^"]*)", "([^"]*)"\)$'
)
FAMILIES = {
    "launch": 1, "wait": 2, "copy": 3, "alloc": 4, "event": 5, "graph": 6,
    "collective": 8, "p2p": 8, "group": 8, "comm": 8,
}  # fmt: skip
NCCL_KINDS = ("collective", "p2p", "group", "comm")
REGISTERS = 6
MAX_PERF_PROBES = 44
SEQ, VITAL, CONFIG, DRIVER, UID_VALUE, UID_RETURN, SHARED, RUNTIME = 1, 2, 4, 8, 16, 32, 64, 128


def slots(words: list[str]) -> dict[str, int]:
    """Argument name -> index + 1; stack words count from 7. The by-value uid takes no register."""
    found: dict[str, int] = {}
    index = 0
    for word in words:
        if word == "uid[128]":
            continue
        index += 1
        found[word.lstrip("*")] = index
    return found


def stack_words(words: list[str], found: dict[str, int]) -> int:
    """How many stack words BPF has to read: up to the last one that it or the report needs."""
    if "uid[128]" in words:
        return 0
    needed = [found[name] for name in ("stream", "comm", "smem", "copy_kind") if name in found]
    return max([0, *(place - REGISTERS for place in needed)])


def cookie(hook: int, library: str, kind: str, time_id: int, arguments: str) -> int:
    """The descriptor of native/wire.h."""
    words = arguments.split()
    found = slots(words)
    flags = 0
    if kind in ("collective", "p2p"):
        flags |= SEQ
    if kind in NCCL_KINDS:
        flags |= VITAL
    if "*config" in words:
        flags |= CONFIG
    if library == "CUDA":
        flags |= DRIVER
    if library == "CUDART":
        flags |= RUNTIME
    if "uid[128]" in words:
        flags |= UID_VALUE
    if "*uid_out" in words:
        flags |= UID_RETURN
    uid = found.get("uid", 0) or found.get("uid_out", 0)
    return (
        hook | FAMILIES[kind] << 12 | time_id << 20 | flags << 32 | found.get("comm", 0) << 40
        | stack_words(words, found) << 44 | found.get("newcomm", 0) << 48 | uid << 52
    )  # fmt: skip


def read_table(text: str) -> list[tuple[int, str, str, str, str, str, str, str]]:
    """Rows (id, library, name, kind, mode, arguments, since, reason), twins expanded.

    Raises ValueError for a line that does not parse, an id used twice, or a return probe without a reason.
    """
    rows = []
    for line in text.splitlines():
        if not line.startswith("HOOK"):
            continue
        found = LINE.match(line)
        if not found:
            raise ValueError(f"hooks.def: not understood: {line}")
        macro, number, *rest = found.groups()
        rows.append((int(number), *rest))
        if macro != "HOOK":
            library, name, *tail = rest
            rows.append((int(number) + 1, library, name + "_" + macro[5:].lower(), *tail))
    ids = [row[0] for row in rows]
    if len(set(ids)) != len(ids):
        raise ValueError(f"hooks.def: id used twice: {sorted(i for i in ids if ids.count(i) > 1)}")
    for row in rows:
        if row[4] == "PAIR" and not row[7]:
            raise ValueError(f"hooks.def: {row[2]} has a return probe and no reason")
    return rows


def read_few(text: str, rows: list[tuple[int, str, str, str, str, str, str, str]]) -> list[int]:
    """Ids of the hooks of few.def, in its order.

    Raises ValueError for a name that hooks.def does not probe, one that stands there twice, or too many probes.
    """
    probes = {row[2]: (row[0], 2 if row[4] == "PAIR" else 1) for row in rows if row[4] != "SHIM"}
    names = re.findall(r"^FEW\((\w+)\)$", text, re.MULTILINE)
    if unknown := [name for name in names if name not in probes]:
        raise ValueError(f"few.def: hooks.def does not probe {', '.join(unknown)}")
    if len(set(names)) != len(names):
        raise ValueError("few.def: a name stands there twice")
    if (cost := sum(probes[name][1] for name in names)) > MAX_PERF_PROBES:
        raise ValueError(f"few.def: {cost} probes, and {MAX_PERF_PROBES} are the most")
    return [probes[name][0] for name in names]


def program_text(number: int, name: str, kind: str, mode: str, value: int) -> str:
    """The programs of one hook, its descriptor a constant.

    Plain text, not a macro's expansion: the helper reads the names of programs from the text that it hands to bcc.
    """
    nccl = "1" if kind in NCCL_KINDS else "0"
    call = "do_launch(ctx, {0})" if mode == "ENTRY" else "do_enter(ctx, {0}, " + nccl + ")"
    halves = [("enter", call)]
    if mode == "PAIR":  # and as it is counted where returns are not probed
        halves += [("return", "do_return(ctx, {0})"), ("count", "do_launch(ctx, {0})")]
    text = f"/* {name} */\n"
    for half, body in halves:
        text += f'ON("uprobe") int {half}_{number}(struct pt_regs *ctx) {{\n'
        text += f"  return {body.format(f'{value:#x}ull')};\n}}\n"
    return text


def render_per_hook() -> str:
    """The text of per_hook.h."""
    rows = sorted(read_table((HERE / "hooks.def").read_text()))
    values = dict(zip((row[0] for row in rows), cookies(rows), strict=True))
    by_id = {row[0]: row for row in rows}
    out = [
        "/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only\n",
        " * Generated by probes/gen_hooks.py from hooks.def and few.def: do not edit.\n",
        " * For kernels without link cookies (before 5.15): a program a probe. All links are unfiltered and of file 0. */\n",
    ]
    for number in read_few((HERE / "few.def").read_text(), rows):
        _, _, name, kind, mode, *_ = by_id[number]
        # Not RUNTIME: the range of a runtime is learned by the file's number, and without cookies there is none.
        out.append(program_text(number, name, kind, mode, values[number] & ~(RUNTIME << 32) | SHARED << 32))
    return "".join(out)


def cookies(rows: list[tuple[int, str, str, str, str, str, str, str]]) -> list[int]:
    """The descriptors of sorted rows; timed ones take two time ids each, in order."""
    time_id, values = 0, []
    for number, library, _, kind, mode, arguments, *_ in rows:
        timed = mode == "PAIR"
        values.append(cookie(number, library, kind, time_id if timed else 0, arguments))
        time_id += 2 if timed else 0
    return values


def render() -> str:
    """The text of hook_table.py."""
    rows = sorted(read_table((HERE / "hooks.def").read_text()))
    few = read_few((HERE / "few.def").read_text(), rows)
    out = [
        '"""Generated by probes/gen_hooks.py from probes/hooks.def: do not edit."""\n\n',
        "from __future__ import annotations\n\nfrom typing import NamedTuple\n\n\n",
        "class Hook(NamedTuple):\n",
        '    """One traced function.\n\n',
        "    `cookie` is its descriptor (native/wire.h); `time_id` is the row of `wire_time` for outermost calls, the next\n",
        '    one is for nested calls; -1 when calls are not timed.\n    """\n\n',
        "    id: int\n    library: str\n    name: str\n    kind: str\n    mode: str\n    arguments: str\n    since: str\n",
        "    reason: str\n    time_id: int\n    cookie: int\n\n\n",
        "# fmt: off\nHOOKS: tuple[Hook, ...] = (\n",
    ]
    time_id = 0
    for row, value in zip(rows, cookies(rows), strict=True):
        number, library, name, kind, mode, arguments, since, reason = row
        timed = mode == "PAIR"
        out.append(
            f'    Hook({number}, "{library}", "{name}", "{kind}", "{mode}", "{arguments}", "{since}",\n'
            f'         "{reason}", {time_id if timed else -1}, {value:#x}),\n'
        )
        time_id += 2 if timed else 0
    out.append(f")\nTIME_IDS = {time_id}\n# fmt: on\nBY_ID = {{hook.id: hook for hook in HOOKS}}\n")
    out.append("BY_NAME = {hook.name: hook for hook in HOOKS}\n")
    out.append(
        f"MAX_PERF_PROBES = {MAX_PERF_PROBES}\n# Hooks that one perf event a probe leaves room for, most important first\n"
    )
    out.append("FEW = (\n" + "".join(f"    {number},\n" for number in few) + ")\n")
    return "".join(out)


def main() -> int:
    """Write both files, or with --check compare them; 1 when one is stale."""
    texts = {TARGET: render(), PER_HOOK: render_per_hook()}
    if "--check" in sys.argv[1:]:
        stale = [path.name for path, text in texts.items() if not path.exists() or path.read_text() != text]
        if stale:
            print(f"stale: {', '.join(stale)}: run `make generate`", file=sys.stderr)
        return 1 if stale else 0
    for path, text in texts.items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
