"""A table for a person: words give way, numbers are never cut."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from stallscope.output.rows import Row
from stallscope.output.words import count

__all__ = ["table"]


def table(
    page: Console,
    title: str,
    columns: list[str],
    rows: list[Row],
    limit: int,
    cells: Callable[[Row], list[str]],
    more: str | None = None,
) -> None:
    """Print the first `limit` rows, and `more` about the others.

    Columns named in capitals hold words and give way; numbers are never cut.
    """
    page.print()
    page.print(Text(title, style="bold"))
    grid = Table(box=None, padding=(0, 1, 0, 0), header_style="dim", pad_edge=False)
    lines = [cells(row) for row in rows[:limit]]
    for i, name in enumerate(columns):
        is_word = name.isupper()
        widest = max(len(name), *(len(line[i]) for line in lines))
        grid.add_column(
            Text(name.lower()),
            no_wrap=True,
            justify="left" if is_word else "right",
            min_width=None if is_word else widest,
        )
    for line in lines:
        grid.add_row(*map(Text, line))
    page.print(grid)
    if len(rows) > limit:
        page.print(Text(more or f"and {count(len(rows) - limit)} more: --json shows all", style="dim"))
