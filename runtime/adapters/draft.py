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
from stepgraph.runtime.adapters.binding import BindingError, Settings
from stepgraph.runtime.adapters.family import Config, Family, family_of


def draft(source: str, name: str) -> str:
    """The shipped schedule of a class's family under a name of its own, with the sizes of a config. ``source`` is the
    class, as ``diffusers.WanTransformer3DModel``, for its default config, or the path of a model's ``config.json`` or
    of the folder that holds it.

    Raises:
        BindingError: E622 for a class without a binding, E620 for a config with parts that the schedule has no op for.
        CapabilityError: E601 where diffusers is not installed. ScheduleError: E100 for a file that is no config.
    """
    path = Path(source) / "config.json" if source and Path(source).is_dir() else Path(source)
    given = _read(path) if path.suffix == ".json" or "/" in source else {}
    module, _, kind = ("", "", str(given["_class_name"])) if given else source.rpartition(".")
    if importlib.util.find_spec("diffusers") is None:
        hint = "pip install 'stepgraph[diffusers]'"
        message = "the package diffusers is not installed"
        raise CapabilityError([Diagnostic("E601", message, None, "diffusers, for its configs", "nothing", hint)])
    family = family_of(kind, module or "diffusers")
    config = {**_defaults(kind), **given}
    try:
        problems, sizes = list(family.refuses(config)), family.settings(config)
    except (TypeError, ValueError, ArithmeticError) as error:
        got = f"{type(error).__name__}: {error}"
        message = f"{source} is no config of {kind}"
        raise ScheduleError([Diagnostic("E100", message, None, "values as the class takes", got)]) from None
    if problems:
        expected = f"what the schedule {family.schedule} computes"
        raise BindingError([Diagnostic("E620", problem, None, expected, "something else") for problem in problems])
    return _written(family, sizes, source, name)


def _read(path: Path) -> Config:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        got = error.strerror if isinstance(error, OSError) and error.strerror else "other text"
        hint = "take the pipeline's folder `transformer`" if path.with_name("model_index.json").exists() else ""
        raise ScheduleError([Diagnostic("E100", f"{path} is no config", None, "JSON", got, hint)]) from None
    if not isinstance(found, dict) or "_class_name" not in found:
        got = "one without" if isinstance(found, dict) else "other JSON"
        raise ScheduleError([Diagnostic("E100", f"{path} is no config", None, "a JSON object with _class_name", got)])
    return found


def _defaults(kind: str) -> Config:
    """The config that a class has by default."""
    made = getattr(importlib.import_module("diffusers"), kind).__init__
    parameters = inspect.signature(made).parameters
    return {name: found.default for name, found in parameters.items() if found.default is not inspect.Parameter.empty}


def _written(family: Family, settings: Settings, source: str, name: str) -> str:
    text = schedule_path(family.schedule).read_text(encoding="utf-8")
    body = "\n".join(line for line in text.splitlines() if not line.startswith("#")) + "\n"
    for section in ("model", "sizes"):
        sizes = {path.split(".")[1]: size for path, size in settings.items() if path.startswith(section)}
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
