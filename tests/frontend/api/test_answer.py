"""The JSON of answers, by itself: streamed and whole are the same answer (failure reports B7, C2, C4)."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend.api.answer import ChatShape, Choice, Shape, finite, usage
from protocol.limits import LOGPROB_FLOOR
from protocol.messages import Finish, TextDelta, TokenLogprobs

from .conftest import delta, logprobs, token

EMOJI = "🌶".encode()


def parse(events: bytes) -> list[Any]:
    """The objects of an event stream, strictly: no NaN, no line breaks within."""
    *blocks, rest = events.decode().split("\n\n")
    assert rest == ""
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    return [json.loads(block.removeprefix("data: "), parse_constant=pytest.fail) for block in blocks]


def both(
    shape: type[Shape], deltas: list[TextDelta], top: int = -1, echo: bool = False, prompt_top: int | None = None
) -> tuple[list[Any], Any]:
    """A stream's objects and the whole answer that the same deltas make."""
    streamed, gathered = Choice(0), Choice(0)
    one, other = (shape("id", 1, "m", top, echo, prompt_top) for _ in range(2))
    one.begin_stream([streamed], include_usage=False)
    events = b""
    for item in deltas:
        streamed.count(item)
        gathered.count(item)
        events += one.events(streamed, item)
        gathered.gather(item)
    assert usage(5, [streamed], 1) == usage(5, [gathered], 1)
    whole = other.whole([gathered], usage(5, [gathered], 1))
    return parse(events), json.loads(whole, parse_constant=pytest.fail)


texts = st.lists(st.text(max_size=5), max_size=6)
numbers = st.one_of(st.floats(-20, 0), st.sampled_from([float("-inf"), float("nan"), float("inf")]))
entries = st.builds(
    lambda text, value, top: TokenLogprobs(token(text, value), [token(t, v, i) for i, (t, v) in enumerate(top)]),
    st.binary(max_size=4),
    numbers,
    st.lists(st.tuples(st.binary(max_size=3), numbers), min_size=5, max_size=5),
)


@given(texts, st.lists(st.lists(entries, max_size=2), max_size=6), st.booleans())
def test_a_stream_adds_up_to_the_whole_chat_answer(
    parts: list[str], logs: list[list[TokenLogprobs]], wanted: bool
) -> None:
    logs += [[]] * (len(parts) - len(logs))
    deltas = [delta(text, 1, logprobs=log if wanted else []) for text, log in zip(parts, logs, strict=False)]
    deltas.append(delta("end", 1, Finish.LENGTH))
    chunks, whole = both(ChatShape, deltas, top=3 if wanted else -1)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "".join([*parts, "end"])
    assert choices[-1]["delta"] == {}
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
    answer = whole["choices"][0]
    assert (answer["message"]["content"], answer["finish_reason"]) == ("".join([*parts, "end"]), "length")
    streamed = [entry for choice in choices for entry in (choice["logprobs"] or {"content": []})["content"]]
    assert streamed == (answer["logprobs"]["content"] if wanted else [])


@given(texts, st.lists(entries, max_size=6), st.booleans())
def test_a_stream_adds_up_to_the_whole_completion(parts: list[str], logs: list[TokenLogprobs], echo: bool) -> None:
    deltas = [delta(text, 0) for text in parts] + [delta("", 1, logprobs=[log]) for log in logs]
    if echo and logs:
        deltas[0] = delta("prompt", 0, prompt_logprobs=logs)
    deltas.append(delta("", 0, Finish.STOP, stop_reason="END"))
    chunks, whole = both(Shape, deltas, top=2, echo=echo)
    answer = whole["choices"][0]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == answer["text"]
    assert chunks[-1]["choices"][0]["finish_reason"] == answer["finish_reason"] == "stop"
    assert chunks[-1]["choices"][0]["stop_reason"] == answer["stop_reason"] == "END"
    for key, values in answer["logprobs"].items():
        assert [v for chunk in chunks for v in (chunk["choices"][0]["logprobs"] or {key: []})[key]] == values


def test_chat_logprobs_have_true_bytes() -> None:
    entry = logprobs(EMOJI[:2], -0.5, (EMOJI[:2], -0.5), (b" a", float("-inf")))
    _, whole = both(ChatShape, [delta("", 1, Finish.STOP, logprobs=[entry])], top=2)
    half = {"token": "�", "logprob": -0.5, "bytes": [0xF0, 0x9F]}
    other = {"token": " a", "logprob": LOGPROB_FLOOR, "bytes": [0x20, 0x61]}
    assert whole["choices"][0]["logprobs"] == {"content": [half | {"top_logprobs": [half, other]}]}


def test_logprobs_without_alternatives() -> None:
    last = delta("a", 1, Finish.STOP, logprobs=[logprobs(b"a", -1.0)])
    _, chat = both(ChatShape, [last], top=0)
    assert chat["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    _, completion = both(Shape, [last], top=0)
    assert completion["choices"][0]["logprobs"]["top_logprobs"] == [{"a": -1.0}]


def test_completion_logprobs_with_echo() -> None:
    prompt = [logprobs(b"Once", float("nan")), logprobs(b" up", -2.0, (b" up", -2.0), (b" in", -3.0), offset=4)]
    answer = [
        logprobs(EMOJI[:2], -1.0, (b"x", -0.1), offset=7),
        logprobs(EMOJI[2:], -1.5, (b"y", float("-inf")), offset=7),
    ]
    deltas = [delta("Once up", 1, prompt_logprobs=prompt, logprobs=answer[:1])]
    deltas += [delta("🌶", 1, Finish.LENGTH, logprobs=answer[1:])]
    _, whole = both(Shape, deltas, top=2, echo=True)
    assert whole["choices"][0]["text"] == "Once up🌶"
    assert whole["choices"][0]["logprobs"] == {
        "tokens": ["Once", " up", "bytes:\\xf0\\x9f", "bytes:\\x8c\\xb6"],
        "token_logprobs": [None, -2.0, -1.0, -1.5],
        "top_logprobs": [
            None,
            {" up": -2.0, " in": -3.0},
            {"x": -0.1, "bytes:\\xf0\\x9f": -1.0},
            {"y": LOGPROB_FLOOR, "bytes:\\x8c\\xb6": -1.5},
        ],
        "text_offset": [0, 4, 7, 7],
    }


def test_prompt_logprobs_are_by_token_id() -> None:
    prompt = [logprobs(b"Once", float("nan")), logprobs(b" up", -2.0, (b" in", float("-inf")))]
    _, whole = both(ChatShape, [delta("x", 1, Finish.STOP, prompt_logprobs=prompt)], prompt_top=1)
    by_id = {
        "7": {"logprob": -2.0, "decoded_token": " up"},
        "0": {"logprob": LOGPROB_FLOOR, "decoded_token": " in"},
    }
    assert whole["choices"][0]["prompt_logprobs"] == [None, by_id]
    assert whole["choices"][0]["logprobs"] is None


def test_usage_counts_a_prompt_once_and_its_first_answer_tells_the_cache() -> None:
    choices = [Choice(i) for i in range(4)]
    for choice, cached in zip(choices, (3, 8, 1, 8), strict=True):
        choice.count(delta("x", 2, cached_tokens=cached))
    assert usage(10, choices, 2) == {
        "prompt_tokens": 10,
        "completion_tokens": 8,
        "total_tokens": 18,
        "prompt_tokens_details": {"cached_tokens": 4},
    }


@pytest.mark.parametrize("bad", [float("-inf"), float("inf"), float("nan"), -1e300])
def test_a_logprob_is_always_a_number_that_json_has(bad: float) -> None:
    assert finite(bad) == LOGPROB_FLOOR
    assert finite(-0.25) == -0.25
