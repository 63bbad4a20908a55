"""Random weights from a config: complete, the same each time, and with finite activations."""

import json
from pathlib import Path

import pytest
import torch

from engine_core.memory import describe_plan, plan_memory
from engine_core.model.config import load_model_config
from engine_core.model.dummy import DummyWeights
from engine_core.model.weights import check_shapes, expected_shapes
from engine_core.open_model import open_model
from protocol.config import EngineConfig
from protocol.errors import StartupError

from .test_decoder import make_row, open_runner, prompt, step_logits

CPU = torch.device("cpu")
TINY = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
    "eos_token_id": 2,
}
AWQ = {
    "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True}
}
CONFIGS = Path(__file__).parents[2] / "data" / "configs"


def folder(path: Path, **changes: object) -> Path:
    (path / "config.json").write_text(json.dumps(TINY | changes))
    return path


@pytest.mark.parametrize("more", [{}, AWQ], ids=["dense", "4-bit"])
def test_logits_are_finite_and_the_same_each_time(tmp_path: Path, more: dict[str, object]) -> None:
    path = folder(tmp_path, **more)
    ids = prompt(40)
    logits = []
    for _ in range(2):
        runner = open_runner(path, load_format="dummy")
        (found,) = step_logits(runner, [], [make_row(1, ids, 0, 40, list(range(3)))])
        logits.append(found)
    assert torch.isfinite(logits[0]).all()
    assert 0.01 < logits[0].std() < 10
    assert len(set(logits[0].argmax(-1).tolist())) > 1, "nothing of the prompt reaches the logits"
    assert torch.equal(*logits)


def test_tensors_have_the_form_that_is_asked_for(tmp_path: Path) -> None:
    config = load_model_config(folder(tmp_path, **AWQ))
    weights = DummyWeights(config, CPU, torch.bfloat16)
    check_shapes(expected_shapes(config), weights.shapes)
    for name, shape in weights.shapes.items():
        tensor = weights.dense(name)
        assert (tuple(tensor.shape), tensor.dtype) == (shape, torch.bfloat16)
    assert weights.group_size("layers.0.gate") == 64
    assert not weights.group_size("embed") + weights.group_size("layers.0.q.bias") + weights.group_size("norm")
    assert weights.four_bit("layers.0.gate", CPU).packed.shape == (384, 128)
    assert weights.dense("layers.0.gate").float().std() == pytest.approx(128**-0.5, rel=0.05)
    assert not torch.equal(weights.dense("layers.0.gate"), weights.dense("layers.1.gate"))
    assert weights.total_bytes == sum(map(weights.bytes_of, weights.shapes))


@pytest.mark.parametrize(("name", "gib"), [("qwen2.5-3b", 5.75), ("qwen2.5-7b", 14.2), ("llama-3.1-8b", 14.96)])
def test_published_shapes(name: str, gib: float) -> None:
    """Sizes in 16 bits; 8-bit KV finds no outliers to keep in 16 bits, as nothing is known of the real biases."""
    config = EngineConfig(
        model=str(CONFIGS / name), load_format="dummy", dtype="fp16", weights="dense", kv_cache_dtype="int8"
    )
    plan = plan_memory(open_model(config, CPU, (100 << 30, 100 << 30)), config)
    assert plan.weights / (1 << 30) == pytest.approx(gib, rel=0.01)
    assert plan.kv_16bit_layers == "none"


def test_plans_and_refusals(tmp_path: Path) -> None:
    config = EngineConfig(model=str(folder(tmp_path)), load_format="dummy", dtype="fp32")
    assert str(describe_plan(config)["model"]).endswith("-dummy")
    with pytest.raises(StartupError, match="no such model"):
        describe_plan(EngineConfig(model=str(tmp_path / "none"), load_format="dummy"))
    with pytest.raises(StartupError, match=r"config\.json"):
        describe_plan(EngineConfig(model=str(tmp_path.parent), load_format="dummy"))
