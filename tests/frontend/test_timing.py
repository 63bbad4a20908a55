"""Whether the phases of a request add up."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend.timing import PHASES, Times, account
from protocol.messages import Timing

SECONDS = st.floats(0, 1e5)


def test_phases() -> None:
    timing = Timing(100.5, 107.0, 1.0, 2.0, 1.5, 0.5, 0.75, 0.25, swaps=2, recomputes=1)
    times = account(timing, submitted=100.0, received=107.5, longest_gap=3.0)
    assert times == Times(0.5, 1.0, 2.0, 1.5, 0.5, 0.75, 0.25, 0.5, 0.5, 7.5, 3.0, 2, 1)
    assert PHASES[0] == "before_core"
    assert PHASES[-1] == "residual"


@given(before=SECONDS, inside=st.lists(SECONDS, min_size=6, max_size=6), lost=SECONDS, send=SECONDS)
def test_the_phases_add_up_to_the_total(before: float, inside: list[float], lost: float, send: float) -> None:
    """And what the core can't explain is the residual."""
    arrival = 1e4 + before
    ended = arrival + sum(inside) + lost
    times = account(Timing(arrival, ended, *inside), 1e4, ended + send, 0.0)
    assert sum(getattr(times, phase) for phase in PHASES) == pytest.approx(times.total, abs=1e-6)
    assert times.residual == pytest.approx(lost, abs=1e-6)
    assert times.before_core == pytest.approx(before, abs=1e-6)
    assert times.send == pytest.approx(send, abs=1e-6)
