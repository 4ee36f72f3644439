"""A schedule for a class of diffusers, with the sizes of its config."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import re
from pathlib import Path

from stepgraph.planner.diagnostics import CapabilityError, Diagnostic, ScheduleError
from stepgraph.planner.schedule import schedule_path
from stepgraph.runtime.adapters.binding import BindingError
from stepgraph.runtime.adapters.family import Config, Family, family_of


def draft(source: str, name: str) -> str:
    """The shipped schedule of a class's family under a name of its own, with the sizes of a config. ``source`` is the
    class, as ``diffusers.WanTransformer3DModel``, for its default config, or the path of a model's ``config.json``.

    Raises:
        BindingError: E622 for a class without a binding, E620 for a config with parts that the schedule has no op for.
        CapabilityError: E601 where diffusers is not installed. ScheduleError: E100 for a file that is no config.
    """
    given = _read(Path(source)) if source.endswith(".json") else {}
    kind = str(given.get("_class_name", "")) if source.endswith(".json") else source.rpartition(".")[2]
    module = "diffusers" if source.endswith(".json") else source.rpartition(".")[0]
    if importlib.util.find_spec("diffusers") is None:
        hint = "pip install 'stepgraph[diffusers]'"
        message = "the package diffusers is not installed"
        raise CapabilityError([Diagnostic("E601", message, None, "diffusers, for its configs", "nothing", hint)])
    family = family_of(kind, module)
    config = {**_defaults(kind), **given}
    problems = list(family.refuses(config))
    if problems:
        expected = f"what the schedule {family.schedule} computes"
        raise BindingError([Diagnostic("E620", problem, None, expected, "something else") for problem in problems])
    return _written(family, config, source, name)


def _read(path: Path) -> Config:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        got = error.strerror if isinstance(error, OSError) and error.strerror else "other text"
        raise ScheduleError([Diagnostic("E100", f"{path} is no config", None, "JSON", got)]) from None
    if not isinstance(found, dict):
        raise ScheduleError([Diagnostic("E100", f"{path} is no config", None, "a JSON object", "other JSON")])
    return found


def _defaults(kind: str) -> Config:
    """The config that a class has by default."""
    made = getattr(importlib.import_module("diffusers"), kind).__init__
    parameters = inspect.signature(made).parameters
    return {name: found.default for name, found in parameters.items() if found.default is not inspect.Parameter.empty}


def _written(family: Family, config: Config, source: str, name: str) -> str:
    text = schedule_path(family.schedule).read_text(encoding="utf-8")
    body = "\n".join(line for line in text.splitlines() if not line.startswith("#")) + "\n"
    for section in ("model", "sizes"):
        sizes = {path.split(".")[1]: size for path, size in family.settings(config).items() if path.startswith(section)}
        if section == "model":
            sizes["dtype"] = "bfloat16"
        line = f"{section}: {{{', '.join(f'{size}: {value}' for size, value in sizes.items())}}}"
        body = re.sub(rf"^{section}: \{{.*\}}$", line, body, flags=re.M)
    body = re.sub(r"^name: .*$", f"name: {name}", body, flags=re.M)
    head = [
        f"# {source}, after the shipped schedule {family.schedule}: set mesh, shape and dtype, then reorder ops.",
        "# stepgraph.wrap(model, THIS_FILE) runs it in place of the model; lengths then come from each call.",
    ]
    return "\n".join(head) + "\n" + body
