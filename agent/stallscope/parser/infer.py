"""The request "infer": which hooked calls a thread was already inside, from a copy of its stack.

A word on a stack may be left over from a call that returned long ago. So a frame counts only with a proof:

* the thread's frames, unwound from its program counter, lead through it (then nothing else up to there counts);
* where the tables or registers don't lead on, a return address behind a call that goes to the hook (`call_site`), or
  a return address inside the hook from which one unwinding step leads exactly to the slot (`unwound`).
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any, NamedTuple

from stallscope.parser.cfi import RBP
from stallscope.parser.errors import ParseError
from stallscope.parser.machine import CALL_BYTES, STUB_BYTES, Call, call_before, stub_pointer
from stallscope.parser.source import Source
from stallscope.parser.unwind import Chain, Frame, chain, is_call_slot, row_of, step
from stallscope.parser.view import WORD, Range, View

__all__ = ["infer"]

MAX_STACK = 64 << 10
MAX_HOOKS, MAX_RANGES, MAX_MEMORY = 4096, 65536, 2048
MAX_SITES, MAX_BODIES, MAX_GUESSES, MAX_ANSWER = 2048, 256, 1024, 64


class Hook(NamedTuple):
    """A hooked function in memory: [start, end). Sorts by address."""

    start: int
    end: int
    number: int


class Body(NamedTuple):
    """A return address (or the pc) inside a hook. `slot`: where it stands (below the stack for the pc); `out`: slot
    of the hook's own return address, None when it can't be computed."""

    hook: Hook
    slot: int
    out: int | None


class _Search:
    """One inference: the candidates found so far."""

    def __init__(self, view: View, hooks: list[Hook]) -> None:
        self.view = view
        self.hooks = sorted(hooks)
        self.starts = [h.start for h in self.hooks]
        self.by_start = {h.start: h for h in reversed(self.hooks)}
        self.bodies: list[Body] = []
        self.sites: dict[int, tuple[int, Call]] = {}
        self.first_seen: dict[int, int] = {}

    def hook_around(self, pc: int) -> Hook | None:
        """Return the hook whose body holds an address; of aliases the lowest number."""
        index = bisect_right(self.starts, pc) - 1
        hook = self.by_start[self.starts[index]] if index >= 0 else None
        return hook if hook and pc < hook.end else None


def infer(request: dict[str, Any], sources: list[Source]) -> dict[str, Any]:
    """Answer one round.

    Args:
        request: sp, pc, bp (or None), stack (bytes from sp upwards), maps [[start, end, file, offset]], hooks
            [[id, address, size]], memory {address: bytes}, final (no further round comes).
        sources: the files that maps refers to by index.

    Returns:
        {need: [[address, length]]} when memory is missing, else {frames: [[hook, slot, return_address, evidence]]},
        outermost first, innermost last.

    Raises:
        ParseError: the request is out of bounds.
    """
    view = _view(request, sources)
    search = _Search(view, _hooks(request["hooks"]))
    frames = _find(search, _address(request["pc"]), request.get("bp"))
    if view.needs and not request["final"]:
        return {"need": [[address, length] for address, length in view.needs.items()]}
    return {"frames": frames}


def _view(request: dict[str, Any], sources: list[Source]) -> View:
    """Check the request's memory and wrap it."""
    stack, maps, memory = request["stack"], request["maps"], request["memory"]
    sp = _address(request["sp"])
    if not isinstance(stack, bytes) or len(stack) > MAX_STACK or sp & 7:
        raise ParseError("cannot infer calls", "stack", "misaligned or over 64 KiB")
    if len(maps) > MAX_RANGES or len(memory) > MAX_MEMORY:
        raise ParseError("cannot infer calls", "maps", "too many ranges")
    view = View(sp, stack, [Range(*map(int, m)) for m in maps], sources)
    view.memory = {_address(address): bytes(data) for address, data in memory.items()}
    return view


def _hooks(rows: list[list[int]]) -> list[Hook]:
    """Check the hooks; a function without a size has an empty body and can only be proven by its call site."""
    if len(rows) > MAX_HOOKS:
        raise ParseError("cannot infer calls", "hooks", f"{len(rows)} of them")
    return [Hook(_address(start), start + max(0, int(size)), int(number)) for number, start, size in rows]


def _address(value: object) -> int:
    if not isinstance(value, int) or not 0 <= value < 1 << 64:
        raise ParseError("cannot infer calls", "request", f"{value!r:.40} is no address")
    return value


def _find(search: _Search, pc: int, bp: int | None) -> list[list[Any]]:
    """Collect candidates, then keep those with a proof; outermost first."""
    links = chain(search.view, pc, bp)
    _follow_chain(search, links)
    if not links.complete:
        _note_stuck(search, links, pc)
        _scan_stack(search, links.floor)
    _see(search, pc, search.view.sp - 8)
    frames = [f for slot in sorted(search.sites, reverse=True) for f in _judge(search, slot)]
    return frames[-MAX_ANSWER:]


def _follow_chain(search: _Search, links: Chain) -> None:
    """Take the unwound frames: each one's return slot is certain, and so is the way out of a hook's body."""
    slot = search.view.sp - 8
    for frame, out in links.frames:
        hook = search.hook_around(frame.pc)
        if hook:
            search.bodies.append(Body(hook, slot, out))
        ret = search.view.stack_word(out)
        if ret is not None:
            _see(search, ret, out)
            _add_site(search, out, ret)
        slot = out


def _note_stuck(search: _Search, links: Chain, pc: int) -> None:
    """The frame where unwinding stopped may be a hook's: note it, with a guess where its return address is."""
    slot = links.frames[-1][1] if links.frames else search.view.sp - 8
    ret = search.view.stack_word(slot)
    inner = pc if not links.frames else ret - 1 if ret is not None else 0
    hook = search.hook_around(inner)
    if hook:
        search.bodies.append(Body(hook, slot, _guess(search, Frame(inner, links.floor, None))))


def _scan_stack(search: _Search, floor: int) -> None:
    """Take every word above the proven frames that points into code."""
    view = search.view
    start = max(view.sp, floor + 7 & ~7)
    words = WORD.iter_unpack(view.stack[start - view.sp : len(view.stack) - len(view.stack) % 8])
    for slot, (word,) in zip(range(start, view.end, 8), words, strict=False):
        if view.range_of(word) is None:
            continue
        _see(search, word, slot)
        _add_site(search, slot, word)
        hook = search.hook_around(word - 1)
        if hook and len(search.bodies) < MAX_BODIES:
            search.bodies.append(Body(hook, slot, _way_out(search, Frame(word - 1, slot + 8, None))))


def _see(search: _Search, address: int, slot: int) -> None:
    """Remember the lowest slot at which a file's code shows up."""
    where = search.view.range_of(address)
    if where is not None:
        key = where.file if where.file >= 0 else -where.start
        search.first_seen[key] = min(slot, search.first_seen.get(key, slot))


def _add_site(search: _Search, slot: int, ret: int) -> None:
    """Keep a slot whose word stands behind a call instruction."""
    if slot not in search.sites and len(search.sites) < MAX_SITES:
        call = call_before(search.view.code(ret - CALL_BYTES, CALL_BYTES) or b"", ret)
        if call:
            search.sites[slot] = (ret, call)


def _way_out(search: _Search, frame: Frame) -> int | None:
    """Return the slot of a hook's return address, from a frame inside it found by its return address alone."""
    out = step(search.view, frame)
    return out.slot if out else _guess(search, frame)


def _guess(search: _Search, frame: Frame) -> int | None:
    """Find the way out of a frame that counts from an rbp nobody told: code below it may have saved that."""
    row = row_of(search.view, frame.pc)
    if row is None or row.cfa.register != RBP or row.cfa.deref:
        return None
    below = range(frame.sp - 16, max(search.view.sp, frame.sp - 8 * MAX_GUESSES) - 8, -8)
    saved = [search.view.stack_word(slot) for slot in below]
    for bp in saved:
        slot = (bp or 0) + row.cfa.offset - 8
        if slot > frame.sp and is_call_slot(search.view, slot):
            return slot
    return None


def _judge(search: _Search, slot: int) -> list[list[Any]]:
    """Return the frames proven at one slot: usually none or one; two where one hook jumps into another."""
    ret, call = search.sites[slot]
    proven = {b.hook for b in search.bodies if b.out == slot}
    called = _called_hook(search, call)
    frames: list[list[Any]] = []
    if called and (called in proven or _plausible(search, called, slot)):
        frames.append([called.number, slot, ret, "call_site"])
    for hook in sorted(proven - {called}):
        frames.append([hook.number, slot, ret, "unwound"])
    return frames


def _called_hook(search: _Search, call: Call) -> Hook | None:
    """Return the hook a call goes to: directly, through a word in memory, or through a PLT stub and its word."""
    pointer = call.pointer
    if call.target is not None:
        hook = search.by_start.get(call.target)
        if hook:
            return hook
        pointer = stub_pointer(search.view.code(call.target, STUB_BYTES) or b"", call.target)
    word = search.view.word(pointer) if pointer is not None else None
    return search.by_start.get(word) if word is not None else None


def _plausible(search: _Search, hook: Hook, slot: int) -> bool:
    """Tell whether a call to a hook may still be under way though no unwinding step proves it.

    A return address inside the hook that leads elsewhere, and none that can't be followed, says: a leftover. Without
    any (the function jumped into another one) its library must at least be on the stack below.
    """
    inside = [b for b in search.bodies if b.hook == hook and b.slot < slot]
    if inside:
        return any(b.out is None for b in inside)
    where = search.view.range_of(hook.start)
    if where is None:
        return False
    key = where.file if where.file >= 0 else -where.start
    return search.first_seen.get(key, slot) < slot
