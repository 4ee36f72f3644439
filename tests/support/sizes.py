"""Small sizes for the shipped schedules: every mechanism stays, arithmetic shrinks."""

from pathlib import Path

from stepgraph.planner.compile import compile_schedule
from stepgraph.planner.plan import Plan
from stepgraph.planner.schedule import Schedule, load_schedule, read_schedule

PLANS = Path(__file__).parents[2] / "plans"
SHIPPED = sorted(path.stem for path in PLANS.glob("*.yaml"))


def small_schedule(name: str, **more: str) -> Schedule:
    """A shipped schedule with two or three layers and sizes that don't divide; ``more`` are settings, with _ for dots
    written as __."""
    text = (PLANS / f"{name}.yaml").read_text()
    if name == "flux_1024_u4":
        text = text.replace("repeat: 19", "repeat: 2").replace("repeat: 38", "repeat: 2")
    found = load_schedule(PLANS / f"{name}.yaml")
    settings = {"model.layers": "2", "model.hidden": "48", "model.heads": "9", "model.head_dim": "4", "model.ffn": "32"}
    if "tp2" in name:
        settings["model.heads"] = "10"
    if len(found.segments) == 1:
        settings["shape.seq"] = "21"
    else:
        settings |= {f"shape.seq.{segment}": str(21 - 8 * index) for index, (segment, _) in enumerate(found.segments)}
    rows = {"cache": "29", "kv": "27", "past": "5"}
    settings |= {f"shape.{name}": rows[name] for name, _ in found.more_sizes}
    settings |= {key.replace("__", "."): value for key, value in more.items()}
    return read_schedule(text, f"{name}.yaml", tuple(settings.items()))


def small_plan(name: str, **more: str) -> Plan:
    return compile_schedule(small_schedule(name, **more))
