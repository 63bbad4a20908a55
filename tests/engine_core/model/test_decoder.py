"""Logits equal transformers' for every architecture, however the tokens are split into steps."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gguf.constants import GGMLQuantizationType as Kind

from engine_core.model.decoder import _side_by_side
from engine_core.model_runner import ModelRunner, load_runner
from engine_core.plan import Row, StepPlan
from protocol.config import EngineConfig
from protocol.messages import SamplingParams

from .conftest import CASES, Oracle, to_gguf

GREEDY = SamplingParams(temperature=0.0)
TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}


def open_runner(path: Path, block_size: int = 16, **options: object) -> ModelRunner:
    """An FP32 runner whose pool is full of NaN."""
    settings = {"dtype": "fp32", "threads": 1, "num_blocks": 2 * (512 // block_size), "max_cache": 256} | options
    runner = load_runner(EngineConfig(model=str(path), block_size=block_size, **settings))  # type: ignore[arg-type]
    runner.store.pool.fill_(0xFF)  # NaN in every float format
    return runner


def make_row(request: int, ids: list[int], start: int, count: int, blocks: list[int]) -> Row:
    return Row(request, ids[start : start + count], start, blocks, True, GREEDY, 0)


def step_logits(runner: ModelRunner, decodes: list[Row], prefills: list[Row]) -> list[torch.Tensor]:
    """Logits of all tokens, by row."""
    _, hidden = runner.forward(StepPlan(0, decodes, prefills))
    with torch.inference_mode():
        logits = runner.decoder.logits(hidden)
    return list(logits.split([len(row.tokens) for row in (*decodes, *prefills)]))


def prompt(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(160), k=count)


@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("case", CASES)
def test_logits(oracle: Callable[[str], Oracle], case: str, block_size: int) -> None:
    made = oracle(case)
    runner = open_runner(made.folder, block_size)
    ids = prompt(75)
    expected = made.logits(ids)
    order = random.Random(1).sample(range(runner.num_blocks), runner.num_blocks)
    need = -(-75 // block_size)
    whole, chunked, single = (order[n * need : (n + 1) * need] for n in range(3))
    (logits,) = step_logits(runner, [], [make_row(1, ids, 0, 75, whole)])
    torch.testing.assert_close(logits, expected, **TOLERANCE)

    parts = [step_logits(runner, [], [make_row(2, ids, s, min(20, 75 - s), chunked)])[0] for s in range(0, 75, 20)]
    torch.testing.assert_close(torch.cat(parts), expected, **TOLERANCE)

    parts = [step_logits(runner, [make_row(3, ids, s, 1, single)], [])[0] for s in range(75)]
    torch.testing.assert_close(torch.cat(parts), expected, **TOLERANCE)


@pytest.mark.parametrize("case", ["llama", "mistral-window", "qwen2-window", "qwen3", "gemma3"])
def test_mixed_batch(oracle: Callable[[str], Oracle], case: str) -> None:
    """Three decode rows of different lengths and two chunks in one step."""
    made = oracle(case)
    runner = open_runner(made.folder, block_size=4)
    lengths = [1, 17, 40, 30, 9]  # tokens before the last step; the fourth is chunked from 12 on
    prompts = [prompt(length + 1, seed) for seed, length in enumerate(lengths)]
    order = iter(random.Random(2).sample(range(runner.num_blocks), runner.num_blocks))
    blocks = [[next(order) for _ in range(-(-len(ids) // 4))] for ids in prompts]
    first = [make_row(n, prompts[n], 0, lengths[n] if n < 3 else 12, blocks[n]) for n in range(4)]
    step_logits(runner, [], first)
    decodes = [make_row(n, prompts[n], lengths[n], 1, blocks[n]) for n in range(3)]
    prefills = [make_row(3, prompts[3], 12, 19, blocks[3]), make_row(4, prompts[4], 0, 10, blocks[4])]
    for row, logits in zip((*decodes, *prefills), step_logits(runner, decodes, prefills), strict=True):
        expected = made.logits(prompts[row.request_id])[row.start :]
        torch.testing.assert_close(logits, expected, **TOLERANCE)


def test_layers_that_are_made_side_by_side(oracle: Callable[[str], Oracle]) -> None:
    """Each in its place, with all bytes of the file accounted for; threads are as before."""
    made, heard = oracle("qwen2-window"), list[tuple[int, int]]()
    config = EngineConfig(model=str(made.folder), dtype="fp32", threads=3, num_blocks=8, max_cache=64)
    runner = load_runner(config, lambda done, total: heard.append((done, total)))
    total = sum(tensor.nbytes for tensor in made.model.state_dict().values())
    assert heard[-1] == (total, total) and [done for done, _ in heard] == sorted(done for done, _ in heard)
    (logits,) = step_logits(runner, [], [make_row(1, prompt(40), 0, 40, [5, 1, 3])])
    torch.testing.assert_close(logits, made.logits(prompt(40)), **TOLERANCE)


GGUF_CASES = ["llama", "llama-tied-bias", "llama-linear", "mistral", "qwen2", "qwen3", "gemma3-plain"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_torch_has_its_threads_again_after_a_load(device: str) -> None:
    before, during = torch.get_num_threads(), list[int]()
    torch.set_num_threads(3)
    try:
        _side_by_side([lambda: during.append(torch.get_num_threads())] * 3, torch.device(device))
        assert (during, torch.get_num_threads()) == ([1 if device == "cpu" else 3] * 3, 3)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("case", [*CASES, *(f"{case}.gguf" for case in GGUF_CASES)])
def test_greedy_tokens(oracle: Callable[[str], Oracle], tmp_path: Path, case: str) -> None:
    """64 tokens, each the most likely one to transformers too, given those before it."""
    made = oracle(case.removesuffix(".gguf"))
    path = made.folder
    if case.endswith(".gguf"):
        to_gguf(made.model, path := tmp_path / "m.gguf", Kind.F32)
    runner, ids = open_runner(path), prompt(11)
    step = StepPlan(0, [], [make_row(1, ids, 0, 11, list(range(5)))])
    for position in range(11, 75):
        ids.append(runner.launch(step).tokens().tokens[0])
        step = StepPlan(0, [make_row(1, ids, position, 1, list(range(5)))], [])
    assert ids[11:] == made.logits(ids)[10:-1].argmax(-1).tolist()


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0])
@pytest.mark.parametrize("case", ["llama", "qwen2", "gemma3-plain"])
def test_gguf(oracle: Callable[[str], Oracle], tmp_path: Path, case: str, kind: Kind) -> None:
    """Also K1: qwen2 is tied and has no output.weight."""
    made = oracle(case)
    state = to_gguf(made.model, tmp_path / "m.gguf", kind, eos_token_id=106, eot_token_id=107)
    before = {name: tensor.clone() for name, tensor in made.model.state_dict().items()}
    made.model.load_state_dict(state)
    try:
        ids = prompt(40)
        runner = open_runner(tmp_path / "m.gguf")
        (logits,) = step_logits(runner, [], [make_row(1, ids, 0, 40, [5, 1, 3])])
        torch.testing.assert_close(logits, made.logits(ids), **TOLERANCE)
        assert runner.eos_token_ids == [106, 107]
    finally:
        made.model.load_state_dict(before)


@pytest.mark.parametrize("weights", ["dense", "int8", "int4"])
def test_quantised_weights_stay_close(oracle: Callable[[str], Oracle], tmp_path: Path, weights: str) -> None:
    """bfloat16 on one token (the quantised form) and on many (the dense one) against the FP32 oracle."""
    made = oracle("qwen2")
    state = to_gguf(made.model, tmp_path / "m.gguf", Kind.Q4_1)
    before = {name: tensor.clone() for name, tensor in made.model.state_dict().items()}
    made.model.load_state_dict(state)
    try:
        ids = prompt(24)
        runner = open_runner(tmp_path / "m.gguf", dtype="bf16", weights=weights)
        expected = made.logits(ids)
        (many,) = step_logits(runner, [], [make_row(1, ids, 0, 24, [0, 1])])
        few = torch.cat([step_logits(runner, [make_row(2, ids, n, 1, [2, 3])], [])[0] for n in range(24)])
        for logits in (many, few):
            error = (logits - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt()
            assert error < 0.08
    finally:
        made.model.load_state_dict(before)
