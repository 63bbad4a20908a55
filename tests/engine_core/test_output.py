"""What a step's outcomes look like on the wire."""

from types import SimpleNamespace
from typing import Any

import pytest

from engine_core.output import OutputChannel, encode_step, timing_of
from engine_core.plan import StepResult
from engine_core.request import Request, State
from engine_core.scheduler import Outcome
from protocol.messages import (
    Finish,
    Pause,
    Paused,
    SamplingParams,
    Started,
    TextParams,
    TopLogprobs,
    pack_i64,
    unpack_i64,
)

ENTRY = TopLogprobs(5, -1.0, b"", [])


def recording_channel() -> tuple[Any, list[Any]]:
    """A channel with two detokenizers, and what it sends."""
    sent: list[Any] = []
    channel: Any = OutputChannel.__new__(OutputChannel)
    peers = {name: SimpleNamespace(identity=name) for name in ("", "other")}
    channel.server = SimpleNamespace(peers=peers, send=lambda peer, message: sent.append(message))
    return channel, sent


@pytest.mark.parametrize("entries", [[], [ENTRY]], ids=["one-token prompt", "computed by an earlier chunk"])
def test_prompt_logprobs_come_with_the_first_token(entries: list[TopLogprobs]) -> None:
    """The step that samples the first token needn't have computed any of them itself."""
    request = Request(1, [4] * (1 + len(entries)), SamplingParams(prompt_logprobs=0), 3, 0.0)
    request.prompt_logprobs, request.output = entries, [9]
    outcome = Outcome(request, 9, Finish.NONE)
    (extra,) = encode_step(1, [outcome], StepResult([9])).extras
    assert extra.prompt_logprobs == [None, *entries]
    request.output.append(10)
    assert encode_step(2, [outcome], StepResult([10])).extras == []


def test_each_prompt_s_logprobs_have_a_message_of_their_own() -> None:
    """Together they may be larger than a frame."""
    requests = [Request(i, [4, 5], SamplingParams(prompt_logprobs=0 if i else -1), 3, 0.0) for i in range(3)]
    for request in requests:
        request.output, request.announced = [9], True
        request.prompt_logprobs = [ENTRY] if request.id else []
    channel, sent = recording_channel()
    outcomes = [Outcome(request, 9, Finish.NONE) for request in requests]
    channel.publish(1, outcomes, StepResult([9] * 3))
    assert [unpack_i64(message.ids).tolist() for message in sent] == [[1], [2], [0]]
    sent.clear()
    for request in requests:
        request.output.append(9)
    channel.publish(2, outcomes, StepResult([9] * 3))
    assert [unpack_i64(message.ids).tolist() for message in sent] == [[0, 1, 2]]


def make(request_id: int, **changes: Any) -> Request:
    return Request(request_id, [4, 5], SamplingParams(), 3, 10.0, **changes)


def finished(request: Request) -> Request:
    """Waited 1 s, computed its prompt for 2 s, and then was swapped out at once for 4 s, until its end."""
    for state, now in ((State.PREFILL, 11.0), (State.SWAPPED, 13.0), (State.FINISHED, 17.0)):
        request.enter(state, now)
    request.swaps = 1
    return request


def test_the_last_row_of_a_request_tells_where_its_time_went() -> None:
    ended, running = finished(make(1)), make(2)
    outcomes = [Outcome(running, 8, Finish.NONE), Outcome(ended, 9, Finish.STOP)]
    (extra,) = encode_step(1, outcomes, StepResult([8, 9])).extras
    assert extra.row == 1
    timing = extra.timing
    assert timing is not None
    assert (timing.arrival, timing.ended, timing.swaps, timing.recomputes) == (10, 17, 1, 0)
    assert (timing.queued, timing.prefill, timing.decode) == (1, 2, 0)
    assert (timing.swapping_out, timing.swapped, timing.swapping_in) == (0, 4, 0)


def test_rows_that_a_stop_string_may_end_tell_it_too_if_asked() -> None:
    texts = [TextParams(stop=["x"], timing=True), TextParams(stop=["x"]), TextParams(timing=True)]
    outcomes = [Outcome(make(i, text=text), 9, Finish.NONE) for i, text in enumerate(texts)]
    assert [extra.row for extra in encode_step(1, outcomes, StepResult([9] * 3)).extras] == [0]


def test_the_timing_of_what_still_runs_goes_up_to_now() -> None:
    request = make(1)
    request.enter(State.DECODE, 11.0)
    timing = timing_of(request)
    assert timing.decode == pytest.approx(timing.ended - 11.0)
    assert timing.queued + timing.decode == pytest.approx(timing.ended - timing.arrival)
    assert request.spent[State.DECODE] == 0, "only told, not taken down"


def test_only_those_who_asked_hear_of_pauses_in_order() -> None:
    channel, sent = recording_channel()
    notices = TextParams(notices=True)
    swapped, dropped, other, quiet, gone, ended = (
        make(1, text=notices),
        make(2, text=notices),
        make(3, text=notices, detokenizer="other"),
        make(4),
        make(5, text=notices, detokenizer="gone"),
        finished(make(6, text=notices)),
    )
    swapped.state = other.state = State.SWAPPING_OUT
    pauses = [(swapped, True), (dropped, True), (other, True), (quiet, True), (gone, True), (ended, True)]
    channel.notify([*pauses, (swapped, False)])
    assert [message.request_id for message in sent if isinstance(message, Started)] == [1, 2, 3]
    assert sent[3:] == [
        Paused(pack_i64([1, 2, 1]), bytes([Pause.SWAPPED, Pause.RECOMPUTED, Pause.RESUMED])),
        Paused(pack_i64([3]), bytes([Pause.SWAPPED])),
    ]
    sent.clear()
    channel.notify([(swapped, True)])
    assert sent == [Paused(pack_i64([1]), bytes([Pause.SWAPPED]))], "announced once"
    sent.clear()
    channel.notify([(quiet, True)])
    assert sent == []
