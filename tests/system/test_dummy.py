"""Random weights through the real processes: token ids in, numbered words out, and no text in."""

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from ..engine_core.model.test_dummy import TINY
from .serving import Serve, environment_in

CPU = ["--device", "cpu", "--dtype", "fp32", "--max-cache", "256", "--load-format", "dummy"]


@pytest.fixture(scope="module")
def serve() -> Iterator[Serve]:
    path = Path(tempfile.mkdtemp(prefix="pt-"))
    model = path / "tiny"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(TINY))
    running = Serve(environment_in(path), model, device=CPU)
    yield running
    running.stop()
    shutil.rmtree(path, ignore_errors=True)


def post(serve: Serve, path: str, **body: object) -> httpx.Response:
    return httpx.post(f"{serve.url}{path}", json={"model": "tiny-dummy"} | body, timeout=30)


def test_token_ids_are_answered_with_numbered_words(serve: Serve) -> None:
    asked = {"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, "ignore_eos": True, "logprobs": 1}
    answer = post(serve, "/v1/completions", **asked)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    words = choice["text"].split()
    assert len(words) == 4 and all(word[0] == "w" and 0 <= int(word[1:]) < 300 for word in words)
    assert [token.strip() for token in choice["logprobs"]["tokens"]] == words
    assert post(serve, "/v1/completions", **asked).json()["choices"][0]["text"] == choice["text"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hello"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
        ("/tokenize", {"prompt": "hello"}),
    ],
)
def test_text_is_refused(serve: Serve, path: str, body: dict[str, object]) -> None:
    answer = post(serve, path, **body)
    assert answer.status_code == 400, answer.text
    assert "dummy weights: token ids only" in answer.json()["error"]["message"]


def test_it_says_so_wherever_one_looks(serve: Serve) -> None:
    assert httpx.get(f"{serve.url}/health").json() == {"status": "ok", "weights": "dummy"}
    model = httpx.get(f"{serve.url}/status").json()["model"]
    assert (model["name"], model["is_dummy"]) == ("tiny-dummy", True)
    assert [one["id"] for one in httpx.get(f"{serve.url}/v1/models").json()["data"]] == ["tiny-dummy"]
    assert "tiny-dummy" in serve.run("status", "--once").stdout


def test_a_folder_without_weights_is_an_error_otherwise(serve: Serve) -> None:
    model = Path(serve.environment["XDG_RUNTIME_DIR"]) / "tiny"
    plan = serve.run("plan", str(model), "--load-format", "dummy", "--json")
    assert json.loads(plan.stdout)["model"] == "tiny-dummy"
    assert serve.run("serve", str(model), "--port", "0").returncode != 0
