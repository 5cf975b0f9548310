"""The request "infer": which hooked calls a thread was already inside, from a copy of its stack.

A word on a stack may be left over from a call that returned long ago, with all of that call's frames: how it looks
proves nothing. So a frame counts only when the thread's own frames, unwound from its program counter without a gap,
lead through it. It is a hook's when the call before its return address goes there (`call_site`), or when the frame
below it lies in the hook's body (`unwound`).

Where the frames lead into the program, the search ends: a hooked function does not call it back. Only a blocked thread
whose innermost code has no unwind table at all is searched word by word (`_search_words`): then the first return
address outside that code must lie in a hooked library.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any, NamedTuple

from stallscope.parser.errors import ParseError
from stallscope.parser.source import Source
from stallscope.parser.unwind import Chain, Frame, call_at, chain, destinations, row_of
from stallscope.parser.view import ADDRESS_LIMIT, Range, View

__all__ = ["address_of", "infer", "view_of"]

MAX_STACK = 64 << 10
MAX_HOOKS, MAX_RANGES, MAX_MEMORY = 4096, 65536, 2048
MAX_SITES, MAX_ANSWER = 2048, 64


class Hook(NamedTuple):
    """A hooked function in memory: [start, end). Sorts by address."""

    start: int
    end: int
    number: int


class Library(NamedTuple):
    """Code that holds hooks: a whole file, or of a program that contains the library the hull of its hooks."""

    whole: bool
    start: int
    end: int


class Finding(NamedTuple):
    """Frames [hook, slot, return address, evidence], innermost first. `known_to`: no hook's frame that is not among
    them lies below this stack address."""

    frames: list[list[Any]]
    known_to: int


class _Search:
    """One inference: the thread's memory, and where hooks are."""

    def __init__(self, view: View, hooks: list[Hook], pc: int) -> None:
        self.view = view
        self.hooks = sorted(hooks)
        self.starts = [h.start for h in self.hooks]
        self.by_start = {h.start: h for h in reversed(self.hooks)}
        where = view.range_of(pc)
        self.inner = _key(where) if where else None
        self.libraries: dict[int, Library] = {}
        for hook in self.hooks:
            self._add_library(hook)

    def _add_library(self, hook: Hook) -> None:
        where = self.view.range_of(hook.start)
        if where is None:
            return
        key = _key(where)
        known = self.libraries.get(key)
        if known:
            self.libraries[key] = known._replace(end=max(known.end, hook.end))
            return
        elf = self.view.elf(where.file)
        # Of a file that can't be read nobody knows whether it is a program.
        whole = not elf.is_program() if elf else key != self.inner
        self.libraries[key] = Library(whole, hook.start, hook.end)

    def hooked(self, address: int) -> bool:
        """Tell whether an address lies in code that holds hooks."""
        where = self.view.range_of(address)
        library = self.libraries.get(_key(where)) if where else None
        return library is not None and (library.whole or library.start <= address < library.end)

    def may_read(self, address: int) -> bool:
        """Tell whether frames in the code at an address are worth some effort: not those of a program without hooks."""
        where = self.view.range_of(address)
        if where is None or _key(where) in self.libraries:
            return where is not None
        elf = self.view.elf(where.file)
        return elf is not None and not elf.is_program()

    def is_inner(self, address: int) -> bool:
        """Tell whether an address lies in the file that the thread's pc is in."""
        where = self.view.range_of(address)
        return where is not None and _key(where) == self.inner

    def hook_around(self, pc: int) -> Hook | None:
        """Return the hook whose body holds an address; of aliases the lowest number."""
        index = bisect_right(self.starts, pc) - 1
        hook = self.by_start[self.starts[index]] if index >= 0 else None
        return hook if hook and pc < hook.end else None

    def called(self, slot: int) -> Hook | None:
        """Return the hook that the call before the return address at a slot goes to."""
        site = call_at(self.view, slot)
        found = [self.by_start[to] for to in destinations(self.view, site[1]) if to in self.by_start] if site else []
        return found[0] if found else None


def _key(where: Range) -> int:
    return where.file if where.file >= 0 else -where.start


def infer(request: dict[str, Any], sources: list[Source]) -> dict[str, Any]:
    """Answer one round.

    Args:
        request: sp, pc, bp (or None), stack (bytes from sp upwards), maps [[start, end, file, offset]], hooks
            [[id, address, size]], memory {address: bytes}, final (no further round comes).
        sources: the files that maps refers to by index.

    Returns:
        {need: [[address, length]]} when memory is missing, else {frames: [[hook, slot, return_address, evidence]],
        outermost first, innermost last, known_to: below this stack address lies no other}.

    Raises:
        ParseError: the request is out of bounds.
    """
    view = view_of(request, sources)
    pc, bp = address_of(request["pc"]), request.get("bp")
    search = _Search(view, _hooks(request["hooks"]), pc)
    finding = _find(search, Frame(pc, view.sp, None if bp is None else address_of(bp)))
    if view.needs and not request["final"]:
        return {"need": [[address, length] for address, length in view.needs.items()]}
    return {"frames": finding.frames[:MAX_ANSWER][::-1], "known_to": min(finding.known_to, ADDRESS_LIMIT)}


def view_of(request: dict[str, Any], sources: list[Source]) -> View:
    """Check the request's memory and wrap it."""
    stack, maps, memory = request["stack"], request["maps"], request["memory"]
    sp = address_of(request["sp"])
    if not isinstance(stack, bytes) or len(stack) > MAX_STACK or sp & 7:
        raise ParseError("cannot infer calls", "stack", "misaligned or over 64 KiB")
    if len(maps) > MAX_RANGES or len(memory) > MAX_MEMORY:
        raise ParseError("cannot infer calls", "maps", "too many ranges")
    view = View(sp, stack, [Range(*map(int, m)) for m in maps], sources)
    view.memory = {address_of(address): bytes(data) for address, data in memory.items()}
    return view


def _hooks(rows: list[list[int]]) -> list[Hook]:
    """Check the hooks; a function without a size has an empty body and can only be proven by its call site."""
    if len(rows) > MAX_HOOKS:
        raise ParseError("cannot infer calls", "hooks", f"{len(rows)} of them")
    return [Hook(address_of(start), start + max(0, int(size)), int(number)) for number, start, size in rows]


def address_of(value: object) -> int:
    """Check a 64-bit number. Raises ParseError."""
    if not isinstance(value, int) or not 0 <= value < 1 << 64:
        raise ParseError("cannot infer calls", "request", f"{value!r:.40} is no address")
    return value


def _find(search: _Search, innermost: Frame) -> Finding:
    """Unwind from the pc; where that is not possible from the first frame on, look at the words."""
    links = chain(search.view, innermost, search.may_read)
    frames = _proven(search, links)
    stuck = links.stuck
    if stuck is None or _left(search, links):
        return Finding(frames, _known_to(search, links))
    if search.hooked(stuck.pc):
        return _resumed(search, links, frames)
    blocked = innermost.bp is None
    if blocked and search.is_inner(stuck.pc) and not frames and _without_table(search.view, stuck.pc):
        return Finding(_search_words(search, stuck.sp), stuck.sp)
    return Finding(frames, stuck.sp)


def _left(search: _Search, links: Chain) -> bool:
    """Tell whether the frames have come from the innermost code, or from hooked code, to the code that calls it."""
    if links.stuck is None or search.hooked(links.stuck.pc):
        return False
    return not search.is_inner(links.stuck.pc) or any(search.hooked(f.pc) for f, _ in links.frames)


def _known_to(search: _Search, links: Chain) -> int:
    """Return up to which stack address unwound frames say where hooks' frames are. The last may span more than the
    copy of the stack."""
    if links.stuck is None:
        return max([search.view.end, *(slot for _, slot in links.frames[-1:])])
    return ADDRESS_LIMIT if _left(search, links) else links.stuck.sp


def _without_table(view: View, pc: int) -> bool:
    """Tell whether nothing is known of the code at an address: no unwind rules, and no sign of a program."""
    where = view.range_of(pc)
    elf = view.elf(where.file) if where else None
    return where is not None and row_of(view, pc) is None and not (elf and elf.is_program())


def _proven(search: _Search, links: Chain) -> list[list[Any]]:
    """Return the hooks' frames among unwound ones: two at one slot where one hook jumps into another."""
    found: list[list[Any]] = []
    for frame, slot in links.frames:
        ret = search.view.stack_word(slot)
        if ret is None:
            continue
        called, around = search.called(slot), search.hook_around(frame.pc)
        if around and around != called:
            found.append([around.number, slot, ret, "unwound"])
        if called:
            found.append([called.number, slot, ret, "call_site"])
    return found


def _resumed(search: _Search, links: Chain, frames: list[list[Any]]) -> Finding:
    """Go on where a frame in hooked code needs an rbp that is not known: by the one call of its function further up."""
    stuck = links.stuck
    row = row_of(search.view, stuck.pc) if stuck else None
    place = search.view.file_address(stuck.pc) if stuck else None
    if stuck is None or row is None or place is None or stuck.bp is not None or row.cfa.deref:
        return Finding(frames, stuck.sp if stuck else search.view.end)
    start = stuck.pc - (place[1] - row.start)
    slots = range(stuck.sp, min(search.view.end, stuck.sp + 8 * MAX_SITES), 8)
    callers = [s for s in slots if (site := call_at(search.view, s)) and start in destinations(search.view, site[1])]
    if len(callers) != 1:
        return Finding(frames, stuck.sp)
    more = chain(search.view, stuck._replace(bp=callers[0] + 8 - row.cfa.offset), search.may_read)
    return Finding([*frames, *_proven(search, more)], _known_to(search, more))


def _search_words(search: _Search, floor: int) -> list[list[Any]]:
    """Look for the first frame outside the innermost code word by word, and unwind from there."""
    view = search.view
    for slot in range(floor + 7 & ~7, min(view.end, floor + 8 * MAX_SITES), 8):
        site = call_at(view, slot)
        if site is None or (search.is_inner(site[0] - 1) and not search.hooked(site[0] - 1)):
            continue
        if not search.hooked(site[0] - 1):
            return []
        links = chain(view, Frame(site[0] - 1, slot + 8, None), search.may_read)
        return _proven(search, links) if links.frames else _way_out(search, slot)
    return []


def _way_out(search: _Search, inside: int) -> list[list[Any]]:
    """Without any table: the first call above that goes into hooked code from outside must go to a hook, and a return
    address inside that hook must lie below it."""
    view, bodies = search.view, set()
    for slot in range(inside, min(view.end, inside + 8 * MAX_SITES), 8):
        site = call_at(view, slot)
        if site is None:
            continue
        if search.hooked(site[0] - 1):
            bodies.add(search.hook_around(site[0] - 1))
        elif any(search.hooked(to) for to in destinations(view, site[1])):
            hook = search.called(slot)
            return [[hook.number, slot, site[0], "call_site"]] if hook in bodies and hook else []
    return []
