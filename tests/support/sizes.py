"""Small sizes for the shipped schedules: every mechanism stays, arithmetic shrinks."""

from pathlib import Path

from stepgraph.planner.compile import compile_schedule, compile_set
from stepgraph.planner.plan import Plan
from stepgraph.planner.plan_set import PlanSet
from stepgraph.planner.schedule import Schedule, load_schedule

PLANS = Path(__file__).parents[2] / "plans"
SETS = sorted(path.stem for path in PLANS.glob("*.yaml") if "\nvariants:" in path.read_text())
"""Shipped schedules with several versions of their step."""
SHIPPED = sorted(path.stem for path in PLANS.glob("*.yaml") if path.stem not in SETS)


def small_schedule(name: str, **more: str) -> Schedule:
    """A shipped schedule with two or three layers and sizes that don't divide; ``more`` are settings, with _ for dots
    written as __."""
    found = load_schedule(PLANS / f"{name}.yaml")
    settings = {"model.layers": "2", "model.hidden": "48", "model.heads": "9", "model.head_dim": "4", "model.ffn": "32"}
    if "tp2" in name:
        settings["model.heads"] = "10"
    if len(found.segments) == 1:
        settings["shape.seq"] = "21"
    else:
        settings |= {f"shape.seq.{segment}": str(21 - 8 * index) for index, (segment, _) in enumerate(found.segments)}
    settings |= {f"sizes.{size}": "2" if size.endswith("_layers") else "20" for size, _ in found.own_sizes}
    rows = {"cache": "29", "kv": "27", "past": "5"}
    settings |= {f"shape.{name}": rows[name] for name, _ in found.more_sizes}
    settings |= {key.replace("__", "."): value for key, value in more.items()}
    return load_schedule(PLANS / f"{name}.yaml", tuple(settings.items()))


def small_plan(name: str, **more: str) -> Plan:
    return compile_schedule(small_schedule(name, **more))


def small_set(name: str, **more: str) -> PlanSet:
    """A shipped schedule of several versions, with four layers."""
    settings = {"model.layers": "4", "model.hidden": "48", "model.heads": "9", "model.head_dim": "4", "model.ffn": "32"}
    if name == "minimax_h3_cached_u4":
        settings |= {"sizes.ends": "1", "sizes.middle": "2", "sizes.last": "3", "shape.seq": "21"}
    elif name == "wan_14b_cached_u4":
        settings |= {"sizes.ends": "1", "sizes.middle": "2", "sizes.last": "3"}
        settings |= {"shape.seq.vid": "21", "shape.seq.txt": "5", "sizes.patch_in": "20", "sizes.text_dim": "20"}
    else:
        settings |= {"sizes.but_last": "3", "shape.seq.vid": "7", "shape.seq.txt": "5", "shape.cache": "32"}
        for chunk, kv in enumerate((7, 14, 21, 28, 32), 1):
            settings |= {f"buckets.chunk{chunk}.kv": str(kv), f"buckets.chunk{chunk}.past": str(kv - 7)}
    settings |= {key.replace("__", "."): value for key, value in more.items()}
    return compile_set(load_schedule(PLANS / f"{name}.yaml", tuple(settings.items())))
