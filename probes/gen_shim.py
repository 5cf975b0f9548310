"""Write the shim's wrappers from probes/hooks.def: `gen_shim.py FOLDER [NAME,NAME...]`, by `make build`.

With names only those functions are wrapped (tests build variants of the library, and all of it takes a minute).

shim_hooks.h (macro calls for native/shim/wrap.c), shim_entries.h (the same names sorted), shim_tables.c and shim.map.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import gen_hooks
from gen_hooks import FAMILIES, HERE, REGISTERS

IN_RUNTIME = 1 << 31
NO_WORD = 8
ID_POSITION = 2  # of a unique id by value, in both functions that take one
TAP = ("cudaEventRecord", "cudaEventRecord_ptsz", "cudaEventRecordWithFlags", "cudaEventRecordWithFlags_ptsz",
       "cudaEventQuery")  # fmt: skip
GETTERS = {"cuGetProcAddress": 391, "cuGetProcAddress_v2": 392, "cudaGetDriverEntryPoint": 393,
           "cudaGetDriverEntryPoint_ptsz": 394, "cudaGetDriverEntryPointByVersion": 395,
           "cudaGetDriverEntryPointByVersion_ptsz": 396}  # fmt: skip
PRELOAD = ("dlsym", "dlvsym", "execve", "execv", "execvp", "execvpe", "execl", "execlp", "execle", "fexecve",
           "execveat", "posix_spawn", "posix_spawnp")  # fmt: skip
FIRST = ("func", "event", "bytes", "graph_exec", "device", "host", "stream")
PLUGIN = tuple(f"ncclProfiler_v{version}" for version in (3, 4, 5, 6))  # native/shim/gpu_plugin.c
LIBRARIES = {"CUDART": 0, "CUDA": 1, "NCCL": 2}


class Hook(NamedTuple):
    """A line of hooks.def; `id`: under which it is counted, `slot`: its own."""

    id: int
    slot: int
    library: str
    name: str
    kind: str
    mode: str
    words: list[str]
    time_id: int
    cookie: int

    @property
    def params(self) -> list[str]:
        """Its words without the unique id by value."""
        return [word for word in self.words if word != "uid[128]"]

    @property
    def by_value(self) -> bool:
        """Whether it takes a unique id by value."""
        return "uid[128]" in self.words


def hooks() -> list[Hook]:
    """All of the table; a SHIM line is counted as the function it jumps into, whose name is that without `__`."""
    rows = sorted(gen_hooks.read_table((HERE / "hooks.def").read_text()))
    values = dict(zip((row[0] for row in rows), gen_hooks.cookies(rows), strict=True))
    found, time_id = [], 0
    ids = {row[2]: row[0] for row in rows}
    for number, library, name, kind, mode, arguments, *_ in rows:
        counted = ids[name.removeprefix("__")] if mode == "SHIM" else number
        found.append(Hook(counted, number, library, name, kind, mode, arguments.split(), time_id, values[number]))
        time_id += 2 if mode == "PAIR" else 0
    if max(ids.values()) >= min(GETTERS.values()):
        raise ValueError("hooks.def has come to the ids of the getters")
    return found


def packed(hook: Hook) -> list[str]:
    """The eight words of a record (native/wire.h, wire_rec) as C expressions."""
    if "*config" in hook.words:
        return ["a1", *(f"seg_config(a0, {i})" for i in range(1, 8))]
    names = [f"(uint64_t)a{i}" for i in range(len(hook.params))]
    words = (names + ["0"] * REGISTERS)[:REGISTERS]
    stack = names[REGISTERS:]
    count = gen_hooks.stack_words(hook.words, gen_hooks.slots(hook.words))
    if count == 3:
        return [*words, f"((uint32_t){stack[0]} | ({stack[1]} << 32))", stack[2]]
    return [*words, *[*stack, "0", "0"][:2]]


def places(hook: Hook) -> tuple[int, int, int]:
    """Which of the eight words a bulk record keeps: all of one, 48 bits of another, 16 of a third; NO_WORD = none."""
    if "*config" in hook.words:
        return 0, 7, NO_WORD
    names = [word.lstrip("*") for word in hook.params]
    where = {name: place_of(hook, i) for i, name in enumerate(names)}
    first = next((name for name in FIRST if where.get(name, NO_WORD) < NO_WORD), names[0] if names else "")
    second = "stream" if first != "stream" else ""
    if second not in where:
        second = next((name for name in names if name != first), "")
    third = "copy_kind" if second != "copy_kind" else ""
    return where.get(first, NO_WORD), where.get(second, NO_WORD), where.get(third, NO_WORD)


def place_of(hook: Hook, index: int) -> int:
    """Where argument `index` stands among the eight words, NO_WORD where it does not stand alone."""
    if index < REGISTERS:
        return index
    count = gen_hooks.stack_words(hook.words, gen_hooks.slots(hook.words))
    stack = index - REGISTERS
    if count == 3:
        return 7 if stack == 2 else NO_WORD
    return REGISTERS + stack if stack < count else NO_WORD


def signature(hook: Hook) -> tuple[str, str, str]:
    """Parameters, their types, arguments."""
    types = ["uint64_t"] * len(hook.params)
    names = [f"a{i}" for i in range(len(hook.params))]
    if hook.by_value:
        types.insert(ID_POSITION, "struct seg_id_by_value")
        names.insert(ID_POSITION, "id")
    both = ", ".join(f"{t} {n}" for t, n in zip(types, names, strict=True))
    return f"({both or 'void'})", f"({', '.join(types) or 'void'})", f"({', '.join(names)})"


def bits(hook: Hook) -> tuple[str, str]:
    """Of seg_thread.active: what a call sets, and what makes it nested."""
    family = 1 << FAMILIES[hook.kind]
    sets = family | (IN_RUNTIME if hook.library == "CUDART" else 0)
    nests = family | (IN_RUNTIME if hook.library == "CUDA" else 0)
    return f"{sets:#x}u", f"{nests:#x}u"


def cuda_line(hook: Hook) -> str:
    """The macro call of a function of the runtime or the driver."""
    params, types, args = signature(hook)
    all_words = packed(hook)
    first, second, third = places(hook)
    a = all_words[first] if first < NO_WORD else "0"
    b = all_words[second] if second < NO_WORD else "0"
    if third < NO_WORD or second < NO_WORD:
        b = f"WORD_B({b}, {all_words[third] if third < NO_WORD else '0'})"
    tap = "true" if hook.name in TAP else "false"
    head = f"{hook.name}, {hook.id}, {hook.slot}, {', '.join(bits(hook))}, {tap}"
    if hook.mode == "PAIR":
        return f"SEG_TIMED({head}, {hook.time_id}, {params}, {types}, {args}, {a}, {b}, ({', '.join(all_words)}))\n"
    return f"SEG_CALL({head}, {params}, {types}, {args}, {a}, {b})\n"


def nccl_line(hook: Hook) -> str:
    """The macro call of a function of NCCL, and its second name."""
    params, types, args = signature(hook)
    names = [word.lstrip("*") for word in hook.params]
    where = [names.index(w) + 1 if w in names else 0 for w in ("count", "dtype", "redop", "nranks", "rank")]
    fixed = ", ".join(map(str, [f"{hook.cookie:#x}ull", int(hook.mode == "ENTRY"), hook.id, *where]))
    found = gen_hooks.slots(hook.words)
    pointer = found.get("uid", 0) or found.get("uid_out", 0)
    uid = "&id" if hook.by_value else f"(void *)a{pointer - 1}" if pointer else "NULL"
    line = (
        f"SEG_NCCL({hook.name}, {hook.id}, ({fixed}), {params}, {types}, {args}, {uid}, ({', '.join(packed(hook))}))\n"
    )
    return line + f"SEG_ALIAS(p{hook.name}, {hook.name})\n"


def entries(found: list[Hook]) -> list[tuple[str, str, int, int, int]]:
    """(name, wrapper, slot, library, is getter) by name."""
    rows = [(h.name, h.name, h.slot, LIBRARIES[h.library], 0) for h in found]
    rows += [("p" + h.name, h.name, h.slot, LIBRARIES[h.library], 0) for h in found if h.library == "NCCL"]
    rows += [(name, name, slot, 0 if name.startswith("cuda") else 1, 1) for name, slot in GETTERS.items()]
    return sorted(rows)


def tables(found: list[Hook]) -> str:
    """shim_tables.c: what the wrappers' names, hooks and words are."""
    out = ['/* Generated by probes/gen_shim.py: do not edit. */\n#include "shim.h"\n']
    rows = entries(found)
    out.append("const struct seg_entry seg_entries[] = {\n")
    out += [f'    {{"{name}", {slot}, {library}, {getter}}},\n' for name, _, slot, library, getter in rows]
    out.append(f"}};\nconst uint32_t seg_n_entries = {len(rows)};\n")
    names = {slot: (name, library) for name, wrapper, slot, library, _ in rows if name == wrapper}
    out.append("const char *const seg_name_of[WIRE_HOOKS] = {\n")
    out += [f'    [{slot}] = "{name}",\n' for slot, (name, _) in sorted(names.items())]
    out.append("};\nconst uint8_t seg_library_of[WIRE_HOOKS] = {\n")
    out += [f"    [{slot}] = {library},\n" for slot, (_, library) in sorted(names.items())]
    out.append("};\nconst struct seg_words seg_words_of[WIRE_HOOKS] = {\n")
    for h in found:
        if h.id == h.slot:
            out.append(
                f"    [{h.id}] = {{{', '.join(map(str, places(h)))}, {int(h.mode != 'PAIR')}, {h.time_id}, 0}},\n"
            )
    words = [sum(1 << h.id % 64 for h in found if h.id == h.slot and h.id // 64 == i) for i in range(7)]
    out.append("};\nconst uint64_t seg_hook_bits[(WIRE_HOOKS + 63) / 64] = {\n")
    out += [f"    {word:#x}ull,\n" for word in words]
    out.append("};\n")
    for i in range(4):
        out.append(f"extern void *const *const seg_wrappers_{i};\n")
    return "".join(out)


def main(folder: Path, names: list[str]) -> None:
    """Write the four files."""
    found = [hook for hook in hooks() if not names or hook.name in names]
    lines = [nccl_line(h) if h.library == "NCCL" else cuda_line(h) for h in found]
    head = "/* Generated by probes/gen_shim.py: do not edit. */\n"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "shim_hooks.h").write_text(head + "".join(lines))
    rows = entries(found)
    (folder / "shim_entries.h").write_text(head + "".join(f"SEG_ENTRY({name}, {to})\n" for name, to, *_ in rows))
    (folder / "shim_tables.c").write_text(tables(found))
    exported = "".join(f"    {name};\n" for name in sorted([*(row[0] for row in rows), *PRELOAD, *PLUGIN]))
    (folder / "shim.map").write_text("{\n  global:\n" + exported + "  local: *;\n};\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), [name for word in sys.argv[2:] for name in word.split(",") if name])
