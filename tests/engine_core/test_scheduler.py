"""The scheduler against a model that computes nothing (fake_engine.py)."""

import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_core.capacity import Capacity
from engine_core.plan import StepResult
from engine_core.prefix_index import PrefixIndex
from engine_core.request import Request, State
from engine_core.scheduler import Scheduler
from engine_core.swap import SwapPolicy
from protocol.errors import ErrorCode, PagetideError
from protocol.limits import check_sampling
from protocol.messages import Finish, SamplingParams

from .fake_engine import EOS, FakeEngine, expected_output, make_request, make_scheduler


@dataclass
class Arrival:
    prompt: list[int]
    max_tokens: int
    priority: int
    abort_after: int | None


arrivals = st.builds(
    Arrival,
    prompt=st.lists(st.integers(0, 2), min_size=1, max_size=40),
    max_tokens=st.integers(1, 30),
    priority=st.integers(0, 2),
    abort_after=st.none() | st.integers(0, 12),
)


policies = st.builds(
    SwapPolicy,
    preemption=st.sampled_from(["auto", "swap", "recompute"]),
    max_pause=st.sampled_from([0.02, 0.1, 1.0]),
    min_tokens=st.integers(1, 8),
    min_interval=st.sampled_from([0.0, 0.05]),
    overcommit=st.sampled_from([1.0, 2.0, 4.0]),
    swap_every=st.sampled_from([0, 0, 0, 1, 3]),
)


@settings(max_examples=300, deadline=None)
@given(
    events=st.lists(st.one_of(arrivals, st.integers(1, 6)), max_size=24),
    num_blocks=st.integers(2, 40),
    block_size=st.sampled_from([1, 2, 4, 16]),
    max_running=st.integers(1, 6),
    chunk=st.integers(1, 24),
    prefix_cache=st.booleans(),
    host_blocks=st.sampled_from([0, 1, 3, 10, 100]),
    policy=policies,
    seed=st.integers(0, 1 << 16),
    failing=st.sampled_from([0.0, 0.0, 0.2]),
    overlap=st.booleans(),
)
def test_any_load_ends_with_the_right_tokens(
    events: list[Arrival | int],
    num_blocks: int,
    block_size: int,
    max_running: int,
    chunk: int,
    prefix_cache: bool,
    host_blocks: int,
    policy: SwapPolicy,
    seed: int,
    failing: float,
    overlap: bool,
) -> None:
    """Whatever arrives, is aborted, swapped and copied, however slowly and badly: the invariants hold at each event."""
    scheduler = make_scheduler(
        num_blocks,
        block_size,
        host_blocks,
        policy,
        max_running=max_running,
        prefill_chunk_tokens=chunk,
        prefix_cache=prefix_cache,
    )
    chance = random.Random(seed)
    engine = FakeEngine(scheduler, lambda: chance.randint(0, 4), lambda: chance.random() < failing, overlap)
    accepted: dict[int, tuple[Request, Arrival]] = {}
    aborts: dict[int, int] = {}
    ended: dict[int, int] = {}

    def take_step() -> None:
        for outcome in engine.step():
            if outcome.finish:
                ended[outcome.request.id] = ended.get(outcome.request.id, 0) + 1
        for request_id in [key for key, left in aborts.items() if left <= 0]:
            del aborts[request_id]
            if scheduler.abort(request_id):
                ended[request_id] = ended.get(request_id, 0) + 1
            assert scheduler.abort(request_id) is None
            scheduler.check()
        for request_id in aborts:
            aborts[request_id] -= 1

    for event in events:
        if isinstance(event, int):
            for _ in range(event):
                take_step()
            continue
        if len(event.prompt) >= num_blocks * block_size:
            with pytest.raises(PagetideError) as refused:
                make_request(scheduler, event.prompt, event.max_tokens)
            assert refused.value.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED
            continue
        request = engine.add(event.prompt, event.max_tokens, priority=event.priority)
        accepted[request.id] = request, event
        if event.abort_after is not None:
            aborts[request.id] = event.abort_after
    for _ in range(20_000):
        if not scheduler.has_work and not scheduler.pool.moving:
            break
        take_step()

    assert not scheduler.has_work
    assert ended == dict.fromkeys(accepted, 1)
    assert scheduler.pool.free + scheduler.pool.cached == num_blocks
    assert scheduler.pool.host_room == host_blocks
    assert scheduler.pool.strays == 0
    for request, event in accepted.values():
        reference = expected_output(event.prompt, request.max_tokens)
        assert request.output == reference[: len(request.output)]
        if event.abort_after is None:
            assert len(request.output) == request.max_tokens
        assert sum(request.spent) == pytest.approx(request.ended - request.arrival)


def test_decodes_go_on_under_endless_prefills() -> None:
    scheduler = make_scheduler(num_blocks=2000, prefill_chunk_tokens=8, max_running=4)
    engine = FakeEngine(scheduler)
    stream = make_request(scheduler, [1], max_tokens=100)
    scheduler.add(stream)
    engine.step()
    for step in range(60):
        if step % 4 == 0:
            scheduler.add(make_request(scheduler, [step] * 160, max_tokens=1))
        plan = scheduler.schedule(0.0)
        assert [row.request_id for row in plan.decodes] == [stream.id], "the stream missed a step"
        assert sum(len(row.tokens) for row in plan.prefills) == 8, "the prompts got no part of the step"
        scheduler.commit(plan, engine.compute(plan), 0.0)


@pytest.mark.parametrize("length", [31, 32, 33])
def test_prompt_at_the_size_of_the_pool(length: int) -> None:
    scheduler = make_scheduler(num_blocks=8)
    engine = FakeEngine(scheduler)
    if length >= 32:
        with pytest.raises(PagetideError, match="context holds 32"):
            make_request(scheduler, [1] * length)
    else:
        scheduler.add(make_request(scheduler, [1] * length, max_tokens=100))
    small = make_request(scheduler, [2], max_tokens=2)
    scheduler.add(small)
    engine.finish()
    assert small.output == expected_output([2], 2)


@pytest.mark.parametrize("length", range(32 - 8, 32 + 1))
@pytest.mark.parametrize("max_tokens", [0, 1, 4])
def test_what_is_accepted_near_the_size_of_the_pool_can_run_and_be_cancelled(length: int, max_tokens: int) -> None:
    """Failure report H2: the check on arrival and the admission must agree, and a cancel must leave no trace."""
    if max_tokens == 0:
        with pytest.raises(PagetideError):
            check_sampling(SamplingParams(max_tokens=0), 100)
        return
    scheduler = make_scheduler(num_blocks=8)
    engine = FakeEngine(scheduler)
    if length == 32:
        with pytest.raises(PagetideError):
            make_request(scheduler, [1] * length, max_tokens)
        return
    holder = make_request(scheduler, [2] * 16, max_tokens=3)
    cancelled, kept = (make_request(scheduler, [1] * length, max_tokens) for _ in range(2))
    for request in (holder, cancelled, kept):
        scheduler.add(request)
    engine.step()
    assert scheduler.waiting == [cancelled, kept]
    assert scheduler.abort(cancelled.id) is cancelled
    scheduler.check()
    engine.finish()
    assert kept.output == expected_output([1] * length, min(max_tokens, 32 - length))
    assert scheduler.pool.available == 8


def test_two_prompts_that_fit_only_one_at_a_time() -> None:
    scheduler = make_scheduler(num_blocks=10, prefill_chunk_tokens=8)
    first, second = (make_request(scheduler, [token] * 30, max_tokens=8) for token in (1, 2))
    scheduler.add(first)
    scheduler.add(second)
    FakeEngine(scheduler).finish()
    assert first.output == expected_output([1] * 30, 8)
    assert second.output == expected_output([2] * 30, 8)


def test_preemption_keeps_every_token_and_converges() -> None:
    scheduler = make_scheduler(num_blocks=8, prefix_cache=False)
    requests = [make_request(scheduler, [token] * 8, max_tokens=16) for token in (1, 2)]
    for request in requests:
        scheduler.add(request)
    FakeEngine(scheduler).finish()
    assert scheduler.counts.recomputed >= 1
    assert [request.output for request in requests] == [expected_output([token] * 8, 16) for token in (1, 2)]


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33])
def test_a_wholly_cached_prompt_still_computes_one_token(length: int) -> None:
    scheduler = make_scheduler(block_size=16, prefill_chunk_tokens=64)
    engine = FakeEngine(scheduler)
    prompt = list(range(length))
    for attempt in range(3):
        request = make_request(scheduler, prompt, max_tokens=20)
        scheduler.add(request)
        engine.finish()
        assert request.output == expected_output(prompt, 20)
        assert request.cached_tokens == (0 if attempt == 0 else (length - 1) // 16 * 16)


def run_many_prompts(scheduler: Scheduler) -> None:
    """Prompts of two full blocks that differ in one token each, one after the other through one pool."""
    engine = FakeEngine(scheduler)
    for token in range(40):
        prompt = [token, 1, 2, 3, 4, 5, 6, 7, 8]
        request = make_request(scheduler, prompt, max_tokens=2)
        scheduler.add(request)
        engine.finish()
        assert request.output == expected_output(prompt, 2)


def test_prompts_share_no_kv_because_their_digests_are_128_bits_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failure report E2: a hit is believed without comparing tokens, so the digest's width is all that there is."""
    run_many_prompts(make_scheduler())
    whole = PrefixIndex.digest
    monkeypatch.setattr(PrefixIndex, "digest", lambda *arguments: bytes([whole(*arguments)[0] & 15]))
    with pytest.raises(AssertionError, match="somebody else's KV"):
        run_many_prompts(make_scheduler())


def test_salts_separate_the_cache() -> None:
    scheduler = make_scheduler()
    engine = FakeEngine(scheduler)
    hits = []
    for salt in ("a", "b", "a"):
        request = make_request(scheduler, [1] * 20, cache_salt=salt)
        scheduler.add(request)
        engine.finish()
        hits.append(request.cached_tokens)
    assert hits == [0, 0, 16]


def test_prompt_logprobs_do_not_read_the_cache() -> None:
    scheduler = make_scheduler()
    engine = FakeEngine(scheduler)
    for _ in range(2):
        request = make_request(scheduler, [1] * 9, sampling=SamplingParams(prompt_logprobs=1, ignore_eos=True))
        scheduler.add(request)
        engine.finish()
        assert request.cached_tokens == 0


def test_higher_priority_takes_the_place_of_lower() -> None:
    scheduler = make_scheduler(num_blocks=8, max_running=1)
    engine = FakeEngine(scheduler)
    low = make_request(scheduler, [1] * 8, max_tokens=20, priority=5)
    scheduler.add(low)
    engine.step()
    high = make_request(scheduler, [2] * 8, max_tokens=2, priority=1)
    scheduler.add(high)
    plan = scheduler.schedule(0.0)
    assert [row.request_id for row in plan.prefills] == [high.id]
    scheduler.commit(plan, engine.compute(plan), 0.0)
    engine.finish()
    assert low.output == expected_output([1] * 8, 20)


def test_equal_priority_is_first_come_first_served() -> None:
    scheduler = make_scheduler(max_running=1)
    requests = [make_request(scheduler, [token], max_tokens=2) for token in range(4)]
    for request in requests:
        scheduler.add(request)
    ended = [o.request.id for outcomes in FakeEngine(scheduler).run_to_end() for o in outcomes if o.finish]
    assert ended == [request.id for request in requests]


def test_a_long_prompt_lets_shorter_ones_pass_that_come_soon_after_it() -> None:
    scheduler = make_scheduler(num_blocks=2000, prefill_chunk_tokens=16, policy=SwapPolicy(yielding=8.0))
    scheduler.rates.learn("prefill", 100, 1.0)  # tokens per second: a prompt of 100 yields for 8 s
    engine = FakeEngine(scheduler)
    running, waiting = (make_request(scheduler, [token] * 100, arrival=0.0) for token in (1, 2))
    for request in (running, waiting):
        scheduler.add(request)
    engine.step()
    soon = make_request(scheduler, [3] * 10, max_tokens=2, arrival=7.0)
    late = make_request(scheduler, [4] * 10, max_tokens=2, arrival=7.9)
    urgent = make_request(scheduler, [5] * 40, max_tokens=2, arrival=9.0, priority=-1)
    for request in (late, soon, urgent):
        scheduler.add(request)
    assert scheduler.waiting == [urgent, soon, waiting, late]
    plan = scheduler.schedule(9.0)
    assert [row.request_id for row in plan.prefills] == [urgent.id], "it has the step's whole budget"
    scheduler.commit(plan, engine.compute(plan), 9.0)
    ended = [o.request for outcomes in engine.run_to_end() for o in outcomes if o.finish]
    assert ended[:2] == [urgent, soon], "in mid-prompt, too, the shorter one passes"
    assert ended.index(late) > ended.index(running)


def test_what_a_prompt_yields_goes_by_what_it_has_to_compute() -> None:
    scheduler = make_scheduler(
        num_blocks=500, prefill_chunk_tokens=16, policy=SwapPolicy(yielding=8.0, most_yielding=2.0)
    )
    engine = FakeEngine(scheduler)
    first = engine.add([1] * 16, 1)
    engine.finish()
    rate = scheduler.rates.prefill
    assert rate > 0
    engine.add([2] * 2, 1)
    engine.finish()
    assert scheduler.rates.prefill == rate, "a short step says only how fast it is at least"
    assert first.due == first.arrival, "nobody knew yet"
    fresh, known = engine.add([3] * 16), engine.add([1] * 16)
    assert fresh.due - fresh.arrival == pytest.approx(8 * 16 / rate)
    assert known.due - known.arrival == pytest.approx(8 * 4 / rate), "three of its four blocks are cached"
    scheduler.rates.prefill = 1.0
    assert engine.add([4] * 16).due == pytest.approx(engine.now + 2.0)


def test_who_came_last_is_computed_again_whatever_its_length() -> None:
    scheduler = make_scheduler(num_blocks=12, policy=SwapPolicy("recompute"), prefill_chunk_tokens=64)
    scheduler.rates.prefill = 100.0
    engine = FakeEngine(scheduler)
    long = engine.add([1] * 20, 20)
    short = engine.add([2] * 8, 20)
    assert short.due < long.due
    engine.finish()
    assert (long.recomputes, short.recomputes > 0) == (0, True)


def test_room_made_for_a_newcomer_is_not_taken_by_a_shorter_one_that_passes_it() -> None:
    policy = SwapPolicy("swap", max_pause=10.0, min_interval=0.0, min_tokens=1, overcommit=10.0)
    scheduler = make_scheduler(num_blocks=20, host_blocks=200, policy=policy, prefill_chunk_tokens=64)
    engine = FakeEngine(scheduler, delay=lambda: 6)
    running = [engine.add([token] * 20, 60) for token in (1, 2)]
    for _ in range(12):
        engine.step()
    long = engine.add([3] * 36)
    engine.step()
    assert long.is_promised and sum(request.swaps for request in running) == 1
    short = engine.add([4] * 16)
    assert scheduler.waiting == [short, long]
    engine.step_until(long, State.DECODE)
    assert short.state is State.WAITING


def test_eos_and_stop_tokens_end_a_request_unless_ignored() -> None:
    for sampling, finish in (
        (SamplingParams(), Finish.STOP),
        (SamplingParams(ignore_eos=True), Finish.LENGTH),
        (SamplingParams(ignore_eos=True, stop_token_ids=[EOS]), Finish.STOP),
    ):
        scheduler = make_scheduler()
        request = make_request(scheduler, [1], max_tokens=1, sampling=sampling)
        scheduler.add(request)
        (outcome,) = scheduler.commit(scheduler.schedule(0.0), StepResult([EOS]), 0.0)
        assert (outcome.token, outcome.finish) == (EOS, finish)
        assert request.state is State.FINISHED


def test_non_finite_logits_end_that_request_alone() -> None:
    scheduler = make_scheduler()
    bad, good = make_request(scheduler, [1]), make_request(scheduler, [2])
    scheduler.add(bad)
    scheduler.add(good)
    outcomes = scheduler.commit(scheduler.schedule(0.0), StepResult([-1, 5]), 0.0)
    assert [(o.request, o.finish) for o in outcomes] == [(bad, Finish.ERROR), (good, Finish.NONE)]
    scheduler.check()


def test_kv_of_a_request_with_non_finite_logits_is_not_found_again() -> None:
    scheduler = make_scheduler()
    for token in (5, -1, 5):
        request = make_request(scheduler, [1] * 12)
        scheduler.add(request)
        scheduler.commit(scheduler.schedule(0.0), StepResult([token]), 0.0)
        scheduler.abort(request.id)
        scheduler.check()
    assert request.cached_tokens == 0


def test_kv_is_found_only_when_its_step_has_ended_well() -> None:
    """A step in flight may fail when its request has gone already, so nobody discards what it was to write."""
    scheduler = make_scheduler()
    gone, again = make_request(scheduler, [1] * 7), make_request(scheduler, [1] * 7 + [5, 6])
    scheduler.add(gone)
    first, _in_flight = scheduler.schedule(0.0), scheduler.schedule(0.0)
    scheduler.commit(first, StepResult([5]), 0.0)
    assert gone.computed == 8
    scheduler.abort(gone.id)
    scheduler.add(again)
    scheduler.schedule(0.0)
    assert again.cached_tokens == 4


def test_results_of_aborted_requests_are_passed_over() -> None:
    scheduler = make_scheduler()
    gone, stays = make_request(scheduler, [1]), make_request(scheduler, [2])
    scheduler.add(gone)
    scheduler.add(stays)
    plan = scheduler.schedule(0.0)
    scheduler.abort(gone.id)
    outcomes = scheduler.commit(plan, StepResult([3, 4]), 0.0)
    assert [(o.request, o.token) for o in outcomes] == [(stays, 4)]
    scheduler.check()


@pytest.mark.parametrize("asked", [None, 1, 1_000_000])
def test_answer_limit_clips_to_the_context(asked: int | None) -> None:
    capacity = Capacity(1000, 4, max_context=256, max_running=1, prefill_chunk_tokens=1)
    assert capacity.answer_limit(255, asked) == 1
    with pytest.raises(PagetideError):
        capacity.answer_limit(256, asked)
