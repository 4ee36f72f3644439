"""stepgraph doctor."""

from __future__ import annotations

import importlib.util
import platform
from importlib.metadata import PackageNotFoundError, version

import click

from stepgraph.tools.output import emit_json, format_option


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def findings() -> list[dict[str, str]]:
    """What is there and what is missing; ``ok`` is whether the cpu device needs it and has it, or nobody needs it."""
    import torch

    rows: list[dict[str, str]] = [
        {"what": "python", "found": platform.python_version(), "means": "3.11 or newer is needed"},
        {"what": "torch", "found": torch.__version__, "means": "2.11 or newer is needed"},
        {"what": "device cpu", "found": "yes", "means": "runs every plan, all ranks in one process"},
        {
            "what": "CUDA",
            "found": torch.version.cuda or "no",
            "means": "the CUDA that torch was built with",
        },
    ]
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            rows.append(
                {
                    "what": f"GPU {index}",
                    "found": torch.cuda.get_device_name(index),
                    "means": "a Session in a process group can use it",
                }
            )
    else:
        rows.append({"what": "GPU", "found": "none", "means": "plans run on the cpu device"})
    bindings = "yes" if importlib.util.find_spec("cuda") else "no"
    rows.append({"what": "cuda-python", "found": bindings, "means": "is needed by the cuda device"})
    diffusers = _version("diffusers")
    rows.append(
        {"what": "diffusers", "found": diffusers or "no", "means": "optional: sigmas are checked against its own"}
    )
    return rows


@click.command("doctor")
@format_option
def command(style: str) -> int:
    """Tell what this machine can run, and what is missing."""
    rows = findings()
    if style == "json":
        emit_json({"ok": True, "findings": rows})
        return 0
    for row in rows:
        click.echo(f"{row['what']:12} {row['found']!s:20} {row['means']}")
    return 0
