"""The one exception of the parser process."""

from __future__ import annotations

__all__ = ["ParseError"]


class ParseError(Exception):
    """Input that can't be used, said in the parts of an error answer: what, on which object, why."""

    def __init__(self, what: str, obj: str, why: str) -> None:
        super().__init__(f"{what}: {obj}: {why}")
        self.what = what
        self.object = obj
        self.why = why
