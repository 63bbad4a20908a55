"""The CUDA executor against transformers in float32: each token it samples, however steps are cut, overlapped, swapped.

Needs a GPU: `make test-gpu`.
"""

import itertools
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_core.capacity import Capacity
from engine_core.core import LaunchedStep
from engine_core.plan import Row, StepPlan
from engine_core.request import Request
from engine_core.scheduler import Outcome, Scheduler
from engine_core.swap import SwapPolicy
from protocol.config import EngineConfig
from protocol.messages import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

SIZES = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.1,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"attention_bias": True}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {}),
    "mistral-window": ("Mistral", {"sliding_window": 24}),
    "gemma3": ("Gemma3", {"sliding_window": 24, "sliding_window_pattern": 2, "query_pre_attn_scalar": 64}),
}
HOST_MB = 64
_ids = itertools.count(1)


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    made: dict[str, tuple[Path, Any]] = {}

    def make(case: str) -> tuple[Path, Any]:
        if case not in made:
            folder = tmp_path_factory.mktemp(case)
            name, extra = MODELS[case]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                import transformers

                suffix = "TextConfig" if name == "Gemma3" else "Config"
                config = getattr(transformers, name + suffix)(**SIZES | extra)
                torch.manual_seed(1)
                model = getattr(transformers, name + "ForCausalLM")(config).float().eval()
                model.save_pretrained(folder)
            made[case] = folder, model
        return made[case]

    return make


def log_probs(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        result: torch.Tensor = model(torch.tensor([ids])).logits[0, -1].float().log_softmax(-1)
    return result


@pytest.fixture
def make_runner() -> Iterator[Callable[..., Any]]:
    """Loads a model. What makes its host pool, copies or not, ends with the test."""
    from engine_core.cuda_runner import load_cuda_runner

    made: list[Any] = []

    def make(folder: Path, **changes: Any) -> Any:
        options = {"num_blocks": 64, "max_cache": 256, "max_running": 8, "prefill_chunk_tokens": 32, "dtype": "fp16"}
        options |= {"max_cpu_offload_mb": HOST_MB}
        config = EngineConfig(model=str(folder), device="cuda", **options | changes)
        made.append(load_cuda_runner(config, lambda done, total: None))
        return made[-1]

    yield make
    for runner in made:
        torch.cuda.synchronize()
        runner.host_pool.close()


class Script:
    """Two requests whose tokens are given: chunked prefills, decode rows beside them, decode graphs with idle rows."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.known = {0: [(7 * n + 3) % 512 for n in range(41)], 1: [(11 * n + 5) % 512 for n in range(53)]}
        self.blocks = {0: list(range(16)), 1: list(range(63, 47, -1))}
        self.computed = {0: 0, 1: 0}
        self.found: list[tuple[list[int], torch.Tensor, torch.Tensor]] = []  # known tokens, best ids, log-probabilities

    def run(self) -> "Script":
        self._step({}, {0: 25})
        self._step({}, {0: 16, 1: 16})
        for _ in range(3):
            self._step({0: 1}, {1: 11})
        self._step({0: 1}, {1: 4})
        for _ in range(20):
            self._step({0: 1, 1: 1}, {})
        return self

    def _row(self, request: int, count: int) -> Row:
        start, ids = self.computed[request], self.known[request]
        samples = start + count == len(ids)
        params = SamplingParams(temperature=0.0, logprobs=5)
        return Row(request, ids[start : start + count], start, self.blocks[request], samples, params, 0, ids, [])

    def _step(self, decodes: dict[int, int], prefills: dict[int, int]) -> None:
        rows = [[self._row(request, count) for request, count in part.items()] for part in (decodes, prefills)]
        for request, entry in sorted(self.runner.launch(StepPlan(0, *rows)).tokens().logprobs.items()):
            ids = torch.frombuffer(bytearray(entry.top_ids), dtype=torch.int32).long()
            self.found.append((list(self.known[request]), ids, torch.tensor(entry.top_logprobs)))
            self.known[request].append((3 * len(self.known[request])) % 512)
        for request, count in (decodes | prefills).items():
            self.computed[request] += count


@pytest.mark.parametrize("case", MODELS)
def test_log_probabilities_match_transformers(
    oracle: Callable[[str], tuple[Path, Any]], make_runner: Callable[..., Any], case: str
) -> None:
    folder, model = oracle(case)
    script = Script(make_runner(folder)).run()
    assert len(script.found) == 46
    for ids, best, found in script.found:
        assert (found - log_probs(model, ids)[best]).abs().max() < 0.05


@pytest.mark.parametrize("kv", ["int8", "fp8_e4m3", "fp8_e5m2", "fp8_per_token_head"])
@pytest.mark.parametrize("wide", ["none", "1"])
def test_8_bit_kv_matches_the_cpu(
    oracle: Callable[[str], tuple[Path, Any]], make_runner: Callable[..., Any], kv: str, wide: str
) -> None:
    """The same format in float32 on the CPU: what differs is rounding, which now and then moves a stored code."""
    from engine_core.model_runner import load_runner

    folder, _ = oracle("qwen2")
    options = {"kv_cache_dtype": kv, "kv_16bit_layers": wide}
    sizes = {"num_blocks": 64, "max_cache": 256}
    cpu = EngineConfig(model=str(folder), dtype="fp32", weights="dense", **sizes, **options)  # type: ignore[arg-type]
    ours, theirs = (Script(runner).run().found for runner in (make_runner(folder, **options), load_runner(cpu)))
    differences = [(a[2] - b[2]).abs().max().item() for a, b in zip(ours, theirs, strict=True)]
    middle, most = (0.05, 0.3) if kv == "int8" else (0.2, 0.8)  # codes of fp8 are up to an eighth apart
    assert sorted(differences)[len(differences) // 2] < middle, sorted(differences)
    assert max(differences) < most, sorted(differences)


@pytest.mark.parametrize("zeros", [(), ("--asymmetric",)])
def test_4_bit_weights_match_the_cpu(
    oracle: Callable[[str], tuple[Path, Any]], make_runner: Callable[..., Any], tmp_path: Path, zeros: tuple[str, ...]
) -> None:
    from engine_core.model_runner import load_runner
    from tools.quantize_w4 import main

    folder, _ = oracle("qwen2")
    target = tmp_path / "w4"
    assert main([str(folder), str(target), "--group-size", "64", "--no-perplexity", *zeros]) == 0
    cpu = EngineConfig(model=str(target), dtype="fp32", weights="dense", num_blocks=64, max_cache=256)
    ours, theirs = (Script(runner).run().found for runner in (make_runner(target, weights="int4"), load_runner(cpu)))
    assert max((a[2] - b[2]).abs().max().item() for a, b in zip(ours, theirs, strict=True)) < 0.06


class Drive:
    """The step loop without its process."""

    def __init__(self, runner: Any, policy: SwapPolicy, overlap: bool = True) -> None:
        capacity = Capacity(runner.num_blocks, 16, runner.max_context, 8, 32, block_bytes=runner.block_bytes)
        self.scheduler = Scheduler(capacity, [], policy)
        self.runner, self.overlap = runner, overlap
        self.transfer = runner.open_transfer(HOST_MB << 20, lambda: None, 0)
        self.launch: Callable[[Any, StepPlan], Any] = lambda runner, plan: runner.launch(plan)
        self._in_flight: tuple[StepPlan, Any] | None = None

    def add(self, prompt: list[int], max_tokens: int, **sampling: Any) -> Request:
        params = SamplingParams(**{"temperature": 0.0, "ignore_eos": True} | sampling)
        request = Request(next(_ids), prompt, params, max_tokens, time.monotonic())
        self.scheduler.add(request)
        return request

    def run(self) -> None:
        deadline = time.monotonic() + 60
        while self.scheduler.has_work:
            assert time.monotonic() < deadline, "no end in sight"
            for landed in self.transfer.landed():
                self.scheduler.land(landed, time.monotonic())
            if self.transfer.host_blocks > self.scheduler.pool.host_blocks:
                self.scheduler.grow_host(self.transfer.host_blocks)
            if self._in_flight is not None and not LaunchedStep(*self._in_flight, 0.0).may_plan_ahead:
                self._collect()
            plan = self.scheduler.schedule(time.monotonic())
            launched = None
            if plan is not None:
                self.transfer.start(plan.copies)
                launched = (plan, self.launch(self.runner, plan)) if plan.num_tokens else None
            self._collect()
            self._in_flight = launched
            if not self.overlap:
                self._collect()
        self.scheduler.check()
        self.transfer.close()

    def _collect(self) -> list[Outcome]:
        step, self._in_flight = self._in_flight, None
        if step is None:
            return []
        return self.scheduler.commit(step[0], step[1].tokens(), time.monotonic())


def launch_without_waiting(runner: Any, plan: StepPlan) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is a prototype, says torch
        torch.cuda.set_sync_debug_mode("error")
    try:
        return runner.launch(plan)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def assert_greedy(model: Any, request: Request) -> None:
    """Each token is the likeliest, given those before it, or as good as the likeliest."""
    with torch.inference_mode():
        logits = model(torch.tensor([request.prompt + request.output])).logits[0].float().log_softmax(-1)
    for place, token in enumerate(request.output, len(request.prompt) - 1):
        assert logits[place].max() - logits[place, token] < 0.1, f"token {place} of request {request.id}"


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("swap_every", [0, 3])
def test_a_crowd_gets_the_likeliest_tokens(
    oracle: Callable[[str], tuple[Path, Any]], make_runner: Callable[..., Any], overlap: bool, swap_every: int
) -> None:
    """Twice as many as the pool holds, swapped for want of room and for nothing."""
    folder, model = oracle("llama")
    runner = make_runner(folder, num_blocks=24)
    drive = Drive(runner, SwapPolicy("swap", max_pause=0.05, swap_every=swap_every), overlap=overlap)
    requests = [drive.add([(k * n + 1) % 512 for n in range(20 + k)], 40) for k in range(3, 15)]
    drive.run()
    assert drive.scheduler.counts.swapped > 0
    assert drive.scheduler.counts.failed == 0
    for request in requests:
        assert len(request.output) == 40
        assert_greedy(model, request)


def test_overlap_changes_no_token(oracle: Callable[[str], tuple[Path, Any]], make_runner: Callable[..., Any]) -> None:
    """Greedy, seeded, penalised, and one that stops at a token that it samples."""
    folder, _ = oracle("llama")
    outputs = []
    for overlap in (True, False):
        runner = make_runner(folder)
        drive = Drive(runner, SwapPolicy(), overlap=overlap)
        found = []
        for sampling in ({}, {"temperature": 0.8, "seed": 5}, {"repetition_penalty": 1.3}):
            request = drive.add([1, 2, 3, 4, 5, 6, 7], 30, **sampling)
            drive.run()  # alone, so that both have the same batches
            drive = Drive(runner, SwapPolicy(), overlap=overlap)
            found.append(request.output)
        stopped = drive.add([1, 2, 3, 4, 5, 6, 7], 30, stop_token_ids=[found[0][9]])
        drive.run()
        found.append(stopped.output)
        outputs.append(found)
    assert outputs[0] == outputs[1]
    assert outputs[0][3] == outputs[0][0][: outputs[0][0].index(outputs[0][0][9]) + 1]


@pytest.mark.parametrize("overlap", [True, False])
def test_whatever_one_can_ask_of_the_sampling(
    oracle: Callable[[str], tuple[Path, Any]], make_runner: Callable[..., Any], overlap: bool
) -> None:
    """Side by side in the same steps: several forbidden tokens, biases, penalties, log-probabilities, seeds.

    And no launch waits for the device: torch raises at what would.
    """
    folder, _ = oracle("llama")
    drive = Drive(make_runner(folder), SwapPolicy(), overlap=overlap)
    drive.launch = launch_without_waiting
    asked: list[dict[str, Any]] = [
        {"min_tokens": 9, "stop_token_ids": list(range(0, 512, 2))},
        {"logit_bias": {5: 100.0, 6: -100.0}},
        {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.1},
        {"temperature": 0.7, "seed": 3, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "logprobs": 2},
        {"prompt_logprobs": 3, "logprobs": 0},
        {"logprobs": 20, "min_tokens": 3, "stop_token_ids": [1]},
    ]
    requests = [drive.add([(7 * n + k) % 512 for n in range(40 + k)], 12, **one) for k, one in enumerate(asked)]
    drive.run()
    assert drive.scheduler.counts.failed == 0
    assert all(-1 not in request.output and request.output for request in requests)
    assert len(requests[0].output) >= 9
    assert all(token % 2 for token in requests[0].output[:9]), "forbidden before the tenth"
    assert requests[1].output == [5] * 12
    assert len(requests[4].prompt_logprobs) == 43
    for request in requests:
        assert len(request.output) == 12 or request.output[-1] in request.sampling.stop_token_ids


def test_prompt_logprobs(oracle: Callable[[str], tuple[Path, Any]], make_runner: Callable[..., Any]) -> None:
    folder, model = oracle("llama")
    runner = make_runner(folder)
    prompt = [(5 * n + 2) % 512 for n in range(30)]
    row = Row(1, prompt, 0, list(range(2)), True, SamplingParams(temperature=0.0, prompt_logprobs=2), 0, prompt, [])
    entries = runner.launch(StepPlan(0, [], [row])).tokens().prompt_logprobs[1]
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
    assert len(entries) == 29
    for place, entry in enumerate(entries):
        assert entry.logprob == pytest.approx(expected[place, prompt[place + 1]].item(), abs=0.05)
