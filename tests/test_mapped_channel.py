"""In which order a channel enqueues what it has gathered."""

from types import SimpleNamespace

import pytest

from stepgraph.planner.plan import Flag, Protocol, Reset, Signal, Wait
from stepgraph.runtime.transport import mapped
from stepgraph.runtime.transport.mapped import MappedChannel

OTHERS = (Flag(1, 0),)
OWN = (Flag(1, 1),)


@pytest.mark.parametrize("protocols", [(Protocol.KERNEL, Protocol.MEMOP), (Protocol.MEMOP, Protocol.KERNEL)])
def test_handshakes_of_two_protocols_keep_their_order(
    protocols: tuple[Protocol, Protocol], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An epoch handshake is held back until its wait, and not behind what comes after it."""
    order: list[Protocol] = []
    monkeypatch.setattr(mapped, "enqueue_memops", lambda *_: order.append(Protocol.MEMOP))
    kernel = SimpleNamespace(enqueue=lambda _: order.append(Protocol.KERNEL))
    channel = MappedChannel.__new__(MappedChannel)
    channel.batch, channel.stream, channel.pending, channel.answers, channel.rank = [], 0, None, False, 0
    channel.plan = SimpleNamespace(exchanges=[SimpleNamespace(protocol=protocol) for protocol in protocols])
    channel.site = SimpleNamespace(streams=[SimpleNamespace(cuda_stream=0)], device=SimpleNamespace(index=0))
    channel.tables = {(number, OTHERS, OWN): kernel for number in range(2)}
    channel.flag = lambda rank, slot: 16 * rank + slot
    for number, protocol in enumerate(protocols):
        channel.signal(Signal(0, number, OTHERS))
        channel.wait(Wait(0, number, OWN))
        if protocol is Protocol.MEMOP:
            channel.reset(Reset(0, number, OWN))
    channel.finish()
    assert order == list(protocols)
