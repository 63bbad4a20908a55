"""What a step's outcomes look like on the wire."""

from types import SimpleNamespace
from typing import Any

import pytest

from engine_core.output import OutputChannel, encode_step
from engine_core.plan import StepResult
from engine_core.request import Request
from engine_core.scheduler import Outcome
from protocol.messages import Finish, SamplingParams, StepOutput, TopLogprobs, unpack_i64

ENTRY = TopLogprobs(5, -1.0, b"", [])


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
    sent: list[StepOutput] = []
    channel: Any = OutputChannel.__new__(OutputChannel)
    channel.server = SimpleNamespace(peers={"": object()}, send=lambda peer, message: sent.append(message))
    outcomes = [Outcome(request, 9, Finish.NONE) for request in requests]
    channel.publish(1, outcomes, StepResult([9] * 3))
    assert [unpack_i64(message.ids).tolist() for message in sent] == [[1], [2], [0]]
    sent.clear()
    for request in requests:
        request.output.append(9)
    channel.publish(2, outcomes, StepResult([9] * 3))
    assert [unpack_i64(message.ids).tolist() for message in sent] == [[0, 1, 2]]
