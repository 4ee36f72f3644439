"""The Triton kernel of an epoch handshake; imported where it is launched, since Triton may not be there."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl


# One variant: another one would be loaded while an earlier handshake spins, and loading waits for the GPU to be idle.
@triton.jit(do_not_specialize=["words", "epoch_word", "writes", "waits"])
def epoch_handshake(words, epoch_word, writes, waits, LANES: tl.constexpr):
    """``words`` holds addresses: first those to write, then those to wait for. Who waits counts the epoch."""
    epoch = tl.load(epoch_word) + 1
    lane = tl.arange(0, LANES)
    given = tl.load(words + lane, mask=lane < writes, other=0)
    epochs = epoch + tl.zeros_like(given)
    tl.atomic_xchg(given.to(tl.pointer_type(tl.int64)), epochs, mask=lane < writes, sem="release", scope="sys")
    if waits > 0:
        mine = lane < waits
        awaited = tl.load(words + writes + lane, mask=mine, other=0).to(tl.pointer_type(tl.int64))
        behind = waits
        while behind > 0:
            seen = tl.atomic_add(awaited, tl.zeros_like(given), mask=mine, sem="acquire", scope="sys")
            behind = tl.sum((mine & (seen < epoch)).to(tl.int32))
        tl.store(epoch_word, epoch)
