"""Where the time of a request went, from its submission to its last text."""

import msgspec

from protocol.messages import Timing


class Times(msgspec.Struct, frozen=True):
    """The parts of one choice's time, in seconds. Those from `before_core` to
    `residual` add up to `total`.
    """

    before_core: float  # tokenising, and the way to the core
    queued: float
    prefill: float
    decode: float
    swapping_out: float
    swapped: float
    swapping_in: float
    send: float  # from the end in the core to the last text here: the way back, and detokenising
    residual: float
    total: float
    longest_gap: float  # between two deltas; not a part
    swaps: int
    recomputes: int


PHASES = Times.__struct_fields__[:9]


def account(timing: Timing, submitted: float, received: float, longest_gap: float) -> Times:
    """The times of a choice from what the core says of it and when it began and ended here, on the same clock."""
    before, send = timing.arrival - submitted, received - timing.ended
    inside = (
        timing.queued,
        timing.prefill,
        timing.decode,
        timing.swapping_out,
        timing.swapped,
        timing.swapping_in,
    )
    total = received - submitted
    residual = total - before - sum(inside) - send
    return Times(before, *inside, send, residual, total, longest_gap, timing.swaps, timing.recomputes)
