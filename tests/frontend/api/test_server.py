"""A real server on a real port: the openai client, signals, lost engines, clients that don't read."""

import asyncio
import json
import os
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest

from frontend.api import server
from frontend.api.app import ApiConfig
from protocol.errors import ErrorCode, PagetideError, StartupError
from protocol.messages import Finish, TextDelta

from .conftest import HELLO, FakeClient, delta, logprobs

MESSAGES: Any = [{"role": "user", "content": "Hi"}]


class Running:
    """A server in this loop, over a fake client."""

    def __init__(self, config: ApiConfig, client: FakeClient, sock: socket.socket) -> None:
        self.client = client
        self.address = sock.getsockname()
        self.url = f"http://127.0.0.1:{self.address[1]}"
        self.openai = openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=config.api_key or "none", max_retries=0)
        self.http = httpx.AsyncClient(base_url=self.url)
        self.task = asyncio.create_task(server._serve(config, sock, self._connect))

    async def _connect(self) -> Any:
        return self.client

    async def stop(self) -> int:
        """SIGTERM; the exit code."""
        os.kill(os.getpid(), signal.SIGTERM)
        return await self.task


@asynccontextmanager
async def serving(**options: Any) -> AsyncIterator[Running]:
    config = ApiConfig(port=0, **options)
    with server.listener(config) as sock:
        running = Running(config, FakeClient(), sock)
        try:
            while True:
                try:
                    await running.http.get("/health")
                    break
                except httpx.ConnectError:
                    assert not running.task.done(), running.task.exception()
                    await asyncio.sleep(0.01)
            yield running
        finally:
            await running.openai.close()
            await running.http.aclose()
            if not running.task.done():
                await running.stop()
            assert running.client.closed


def go(scenario: Callable[[Running], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        async with asyncio.timeout(20), serving(**options) as running:
            await scenario(running)

    asyncio.run(main())


def test_openai_chat() -> None:
    async def scenario(api: Running) -> None:
        answer = await api.openai.chat.completions.create(model="org/tiny", messages=MESSAGES, n=2, user="me")
        assert [choice.message.content for choice in answer.choices] == ["Hello wörld"] * 2
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 10, 15)
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == 4
        assert (await api.openai.models.list()).data[0].id == answer.model == "org/tiny"

    go(scenario)


def test_openai_chat_stream_with_usage() -> None:
    async def scenario(api: Running) -> None:
        stream = await api.openai.chat.completions.create(
            model="org/tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        *chunks, last = [chunk async for chunk in stream]
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello wörld"
        assert chunks[-1].choices[0].finish_reason == "stop"
        assert [chunk.usage for chunk in chunks] == [None] * len(chunks)
        assert last.choices == []
        assert last.usage is not None
        assert last.usage.completion_tokens == 5

    go(scenario)


def test_openai_logprobs() -> None:
    async def scenario(api: Running) -> None:
        entry = logprobs(b"a", -0.5, (b"a", -0.5), (b"b", float("-inf")))
        api.client.script = lambda *_: [delta("a", 1, Finish.LENGTH, logprobs=[entry])]
        chat = await api.openai.chat.completions.create(
            model="org/tiny", messages=MESSAGES, logprobs=True, top_logprobs=2
        )
        assert chat.choices[0].logprobs is not None
        assert chat.choices[0].logprobs.content is not None
        content = chat.choices[0].logprobs.content[0]
        assert (content.token, content.bytes, content.top_logprobs[1].logprob) == ("a", [97], -9999.0)
        completion = await api.openai.completions.create(model="org/tiny", prompt="x", logprobs=2)
        assert completion.choices[0].logprobs is not None
        assert completion.choices[0].logprobs.top_logprobs == [{"a": -0.5, "b": -9999.0}]
        assert completion.choices[0].logprobs.text_offset == [0]
        stream = await api.openai.chat.completions.create(
            model="org/tiny", messages=MESSAGES, logprobs=True, top_logprobs=2, stream=True
        )
        found = [c.choices[0].logprobs.content async for c in stream if c.choices[0].logprobs]
        assert found == [[content]]

    go(scenario)


def test_openai_completions() -> None:
    async def scenario(api: Running) -> None:
        answer = await api.openai.completions.create(
            model="org/tiny", prompt=[[1, 2], [3]], extra_body={"top_k": 5, "min_p": 0.1}
        )
        assert [choice.text for choice in answer.choices] == ["Hello wörld"] * 2
        assert api.client.generations[0].sampling.top_k == 5
        stream = await api.openai.completions.create(model="org/tiny", prompt="x", stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "Hello wörld"

    go(scenario)


def test_openai_errors() -> None:
    async def scenario(api: Running) -> None:
        create = api.openai.chat.completions.create
        with pytest.raises(openai.BadRequestError) as bad:
            await create(model="org/tiny", messages=MESSAGES, temperature=-1)
        assert (bad.value.param, bad.value.code) == ("temperature", "invalid_value")
        with pytest.raises(openai.NotFoundError):
            await create(model="gpt-4", messages=MESSAGES)
        with pytest.raises(openai.AuthenticationError):
            await api.openai.with_options(api_key="wrong").models.list()
        api.client.refuse = lambda prompt: PagetideError(ErrorCode.QUEUE_FULL, "full")
        with pytest.raises(openai.RateLimitError) as limited:
            await create(model="org/tiny", messages=MESSAGES)
        assert limited.value.response.headers["retry-after"] == "1"
        api.client.refuse = lambda prompt: None
        api.client.script = lambda *_: [*HELLO[:2], PagetideError(ErrorCode.ENGINE_UNAVAILABLE, "the core is gone")]
        with pytest.raises(openai.APIError, match="the core is gone"):
            async for _ in await create(model="org/tiny", messages=MESSAGES, stream=True):
                pass
        with pytest.raises(openai.InternalServerError):
            await create(model="org/tiny", messages=MESSAGES)

    go(scenario, api_key="secret")


def test_a_client_that_closes_its_connection_ends_its_generation() -> None:
    async def scenario(api: Running) -> None:
        api.client.script = lambda *_: [delta("x"), delta("y"), asyncio.Event()]
        stream = await api.openai.chat.completions.create(model="org/tiny", messages=MESSAGES, stream=True)
        await anext(aiter(stream))
        assert api.client.open
        await stream.close()
        await api.client.left.wait()
        assert not api.client.open

    go(scenario)


def test_sigterm_lets_running_streams_finish() -> None:
    async def scenario(api: Running) -> None:
        go_on = asyncio.Event()
        api.client.script = lambda *_: [delta("x"), go_on, delta("y", 1, Finish.STOP)]
        stream = aiter(await api.openai.completions.create(model="org/tiny", prompt="x", stream=True))
        assert (await anext(stream)).choices[0].text == "x"
        stopped = asyncio.create_task(api.stop())
        while True:  # nobody new gets in
            try:
                _, writer = await asyncio.open_connection(*api.address)
            except OSError:  # refused, or reset while it was in the backlog
                break
            writer.close()
            await asyncio.sleep(0.01)
        go_on.set()
        assert [chunk.choices[0].finish_reason async for chunk in stream] == [None, "stop"]
        assert await stopped == 0

    go(scenario)


def test_sigterm_ends_what_does_not_finish_with_an_error() -> None:
    async def scenario(api: Running) -> None:
        api.client.script = lambda *_: [delta("x"), asyncio.Event()]
        stream = aiter(await api.openai.completions.create(model="org/tiny", prompt="x", stream=True))
        await anext(stream)
        whole = asyncio.create_task(api.http.post("/v1/completions", json={"prompt": "x"}))
        while len(api.client.open) < 2:
            await asyncio.sleep(0.01)
        stopped = asyncio.create_task(api.stop())
        with pytest.raises(openai.APIError, match="shutting down"):
            await anext(stream)
        assert (await whole).json()["error"]["code"] == "shutting_down"
        assert await stopped == 0
        assert not api.client.open

    go(scenario, grace=0.2)


def test_a_lost_engine_ends_everything(capsys: pytest.CaptureFixture[str]) -> None:
    async def scenario(api: Running) -> None:
        gone = PagetideError(ErrorCode.ENGINE_UNAVAILABLE, "the engine core is gone")
        api.client.script = lambda *_: [delta("x"), api.client.lost, gone]
        stream = aiter(await api.openai.completions.create(model="org/tiny", prompt="x", stream=True))
        await anext(stream)
        api.client.lost.set()
        async with asyncio.timeout(2):
            with pytest.raises(openai.APIError, match="the engine core is gone"):
                await anext(stream)
            assert await api.task == 1

    go(scenario)
    assert capsys.readouterr().err == "error: the engine core is gone\n"


def test_a_signal_while_connecting_ends_at_once() -> None:
    async def main() -> None:
        connecting = asyncio.Event()

        async def never() -> Any:
            connecting.set()
            await asyncio.Event().wait()

        with server.listener(ApiConfig(port=0)) as sock:
            task = asyncio.create_task(server._serve(ApiConfig(), sock, never))
            await connecting.wait()
            os.kill(os.getpid(), signal.SIGTERM)
            async with asyncio.timeout(2):
                assert await task == 0

    asyncio.run(main())


def test_a_taken_port_and_an_engine_that_is_not_there_end_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    async def refuse() -> Any:
        raise StartupError("no engine runs in /nowhere")

    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = ApiConfig(port=taken.getsockname()[1])
        assert server.serve(config, refuse) == 1
        assert "in use" in capsys.readouterr().err
    assert server.serve(ApiConfig(port=0), refuse) == 1
    assert capsys.readouterr().err == "error: no engine runs in /nowhere\n"
    assert server.serve(ApiConfig(port=70000), refuse) == 1
    assert capsys.readouterr().err.startswith("error: can't listen on 127.0.0.1:70000: ")


def test_servers_share_a_port_only_if_both_are_told_to() -> None:
    with server.listener(ApiConfig(port=0, reuse_port=True)) as first:
        port = first.getsockname()[1]
        with server.listener(ApiConfig(port=port, reuse_port=True)) as second:
            assert second.getsockname() == first.getsockname()
        first.listen()
        with pytest.raises(StartupError):
            server.listener(ApiConfig(port=port))


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the kernel has no such timeout")
def test_a_client_that_reads_nothing_is_cut_off_while_others_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "UNREAD_SECONDS", 1)
    produced = 0

    def script(prompt: Any, choice: int) -> Any:
        def endless() -> Any:
            nonlocal produced
            while True:
                produced += 1
                yield TextDelta(0, "x" * 10_000, 1)

        return endless() if prompt.text == "endless" else HELLO

    async def scenario(api: Running) -> None:
        api.client.script = script
        body = json.dumps({"prompt": "endless", "stream": True}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
        with socket.create_connection(api.address) as stalled:
            stalled.sendall(head + body)
            while not api.client.open:
                await asyncio.sleep(0.01)
            while api.client.open:
                answer = await api.openai.completions.create(model="org/tiny", prompt="x")
                assert answer.choices[0].text == "Hello wörld"
                await asyncio.sleep(0.05)
        assert produced < 5000  # what the sockets' buffers hold, and no more

    go(scenario)
