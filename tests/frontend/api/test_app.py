"""Routes, keys, CORS, names, errors: what HTTP clients meet before and beside generation (failure reports C7, C11)."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from protocol.errors import ErrorCode, PagetideError
from protocol.messages import ChatPrompt, TextPrompt

from .conftest import Harness

Run = Callable[..., Any]
ORIGIN = {"origin": "https://app.example"}
KEY = {"authorization": "Bearer secret"}
PREFLIGHT = {**ORIGIN, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
ROUTES = ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"]
PAGES = ["/v1/models", "/v1/models/org/tiny", "/status", "/metrics"]


def test_every_route_but_health_wants_the_key(run: Run) -> None:
    async def scenario(api: Harness) -> None:
        calls = [("POST", path) for path in ROUTES] + [("GET", path) for path in [*PAGES, "/nowhere"]]
        for method, path in calls:
            for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
                answer = await api.http.request(method, path, headers={**ORIGIN, **headers})
                assert answer.status_code == 401, path
                error = answer.json()["error"]
                assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
                assert error["message"]
                assert answer.headers["access-control-allow-origin"] == "*"
                assert answer.headers["www-authenticate"] == "Bearer"
            assert (await api.http.request(method, path, headers=KEY)).status_code != 401
        assert (await api.http.get("/health")).status_code == 200
        assert not api.client.generations

    run(scenario, api_key="secret", cors_origins=("*",))


def test_preflights_need_no_key(run: Run) -> None:
    async def scenario(api: Harness) -> None:
        for path in ROUTES:
            answer = await api.http.options(path, headers=PREFLIGHT)
            assert answer.status_code == 200
            assert answer.headers["access-control-allow-origin"] == "*"
            assert "authorization" in answer.headers["access-control-allow-headers"].lower()
            assert (await api.http.options(path, headers=ORIGIN)).is_success

    run(scenario, api_key="secret", cors_origins=("*",))


def test_other_origins_get_no_leave(run: Run) -> None:
    async def scenario(api: Harness) -> None:
        answer = await api.http.options("/v1/completions", headers=PREFLIGHT)
        assert "access-control-allow-origin" not in answer.headers

    run(scenario)
    run(scenario, cors_origins=("https://other.example",))


def test_errors_are_visible_to_browsers(run: Run) -> None:
    async def scenario(api: Harness) -> None:
        api.client.refuse = lambda prompt: 1 / 0  # type: ignore[assignment,return-value]
        answer = await api.http.post("/v1/completions", json={"prompt": "x"}, headers=ORIGIN)
        assert answer.status_code == 500
        assert answer.headers["access-control-allow-origin"] == "*"

    run(scenario, cors_origins=("*",))


def test_model_names(run: Run) -> None:
    async def scenario(api: Harness) -> None:
        for name in ("org/tiny", "gpt-x", None, ""):
            answer = await api.complete(model=name)
            assert answer.json()["model"] == "org/tiny"
        for ask in (api.complete, api.chat):
            for name in ("tiny", "gpt-3.5-turbo", "org/tiny2"):
                answer = await ask(model=name, stream=True)
                error = answer.json()["error"]
                assert (answer.status_code, error["param"], error["code"]) == (404, "model", "model_not_found")
                assert "org/tiny, gpt-x" in error["message"]
        for path in ("/tokenize", "/detokenize"):
            answer = await api.http.post(path, json={"model": "no", "prompt": "x", "tokens": []})
            assert answer.json()["error"]["code"] in ("model_not_found", "invalid_value")
        models = (await api.http.get("/v1/models")).json()["data"]
        assert [model["id"] for model in models] == ["org/tiny", "gpt-x"]
        assert (await api.http.get("/v1/models/org/tiny")).json() == models[0]
        assert (await api.http.get("/v1/models/gpt-x")).json()["root"] == "org/tiny"
        assert (await api.http.get("/v1/models/other")).json()["error"]["code"] == "model_not_found"

    run(scenario, aliases=("gpt-x",))


def test_tokenize_and_detokenize(run: Run) -> None:
    async def scenario(api: Harness) -> None:
        answer = (await api.http.post("/tokenize", json={"prompt": "x"})).json()
        assert answer == {"count": 3, "max_model_len": 256, "tokens": [1, 5, 9], "token_strs": None}
        chat = {"messages": [{"role": "user", "content": "x"}], "return_token_strs": True}
        assert (await api.http.post("/tokenize", json=chat)).json()["token_strs"] == ["<s>", "Hel", "lo"]
        assert (await api.http.post("/detokenize", json={"tokens": [1, 5]})).json() == {"prompt": "1 5"}
        refused = await api.http.post("/tokenize", json={"prompt": "bad"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")
        assert (await api.http.post("/detokenize", json={"tokens": ["x"]})).json()["error"]["param"] == "tokens"

    run(scenario)


def test_health_says_why_not(run: Run) -> None:
    async def scenario(api: Harness) -> None:
        assert (await api.http.get("/health")).status_code == 200
        api.client.reason = "no step has ended for 12 s"
        answer = await api.http.get("/health")
        assert (answer.status_code, answer.json()["error"]["message"]) == (503, "no step has ended for 12 s")
        assert "pagetide_healthy 0.0" in (await api.http.get("/metrics")).text

    run(scenario)


def test_status_is_the_heartbeat_as_objects(run: Run) -> None:
    async def scenario(api: Harness) -> None:
        status = (await api.http.get("/status")).json()
        assert status["health"] == "ok"
        assert status["model"]["name"] == "org/tiny"
        assert status["peers"][0]["role"] == "frontend"
        assert status["gauges"] == {"kv_blocks_free": 12.0}
        api.client.status = None
        assert (await api.http.get("/status")).status_code == 503

    run(scenario)


def test_request_ids_are_echoed_if_they_are_fit(run: Run) -> None:
    async def scenario(api: Harness) -> None:
        for fit in ("abc-1", "x" * 128):
            assert (await api.http.get("/health", headers={"x-request-id": fit})).headers["x-request-id"] == fit
        for unfit in ("x" * 129, "", "é".encode(), b"a\tb"):
            given = (await api.http.get("/health", headers={"x-request-id": unfit})).headers["x-request-id"]
            assert len(given) == 24
        # Never a key: two requests at once with one id are two answers.
        ask: Any = {"url": "/v1/completions", "json": {"prompt": "x"}, "headers": {"x-request-id": "1"}}
        first, second = await asyncio.gather(api.http.post(**ask), api.http.post(**ask))
        assert first.headers["x-request-id"] == second.headers["x-request-id"] == "1"
        assert len({first.json()["id"], second.json()["id"], "1"}) == 3

    run(scenario)


def test_what_is_not_there_has_the_error_shape(run: Run) -> None:
    async def scenario(api: Harness) -> None:
        for method, path, status in (
            ("GET", "/nowhere", 404),
            ("GET", "/v1/completions", 405),
            ("POST", "/health/", 404),
            ("DELETE", "/v1/models", 405),
        ):
            answer = await api.http.request(method, path)
            assert answer.status_code == status
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}

    run(scenario)


@pytest.mark.parametrize("announced", [True, False])
def test_a_body_over_the_limit_is_refused(run: Run, announced: bool) -> None:
    async def scenario(api: Harness) -> None:
        body = json.dumps({"prompt": "x" * 2000}).encode()

        async def pieces() -> Any:
            for start in range(0, len(body), 100):
                yield body[start : start + 100]

        answer = await api.http.post("/v1/completions", content=body if announced else pieces())
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
        assert not api.client.generations

    run(scenario, max_body=1000)


def test_requests_reach_the_engine_as_they_are_meant(run: Run) -> None:
    async def scenario(api: Harness) -> None:
        await api.complete(prompt="Once", n=3, priority=2, cache_salt="pepper", max_tokens=7)
        generation = api.client.generations[-1]
        assert (generation.prompt, generation.choices) == (TextPrompt("Once"), 3)
        assert api.client.calls[-1] == {"priority": 2, "cache_salt": "pepper"}
        await api.chat(seed=5)
        assert api.client.generations[-1].prompt == ChatPrompt([{"role": "user", "content": "Hi"}])
        assert api.sampling.seed == 5
        seeds = set()
        for _ in range(3):
            await api.chat()
            seeds.add(api.sampling.seed)
        assert len(seeds) == 3

    run(scenario)


def test_a_tokenizer_that_goes_away_is_a_503(run: Run) -> None:
    async def scenario(api: Harness) -> None:
        async def gone(prompt: Any) -> Any:
            raise PagetideError(ErrorCode.ENGINE_UNAVAILABLE, "the tokenizer is gone")

        api.client.tokenize = gone  # type: ignore[method-assign]
        assert (await api.http.post("/tokenize", json={"prompt": "x"})).status_code == 503

    run(scenario)
