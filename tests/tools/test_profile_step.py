"""How the time of kernels that overlap is shared out among them."""

import pytest

from tools.profile_step import shares


def test_a_kernel_that_waits_for_another_has_only_what_passes_after_its_end() -> None:
    intervals = [("b", 1.0, 7.0), ("a", 0.0, 4.0), ("a", 9.0, 10.0), ("c", 1.0, 8.5), ("b", 9.5, 10.0)]
    assert shares(intervals) == {"a": (5.0, 2), "b": (3.0, 2), "c": (1.5, 1)}
    assert sum(time for time, _ in shares(intervals).values()) == pytest.approx(9.5)  # of ten, half a one idle
