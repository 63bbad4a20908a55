"""What swapping promises, one promise a test, against a model that computes nothing (fake_engine.py)."""

import pytest

from engine_core.request import NOWHERE, Motion, Request, State
from engine_core.scheduler import Scheduler
from engine_core.swap import Rates, SwapPolicy, is_protected
from protocol.messages import SamplingParams

from .fake_engine import PATIENT, FakeEngine, expected_output, make_scheduler


def make_engine(num_blocks: int, host_blocks: int = 100, policy: SwapPolicy = PATIENT, **options: int) -> FakeEngine:
    return FakeEngine(make_scheduler(num_blocks, 4, host_blocks, policy, **options))


def assert_right(*requests: Request) -> None:
    for request in requests:
        assert request.output == expected_output(request.prompt, request.max_tokens)


def test_the_classic_experiment() -> None:
    """Three blocks, two requests that need three each: one swap and one resume, nothing computed twice."""
    engine = make_engine(3, prefix_cache=False)
    first = engine.add([1] * 9, max_tokens=3)
    engine.step_until(first, State.DECODE)
    second = engine.add([2] * 9, max_tokens=3)
    engine.finish()
    assert_right(first, second)
    counts = engine.scheduler.counts
    assert (counts.swapped, counts.resumed, counts.recomputed) == (1, 1, 0)
    assert (first.swaps, second.swaps) == (1, 0)
    assert engine.computed_tokens(first) == engine.computed_tokens(second) == 11
    assert counts.blocks_out == counts.blocks_in == 3


def test_copy_then_budget_then_free() -> None:
    """The order of a swap: a place is free only when its copy has landed; without room nothing has moved."""
    engine = make_engine(3)
    first = engine.add([1] * 9, max_tokens=3)
    engine.step_until(first, State.DECODE)
    places = set(first.blocks)
    engine.add([2] * 9, max_tokens=3)
    plan = engine.scheduler.schedule(1.0)
    assert first.state is State.SWAPPING_OUT
    assert {copy.device for copy in plan.copies if copy.out} == places
    assert engine.scheduler.pool.available == 0, "freed before the copies have landed"
    engine.start(plan.copies)
    engine.steps += 1
    engine.land()
    assert engine.scheduler.pool.available == 3

    for host_blocks in (0, 2):
        engine = make_engine(3, host_blocks)
        first = engine.add([1] * 9, max_tokens=3)
        engine.step_until(first, State.DECODE)
        second = engine.add([2] * 9, max_tokens=3, priority=-1)  # may displace by recompute as well
        engine.finish()
        assert_right(first, second)
        counts = engine.scheduler.counts
        assert (counts.swapped, counts.recomputed, counts.rejected) == (0, 1, host_blocks > 0)
        assert first.swaps == 0


def test_a_request_is_swapped_in_mid_prompt_and_goes_on_there() -> None:
    engine = make_engine(12, prefill_chunk_tokens=8)
    long = engine.add([1] * 40, max_tokens=2)
    engine.step()
    engine.step()
    urgent = engine.add([2] * 16, max_tokens=3, priority=-1)
    engine.step_until(long, State.SWAPPED)
    assert long.state_before_swap is State.PREFILL
    assert long.computed == 16
    engine.finish()
    assert_right(long, urgent)
    assert engine.computed_tokens(long) == 41


def test_bystanders_decode_and_newcomers_start_while_copies_are_in_flight() -> None:
    slow = make_scheduler(24, 4, 100, PATIENT)
    engine = FakeEngine(slow, delay=lambda: 30)
    bystander = engine.add([1] * 8, max_tokens=60)
    victim = engine.add([2] * 40, max_tokens=30)
    engine.step_until(victim, State.DECODE)
    slow.residency.swap_out(victim)
    newcomer = engine.add([3] * 8, max_tokens=3)
    before = len(bystander.output)
    for _ in range(20):
        engine.step()
        assert victim.state is State.SWAPPING_OUT
    assert len(bystander.output) == before + 20, "a bystander missed a step"
    assert newcomer.state is State.FINISHED
    engine.finish()
    assert_right(bystander, victim, newcomer)


def test_growth_swaps_ahead_so_that_no_row_misses_a_step() -> None:
    engine = make_engine(12)
    requests = [engine.add([token] * 8, max_tokens=30) for token in range(3)]
    misses = 0
    for _ in range(200):
        decoding = [r for r in engine.scheduler.running if r.state is State.DECODE]
        before = {r: len(r.output) for r in decoding}
        engine.step()
        misses += sum(len(r.output) == before[r] for r in decoding if r.state is State.DECODE)
    assert_right(*requests)
    assert engine.scheduler.counts.swapped > 0
    assert misses == 0


def test_n_requests_with_one_prefix_cost_one_copy_of_it() -> None:
    engine = make_engine(64, prefill_chunk_tokens=1000)
    prefix = list(range(24))
    engine.add([*prefix, 89], max_tokens=1)
    engine.finish()
    requests = [engine.add([*prefix, 90 + n], max_tokens=12) for n in range(8)]
    while not all(r.state is State.DECODE for r in requests):
        engine.step()
    assert all(r.table[:6] == requests[0].table[:6] for r in requests)
    for request in requests:
        engine.scheduler.residency.swap_out(request)
        engine.scheduler.check()
    assert len(engine.scheduler.pool.copies) == 6 + len(requests)
    engine.finish()
    assert_right(*requests)


def test_a_shared_prefix_is_found_again_on_either_tier() -> None:
    engine = make_engine(10, prefill_chunk_tokens=1000)
    prefix = list(range(16))
    keeper = engine.add([*prefix, 50], max_tokens=8)
    engine.step()
    swapped = engine.add([*prefix, 60], max_tokens=8)
    engine.step_until(swapped, State.DECODE)
    shared = swapped.table[:4]
    assert keeper.table[:4] == shared
    engine.scheduler.residency.swap_out(swapped)
    assert [copy.device for copy in engine.scheduler.pool.copies] == [swapped.table[4].device]
    engine.start(engine.scheduler.pool.copies)
    engine.scheduler.pool.copies = []
    engine.scheduler.abort(keeper.id)  # nobody holds the prefix any more
    big = engine.add([7] * 38, max_tokens=2, priority=-1)  # needs all places: the prefix must leave, too
    engine.step_until(big, State.DECODE)
    assert all(block.device == NOWHERE and block.host != NOWHERE for block in shared)
    engine.finish()
    assert_right(swapped, big)
    assert engine.computed_tokens(swapped) == 1 + 7, "its prefix was computed again"


def test_a_clean_block_is_evicted_again_for_nothing() -> None:
    """In and out and in and out: full blocks are copied out once, only what was written since is copied again."""
    engine = make_engine(16)
    request = engine.add([1] * 22, max_tokens=12)
    engine.step_until(request, State.DECODE)
    outs = []
    for _ in range(3):
        engine.scheduler.residency.swap_out(request)
        outs.append(sum(copy.out for copy in engine.scheduler.pool.copies))
        engine.add([2] * 60, max_tokens=1, priority=-1)  # takes its places, so that it has to come back
        engine.step_until(request, State.SWAPPED)
        engine.step_until(request, State.DECODE)
        engine.step()
    assert outs == [6, 1, 1]
    engine.finish()
    assert_right(request)


def test_evicted_cached_blocks_are_prefix_hits_in_the_host_pool() -> None:
    engine = make_engine(8, prefill_chunk_tokens=1000)
    prompt = list(range(20))
    engine.add(prompt, max_tokens=1)
    engine.finish()
    engine.add([90] * 30, max_tokens=1)  # evicts them all
    engine.finish()
    again = engine.add(prompt, max_tokens=3)
    engine.finish()
    assert again.cached_tokens == 16
    assert engine.computed_tokens(again) == 20 - 16 + 2
    assert_right(again)
    assert engine.scheduler.counts.blocks_in >= 4


@pytest.mark.parametrize("side", ["out", "in"])
def test_a_failed_copy_costs_a_recompute_and_nothing_else(side: str) -> None:
    scheduler = make_scheduler(3, 4, 100, PATIENT)
    failing = [False]
    engine = FakeEngine(scheduler, fails=lambda: failing[0])
    first = engine.add([1] * 9, max_tokens=3)
    engine.step_until(first, State.DECODE)
    second = engine.add([2] * 9, max_tokens=3)
    failing[0] = side == "out"
    engine.step_until(second, State.DECODE)
    failing[0] = side == "in"
    for _ in range(8):
        engine.step()
    failing[0] = False
    engine.finish()
    assert_right(first, second)
    assert scheduler.counts.failed >= 3
    assert first.recomputes == scheduler.counts.recomputed == 1
    assert [is_paused for _request, is_paused in scheduler.pauses] == [True, False]
    assert engine.computed_tokens(first) > 11


def test_more_room_than_asked_for_is_not_needed_and_less_is_not_fatal() -> None:
    """Failure report F2: a host pool of two blocks and three requests that need to be swapped."""
    engine = make_engine(6, host_blocks=2)
    requests = [engine.add([token] * 3, max_tokens=19) for token in range(3)]
    engine.finish()
    assert_right(*requests)
    assert engine.scheduler.counts.rejected > 0


def test_turns_are_not_taken_by_recompute() -> None:
    """Where the host pool has no room, a turn would cost a prefill: who is in goes on, as without a host pool."""
    computed = []
    for host_blocks in (0, 2, 20):
        engine = make_engine(26, host_blocks, SwapPolicy("swap", max_pause=0.02), prefill_chunk_tokens=64)
        requests = [engine.add([token] * (8 + token), max_tokens=60) for token in range(8)]
        engine.finish()
        assert_right(*requests)
        computed.append(sum(engine.computed_tokens(request) for request in requests))
    assert max(computed[1:]) < 1.5 * computed[0]


def run_rotation(policy: SwapPolicy, count: int = 4) -> tuple[FakeEngine, list[float]]:
    """`count` long requests in a pool that holds half of them; the longest silence of each after its first token."""
    engine = make_engine(13 * count // 2, policy=policy, prefill_chunk_tokens=64)
    requests = [engine.add([token] * 8, max_tokens=40) for token in range(count)]
    silence = dict.fromkeys(requests, 0.0)
    last: dict[Request, float] = {}
    for outcomes in engine.run_to_end():
        for outcome in outcomes:
            request = outcome.request
            silence[request] = max(silence[request], engine.now - last.get(request, engine.now))
            last[request] = engine.now
    assert_right(*requests)
    return engine, list(silence.values())


def test_max_pause_bounds_everybodys_silence_by_taking_turns() -> None:
    patient, long = run_rotation(SwapPolicy("swap", max_pause=1e9, min_tokens=4, min_interval=0.0))
    hasty, short = run_rotation(SwapPolicy("swap", max_pause=0.1, min_tokens=4, min_interval=0.0))
    assert max(long) > 0.2
    assert max(short) <= 0.1 + 0.05, "target and what a turn takes"
    assert hasty.scheduler.counts.swapped > patient.scheduler.counts.swapped


def test_a_pause_is_no_shorter_than_a_few_steps() -> None:
    """Steps of half a second and turns of a quarter would be copies only."""
    scheduler = make_scheduler(policy=SwapPolicy(max_pause=0.25))
    engine = FakeEngine(scheduler)
    engine.add([1, 2, 3], max_tokens=3)
    scheduler.rates.saw_step(0.5)
    scheduler.schedule(1.0)
    assert scheduler.policy.max_pause == 2.0
    for _ in range(600):
        scheduler.rates.saw_step(0.003)
    scheduler.schedule(2.0)
    assert scheduler.policy.max_pause == 0.25


def test_a_victim_gets_something_done_before_it_is_chosen_again() -> None:
    engine, _ = run_rotation(SwapPolicy("swap", max_pause=0.001, min_tokens=16, min_interval=0.0))
    assert engine.scheduler.counts.swapped <= 4 * (1 + 47 // 4)

    policy = SwapPolicy(max_pause=0.5, min_tokens=16, min_interval=0.0)
    request = Request(1, [1] * 100, SamplingParams(), 10, 0.0, swaps=1, output=[1], came_in=10.0, mark=50)
    for done, seconds, is_safe in ((0, 9.0, True), (3, 9.0, True), (4, 0.4, True), (4, 0.5, False), (16, 0.0, False)):
        request.reached = request.mark + done
        assert is_protected(request, policy, 10.0 + seconds) is is_safe, (done, seconds)


def test_swaps_of_one_request_are_bounded_in_time() -> None:
    engine, _ = run_rotation(SwapPolicy("swap", max_pause=0.001, min_tokens=1, min_interval=0.3))
    assert engine.scheduler.counts.recomputed == 0
    assert engine.scheduler.counts.swapped <= 4 * (1 + engine.now / 0.3)


def test_newcomers_come_in_when_they_can_compute_and_hold_no_blocks_before() -> None:
    """A place of its own in the queue of prefills costs blocks and gains nothing."""
    engine = make_engine(64, prefill_chunk_tokens=8)
    requests = [engine.add([token] * 40, max_tokens=2) for token in range(5)]
    most = 0
    while not all(request.output for request in requests):
        engine.step()
        most = max(most, sum(bool(r.table) and not r.output for r in requests))
        assert engine.plans[-1].num_tokens >= 8, "a step's prefill budget was not used up"
    assert most <= 2
    urgent = make_engine(64, prefill_chunk_tokens=8)
    urgent.add([1] * 100, max_tokens=2, priority=1)
    urgent.step()
    first = urgent.add([2] * 8, max_tokens=2)
    urgent.step()
    assert len(first.output) == 1, "those behind it in order don't count"


@pytest.mark.parametrize(("newcomers", "swaps"), [(1, 1), (6, 0)])
def test_newcomers_displace_others_only_while_few_wait(newcomers: int, swaps: int) -> None:
    """In an overload turns would make all slower to answer, and none earlier."""
    engine = make_engine(6)
    first = engine.add([1] * 16, max_tokens=6)
    engine.step_until(first, State.DECODE)
    others = [engine.add([token] * 16, max_tokens=6) for token in range(2, 2 + newcomers)]
    engine.finish()
    assert_right(first, *others)
    assert first.swaps == swaps


def test_nobody_makes_room_behind_one_who_asked_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    """So small ones can't starve a big one, and a step's work doesn't grow with the number of the swapped."""
    engine = make_engine(40, policy=SwapPolicy("swap", max_pause=0.0, min_tokens=8, min_interval=0.0), max_running=32)
    requests = [engine.add([token] * 8, max_tokens=40) for token in range(24)]
    asked: list[Request] = []
    look = engine.scheduler.residency.surviving_blocks
    monkeypatch.setattr(
        engine.scheduler.residency, "surviving_blocks", lambda request: asked.append(request) or look(request)
    )
    engine.finish()
    assert_right(*requests)
    assert len(asked) <= 12 * engine.steps, f"{len(asked)} looks at a request in {engine.steps} steps"


def test_priorities_hold_among_the_swapped() -> None:
    engine = make_engine(10, policy=SwapPolicy("swap", max_pause=0.0, min_interval=0.0))
    low, high = (engine.add([p] * 12, max_tokens=8, priority=p) for p in (5, 1))
    for request in (low, high):
        engine.step_until(request, State.DECODE)
    for request in (low, high):
        engine.scheduler.residency.swap_out(request)
    tags = {block.tag for block in high.table}
    engine.add([9] * 30, max_tokens=3, priority=0)
    engine.finish()
    assert high.ended < low.ended
    first_in = next(copy for copy in engine.copies if not copy.out)
    assert first_in.tag in tags
    assert_right(low, high)


def test_an_abort_is_right_in_every_state() -> None:
    """Nothing leaks, also when the copy ends after its request; aborting twice is ignored."""
    for state in (State.SWAPPING_OUT, State.SWAPPED, State.SWAPPING_IN):
        engine = FakeEngine(make_scheduler(3, 4, 100, PATIENT), delay=lambda: 3)
        first = engine.add([1] * 9, max_tokens=3)
        engine.step_until(first, State.DECODE)
        second = engine.add([2] * 9, max_tokens=3)
        engine.step_until(first, state)
        if state is State.SWAPPING_IN:
            assert any(block.motion is Motion.ARRIVING for block in first.table)
        assert engine.scheduler.abort(first.id) is first
        assert engine.scheduler.abort(first.id) is None
        engine.scheduler.check()
        engine.finish()
        if state is not State.SWAPPING_IN:
            assert_right(second)
        for _ in range(5):
            engine.step()
        pool = engine.scheduler.pool
        assert (pool.free + pool.cached, pool.moving) == (3, 0)
        assert pool.host_room == 100


def test_swap_or_recompute_by_measured_cost() -> None:
    rates = Rates()
    assert rates.swap_is_cheaper(10, 10, 1), "nobody knows yet"
    for name, amount in (("copy_out", 1000.0), ("copy_in", 1000.0), ("prefill", 1000.0)):
        rates.learn(name, amount, 1.0)
    assert rates.swap_is_cheaper(10, 10, 21)
    assert not rates.swap_is_cheaper(10, 10, 19)
    assert rates.swap_is_cheaper(0, 10, 11), "clean blocks cost only the way in"
    for preemption, swapped in (("auto", 0), ("swap", 1), ("recompute", 0)):
        engine = make_engine(3, policy=SwapPolicy(preemption=preemption))
        engine.scheduler.rates.copy_out = engine.scheduler.rates.copy_in = 0.001
        first = engine.add([1] * 9, max_tokens=3)
        engine.step_until(first, State.DECODE)
        second = engine.add([2] * 9, max_tokens=3, priority=-1)
        engine.finish()
        assert engine.scheduler.counts.swapped == swapped, preemption
        assert engine.scheduler.counts.recomputed == 1 - swapped, preemption
        assert_right(first, second)


def test_all_time_is_accounted_for() -> None:
    engine, _ = run_rotation(SwapPolicy("swap", max_pause=0.05, min_tokens=4, min_interval=0.0))
    scheduler: Scheduler = engine.scheduler
    assert not scheduler.has_work
    request = engine.add([5] * 8, max_tokens=4)
    started = engine.now
    engine.finish()
    assert sum(request.spent) == pytest.approx(request.ended - started)
    assert request.spent[State.SWAPPED] == 0
