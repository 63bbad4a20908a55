"""Every KV format in whole models: however steps are cut, the same comes out; NaN and outliers do no harm."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine_core.model_runner import ModelRunner, load_runner
from engine_core.plan import Row, StepPlan
from protocol.config import EngineConfig
from protocol.messages import SamplingParams

from .conftest import Oracle

GREEDY = SamplingParams(temperature=0.0)
FORMATS = ["int8", "fp8_e4m3", "fp8_e5m2", "fp8_per_token_head"]
TOKENS = 75


def open_runner(path: Path, name: str, byte: int = 0xFF, wide: str = "auto") -> ModelRunner:
    """An FP32 runner whose pool is full of NaN: 0xff and 0x7f are NaN in both FP8 forms, and as scales."""
    runner = load_runner(
        EngineConfig(
            model=str(path),
            dtype="fp32",
            threads=1,
            num_blocks=128,
            max_cache=256,
            block_size=4,
            kv_cache_dtype=name,
            kv_16bit_layers=wide,
        )
    )
    runner.store.pool.fill_(byte)
    return runner


def prompt(count: int = TOKENS, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(160), k=count)


def logits(runner: ModelRunner, blocks: list[int], chunk: int, first: int = 0) -> torch.Tensor:
    """Of the prompt from position `first` on, in chunks; chunks of 1 are decode rows."""
    ids, found = prompt(), []
    for start in range(first, TOKENS, chunk):
        row = Row(1, ids[start : start + chunk], start, blocks, True, GREEDY, 0)
        _, hidden = runner.forward(StepPlan(0, [row], []) if chunk == 1 else StepPlan(0, [], [row]))
        with torch.inference_mode():
            found.append(runner.decoder.logits(hidden))
    return torch.cat(found)


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The median over positions of the largest difference of a logit."""
    return (found - expected).abs().amax(1).median().item()


def assert_same(found: torch.Tensor, expected: torch.Tensor, format_error: float) -> None:
    """The same tokens, and far closer than the format is to FP32: rounding moves few values to the next code."""
    assert distance(found, expected) < 0.1 * format_error
    best = expected.topk(2).values
    clear = best[:, 0] - best[:, 1] > 0.1
    assert torch.equal(found.argmax(1)[clear], expected.argmax(1)[clear])


@pytest.mark.parametrize("wide", ["none", "1"])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("case", ["llama", "mistral-window", "qwen2", "qwen3"])
def test_prefix_hit_miss_chunks_and_decode_are_the_same(
    oracle: Callable[[str], Oracle], case: str, name: str, wide: str
) -> None:
    """Because prefill attends to values as stored: to fresh ones, whole and cut would differ by the rounding of KV."""
    made = oracle(case)
    runner = open_runner(made.folder, name, 0x7F if case == "llama" else 0xFF, wide)
    order = random.Random(1).sample(range(128), 128)
    need = -(-TOKENS // 4)
    tables = [order[n * need : (n + 1) * need] for n in range(4)]
    whole = logits(runner, tables[0], TOKENS)
    assert bool(whole.isfinite().all())
    exact = made.logits(prompt())
    error = distance(whole, exact)
    assert error > 5e-3
    assert torch.nn.functional.cosine_similarity(whole, exact).mean() > 0.9
    assert_same(logits(runner, tables[1], 13), whole, error)
    assert_same(logits(runner, tables[2], 1), whole, error)
    hit = tables[0][:10] + tables[3][10:]  # ten blocks of the first request
    assert_same(logits(runner, hit, TOKENS, first=40), whole[40:], error)


@pytest.mark.parametrize("name", ["auto", *FORMATS])
def test_nan_ends_its_request_alone(oracle: Callable[[str], Oracle], name: str) -> None:
    """NaN activations reach the pool, and are seen; neighbours and who reuses the blocks don't notice."""
    runner = open_runner(oracle("llama").folder, name)
    with torch.inference_mode():
        runner.decoder.embedding[7] = float("nan")

    def run(*requests: tuple[list[int], list[int], int]) -> list[int]:
        rows = [Row(n, ids[at:], at, blocks, True, GREEDY, 0) for n, (ids, blocks, at) in enumerate(requests)]
        decodes = [row for row in rows if row.start]
        return runner.launch(StepPlan(0, decodes, [row for row in rows if not row.start])).tokens().tokens

    good = [token for token in prompt(20) if token != 7]
    (wanted,) = run((good, [0, 1, 2, 3, 4], 0))
    bad, other = [5, 7, 9], [8, 9, 10, 11, 12]
    assert run((bad, [6], 0), (good, other, 0)) == [-1, wanted]
    assert run(([*bad, 11], [6], 3))[0] == -1  # what is stored of the poisoned token is still NaN
    assert run((good, [6, 1, 2, 3, 4], 0)) == [wanted]


def test_outlier_layers_are_found_and_help(oracle: Callable[[str], Oracle], tmp_path: Path) -> None:
    """As in Qwen2.5: a huge key bias in one layer spoils int8 keys; with K of that layer kept, errors are ordinary."""
    made = oracle("qwen2")
    before = {name: tensor.clone() for name, tensor in made.model.state_dict().items()}
    try:
        with torch.no_grad():
            made.model.model.layers[1].self_attn.k_proj.bias[3] = 400.0
        made.model.save_pretrained(tmp_path)
        expected = made.logits(prompt())
    finally:
        made.model.load_state_dict(before)
    table = list(range(19))
    errors = {}
    for wide in ("auto", "none"):
        runner = open_runner(tmp_path, "int8", wide=wide)
        assert f"K in 16 bits in layers: {'1' if wide == 'auto' else 'none'};" in runner.summary
        errors[wide] = (logits(runner, table, TOKENS) - expected).pow(2).mean().sqrt().item()
    assert errors["auto"] < errors["none"] / 3
    unspoilt = open_runner(made.folder, "int8")
    assert "K in 16 bits in layers: none;" in unspoilt.summary
