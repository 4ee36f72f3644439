"""What a session on cuda tells of its step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

NO_BINDINGS = "the package cuda-python is not installed"


@dataclass(frozen=True, slots=True)
class CaptureFacts:
    """What a session tells of its step."""

    transport: str
    passed_over: tuple[str, ...]
    """Why other transports were not taken."""
    eager_because: str
    """Why the step is not captured; empty where it is."""
    capture_seconds: float
    nodes: Mapping[str, int]
    """Of the captured graph, by type."""
    planned_nodes: Mapping[str, int]
    """Those that the plan itself asks for; the others are what stages and collectives became."""
    arena_bytes: int
    pool_bytes: int


def has_bindings() -> bool:
    """Whether CUDA can be called from Python: by cuda-python, and not by an older package of the name `cuda`."""
    try:
        return find_spec("cuda.bindings") is not None
    except ModuleNotFoundError:
        return False


def has_triton() -> bool:
    """Whether the kernel of epoch handshakes can be compiled."""
    return find_spec("triton") is not None


def package_version(package: str) -> str | None:
    """The version of an installed package; None where it is not there."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
