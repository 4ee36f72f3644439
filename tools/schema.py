"""stepgraph schema."""

from __future__ import annotations

import click

from stepgraph.tools.output import emit_json, format_option


@click.command("schema")
@format_option
def command(style: str) -> int:  # both styles are JSON: the schema is data
    """Print the JSON Schema of schedules, for editors."""
    from stepgraph.planner.document import json_schema

    emit_json(json_schema())
    return 0
