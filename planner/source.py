"""Reads a YAML file into plain data, with the place of every key and value. Constructs no objects.

Scalars are resolved here, not by YAML: decimal integers, decimal floats, true, false, null, and names. What YAML 1.1
would turn into something else (``no``, ``1:30``, ``010``, a date) is refused, as are anchors, tags, merge keys and
duplicate keys. Time and memory are bounded by limits on bytes, depth and nodes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from stepgraph.planner.diagnostics import Diagnostic, Place, ScheduleError, nearest

MAX_BYTES = 1 << 20
MAX_DEPTH = 50
MAX_NODES = 100_000

Data = None | bool | int | float | str | list["Data"] | dict[str, "Data"]
TreePath = tuple[str | int, ...]
Overrides = tuple[tuple[str, str], ...]
"""(dotted path, value as written), as ("model.layers", "2")."""

_INT = re.compile(r"[-+]?(0|[1-9][0-9]{0,18})$")
_FLOAT = re.compile(r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))([eE][-+]?[0-9]{1,4})?$")
_SURPRISES = (
    (re.compile(r"(yes|no|on|off|true|false)$", re.I), "a boolean in some parsers", "write true or false, or quote it"),
    (re.compile(r"null$", re.I), "null in some parsers", "write null, or quote it"),
    (re.compile(r"[-+]?[0-9]+(:[0-5]?[0-9])+(\.[0-9_]*)?$"), "a number in base 60 in some parsers", "quote it"),
    (
        re.compile(r"[-+]?0[0-7_]+$|[-+]?0o[0-7_]+$"),
        "an octal number in some parsers",
        "write it in decimal, or quote it",
    ),
    (re.compile(r"[-+]?0x[0-9a-fA-F_]+$|[-+]?0b[01_]+$"), "not a decimal number", "write it in decimal, or quote it"),
    (re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?$"), "not a plain decimal number", "write the digits alone"),
    (re.compile(r"[-+]?\.(inf|nan)$", re.I), "infinity or not a number in some parsers", "quote it"),
    (re.compile(r"[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}([Tt \t].*)?$"), "a date in some parsers", "quote it"),
)
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class _Mark:
    """Line and columns, from 0; ``end`` is None where the value goes on after the line."""

    line: int
    column: int
    end: int | None


@dataclass(frozen=True, slots=True)
class SourceTree:
    """The data of a file and where each part of it stands."""

    file: str
    text: str
    data: dict[str, Data]
    overrides: Overrides
    values: dict[TreePath, _Mark] = field(repr=False)
    keys: dict[TreePath, _Mark] = field(repr=False)
    set_places: dict[TreePath, Place] = field(repr=False)

    def value(self, path: TreePath) -> Data:
        """The data at a path. Raises KeyError, IndexError or TypeError where it leads nowhere."""
        here: Data = self.data
        for part in path:
            here = here[part]  # type: ignore[index]
        return here

    def has(self, path: TreePath) -> bool:
        return path in self.values or path in self.set_places

    def place(self, path: TreePath) -> Place:
        """Where the value at ``path`` stands, or its nearest ancestor."""
        return self._find(path, self.values)

    def key_place(self, path: TreePath) -> Place:
        """Where the last key of ``path`` stands, or its nearest ancestor."""
        return self._find(path, self.keys)

    def _find(self, path: TreePath, marks: dict[TreePath, _Mark]) -> Place:
        for length in range(len(path), -1, -1):
            here = path[:length]
            if here in self.set_places:
                return self.set_places[here]
            mark = marks.get(here) or self.values.get(here)
            if mark is not None:
                return _place(self.file, self.text.split("\n"), mark)
        return Place(self.file, 1, 1)


def _place(file: str, lines: list[str], mark: _Mark) -> Place:
    line = lines[mark.line].rstrip() if mark.line < len(lines) else ""
    end = len(line) if mark.end is None else mark.end
    return Place(file, mark.line + 1, mark.column + 1, max(1, end - mark.column), line)


class _Builder:
    """Builds data and marks from parser events, without recursion; collects what is refused."""

    def __init__(self, text: str, file: str) -> None:
        self.file = file
        self.lines = text.split("\n")
        self.problems: list[Diagnostic] = []
        self.values: dict[TreePath, _Mark] = {}
        self.keys: dict[TreePath, _Mark] = {}
        self.root: Data = None
        self.stack: list[tuple[TreePath, dict[str, Data] | list[Data]]] = []
        self.pending: str | None = None
        """The key whose value comes next."""
        self.skipping = 0
        """How deep inside a collection that is thrown away: a key's, or a refused key's value."""
        self.skip_value = False
        self.nodes = 0
        self.documents = 0

    def refuse(self, code: str, mark: _Mark, message: str, expected: str = "", got: str = "", hint: str = "") -> None:
        place = _place(self.file, self.lines, mark)
        self.problems.append(Diagnostic(code, message, place, expected, got, hint))

    def stop(self, code: str, mark: _Mark, message: str, expected: str, got: str, hint: str = "") -> ScheduleError:
        self.refuse(code, mark, message, expected, got, hint)
        return ScheduleError(self.sorted())

    def sorted(self) -> list[Diagnostic]:
        return sorted(self.problems, key=lambda d: (d.place.line, d.place.column) if d.place else (0, 0))

    def feed(self, event: yaml.Event) -> None:
        mark = _mark(event)
        if isinstance(event, yaml.DocumentStartEvent):
            self.documents += 1
            if self.documents > 1:
                raise self.stop("E107", mark, "the file holds several documents", "one", "a second one")
        elif isinstance(event, yaml.AliasEvent):
            self.refuse("E107", mark, "an alias", "the value itself", f"*{event.anchor}", "write the value out")
            self.add(None, mark)
        elif isinstance(event, yaml.NodeEvent):
            self.node(event, mark)
        elif isinstance(event, yaml.CollectionEndEvent):
            if self.skipping:
                self.skipping -= 1
            else:
                self.stack.pop()

    def node(self, event: yaml.NodeEvent, mark: _Mark) -> None:
        self.nodes += 1
        if self.nodes > MAX_NODES:
            raise self.stop("E108", mark, "the file holds too many values", f"at most {MAX_NODES}", "more")
        if len(self.stack) + self.skipping >= MAX_DEPTH:
            raise self.stop("E108", mark, "the file is nested too deeply", f"at most {MAX_DEPTH} levels", "more")
        tag = getattr(event, "tag", None)
        if event.anchor is not None:
            self.refuse("E107", mark, "an anchor", "no anchors or aliases", f"&{event.anchor}", "write the value out")
        elif tag is not None and tag != "!":
            self.refuse("E107", mark, "a tag", "no tags", str(tag)[:60], "take the tag out")
        if isinstance(event, yaml.ScalarEvent):
            plain = not event.style
            self.add(self.scalar(event.value, mark) if plain else event.value, mark, event.value)
            return
        if self.skipping:
            self.skipping += 1
            return
        new: dict[str, Data] | list[Data] = {} if isinstance(event, yaml.MappingStartEvent) else []
        if self.stack and isinstance(self.stack[-1][1], dict) and self.pending is None and not self.skip_value:
            self.refuse("E103", mark, "a key is a name", "a name", "a list or a map")
            self.skipping, self.skip_value = 1, True
            return
        if self.skip_value:
            self.skipping, self.skip_value = 1, False
            return
        self.stack.append((self.add(new, mark), new))

    def scalar(self, text: str, mark: _Mark) -> Data:
        value, surprise = resolve(text)
        if surprise is not None:
            what, hint = surprise
            self.refuse("E106", mark, f"'{text}' is {what}", "a value that means one thing", f"'{text}'", hint)
        return value

    def add(self, value: Data, mark: _Mark, text: str = "") -> TreePath:
        """Put a value where it belongs; a scalar may turn out to be a key. Gives the value's path."""
        if self.skipping:
            return ()
        if not self.stack:
            self.root = value
            self.values[()] = mark
            return ()
        path, parent = self.stack[-1]
        if isinstance(parent, list):
            parent.append(value)
            here = (*path, len(parent) - 1)
        elif self.skip_value:
            self.skip_value = False
            return ()
        elif self.pending is None:
            self.key(value, text, path, parent, mark)
            return ()
        else:
            parent[self.pending] = value
            here = (*path, self.pending)
            self.pending = None
        self.values[here] = mark
        return here

    def key(self, value: Data, text: str, path: TreePath, parent: dict[str, Data], mark: _Mark) -> None:
        if text == "<<":
            self.refuse("E107", mark, "a merge key", "the keys themselves", "<<", "write the keys out")
        elif not isinstance(value, str):
            self.refuse("E103", mark, "a key is a name", "a name", f"'{text}'")
        elif value in parent:
            first = self.keys[(*path, value)].line + 1
            self.refuse(
                "E105",
                mark,
                f"the key '{value}' stands twice",
                "each key once",
                f"also in line {first}",
                "take one of them out",
            )
        else:
            self.pending = value
            parent[value] = None
            self.keys[(*path, value)] = mark
            return
        self.skip_value = True


def _mark(event: yaml.Event) -> _Mark:
    start, end = event.start_mark, event.end_mark
    assert start is not None
    assert end is not None
    same_line = end.line == start.line and end.column > start.column
    return _Mark(start.line, start.column, end.column if same_line and isinstance(event, yaml.ScalarEvent) else None)


def resolve(text: str) -> tuple[Data, tuple[str, str] | None]:
    """What a plain scalar means, and, where parsers disagree on it, (how another one reads it, a hint)."""
    simple: dict[str, Data] = {"true": True, "false": False, "null": None, "~": None, "": None}
    if text in simple:
        return simple[text], None
    if _INT.match(text):
        return int(text), None
    if _FLOAT.match(text):
        return float(text), None
    for pattern, what, hint in _SURPRISES:
        if pattern.match(text):
            return text, (what, hint)
    return text, None


def _refuse(code: str, file: str, message: str, expected: str, got: str, hint: str = "") -> ScheduleError:
    return ScheduleError([Diagnostic(code, message, Place(file, 1, 1), expected, got, hint)])


def read(text: str, file: str, overrides: Overrides = ()) -> SourceTree:
    """The tree of a YAML text; ``file`` is the name that diagnostics give.

    Raises:
        ScheduleError: E100, E101, E103, E105 to E109, all that could be found.
    """
    if len(text.encode("utf-8", "surrogatepass")) > MAX_BYTES:
        raise _refuse("E108", file, "the file is too large", f"at most {MAX_BYTES} bytes", f"{len(text)} characters")
    found = _CONTROL.search(text)
    if found:
        line = text.count("\n", 0, found.start())
        raise ScheduleError(
            [Diagnostic("E100", "the file is not text", Place(file, line + 1, 1), "text", f"byte {ord(found[0])}")]
        )
    builder = _Builder(text, file)
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        for event in yaml.parse(text, Loader=loader):
            builder.feed(event)
    except yaml.YAMLError as error:
        raise _syntax(error, builder) from None
    if builder.problems:
        raise ScheduleError(builder.sorted())
    if not isinstance(builder.root, dict):
        got = "nothing" if builder.root is None else "a list" if isinstance(builder.root, list) else "a single value"
        raise _refuse("E103", file, "a schedule is a map", "version, name, model, ...", got)
    sets = _apply(builder.root, overrides)
    return SourceTree(file, text, builder.root, overrides, builder.values, builder.keys, sets)


def _syntax(error: yaml.YAMLError, builder: _Builder) -> ScheduleError:
    mark = getattr(error, "problem_mark", None)
    at = _Mark(min(mark.line, len(builder.lines) - 1), mark.column, mark.column + 1) if mark else _Mark(0, 0, 1)
    line = builder.lines[at.line]
    tab = "\t" in line[: len(line) - len(line.lstrip())]
    hint = "indent with spaces" if tab else "check brackets, quotes and indentation here and in the line above"
    return builder.stop("E101", at, "this is not YAML", "YAML", getattr(error, "problem", None) or str(error), hint)


def read_file(path: Path, overrides: Overrides = ()) -> SourceTree:
    """The tree of a file. Raises ScheduleError as ``read`` does, and E100 where the file can't be read."""
    name = str(path)
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise _refuse("E108", name, "the file is too large", f"at most {MAX_BYTES} bytes", f"{size} bytes")
        with path.open("rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise _refuse("E100", name, "the file can't be read", "a readable file", error.strerror or "an error") from None
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _refuse(
            "E100", name, "the file is not text", "UTF-8", f"byte {raw[error.start]} at {error.start}"
        ) from None
    return read(text, path.name, overrides)


# Overrides


def parse_overrides(options: tuple[str, ...]) -> Overrides:
    """What ``--set a.b=1,c.d=2`` options say.

    Raises:
        ScheduleError: E109 for a part that is not PATH=VALUE.
    """
    found = []
    for option in options:
        for part in option.split(","):
            path, equals, value = part.partition("=")
            if not equals or not all(path.strip().split(".")) or not value.strip():
                place = Place("--set", 1, option.index(part) + 1 if part else 1, max(1, len(part)), option)
                raise ScheduleError(
                    [Diagnostic("E109", "a setting is PATH=VALUE", place, "model.layers=2", part or "nothing")]
                )
            found.append((path.strip(), value.strip()))
    return tuple(found)


def _apply(root: dict[str, Data], overrides: Overrides) -> dict[TreePath, Place]:
    places: dict[TreePath, Place] = {}
    for dotted, text in overrides:
        written = f"{dotted}={text}"
        place = Place("--set", 1, 1, len(written), written)
        path = tuple(dotted.split("."))
        here = root
        for depth, part in enumerate(path[:-1]):
            below = here.setdefault(part, {}) if depth > 0 or part in ("defaults", "shape") else here.get(part)
            if not isinstance(below, dict):
                known = [key for key, value in here.items() if isinstance(value, dict)]
                raise ScheduleError(
                    [
                        Diagnostic(
                            "E109",
                            f"'{'.'.join(path[: depth + 1])}' is no map",
                            place,
                            "a path through maps",
                            "nothing" if below is None else "a value",
                            nearest(part, known),
                        )
                    ]
                )
            here = below
        value, surprise = resolve(text)
        if surprise is not None:
            raise ScheduleError(
                [
                    Diagnostic(
                        "E106",
                        f"'{text}' is {surprise[0]}",
                        place,
                        "a value that means one thing",
                        f"'{text}'",
                        surprise[1],
                    )
                ]
            )
        here[path[-1]] = value
        places[path] = Place("--set", 1, len(dotted) + 2, len(text), written)
    return places
