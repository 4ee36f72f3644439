"""Whether the host has the memory that is about to be taken; what is not there would end the process without a word."""

from __future__ import annotations

import os
from collections.abc import Mapping

from stepgraph.planner.diagnostics import CapabilityError, Diagnostic


def host_bytes() -> int:
    """All memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def need_host(what: str, parts: Mapping[str, int]) -> None:
    """Raises CapabilityError E606 where ``parts``, bytes by what they are for, come to more than the machine has."""
    wanted, there = sum(parts.values()), host_bytes()
    if wanted > there:
        told = ", ".join(f"{name} {nbytes} bytes" for name, nbytes in parts.items())
        hint = "take a smaller size, as with --set shape.seq=64,model.layers=2"
        found = Diagnostic("E606", f"no memory for {what}", None, f"at most {there} bytes", f"{wanted}: {told}", hint)
        raise CapabilityError([found])
