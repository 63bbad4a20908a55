"""What bringing requests in and taking them out promises of both pools, against a model that computes nothing."""

import pytest

from engine_core.request import State
from engine_core.swap import SwapPolicy

from .fake_engine import PATIENT, FakeEngine, expected_output, make_scheduler


def test_images_of_a_request_are_no_room_for_the_rest_of_it() -> None:
    """Full blocks that came back keep their images, which others may displace; its own next swap needs them."""
    engine = FakeEngine(make_scheduler(16, 4, 6, PATIENT))
    request = engine.add([1] * 22, max_tokens=20)
    engine.step_until(request, State.DECODE)
    residency = engine.scheduler.residency
    assert residency.swap_out(request)
    engine.add([2] * 60, max_tokens=1, priority=-1)
    engine.step_until(request, State.SWAPPED)
    engine.step_until(request, State.DECODE)
    while len(request.table) == 6:
        engine.step()
    assert residency.pool.host_room == 6
    assert residency.can_swap(request) is residency.swap_out(request) is False
    engine.finish()
    assert request.output == expected_output(request.prompt, 20)


def test_those_who_are_to_make_room_share_the_host_pool() -> None:
    """Room for one of two victims isn't room for both: the second one's turn would cost a recompute."""
    policy = SwapPolicy("swap", max_pause=0.05, min_tokens=1, min_interval=0.0, overcommit=9.0)
    engine = FakeEngine(make_scheduler(16, 4, 5, policy))
    small = [engine.add([token] * 8, max_tokens=24) for token in (1, 2)]
    for request in small:
        engine.step_until(request, State.DECODE)
    for _ in range(5):
        engine.step()
    big = engine.add([3] * 52, max_tokens=3)
    engine.finish()
    assert engine.scheduler.counts.recomputed == 0
    for request in (*small, big):
        assert request.output == expected_output(request.prompt, request.max_tokens)


def test_who_drops_its_kv_keeps_what_a_swapped_request_counts_on() -> None:
    """They shared a prefix; it has no image yet, as one of them still held it when the other was swapped out."""
    engine = FakeEngine(make_scheduler(12, 4, 100, SwapPolicy("auto", max_pause=1e9, min_interval=0.0)))
    prefix = list(range(16))
    keeper = engine.add([*prefix, 50], max_tokens=12)
    engine.step()
    engine.step()
    swapped = engine.add([*prefix, 60], max_tokens=12)
    engine.step_until(swapped, State.DECODE)
    residency = engine.scheduler.residency
    assert residency.swap_out(swapped)
    residency.rates.copy_out = residency.rates.copy_in = 1e-9
    residency.rates.prefill = 1e9
    residency.preempt(keeper)
    assert keeper.state is State.WAITING
    urgent = engine.add([7] * 40, max_tokens=2, priority=-1)
    engine.finish()
    assert engine.computed_tokens(swapped) == 1 + 11, "its prefix was computed again"
    for request in (keeper, swapped, urgent):
        assert request.output == expected_output(request.prompt, request.max_tokens)


def test_what_nobody_can_save_makes_room_at_once() -> None:
    """The host pool is full with the swapped one's own block, and the prefix it counts on has nowhere to go."""
    engine = FakeEngine(make_scheduler(8, 4, 1, PATIENT))
    prefix = list(range(16))
    keeper = engine.add([*prefix, 50], max_tokens=8)
    engine.step()
    engine.step()
    swapped = engine.add([*prefix, 60], max_tokens=3)
    engine.step_until(swapped, State.DECODE)
    assert engine.scheduler.residency.swap_out(swapped)
    engine.step()
    urgent = engine.add([7] * 31, max_tokens=1, priority=-1)
    engine.finish()  # a step without a plan, and nothing to wait for, raises
    for request in (keeper, swapped, urgent):
        assert request.output == expected_output(request.prompt, request.max_tokens)


@pytest.mark.parametrize("host_blocks", [2, 300])
def test_a_stream_of_small_newcomers_can_not_starve_a_big_request(host_blocks: int) -> None:
    """Some are always too new to be displaced, or can't be swapped out as the host pool is full."""
    engine = FakeEngine(make_scheduler(40, 4, host_blocks, SwapPolicy("swap", max_pause=0.25)))
    big = engine.add([1] * 140, max_tokens=10)
    engine.step_until(big, State.DECODE)
    engine.add([2] * 60, max_tokens=20, priority=-1)
    while big.state is State.DECODE:
        engine.step()
    left, silence = engine.now, 0.0
    while big.state is not State.DECODE:
        engine.add([engine.steps % 97] * 16, max_tokens=1)
        engine.step()
        silence = engine.now - left
        assert silence < 1.5, "it never comes back"
    assert silence > 1.0, "newcomers pass it for a while"
    engine.finish()
    assert big.output == expected_output(big.prompt, 10)


def test_turns_are_not_held_up_by_who_is_overdue_but_of_a_lower_priority() -> None:
    policy = SwapPolicy("swap", max_pause=0.1, min_interval=0.0, overcommit=9.0)
    engine = FakeEngine(make_scheduler(6, 4, 100, policy))
    engine.add([1] * 16, max_tokens=6, priority=5)
    engine.step()
    first = engine.add([2] * 8, max_tokens=16)
    while len(first.output) < 12:
        engine.step()
    newcomer = engine.add([3] * 16, max_tokens=2)
    engine.finish()
    assert (first.swaps, newcomer.swaps) == (1, 0)
    assert newcomer.ended < first.ended


def test_nobody_is_taken_out_whose_last_token_is_being_sampled() -> None:
    """Known with overlap alone: its KV would be copied for nothing."""
    engine = FakeEngine(make_scheduler(40, 4, 200, SwapPolicy("swap"), max_running=16), overlap=True)
    requests = []
    for number in range(300):
        requests.append(engine.add([number % 97] * (5 + number * 7 % 36), max_tokens=2 + number * 5 % 17))
        for _ in range(3):
            engine.step()
    engine.finish()
    counts = engine.scheduler.counts
    assert counts.resumed == counts.swapped > 0
    for request in requests:
        assert request.output == expected_output(request.prompt, request.max_tokens)
