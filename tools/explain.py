"""stepgraph explain."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import get_args

import click
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from stepgraph.planner.diagnostics import nearest
from stepgraph.tools.output import emit_json, format_option


def _type_words(info: FieldInfo) -> str:
    """What a field takes, in the words of its JSON Schema's types."""
    words = []
    for part in get_args(info.annotation) or (info.annotation,):
        if part is type(None):
            continue
        values = get_args(part)
        if values and all(isinstance(value, str | int) for value in values):
            words += [str(value) for value in values]
        elif isinstance(part, str | int):
            words.append(str(part))
    return " | ".join(words)


def _fields(model: type[BaseModel]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, info in model.model_fields.items():
        text = info.description or ""
        choices = _type_words(info)
        default = f" (default {info.default})" if isinstance(info.default, str | int | float) else ""
        need = " (required)" if info.is_required() else default
        found[info.alias or name] = f"{text}{f' One of {choices}.' if choices else ''}{need}"
    return found


@dataclass(frozen=True, slots=True)
class Topic:
    name: str
    summary: str
    text: str = ""
    cure: str = ""
    stream: str = ""
    """On which an op of this kind runs unless it names another."""
    fields: dict[str, str] = field(default_factory=dict)


def topics() -> dict[str, Topic]:
    """Everything that can be explained, by its name in lower case."""
    from stepgraph.planner import document, ops
    from stepgraph.planner.manual import CODES

    found = {code.lower(): Topic(code, entry.title, entry.text, entry.cure) for code, entry in CODES.items()}
    sections: dict[str, type[BaseModel]] = {
        "schedule": document.Document,
        "model": document.ModelSizes,
        "shape": document.ShapeSizes,
        "inputs": document.InputSpec,
        "state": document.StateSpec,
        "defaults": document.Defaults,
    }
    for name, model in sections.items():
        found[name] = Topic(name, (model.__doc__ or "").strip(), fields=_fields(model))
    for kind, op in ops.OP_KINDS.items():
        found[kind] = Topic(kind, op.summary, stream=op.runs_on, fields=_fields(op))
    for name in ("layers", "each", "chunks", "do"):
        found[name] = Topic(name, ops.Entry.model_fields[name].description or "")
    for name, topic in list(found.items()):
        for part, text in topic.fields.items():
            found.setdefault(f"{name}.{part}", Topic(f"{name}.{part}", text))
            if name == "schedule":
                found.setdefault(part, Topic(part, text))
    return found


@click.command("explain")
@click.argument("topic", required=False)
@format_option
def command(topic: str | None, style: str) -> int:
    """Explain a code (E206), an op kind (send), a field (send.barrier) or a section (mesh). Without TOPIC, list all."""
    known = topics()
    if topic is None:
        if style == "json":
            emit_json({name: entry.summary for name, entry in known.items()})
        for name, entry in known.items() if style == "text" else ():
            if "." not in name:
                click.echo(f"{entry.name:12} {entry.summary}")
        return 0
    found = known.get(topic.lower())
    if found is None:
        hint = nearest(topic.lower(), known)
        raise click.UsageError(f"nothing is called '{topic}'{'; ' + hint if hint else ''}")
    if style == "json":
        emit_json({key: value for key, value in asdict(found).items() if value})
        return 0
    click.echo(f"{found.name}: {found.summary}")
    if found.text:
        click.echo(f"\n{found.text}")
    if found.cure:
        click.echo(f"\nTo mend it: {found.cure}")
    if found.stream:
        click.echo(f"\nRuns on the stream {found.stream} unless it names another.")
    for part, text in found.fields.items():
        click.echo(f"  {part:12} {text}")
    return 0
