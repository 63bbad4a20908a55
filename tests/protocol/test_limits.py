import math
import subprocess
import sys
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import limits
from protocol.channels import MAX_MESSAGE_BYTES
from protocol.codec import encode
from protocol.errors import ErrorCode, InvalidRequest
from protocol.limits import check_prompt_logprobs, check_sampling, check_text
from protocol.messages import SamplingParams, TextDelta, TextParams, TokenLogprobs, TokenText

VOCAB = 1000
INF, NAN = math.inf, math.nan


def refused(**fields: Any) -> str | None:
    """Return the field that is blamed."""
    with pytest.raises(InvalidRequest) as caught:
        check_sampling(SamplingParams(**fields), VOCAB)
    assert caught.value.code is ErrorCode.INVALID_VALUE
    assert 10 < len(caught.value.message) < 200
    return caught.value.param


ALLOWED: dict[str, list[Any]] = {
    "max_tokens": [None, 1, 10_000],
    "min_tokens": [0, 500],
    "temperature": [0.0, 1e-7, 100.0],
    "top_p": [0.0, 1e-9, 1.0],
    "top_k": [-1, 0, 1, VOCAB, VOCAB + 1],
    "min_p": [0.0, 1.0],
    "repetition_penalty": [0.01, 100.0],
    "presence_penalty": [-2.0, 2.0],
    "frequency_penalty": [-2.0, 2.0],
    "seed": [0, 2**63 - 1],
    "choice": [0, limits.MAX_CHOICES - 1],
    "logprobs": [-1, 0, 20],
    "prompt_logprobs": [-1, 0, 20],
    "logit_bias": [{0: -100.0, VOCAB - 1: 100.0}, dict.fromkeys(range(VOCAB), 1.0)],
    "stop_token_ids": [[0, VOCAB - 1], list(range(256))],
}
REFUSED: dict[str, list[Any]] = {
    "max_tokens": [0, -1, 2**31],
    "min_tokens": [-1, 2**31],
    "temperature": [-0.1, 100.1, NAN, INF],
    "top_p": [1.0001, -0.1, NAN],
    "top_k": [-2, 2**64 - 1],
    "min_p": [-0.1, 1.1, NAN],
    "repetition_penalty": [0.0, -1.0, INF, NAN],
    "presence_penalty": [2.1, NAN],
    "frequency_penalty": [-2.1, -INF],
    "seed": [-1, 2**63],
    "logprobs": [21, -2],
    "prompt_logprobs": [21, -2],
    "logit_bias": [
        {99_999_999: 5.0},
        {VOCAB: 5.0},
        {-1: 5.0},
        {3: 100.5},
        {3: NAN},
        {3: -INF},
        dict.fromkeys(range(5000), 1.0),
    ],
    "stop_token_ids": [[VOCAB], [-1], [1] * 257],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field in ALLOWED for value in ALLOWED[field]])
def test_what_is_allowed(field: str, value: Any) -> None:
    check_sampling(SamplingParams(**{field: value}), VOCAB)


@pytest.mark.parametrize(("field", "value"), [(field, value) for field in REFUSED for value in REFUSED[field]])
def test_what_is_refused_names_its_field(field: str, value: Any) -> None:
    assert refused(**{field: value}) == field


def test_no_field_is_left_out() -> None:
    """A new parameter has to be thought of here."""
    assert {*ALLOWED, "ignore_eos"} == set(SamplingParams.__struct_fields__)
    assert {*REFUSED, "ignore_eos", "choice"} == set(SamplingParams.__struct_fields__)


def test_the_choice_is_blamed_on_n() -> None:
    assert refused(choice=limits.MAX_CHOICES) == "n"
    assert refused(choice=-1) == "n"


def test_min_tokens_may_not_pass_max_tokens() -> None:
    check_sampling(SamplingParams(min_tokens=5, max_tokens=5), VOCAB)
    assert refused(min_tokens=6, max_tokens=5) == "min_tokens"


def test_counts_are_checked_before_items() -> None:
    class Untouchable(dict[int, float]):
        def items(self) -> Any:
            raise AssertionError("looked at the items of an oversized field")

    assert refused(logit_bias=Untouchable.fromkeys(range(4097), math.nan)) == "logit_bias"


@given(
    st.sampled_from(sorted(set(ALLOWED) - {"choice"})).flatmap(
        lambda field: st.tuples(st.just(field), st.from_type(SamplingParams.__annotations__[field]))
    )
)
def test_any_value_passes_or_is_refused_by_name(change: tuple[str, Any]) -> None:
    field, value = change
    params = SamplingParams(**{field: value})
    blamed = None
    try:
        check_sampling(params, VOCAB)
    except InvalidRequest as error:
        blamed = error.param
    if blamed is None:  # what passes is safe to make tensors of
        assert all(math.isfinite(value) for value in msgspec.structs.astuple(params) if isinstance(value, float))
        assert all(0 <= token < VOCAB for token in [*params.logit_bias, *params.stop_token_ids])
        assert all(abs(value) < 2**63 for value in msgspec.structs.astuple(params) if isinstance(value, int))
    else:
        assert blamed == field


@pytest.mark.parametrize("stop", [[], ["\n"], ["x" * 1024], ["ab"] * 16])
def test_stop_strings_that_are_allowed(stop: list[str]) -> None:
    check_text(TextParams(stop=stop))


@pytest.mark.parametrize("stop", [[""], ["ok", ""], ["x" * 1025], ["x" * 2**20], ["a"] * 17, [""] * 100_000])
def test_stop_strings_that_are_refused(stop: list[str]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_text(TextParams(stop=stop))
    assert caught.value.param == "stop"
    assert len(caught.value.message) < 200


@pytest.mark.parametrize("top", [-1, 0, 20])
def test_the_log_probabilities_of_a_prompt_fit_into_one_message(top: int) -> None:
    params = SamplingParams(prompt_logprobs=top)
    if top < 0:
        check_prompt_logprobs(params, limits.MAX_PROMPT)
        return
    most = limits.MAX_PROMPT_LOGPROBS // (top + 2)
    check_prompt_logprobs(params, most)
    with pytest.raises(InvalidRequest, match=f"at most {most} tokens") as caught:
        check_prompt_logprobs(params, most + 1)
    assert caught.value.param == "prompt_logprobs"
    token = TokenText(1 << 30, b"x" * 200, -1.5)  # longer ones are rare in any vocabulary
    entries = [TokenLogprobs(token, [token] * top)] * most
    delta = TextDelta(1 << 62, "x" * (200 * most), 1, prompt_logprobs=entries)
    assert len(encode(delta)) < MAX_MESSAGE_BYTES


def test_limits_need_neither_torch_nor_zmq() -> None:
    code = "import sys, protocol.limits; sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'zmq')))"
    path = limits.__file__.rsplit("/", 2)[0]
    assert subprocess.run([sys.executable, "-c", code], cwd=path, timeout=30, check=False).returncode == 0
