"""What a step's outcomes look like on the wire."""

import pytest

from engine_core.output import encode_step
from engine_core.plan import StepResult
from engine_core.request import Request
from engine_core.scheduler import Outcome
from protocol.messages import Finish, SamplingParams, TopLogprobs

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
