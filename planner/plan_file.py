"""Files of plans: one line of canonical JSON under a hash. Reading one runs no code of the file's."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from stepgraph.planner.diagnostics import Diagnostic, PlanError

VERSION = 1
MAX_PLAN_BYTES = 1 << 30
RECOMPILE = "compile the schedule again with 'stepgraph compile'"
Content = TypeVar("Content")


def refuse(code: str, message: str, expected: str, got: str, hint: str = RECOMPILE) -> PlanError:
    return PlanError([Diagnostic(code, message, None, expected, got, hint)])


def digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def sealed(kind: str, key: str, body: bytes) -> str:
    """The text of a file: keys in declaration order, with the SHA-256 of the body in front."""
    return f'{{"format":"{kind}","version":{VERSION},"sha256":"{digest(body)}","{key}":' + body.decode() + "}\n"


def unsealed(text: str, kind: str, key: str, adapter: TypeAdapter[Content], edited: bool) -> Content:
    """What a file holds, refusing what is not whole, not of this version, or not what was hashed (unless it was
    ``edited`` by hand).

    Raises:
        PlanError: E150 not such a file, E151 version, E152 hash, E153 schema.
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise refuse("E150", "the file is not a plan", "JSON", str(error)[:120]) from None
    if not isinstance(document, dict) or document.get("format") != kind:
        raise refuse("E150", "the file is not a plan", f'"format": "{kind}"', "another document")
    if document.get("version") != VERSION:
        raise refuse("E151", "the plan is of another version", str(VERSION), str(document.get("version"))[:40])
    try:
        found = adapter.validate_json(json.dumps(document.get(key)))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        problem = f"the plan does not follow its schema at '{where}'"
        raise refuse("E153", problem, first["msg"], repr(first["input"])[:80]) from None
    actual = digest(adapter.dump_json(found))
    if document.get("sha256") != actual and not edited:
        hint = f"every command takes a plan that was edited by hand with --edited; else {RECOMPILE}"
        raise refuse("E152", "the plan is not what was hashed", str(document.get("sha256"))[:64], actual, hint)
    return found


def read_text(path: Path) -> str:
    """The text of a file. Raises PlanError E150 where it can't be read."""
    try:
        if path.stat().st_size > MAX_PLAN_BYTES:
            raise refuse("E150", f"{path} is too large", f"at most {MAX_PLAN_BYTES} bytes", "more")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise refuse("E150", f"{path} can't be read", "a plan file", error.strerror or "an error") from None
    except UnicodeDecodeError:
        raise refuse("E150", f"{path} is not a plan", "text", "other bytes") from None
