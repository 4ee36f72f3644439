"""In which order a channel enqueues what it has gathered."""

from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from stepgraph.planner.plan import Flag, Protocol, Reset, Signal, Wait
from stepgraph.runtime.transport import mapped
from stepgraph.runtime.transport.mapped import MappedChannel

OTHERS = (Flag(1, 0),)
OWN = (Flag(1, 1),)


def a_channel(protocols: Sequence[Protocol]) -> MappedChannel:
    channel = MappedChannel.__new__(MappedChannel)
    channel.batch, channel.stream, channel.pending, channel.answers, channel.rank = [], 0, None, False, 0
    channel.plan = SimpleNamespace(exchanges=[SimpleNamespace(protocol=protocol) for protocol in protocols])
    channel.site = SimpleNamespace(streams=[SimpleNamespace(cuda_stream=0)], device=SimpleNamespace(index=0))
    channel.flag = lambda rank, slot: 16 * rank + slot
    return channel


@pytest.mark.parametrize("protocols", [(Protocol.KERNEL, Protocol.MEMOP), (Protocol.MEMOP, Protocol.KERNEL)])
def test_handshakes_of_two_protocols_keep_their_order(
    protocols: tuple[Protocol, Protocol], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An epoch handshake is held back until its wait, and not behind what comes after it."""
    order: list[Protocol] = []
    monkeypatch.setattr(mapped, "enqueue_memops", lambda *_: order.append(Protocol.MEMOP))
    kernel = SimpleNamespace(enqueue=lambda _: order.append(Protocol.KERNEL))
    channel = a_channel(protocols)
    channel.tables = {(number, OTHERS, OWN): kernel for number in range(2)}
    for number, protocol in enumerate(protocols):
        channel.signal(Signal(0, number, OTHERS))
        channel.wait(Wait(0, number, OWN))
        if protocol is Protocol.MEMOP:
            channel.reset(Reset(0, number, OWN))
    channel.finish()
    assert order == list(protocols)


def test_no_batch_is_larger_than_cuda_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Handshakes of 64 ranks that follow each other are gathered by an eager step, up to 255 operations."""
    sizes: list[int] = []
    monkeypatch.setattr(mapped, "enqueue_memops", lambda operations, *_: sizes.append(len(operations)))
    channel = a_channel([Protocol.MEMOP] * 3)
    flags = tuple(Flag(peer, peer) for peer in range(1, 64))
    for number in range(3):
        channel.signal(Signal(0, number, flags))
        channel.wait(Wait(0, number, flags))
        channel.reset(Reset(0, number, flags))
    channel.finish()
    assert sum(sizes) == 3 * 3 * 63
    assert max(sizes) <= 255


def test_a_step_that_failed_leaves_nothing_in_the_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped, "enqueue_memops", lambda *_: pytest.fail("what the failed step held back"))
    channel = a_channel([Protocol.MEMOP])
    channel.signal(Signal(0, 0, OTHERS))
    channel.forget()
    channel.finish()
