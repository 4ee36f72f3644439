"""What a user is told when something is wrong: code, place, rule, expected and got, hint.

Codes: E1xx file and schema, E2xx placement, shape and dataflow, E3xx race, E4xx deadlock and flags, E5xx memory,
E6xx capability, W7xx speed.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Place:
    """A stretch of one line of a file. ``line`` and ``column`` count from 1, ``length`` is in characters."""

    file: str
    line: int
    column: int
    length: int = 1
    text: str = ""
    """The line itself, without its newline, for the excerpt."""


@dataclass(frozen=True, slots=True)
class Diagnostic:
    code: str
    message: str
    place: Place | None = None
    expected: str = ""
    got: str = ""
    hint: str = ""

    @property
    def is_error(self) -> bool:
        return self.code.startswith("E")

    def render(self) -> str:
        """Several lines: place and message, the underlined excerpt, expected and got, hint."""
        head = f"{self.code}: {self.message}"
        lines = [head]
        if self.place is not None:
            at = self.place
            lines = [f"{at.file}:{at.line}:{at.column}: {head}"]
            if at.text:
                number = str(at.line)
                lines.append(f"  {number} | {at.text}")
                lines.append(f"  {' ' * len(number)} | {' ' * (at.column - 1)}{'^' * max(1, at.length)}")
        if self.expected:
            lines.append(f"  expected: {self.expected}")
        if self.got:
            lines.append(f"  got:      {self.got}")
        if self.hint:
            lines.append(f"  hint:     {self.hint}")
        return "\n".join(lines)


class StepgraphError(Exception):
    """An error that its reader can mend. ``diagnostics`` is never empty."""

    def __init__(self, diagnostics: Iterable[Diagnostic]) -> None:
        self.diagnostics = tuple(diagnostics)
        super().__init__("\n".join(d.render() for d in self.diagnostics))

    def __reduce__(self) -> tuple[type[StepgraphError], tuple[tuple[Diagnostic, ...]]]:
        return type(self), (self.diagnostics,)

    @property
    def exit_code(self) -> int:
        """What a command that ends with this exits with: 1 findings, 2 usage or I/O, 3 a capability is missing."""
        codes = {diagnostic.code for diagnostic in self.diagnostics}
        if codes & {"E100", "E109", "E150"}:
            return 2
        return 3 if any(code.startswith("E6") for code in codes) else 1


class ScheduleError(StepgraphError):
    """The schedule can't be read or means nothing (E1xx, E2xx)."""


class PlanError(StepgraphError):
    """A plan file is cut off, edited, of another version, or refers to what is not there (E15x)."""


class ProofError(StepgraphError):
    """A plan is not free of races or deadlocks (E3xx, E4xx)."""


class CapabilityError(StepgraphError):
    """This machine lacks what the command needs (E6xx)."""


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint that names the known word closest to ``word``; empty when none is close."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"did you mean '{close[0]}'?" if close else ""
