"""Turns what pydantic says of a source tree into diagnostics with places, expected and got, and nearest names."""

from __future__ import annotations

import re
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from stepgraph.planner.diagnostics import Diagnostic, nearest
from stepgraph.planner.ops import OP_KINDS, ChunkSpec, Entry, LayerRun, Model
from stepgraph.planner.source import SourceTree

Path = tuple[str | int, ...]

_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "string_type": "a name",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "a map",
    "model_type": "a map",
    "model_attributes_type": "a map",
    "missing": "this key",
    "enum": "bfloat16, float16, float32, float64 or bool",
    "is_instance_of": "bfloat16, float16, float32, float64 or bool",
    "string_pattern_mismatch": "a name: letters, digits and _, not starting with a digit, with at most one dot",
    "too_short": "at least one",
    "too_long": "fewer items",
}


def _data_path(loc: Path, data: object) -> tuple[Path, bool]:
    """The part of ``loc`` that leads through ``data`` (pydantic adds the names of union members), and whether the
    last step of it leads to something that is there."""
    path: list[str | int] = []
    here: Any = data
    for index, part in enumerate(loc):
        last = index == len(loc) - 1
        in_list = isinstance(here, list) and isinstance(part, int) and part < len(here)
        if in_list or (isinstance(here, dict) and part in here):
            path.append(part)
            here = here[part]
        elif last and isinstance(here, dict) and isinstance(part, str) and part.isidentifier():
            path.append(part)
            return tuple(path), False
    return tuple(path), True


def _expected(error: ErrorDetails) -> str:
    context = error.get("ctx", {})
    kind = error["type"]
    if kind == "literal_error":
        return re.sub(r"<\w+\.\w+: (\w+)>", r"\1", str(context["expected"]).replace("'", ""))  # members of an enum
    if kind == "greater_than_equal":
        return f"at least {context['ge']}"
    if kind == "less_than_equal":
        return f"at most {context['le']}"
    return _EXPECTED.get(kind, error["msg"].lower())


def _show(value: object) -> str:
    if isinstance(value, dict):
        return "a map"
    if isinstance(value, list | tuple):
        return "a list" if value else "an empty list"
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, str) else str(value)


def _known_keys(path: Path) -> list[str]:
    """The keys that may stand where ``path`` (without its last part) leads."""
    from stepgraph.planner import document as levels

    parents = path[:-1]
    if not parents:
        return list(levels.Document.model_fields)
    if len(parents) >= 2 and isinstance(parents[-1], int) and parents[0] in ("blocks", "step"):
        return list(Entry.model_fields)
    kind = parents[-1]
    named: dict[str, type[Model]] = {
        "model": levels.ModelSizes,
        "shape": levels.ShapeSizes,
        "defaults": levels.Defaults,
    }
    if isinstance(kind, str):
        if len(parents) == 1 and kind in named:
            return list(named[kind].model_fields)
        if len(parents) == 1 and kind == "mesh":
            return ["ulysses", "tensor", "cfg"]
        if parents[0] == "inputs":
            return list(levels.InputSpec.model_fields)
        if parents[0] == "state":
            return list(levels.StateSpec.model_fields)
        if parents[0] == "defaults":
            kind_defaults: Model = getattr(levels.Defaults(), kind, levels.KindDefaults())
            return list(type(kind_defaults).model_fields)
        if kind == "chunks":
            return list(ChunkSpec.model_fields)
        if kind in OP_KINDS:
            return [info.alias or name for name, info in OP_KINDS[kind].model_fields.items()]
        if len(parents) == 2 and parents[0] == "variants":
            return list(levels.VariantSpec.model_fields)
    return list(LayerRun.model_fields)


def schema_diagnostics(error: ValidationError, tree: SourceTree) -> list[Diagnostic]:
    """One diagnostic for each place that is wrong, in the order of the file."""
    found: dict[Path, list[tuple[ErrorDetails, bool]]] = {}
    for item in error.errors(include_url=False):
        path, there = _data_path(item["loc"], tree.data)
        found.setdefault(path, []).append((item, there))
    problems = []
    for path, items in found.items():
        deeper = any(other != path and other[: len(path)] == path for other in found)
        if deeper and all(len(item["loc"]) > len(path) for item, _ in items):
            continue  # another member of the union came further: its errors tell more
        problems.append(_diagnostic(path, items, tree))
    return sorted(problems, key=lambda d: (d.place.line, d.place.column) if d.place else (0, 0))


def _diagnostic(path: Path, items: list[tuple[ErrorDetails, bool]], tree: SourceTree) -> Diagnostic:
    first, there = items[0]
    where = ".".join(str(part) for part in path) or "the file"
    if first["type"] in ("extra_forbidden", "invalid_key") or (
        first["type"] == "literal_error" and path[0] == "mesh" and first["loc"][-1] == "[key]"
    ):
        known = _known_keys(path)
        is_kind = len(path) >= 2 and isinstance(path[-2], int) and path[0] in ("blocks", "step")
        what = "op kind" if is_kind else "key"
        hint = nearest(str(path[-1]), known) or f"known here: {', '.join(known)}"
        return Diagnostic("E102", f"unknown {what} '{path[-1]}'", tree.key_place(path), "", "", hint)
    if first["type"] == "missing" and not there:
        parent = path[:-1]
        of = f"`{parent[-1]}`" if parent and isinstance(parent[-1], str) else "this"
        if not parent:
            of = "the schedule"
        return Diagnostic(
            "E104",
            f"{of} lacks the key '{path[-1]}'",
            tree.key_place(parent) if parent else tree.place(()),
            f"'{path[-1]}'",
            "",
            "",
        )
    expected = list(dict.fromkeys(_expected(item) for item, _ in items))
    if isinstance(path[-1] if path else None, str) and path[-1] in OP_KINDS and "a map" in expected:
        expected = ["a name, a list of names, or a map"]
    if path and isinstance(path[-1], int) and path[0] in ("blocks", "step"):
        expected = ["a map of one key, the op's kind, as `send: v`"]
    got = _show(items[0][0]["input"])
    choices = [word.strip() for text in expected for word in text.replace(" or ", ",").split(",")]
    hint = nearest(str(items[0][0]["input"]), choices) if isinstance(items[0][0]["input"], str) else ""
    return Diagnostic("E103", f"'{where}' has a wrong value", tree.place(path), " or ".join(expected), got, hint)
