#!/usr/bin/env python3
"""Writes the C source of the functions of a library that nobody wrote by hand.

    gen_stubs.py [--finish FUNCTION] LIST OUT.c OBJECT...

LIST holds `name result` lines. A name that one of the objects defines is left out; each other one becomes a function
that counts itself and returns its result: a number, or `launch` (see stubs/stub.h).
"""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path


def listed(path: Path) -> dict[str, str]:
    rows = (tuple(line.split()) for line in path.read_text().splitlines() if line and not line.startswith("#"))
    return dict(rows)


def defined(objects: list[str]) -> set[str]:
    lines = subprocess.run(
        ["nm", "-P", "--defined-only", *objects], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    return {fields[0] for line in lines if len(fields := line.split()) > 1 and fields[1] in "TW"}


def source(rows: dict[str, str], list_name: str, finish: str | None) -> str:
    lines = [f"/* Written by gen_stubs.py from {list_name}. */"]
    if finish:
        lines += [f"int {finish}(int result);", f"#define STUB_FINISH(result) {finish}(result)"]
    lines += [f"#define STUB_COUNT {max(len(rows), 1)}", '#include "stub.h"']
    lines += ["static const char *const stub_names[STUB_COUNT] = {", *(f'    "{name}",' for name in rows), "};"]
    for index, (name, result) in enumerate(rows.items()):
        macro = f"LAUNCH_STUB({index}, {name})" if result == "launch" else f"STUB({index}, {name}, {result})"
        lines.append(macro)
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("list", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--finish", help="function that every result goes through")
    parser.add_argument("objects", nargs="*")
    args = parser.parse_args()
    there = defined(args.objects) if args.objects else set()
    rows = {name: result for name, result in listed(args.list).items() if name not in there}
    args.out.write_text(source(rows, args.list.name, args.finish))


if __name__ == "__main__":
    main()
