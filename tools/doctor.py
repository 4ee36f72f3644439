"""stepgraph doctor."""

from __future__ import annotations

import platform
import shutil
from typing import TYPE_CHECKING

import click

from stepgraph.runtime.facts import has_bindings, has_triton, package_version
from stepgraph.tools.output import emit_json, format_option

if TYPE_CHECKING:
    import torch


def findings() -> list[dict[str, str]]:
    """What is there and what is missing, and what for."""
    import torch

    rows = [
        _row("python", platform.python_version(), "3.11 or newer is needed"),
        _row("torch", torch.__version__, "2.11 or newer is needed"),
        _row("device cpu", "yes", "runs every plan, all ranks in one process"),
        _row("CUDA", torch.version.cuda or "no", "the CUDA that torch was built with"),
    ]
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index in range(gpus):
        rows.append(_row(f"GPU {index}", torch.cuda.get_device_name(index), "a rank runs on it, or several"))
    if not gpus:
        rows.append(_row("GPU", "none", "plans run on the cpu device"))
    bindings = "yes" if has_bindings() else "no"
    rows.append(_row("cuda-python", bindings, "is needed by the cuda device"))
    rows += _transports(torch.device("cuda"))
    rows.append(_row("handshake memop, copy", "yes" if gpus and has_bindings() else "no", "stream memory operations"))
    triton = (package_version("triton") or "yes") if has_triton() else "no"
    rows.append(_row("handshake kernel", triton, "an epoch kernel, which triton compiles"))
    nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    rows.append(_row("NCCL", "yes" if nccl else "no", "captures exchanges via nccl; wants a GPU for each rank"))
    shared = "yes" if shutil.which("nvidia-cuda-mps-control") else "no"
    rows.append(
        _row("multi-process service", shared, "makes several ranks on one GPU faster by far, once it is started")
    )
    diffusers = package_version("diffusers")
    rows.append(_row("diffusers", diffusers or "no", "optional: sigmas are checked against its own"))
    return rows


def _row(what: str, found: str, means: str) -> dict[str, str]:
    return {"what": what, "found": found, "means": means}


def _transports(device: torch.device) -> list[dict[str, str]]:
    """Each transport, whether it can be used here, and why not; a session takes the first that all its ranks have."""
    from stepgraph.runtime.transport.choices import transports

    rows = []
    for number, transport in enumerate(transports(device), 1):
        reason = transport.unavailable()
        found = "no" if reason else "yes"
        rows.append(_row(f"transport {transport.name}", found, reason or f"choice {number} of transport auto"))
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
        click.echo(f"{row['what']:24} {row['found']:20} {row['means']}")
    return 0
