"""An engine client that plays scripted deltas, and an API over it."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import httpx
import pytest

from frontend.api.app import Api, ApiConfig
from frontend.timing import Times
from protocol.errors import ErrorCode, PagetideError
from protocol.messages import (
    Finish,
    Limits,
    ModelInfo,
    Prompt,
    Role,
    SamplingParams,
    TextDelta,
    TextParams,
    TextPrompt,
    Tokenized,
    TokenLogprobs,
    TokenText,
    pack_i32,
)
from protocol.status import CoreStatus, PeerInfo

MODEL = ModelInfo("org/tiny", "path", 1000, 256, 1700000000, [2])
Step = TextDelta | PagetideError | asyncio.Event  # an event: wait until it is set


def delta(text: str, tokens: int = 1, finish: Finish = Finish.NONE, **more: Any) -> TextDelta:
    return TextDelta(0, text, tokens, finish, **more)


def token(text: bytes, logprob: float, number: int = 7, offset: int = 0) -> TokenText:
    return TokenText(number, text, logprob, offset)


def logprobs(chosen: bytes, logprob: float, *top: tuple[bytes, float], offset: int = 0) -> TokenLogprobs:
    return TokenLogprobs(
        token(chosen, logprob, offset=offset), [token(text, value, i) for i, (text, value) in enumerate(top)]
    )


HELLO: list[Step] = [delta("Hel", cached_tokens=4), delta("lo"), delta(" wörld", 2), delta("", 1, Finish.STOP)]


class FakeGeneration:
    """Plays one script per choice, in turn."""

    def __init__(self, client: "FakeClient", prompt: Prompt, sampling: SamplingParams, text: TextParams, choices: int):
        self.client, self.prompt, self.sampling, self.text, self.choices = client, prompt, sampling, text, choices
        self.prompt_tokens = 5
        self.entered = self.left = self.finished = False
        self.times, self.gaps = client.times, client.gaps

    async def __aenter__(self) -> "FakeGeneration":
        self.entered = True
        await asyncio.sleep(0)
        refusal = self.client.refuse(self.prompt)
        if refusal is not None:
            self.left = True
            raise refusal
        self.client.open.add(self)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.left = True
        self.client.open.discard(self)
        self.client.left.set()

    async def __aiter__(self) -> AsyncIterator[tuple[int, TextDelta]]:
        for step in itertools.zip_longest(*(self.client.script(self.prompt, i) for i in range(self.choices))):
            for choice, item in enumerate(step):
                if isinstance(item, asyncio.Event):
                    await item.wait()
                elif isinstance(item, PagetideError):
                    raise item
                elif item is not None:
                    await asyncio.sleep(0)
                    yield choice, item
        self.finished = True


class FakeClient:
    """Has the shape of frontend.engine_client.EngineClient."""

    def __init__(self) -> None:
        self.model, self.limits, self.identity = MODEL, Limits(16, 1000), "frontend-1"
        self.lost = asyncio.Event()
        self.reason: str | None = None
        self.script: Callable[[Prompt, int], Sequence[Step]] = lambda prompt, choice: HELLO
        self.refuse: Callable[[Prompt], PagetideError | None] = lambda prompt: None
        self.generations: list[FakeGeneration] = []
        self.calls: list[dict[str, Any]] = []
        self.open: set[FakeGeneration] = set()
        self.left = asyncio.Event()
        self.closed = False
        self.times: dict[int, Times] = {}
        self.gaps: dict[int, float] = {}
        self.status: CoreStatus | None = CoreStatus(
            identity="core-1", pid=1, time=2.0, uptime=3.0, step=4, step_age=0.0, model=MODEL, limits=self.limits,
            waiting=0, waiting_tokens=0, running=1, peers=[PeerInfo(Role.FRONTEND, "frontend-1", 9, "")],
            gauges={"kv_blocks_free": 12.0}, counters={"requests_swapped_total": 3.0}, memory={"weights": 7},
        )  # fmt: skip

    def health(self) -> str | None:
        return self.reason

    def generate(
        self, prompt: Prompt, sampling: SamplingParams, text: TextParams, *, choices: int = 1, **more: Any
    ) -> FakeGeneration:
        self.generations.append(FakeGeneration(self, prompt, sampling, text, choices))
        self.calls.append(more)
        return self.generations[-1]

    async def tokenize(self, prompt: Prompt) -> Tokenized:
        if isinstance(prompt, TextPrompt) and prompt.text == "bad":
            raise PagetideError(ErrorCode.INVALID_VALUE, "bad text", "prompt")
        return Tokenized(0, pack_i32([1, 5, 9]), ["<s>", "Hel", "lo"])

    async def detokenize(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))

    async def close(self) -> None:
        self.closed = True


class Harness:
    """An API over a fake client, called without a network."""

    def __init__(self, **config: Any) -> None:
        self.client = FakeClient()
        self.api = Api(ApiConfig(**config), self.client)  # type: ignore[arg-type]
        transport = httpx.ASGITransport(self.api.app)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://test")

    @property
    def sampling(self) -> SamplingParams:
        return self.client.generations[-1].sampling

    async def chat(self, **body: Any) -> httpx.Response:
        messages = [{"role": "user", "content": "Hi"}]
        return await self.http.post("/v1/chat/completions", json={"messages": messages} | body)

    async def complete(self, **body: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"prompt": "Once"} | body)


@pytest.fixture
def run() -> Callable[..., Any]:
    """Run a scenario with a Harness made of the given configuration."""

    def run_scenario(scenario: Callable[[Harness], Any], **config: Any) -> Any:
        async def main() -> Any:
            harness = Harness(**config)
            async with asyncio.timeout(20), harness.http:
                return await scenario(harness)

        return asyncio.run(main())

    return run_scenario
