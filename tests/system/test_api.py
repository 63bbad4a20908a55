"""The default model behind the real API, in FP32 and with room for 256 tokens."""

import json
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from frontend.launch import answers_health
from frontend.vocab import load_text_model

from .serving import PAGETIDE, ROOT, Serve, environment_in

pytestmark = [pytest.mark.model, pytest.mark.timeout(120)]
FP32 = ["--device", "cpu", "--dtype", "fp32", "--weights", "dense", "--max-cache", "256"]


@pytest.fixture(scope="module")
def serve(default_model: Path) -> Iterator[Serve]:
    path = Path(tempfile.mkdtemp(prefix="pt-"))
    running = Serve(environment_in(path), default_model, "--served-model-name", "real", device=FP32)
    yield running
    running.stop()
    shutil.rmtree(path, ignore_errors=True)


def complete(url: str, **body: Any) -> Any:
    answer = httpx.post(f"{url}/v1/completions", json={"model": "real", "temperature": 0} | body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def stream(url: str, headers: dict[str, str] | None = None, **body: Any) -> list[str]:
    """The pieces of a streamed answer's text."""
    body = {"model": "real", "temperature": 0, "stream": True} | body
    pieces = []
    with httpx.stream("POST", f"{url}/v1/completions", json=body, headers=headers, timeout=60) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                pieces.append(json.loads(line.removeprefix("data: "))["choices"][0]["text"])
    return pieces


def test_a_prompt_that_ends_inside_a_character_leaks_nothing(serve: Serve, default_model: Path) -> None:
    """Failure report A2. The emoji's last two bytes are equal, so that a bias makes the model complete it."""
    model = load_text_model(default_model)
    first, second, third, fourth = (model.token_bytes.index(bytes([byte])) for byte in "\U0001f30c".encode())
    assert third == fourth
    prompt = [*model.encode("Hello world ", add_special_tokens=False), first, second]
    asked = {"prompt": prompt, "max_tokens": 2, "logit_bias": {str(third): 100}}
    pieces = stream(serve.url, **asked)
    assert "".join(pieces) == "\U0001f30c"
    assert complete(serve.url, **asked)["text"] == "\U0001f30c"
    asked = {"prompt": prompt, "max_tokens": 8}
    assert "".join(stream(serve.url, **asked)) == complete(serve.url, **asked)["text"]


def test_a_chat_longer_than_the_context_is_refused(serve: Serve) -> None:
    """Failure report B6: nothing is cut off silently."""
    messages = [{"role": "user", "content": "The word is tulip. " + "word " * 400}]
    messages += [{"role": "assistant", "content": "Noted."}, {"role": "user", "content": "Which word is it?"}]
    for is_stream in (False, True):
        body = {"model": "real", "messages": messages, "stream": is_stream}
        answer = httpx.post(f"{serve.url}/v1/chat/completions", json=body, timeout=60)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        assert "256" in answer.json()["error"]["message"]


def test_an_echo_with_logprobs_is_the_same_twice(serve: Serve) -> None:
    """Failure report E5: the second time, the prefix cache has the prompt, whose log-probabilities it hasn't."""
    asked = {"prompt": list(range(1000, 1033)), "echo": True, "logprobs": 1, "max_tokens": 1}
    first, second = (complete(serve.url, **asked) for _ in range(2))
    assert first["logprobs"] == second["logprobs"]
    assert {len(values) for values in first["logprobs"].values()} == {34}
    assert first["logprobs"]["token_logprobs"][0] is None
    assert None not in first["logprobs"]["token_logprobs"][1:]


def test_one_request_id_on_two_frontends_is_two_requests(serve: Serve) -> None:
    """Failure report J2: an id from outside is no key, neither at once nor again after an abort."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    urls = serve.url, f"http://127.0.0.1:{port}"
    with subprocess.Popen([*PAGETIDE, "api", "--port", str(port)], cwd=ROOT, env=serve.environment) as other:
        deadline = time.monotonic() + 20
        while not answers_health(urls[1]):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        same = {"X-Request-Id": "the-same"}
        prompts = ("The capital of France is", "One, two, three, four,")
        alone = [complete(serve.url, prompt=prompt, max_tokens=12)["text"] for prompt in prompts]

        def ask(url: str, prompt: str) -> str:
            return "".join(stream(url, same, prompt=prompt, max_tokens=12))

        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(ask, urls, prompts)) == alone
        body = {"model": "real", "prompt": "Once", "max_tokens": 200, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{urls[0]}/v1/completions", json=body, headers=same, timeout=60) as answer:
            next(answer.iter_lines())
        assert [ask(url, prompts[0]) for url in urls] == [alone[0]] * 2
        other.terminate()
        assert other.wait(10) == 0
