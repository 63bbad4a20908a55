"""Answers over a played engine: several choices and prompts, errors, ends (failure reports C9, D1, D2)."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from frontend.timing import Times
from protocol.errors import ErrorCode, PagetideError
from protocol.messages import Finish, Pause, TextPrompt

from .conftest import HELLO, Harness, delta

BROKEN = PagetideError(ErrorCode.ENGINE_UNAVAILABLE, "the engine core is gone")
Run = Callable[..., Any]


def events(answer: httpx.Response) -> list[Any]:
    """What a stream said; the end mark as it is."""
    data = [block.removeprefix("data: ") for block in answer.text.split("\n\n") if block]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


def test_stream_and_whole_are_the_same_answer(run: Run) -> None:
    async def scenario(api: Harness) -> None:
        for ask in (api.chat, api.complete):
            whole = (await ask()).json()
            answer = await ask(stream=True, stream_options={"include_usage": True})
            assert answer.headers["content-type"].startswith("text/event-stream")
            *chunks, last, done = events(answer)
            choices = [chunk["choices"][0] for chunk in chunks]
            text = "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in choices)
            choice = whole["choices"][0]
            assert text == (choice["text"] if "text" in choice else choice["message"]["content"]) == "Hello wörld"
            # Exactly one event has usage: it has no choices, and comes between the finish and the end (C2).
            assert done == "[DONE]"
            assert choices[-1]["finish_reason"] == choice["finish_reason"] == "stop"
            assert all(chunk["usage"] is None for chunk in chunks)
            assert last["choices"] == []
            assert last["usage"] == whole["usage"]
            assert whole["usage"]["completion_tokens"] == 5
            assert {chunk["id"] for chunk in [*chunks, last]} == {last["id"]}

    run(scenario)


def test_without_include_usage_no_event_has_usage(run: Run) -> None:
    async def scenario(api: Harness) -> None:
        assert not any("usage" in event for event in events(await api.chat(stream=True))[:-1])

    run(scenario)


@pytest.mark.parametrize("stream", [True, False])
def test_prompts_and_choices_are_told_apart_by_index(run: Run, stream: bool) -> None:
    async def scenario(api: Harness) -> None:
        api.client.script = lambda prompt, choice: [
            delta(f"{prompt.text}{choice}"),
            delta("!", finish=Finish.LENGTH if choice else Finish.STOP),
        ]
        answer = await api.complete(prompt=["a", "b", "c"], n=2, stream=stream)
        texts = dict.fromkeys(range(6), "")
        finishes = {}
        for event in events(answer)[:-1] if stream else [answer.json()]:
            for choice in event["choices"]:
                texts[choice["index"]] += choice["text"]
                finishes[choice["index"]] = choice["finish_reason"]
        assert list(texts.values()) == ["a0!", "a1!", "b0!", "b1!", "c0!", "c1!"]
        assert [finishes[i] for i in range(6)] == ["stop", "length"] * 3
        assert all(generation.left and generation.choices == 2 for generation in api.client.generations)

    run(scenario)


def test_a_tool_call_that_is_cut_says_length(run: Run) -> None:
    async def scenario(api: Harness) -> None:
        api.client.script = lambda *_: [delta('<tool_call>{"na', 12, Finish.LENGTH)]
        tools = [{"type": "function", "function": {"name": "look"}}]
        whole = await api.chat(tools=tools, max_tokens=12)
        stream = await api.chat(tools=tools, max_tokens=12, stream=True)
        assert whole.json()["choices"][0]["finish_reason"] == "length"
        assert events(stream)[-2]["choices"][0]["finish_reason"] == "length"

    run(scenario)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("refusal", "status"),
    [
        (PagetideError(ErrorCode.CONTEXT_LENGTH_EXCEEDED, "300 tokens, 256 fit", "prompt"), 400),
        (PagetideError(ErrorCode.QUEUE_FULL, "16 requests are waiting"), 429),
        (BROKEN, 503),
    ],
)
def test_a_refused_request_gets_a_status_even_if_it_would_stream(
    run: Run, refusal: PagetideError, status: int, stream: bool
) -> None:
    async def scenario(api: Harness) -> None:
        api.client.refuse = lambda prompt: refusal
        answer = await api.complete(stream=stream)
        assert answer.status_code == status
        error = answer.json()["error"]
        assert (error["message"], error["code"], error["param"]) == (refusal.message, refusal.code, refusal.param)
        assert ("retry-after" in answer.headers) == (status in (429, 503))

    run(scenario)


def test_one_bad_prompt_refuses_the_batch_and_leaves_nothing(run: Run) -> None:
    async def scenario(api: Harness) -> None:
        too_long = PagetideError(ErrorCode.CONTEXT_LENGTH_EXCEEDED, "too long", "prompt")
        api.client.refuse = lambda prompt: too_long if prompt == TextPrompt("long") else None
        answer = await api.complete(prompt=["a"] * 4 + ["long"] + ["b"] * 3)
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        assert not api.client.open
        assert all(generation.left for generation in api.client.generations if generation.entered)

    run(scenario)


def test_what_the_api_refuses_never_reaches_the_engine(run: Run) -> None:
    async def scenario(api: Harness) -> None:
        for body in ({"n": 0}, {"stop": ""}, {"logit_bias": {"99999": 1}}, {"temperature": -1}, {"tools": 3}):
            answer = await api.chat(stream=True, **body)
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == next(iter(body))
        assert (await api.complete(prompt=[1, 1000])).status_code == 400
        assert not api.client.generations

    run(scenario)


@pytest.mark.parametrize("prompts", ["a", ["a", "b"]])
@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (BROKEN, "engine_unavailable"),
        (
            delta("", 0, Finish.ERROR, error_code=ErrorCode.NON_FINITE_LOGITS, error="the logits are not finite"),
            "non_finite_logits",
        ),
        (PagetideError(ErrorCode.CLIENT_TOO_SLOW, "the client did not read"), "client_too_slow"),
    ],
)
def test_a_stream_that_fails_ends_with_one_error_and_no_done(run: Run, failure: Any, code: str, prompts: Any) -> None:
    async def scenario(api: Harness) -> None:
        api.client.script = lambda *_: [*HELLO[:3], failure]
        answer = await api.complete(prompt=prompts, stream=True)
        *chunks, last = events(answer)
        assert last["error"]["code"] == code
        assert last["error"]["message"]
        assert all("choices" in chunk for chunk in chunks)
        assert "Hello wörld" in "".join(c["choices"][0]["text"] for c in chunks if c["choices"][0]["index"] == 0)
        whole = await api.complete(prompt=prompts)
        assert (whole.status_code, whole.json()["error"]["code"]) == (api_status(code), code)
        assert not api.client.open

    run(scenario)


def api_status(code: str) -> int:
    return {"engine_unavailable": 503, "non_finite_logits": 500, "client_too_slow": 408}[code]


def test_text_that_comes_with_an_error_is_not_lost(run: Run) -> None:
    async def scenario(api: Harness) -> None:
        api.client.script = lambda *_: [
            delta("tail", 1, Finish.ERROR, error_code=ErrorCode.INTERNAL_ERROR, error="broken")
        ]
        first, second = events(await api.complete(stream=True))
        assert first["choices"][0]["text"] == "tail"
        assert second["error"]["message"] == "broken"

    run(scenario)


def test_a_fault_of_ours_is_a_500_that_says_nothing_of_the_inside(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(api: Harness) -> None:
        def broken(*_: Any) -> Any:
            raise ZeroDivisionError("secret")

        api.client.script = broken
        whole, stream = await api.complete(), await api.complete(stream=True)
        assert whole.status_code == 500
        assert events(stream)[-1]["error"] == whole.json()["error"]
        assert whole.json()["error"]["message"]
        assert "secret" not in whole.text + stream.text
        assert "secret" in caplog.text

    run(scenario)


class Client:
    """A raw ASGI client that can leave."""

    def __init__(self, body: bytes) -> None:
        self.body, self.leave, self.sent = body, asyncio.Event(), []
        self.news = asyncio.Event()

    async def receive(self) -> Any:
        if self.body:
            body, self.body = self.body, b""
            return {"type": "http.request", "body": body, "more_body": False}
        await self.leave.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)
        self.news.set()

    async def call(self, api: Harness) -> None:
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
        await api.api.app(scope, self.receive, self.send)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("prompts", ["a", ["a", "b"]])
def test_a_client_that_leaves_ends_its_generation(run: Run, stream: bool, prompts: Any) -> None:
    async def scenario(api: Harness) -> None:
        api.client.script = lambda *_: [delta("x"), delta("y"), asyncio.Event()]
        client = Client(json.dumps({"prompt": prompts, "stream": stream}).encode())
        call = asyncio.create_task(client.call(api))
        while len(client.sent) < 3 if stream else len(api.client.open) < len(api.client.generations or "x"):
            await asyncio.sleep(0)
        client.leave.set()
        await call
        assert not api.client.open
        assert all(generation.left and not generation.finished for generation in api.client.generations)
        assert bool(client.sent) == stream
        assert "api_disconnects_total 1.0" in (await api.http.get("/metrics")).text
        assert 'status="499"' in (await api.http.get("/metrics")).text

    run(scenario)


@pytest.mark.parametrize("stream", [True, False])
def test_an_interrupted_request_gets_its_error(run: Run, stream: bool) -> None:
    async def scenario(api: Harness) -> None:
        api.client.script = lambda *_: [delta("x"), asyncio.Event()]
        call = asyncio.create_task(api.complete(stream=stream))
        while not api.client.open:
            await asyncio.sleep(0)
        api.api.interrupt(PagetideError(ErrorCode.SHUTTING_DOWN, "bye"))
        answer = await call
        error = events(answer)[-1]["error"] if stream and answer.status_code == 200 else answer.json()["error"]
        assert error["code"] == "shutting_down"
        assert not api.client.open

    run(scenario)


def test_a_failure_after_the_head_breaks_the_connection(run: Run) -> None:
    async def scenario(api: Harness) -> None:
        client = Client(b'{"prompt": "x"}')
        send = client.send

        async def break_at_the_body(message: Any) -> None:
            await send(message)
            if message["type"] == "http.response.body":
                raise OSError("broken pipe")

        client.send = break_at_the_body  # type: ignore[method-assign]
        with pytest.raises(OSError, match="broken pipe"):
            await client.call(api)
        assert [message["type"] for message in client.sent] == ["http.response.start", "http.response.body"]

    run(scenario)


TIMES = Times(0.1, 0.0, 0.2, 0.3, 0.0, 4.0, 0.0, 0.1, 0.0, 4.7, 4.1, 1, 0)
TIMES_JSON = {
    "before_core": 0.1,
    "queued": 0.0,
    "prefill": 0.2,
    "decode": 0.3,
    "swapping_out": 0.0,
    "swapped": 4.0,
    "swapping_in": 0.0,
    "send": 0.1,
    "residual": 0.0,
    "total": 4.7,
    "longest_gap": 4.1,
    "swaps": 1,
    "recomputes": 0,
}


def test_timing_is_told_by_choice_if_asked(run: Run) -> None:
    async def scenario(api: Harness) -> None:
        api.client.times, api.client.gaps = {0: TIMES}, {0: 4.1, 1: 0.2}
        for ask in (api.chat, api.complete):
            first, second = (await ask(n=2, timing=True)).json()["choices"]
            assert first["timing"] == TIMES_JSON
            assert second["timing"] is None, "the core has told nothing of it"
            ends = [
                event["choices"][0]
                for event in events(await ask(n=2, timing=True, stream=True))[:-1]
                if event["choices"][0]["finish_reason"]
            ]
            assert {end["index"]: end["timing"] for end in ends} == {0: TIMES_JSON, 1: None}
            assert api.client.generations[-1].text.timing
            assert "timing" not in (await ask()).json()["choices"][0]
            assert "timing" not in (await ask(stream=True)).text
        metrics = (await api.http.get("/metrics")).text
        assert 'pagetide_request_phase_seconds_count{phase="swapped"} 8.0' in metrics
        assert "pagetide_longest_gap_seconds_count 16.0" in metrics

    run(scenario)


def test_pauses_are_comments_in_their_place(run: Run) -> None:
    """They are no events, so the first one isn't the first token either."""

    async def scenario(api: Harness) -> None:
        notice = [delta("", 0, pause=pause) for pause in (Pause.SWAPPED, Pause.RECOMPUTED, Pause.RESUMED)]
        api.client.script = lambda prompt, choice: [*notice[:2], delta("a"), notice[2], delta("", 1, Finish.STOP)]
        answer = await api.complete(stream=True, stream_options={"include_pauses": True})
        assert api.client.generations[-1].text.notices
        blocks = answer.text.split("\n\n")
        assert blocks[:2] == [": paused (swapped out)", ": paused (to be computed again)"]
        assert '"text":"a"' in blocks[2]
        assert blocks[3] == ": resumed"
        await api.complete(stream=True)
        assert not api.client.generations[-1].text.notices
        assert (await api.complete()).json()["choices"][0]["text"] == "a"

    run(scenario)
