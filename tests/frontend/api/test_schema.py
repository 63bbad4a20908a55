"""Every field of a request is honoured, refused by name, or ignored on record (failure reports B, C1, C8, C10)."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from frontend.api import schema
from frontend.api.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest, decode
from protocol.errors import InvalidRequest
from protocol.limits import MAX_LOGIT_BIAS, MAX_STOP_LENGTH, MAX_STOP_STRINGS
from protocol.messages import ChatPrompt, SamplingParams, TextParams, TextPrompt, TokenPrompt, pack_i32

VOCAB = 1000
MESSAGES = [{"role": "user", "content": "Hi"}]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


def chat(**body: Any) -> ChatRequest:
    return decode(msgspec.json.encode({"messages": MESSAGES} | body), ChatRequest)


def completion(**body: Any) -> CompletionRequest:
    return decode(msgspec.json.encode({"prompt": "Once"} | body), CompletionRequest)


def check(request: ChatRequest | CompletionRequest) -> tuple[SamplingParams, TextParams]:
    """All that the server checks before it submits."""
    sampling = request.sampling_params(VOCAB, 77)
    request.prompts(VOCAB)
    return sampling, request.text_params()


def refusal(make: Callable[..., Any], **body: Any) -> str | None:
    """The field that is blamed."""
    with pytest.raises(InvalidRequest) as caught:
        check(make(**body))
    assert caught.value.message
    return caught.value.param


SAMPLING = {
    "max_tokens": (5, "max_tokens", 5),
    "min_tokens": (3, "min_tokens", 3),
    "temperature": (0, "temperature", 0.0),
    "top_p": (0.5, "top_p", 0.5),
    "top_k": (-1, "top_k", -1),
    "min_p": (0.1, "min_p", 0.1),
    "repetition_penalty": (1.5, "repetition_penalty", 1.5),
    "presence_penalty": (-2, "presence_penalty", -2.0),
    "frequency_penalty": (2, "frequency_penalty", 2.0),
    "seed": (42, "seed", 42),
    "logit_bias": ({"5": 2, "7": -100}, "logit_bias", {5: 2.0, 7: -100.0}),
    "stop_token_ids": ([3, 4], "stop_token_ids", [3, 4]),
    "ignore_eos": (True, "ignore_eos", True),
    "prompt_logprobs": (3, "prompt_logprobs", 3),
}
TEXT = {
    "stop": ("END", "stop", ["END"]),
    "include_stop_str_in_output": (True, "include_stop_str", True),
    "skip_special_tokens": (False, "skip_special_tokens", False),
}


@pytest.mark.parametrize("make", [chat, completion])
def test_common_fields_reach_the_engine(make: Callable[..., Any]) -> None:
    for field, (value, attribute, expected) in SAMPLING.items():
        assert getattr(check(make(**{field: value}))[0], attribute) == expected, field
    for field, (value, attribute, expected) in TEXT.items():
        assert getattr(check(make(**{field: value}))[1], attribute) == expected, field
    assert check(make(stop=["a", "b"]))[1].stop == ["a", "b"]
    request = make(n=2, stream=True, stream_options={"include_usage": True}, priority=-3, cache_salt="s", model="m")
    assert (request.n, request.stream, request.priority, request.cache_salt, request.model) == (2, True, -3, "s", "m")
    assert request.stream_options.include_usage


@pytest.mark.parametrize("make", [chat, completion])
def test_null_and_absent_are_defaults_and_a_seed_is_drawn(make: Callable[..., Any]) -> None:
    nulls = dict.fromkeys([*SAMPLING, *TEXT, "n", "stream", "stream_options", "logprobs", "user", "response_format"])
    assert check(make(**nulls)) == check(make()) == (SamplingParams(seed=77), TextParams())


def test_chat_fields() -> None:
    assert check(chat(max_completion_tokens=5))[0].max_tokens == 5
    assert check(chat(max_completion_tokens=5, max_tokens=5))[0].max_tokens == 5
    assert refusal(chat, max_completion_tokens=5, max_tokens=6) == "max_tokens"
    assert refusal(chat, max_completion_tokens=0) == "max_completion_tokens"
    assert check(chat(logprobs=True))[0].logprobs == 0
    assert check(chat(logprobs=True, top_logprobs=5))[0].logprobs == 5
    assert check(chat(logprobs=False))[0].logprobs == -1
    options = {"add_generation_prompt": False, "continue_final_message": True, "chat_template_kwargs": {"think": 1}}
    prompt = chat(tools=TOOLS, **options).prompts(VOCAB)
    assert prompt == [ChatPrompt(MESSAGES, TOOLS, False, True, {"think": 1})]
    assert chat(tools=TOOLS, tool_choice="none").prompts(VOCAB) == [ChatPrompt(MESSAGES)]
    assert chat(tools=[]).prompts(VOCAB) == [ChatPrompt(MESSAGES)]


def test_completion_fields() -> None:
    assert check(completion(logprobs=0))[0].logprobs == 0
    sampling, text = check(completion(echo=True, logprobs=2))
    assert (sampling.logprobs, sampling.prompt_logprobs, text.echo) == (2, 2, True)
    assert check(completion(echo=True))[0].prompt_logprobs == -1
    assert check(completion(best_of=2, n=2))
    assert refusal(completion, best_of=2) == "best_of"
    assert completion(add_special_tokens=False).prompts(VOCAB) == [TextPrompt("Once", False)]


def test_prompts_of_completions() -> None:
    def prompts(prompt: Any) -> list[Any]:
        return completion(prompt=prompt).prompts(VOCAB)

    assert prompts("a") == [TextPrompt("a")]
    assert prompts(["a", "b"]) == [TextPrompt("a"), TextPrompt("b")]
    assert prompts([1, 2]) == [TokenPrompt(pack_i32([1, 2]))]
    assert prompts([[1, 2], [3]]) == [TokenPrompt(pack_i32([1, 2])), TokenPrompt(pack_i32([3]))]
    # Empty ones are the tokenizer's to judge: BOS alone, or refused (failure report B4).
    assert prompts("") == prompts([""]) == [TextPrompt("")]
    assert prompts([]) == prompts([[]]) == [TokenPrompt(b"")]
    for bad in ([1, "a"], [["a"]], [True], 3, {}, [-1], [VOCAB], [[1], [VOCAB + 10]], [2**40], [10**30], ["a"] * 257):
        assert refusal(completion, prompt=bad) == "prompt"
    assert refusal(completion, prompt=["a"] * 100, n=3) == "prompt"
    assert refusal(completion, prompt=[1] * (schema.MAX_PROMPT + 1)) == "prompt"


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("temperature", [-0.1, 101, "hot"]),
        ("top_p", [1.0001, -0.1]),
        ("top_k", [-2, 2**31]),
        ("min_p", [-0.1, 1.1]),
        ("presence_penalty", [2.1]),
        ("frequency_penalty", [-2.1]),
        ("repetition_penalty", [0]),
        ("max_tokens", [0, -1, 2**31, 1.5]),
        ("min_tokens", [-1]),
        ("n", [0, -1, 65, 100_000, True]),
        ("seed", [2**63, -(2**63) - 1, 10**40, "x"]),
        ("stop", ["", ["x"] * (MAX_STOP_STRINGS + 1), ["x"] * 100_000, "x" * (MAX_STOP_LENGTH + 1), "x" * 10**6, 3]),
        ("logit_bias", [{"99999999": 5}, {"-1": 5}, {"abc": 5}, {"5": 101}, {"5": "x"}, [1]]),
        ("logit_bias", [{str(i): 1 for i in range(MAX_LOGIT_BIAS + 1)}]),
        ("stop_token_ids", [[VOCAB], [-1], [0] * 257]),
        ("prompt_logprobs", [-1, 21]),
        ("priority", [2**31, 10**30]),
        ("cache_salt", ["x" * 257]),
        ("stream", ["yes"]),
        ("stream_options", [{"include_usage": True}, {"other": 1}, 3]),
        ("model", [3]),
        ("ignore_eos", [1]),
    ],
)
@pytest.mark.parametrize("make", [chat, completion])
def test_bad_values_are_refused_by_name(make: Callable[..., Any], field: str, bad: list[Any]) -> None:
    for value in bad:
        assert refusal(make, **{field: value}) == field, value


def test_edge_values_are_taken() -> None:
    for body in ({"top_p": 1}, {"top_p": 0}, {"top_p": 1e-9}, {"top_k": 0}, {"top_k": VOCAB + 1}, {"min_p": 1}):
        check(chat(**body))
    check(chat(temperature=1e-7, seed=-1))
    check(chat(seed=2**63 - 1, n=64))
    assert check(chat(seed=-1))[0].seed == 2**63 - 1
    assert refusal(chat, min_tokens=5, max_tokens=4) == "min_tokens"
    assert refusal(chat, stream=True, prompt_logprobs=1) == "prompt_logprobs"


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("messages", ["hi", 3, [3], {"role": "user"}]),
        ("tools", [3, [3], [{}], [{"type": "function"}], [{"type": "function", "function": {"name": 3}}]]),
        ("tools", [[{"type": "other", "function": {"name": "x"}}]]),
        ("tool_choice", ["required", {"type": "function", "function": {"name": "look"}}, 3]),
        ("top_logprobs", [5]),
        ("chat_template_kwargs", [3]),
        ("response_format", [{"type": "json_schema"}, {"type": "json_object"}, {"type": "text", "x": 1}, "text"]),
        ("response_format", [{"type": "json_schema", "json_schema": {"schema": {"pattern": "(", "maxLength": 3}}}]),
    ],
)
def test_bad_chat_values_are_refused_by_name(field: str, bad: list[Any]) -> None:
    for value in bad:
        assert refusal(chat, **{field: value}) == field, value


def test_logprobs_ranges() -> None:
    assert refusal(chat, logprobs=True, top_logprobs=21) == "top_logprobs"
    assert refusal(chat, logprobs=True, top_logprobs=-1) == "top_logprobs"
    assert refusal(chat, logprobs=3) == "logprobs"
    assert refusal(completion, logprobs=6) == "logprobs"
    assert refusal(completion, logprobs=-1) == "logprobs"


def test_text_is_the_one_response_format() -> None:
    check(chat(response_format={"type": "text"}))


@pytest.mark.parametrize("make", [chat, completion])
def test_refused_unknown_and_ignored_fields(make: Callable[..., Any]) -> None:
    for name, rule in schema.REFUSED.items():
        assert refusal(make, **{name: {"x": 1}}) == name
        for harmless in rule.harmless:
            check(make(**{name: harmless}))
    for name in schema.IGNORED:
        check(make(**{name: "anything"}))
    assert refusal(make, guided_json="{}") == "guided_json"


def test_a_missing_field_is_named() -> None:
    for shape, body, field in (
        (ChatRequest, b"{}", "messages"),
        (CompletionRequest, b'{"prompt":null}', "prompt"),
        (DetokenizeRequest, b"{}", "tokens"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            decode(body, shape)
        assert caught.value.param == field


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b'"x"', b"{", b'{"messages": [NaN]}', b"\xff", b'{"a":' + b"[" * 100_000, b'{"messages":["\xff"]}'],
    ids=range(8),
)
def test_what_is_not_a_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        decode(body, ChatRequest)


def test_what_could_not_travel_to_the_tokenizer_is_refused() -> None:
    deep: Any = []
    for _ in range(schema.MAX_DEPTH):
        deep = [deep]
    assert refusal(chat, messages=[{"role": "user", "content": deep}]) == "messages"
    assert refusal(chat, messages=[{"role": "user", "content": [[]] * (schema.MAX_VALUES + 1)}]) == "messages"
    assert refusal(chat, chat_template_kwargs={"x": {"y": 10**30}}) == "chat_template_kwargs"
    tool = {"type": "function", "function": {"name": "f", "parameters": {"minimum": -(2**63) - 1}}}
    assert refusal(chat, tools=[tool]) == "tools"


def test_tokenize_requests() -> None:
    def prompt(**body: Any) -> Any:
        return decode(msgspec.json.encode(body), TokenizeRequest).prompts()

    assert prompt(prompt="a", add_special_tokens=False) == TextPrompt("a", False)
    assert prompt(messages=MESSAGES, tools=TOOLS) == ChatPrompt(MESSAGES, TOOLS)
    for bad in ({}, {"prompt": "a", "messages": MESSAGES}, {"prompt": 3}, {"prompt": "a", "user": "x"}):
        with pytest.raises(InvalidRequest):
            prompt(**bad)


def test_every_field_of_openai_has_a_place() -> None:
    for params, shape in (
        (chat_create_params.CompletionCreateParamsStreaming, ChatRequest),
        (completion_create_params.CompletionCreateParamsStreaming, CompletionRequest),
    ):
        known = {*shape.__struct_fields__, *schema.REFUSED, *schema.IGNORED}
        assert set(get_type_hints(params)) - known == set()


def test_the_docs_list_exactly_these_fields() -> None:
    text = (Path(__file__).parents[3] / "docs" / "API.md").read_text()

    def listed(title: str) -> set[str]:
        section = text.split(f"## {title}\n")[1].split("\n## ")[0]
        rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
        return {name for row in rows for name in re.findall(r"`(\w+)`", row)}

    common = set(schema.GenerationRequest.__struct_fields__)
    assert listed("Fields of both generation endpoints") == common
    assert listed("Fields of /v1/chat/completions") == set(ChatRequest.__struct_fields__) - common
    assert listed("Fields of /v1/completions") == set(CompletionRequest.__struct_fields__) - common
    assert listed("Refused fields") == set(schema.REFUSED)
    assert listed("Ignored fields") == schema.IGNORED
