"""`python -m tests.model [SEEDS]` prints whom the diagnosis names, as a table for the documentation."""

from __future__ import annotations

import sys

from stallscope.diagnose.judge import judge

from .faults import FAULTS
from .program import LAYOUTS
from .score import Score, score
from .views import EVIDENCE


def _cell(found: Score) -> str:
    text = f"{found.exact}/{found.runs}, class {found.classed}/{found.runs}"
    if found.undecidable:
        text += f" (+{found.undecidable} undecidable, {found.accused} wrongly accused)"
    return text if found.runs or found.undecidable else "-"


def main(seeds: int) -> None:
    """Print the table, and the first misses of each row on stderr."""
    print(
        "| fault | calls | with the GPU's starts and ends | calls, ends of p2p | nobody waits |\n|---|---|---|---|---|"
    )
    for fault in FAULTS:
        columns = []
        for evidence in EVIDENCE:
            total = Score()
            for layout in LAYOUTS:
                found = score(judge, layout, fault, range(seeds), evidence)
                total.add(found)
                for seed, said in found.misses[:2]:
                    print(f"{fault} {layout.name} seed {seed}: {said}", file=sys.stderr)
            columns.append(total)
        cells = " | ".join(_cell(found) for found in columns)
        print(f"| {fault} | {cells} | {sum(found.no_hang for found in columns)} |", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100)
