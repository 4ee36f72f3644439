"""Writes the table of docs/models.md from what the planner says and from what is measured on the cpu device:

PYTHONPATH=src:tests python tests/support/models_table.py
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from stepgraph.planner.compile import check_schedule
from stepgraph.planner.diagnostics import StepgraphError
from stepgraph.planner.schedule import load_schedule, schedule_path
from stepgraph.runtime.adapters.family import FILES

from support.parity import measured
from support.tiny import FAMILIES

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
ULYSSES = (2, 4, 8)
HEAD = "| class of diffusers | schedule | variants | U2 | U4 | U8 | float32 | bfloat16 |"


@dataclass(frozen=True)
class Row:
    kind: str
    schedule: str
    variants: str
    fits: tuple[str, ...]
    """For each of ULYSSES."""
    float32: float
    bfloat16: float

    def written(self) -> str:
        errors = f"{self.float32:.2f} | {self.bfloat16:.2f}"
        return f"| `{self.kind}` | `{self.schedule}` | {self.variants} | {' | '.join(self.fits)} | {errors} |"


def fit(schedule: str, ranks: int) -> str:
    """What an arena takes on each rank at the schedule's own sizes; "no" with the code where it does not go."""
    try:
        level = check_schedule(load_schedule(schedule_path(schedule), (("mesh.ulysses", str(ranks)),)))
    except StepgraphError as error:
        return f"no ({error.diagnostics[0].code})"
    return f"{level.arena_bytes / 1e6:.0f} MB"


def families() -> dict[tuple[str, str], list[str]]:
    """The tiny models of each class and schedule."""
    found: dict[tuple[str, str], list[str]] = {}
    for name, tiny in FAMILIES.items():
        found.setdefault((type(tiny.made()).__name__, tiny.schedule), []).append(name)
    return {key: found[key] for key in sorted(found, key=lambda key: list(FILES).index(key[0]))}


def planned(schedule: str) -> tuple[str, tuple[str, ...]]:
    """Of a schedule: its variants, and how it fits; nothing that is measured."""
    variants = ", ".join(variant.name for variant in load_schedule(schedule_path(schedule)).variants)
    return variants or "full", tuple(fit(schedule, ranks) for ranks in ULYSSES)


def row(kind: str, schedule: str, names: list[str]) -> Row:
    cases = [(FAMILIES[name], ranks, uneven) for name in names for ranks in (2, 4) for uneven in (False, True)]
    worst = [
        max(measured(tiny, dtype, ranks, uneven) for tiny, ranks, uneven in cases)
        for dtype in (torch.float32, torch.bfloat16)
    ]
    return Row(kind, schedule, *planned(schedule), *worst)


def page(rows: list[Row]) -> str:
    return f"""# Models

Each class of diffusers that [bindings.md](bindings.md) names, with the schedule that corresponds to it. U2, U4 and U8:
what the arena of symmetric memory takes on each rank at the schedule's own sizes, over so many Ulysses ranks. float32
and bfloat16: how far a sharded step of a tiny random model is from the model's own forward in float64, as a multiple of
how far the model's own forward in that dtype is; the largest over 2 and 4 ranks and over lengths that ranks divide and
don't, on the cpu device. 1 means as near as the model itself. `tests/support/models_table.py` writes this page.

{HEAD}
|{"---|" * HEAD.count(" | ")}---|
{chr(10).join(row.written() for row in rows)}
"""


if __name__ == "__main__":
    torch.set_num_threads(1)
    PAGE.write_text(
        page([row(kind, schedule, names) for (kind, schedule), names in families().items()]), encoding="utf-8"
    )
