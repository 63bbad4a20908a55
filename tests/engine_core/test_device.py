import time
from collections.abc import Iterator

import pytest
import torch

from engine_core.device import StepThreads


@pytest.fixture(autouse=True)
def keep_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("seconds_per_token", "share_from"), [(1.0, 1), (0.011, 4), (0.0, 17)])
def test_only_steps_worth_sharing_get_all_threads(
    seconds_per_token: float, share_from: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    threads = StepThreads(2)
    ran = []

    def run_step(tokens: int) -> None:
        nonlocal now
        threads.use_for(tokens)
        ran.append(torch.get_num_threads())
        now += tokens * seconds_per_token

    threads.measure(run_step, num_layers=100)  # worth sharing from 40 ms on
    assert set(ran) == {1}, "a step is measured with one thread"
    for tokens in (share_from - 1, share_from, 512):
        threads.use_for(tokens)
        assert torch.get_num_threads() == (2 if tokens >= share_from else 1)


def test_one_thread_is_not_measured() -> None:
    StepThreads(1).measure(lambda tokens: pytest.fail("nothing to choose"), 1)
    assert torch.get_num_threads() == 1
