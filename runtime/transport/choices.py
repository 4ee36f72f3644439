"""The transports, best first."""

from __future__ import annotations

import torch

from stepgraph.runtime.transport.collective import CollectiveTransport
from stepgraph.runtime.transport.ipc import IpcTransport
from stepgraph.runtime.transport.mapping import Transport
from stepgraph.runtime.transport.symmetric import SymmetricTransport


def transports(device: torch.device) -> tuple[Transport, ...]:
    """What there is to move data with between ranks, best first."""
    return SymmetricTransport(device), IpcTransport(device), CollectiveTransport(device)
