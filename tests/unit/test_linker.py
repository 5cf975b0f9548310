"""How often the parser is asked about a file that it can't read."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from stallscope.capture.parser_client import ParserFailed
from stallscope.capture.resolver import EVERY, Resolver


class Parser:
    """Fails as told."""

    def __init__(self, *, died: bool) -> None:
        self.asked = 0
        self._died = died

    def symbols(self, fd: int, names: Sequence[str], **_: Any) -> Any:
        self.asked += 1
        raise ParserFailed("cannot parse", "symbols", "no answer within 3 s", died=self._died)


@pytest.mark.parametrize(("died", "times"), [(True, 2), (False, 1)])
def test_a_file_that_fails_is_not_asked_about_for_ever(tmp_path: Path, died: bool, times: int) -> None:
    """A job starts the same program a thousand times; each time the capture would stand still for 3 s."""
    (tmp_path / "program").write_bytes(b"x")
    parser = Parser(died=died)
    resolver = Resolver(parser)  # type: ignore[arg-type]
    fd = os.open(tmp_path / "program", os.O_RDONLY)
    for _ in range(5):
        with pytest.raises(ParserFailed, match="no answer within 3 s"):
            resolver.resolve(fd, EVERY)
    os.close(fd)
    assert parser.asked == times
