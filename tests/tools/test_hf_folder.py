"""Folders that transformers reads: shards, and configs made from what GGUF files say."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine_core.model.config import ModelConfig, RopeConfig, from_hf
from protocol.errors import StartupError
from tools.hf_folder import hf_config, module_name, norm_shift, write_tensors

LLAMA = ModelConfig("llama", 100, 64, 96, 4, 4, 2, 32, 1e-5, 2048, RopeConfig(5e5), (0,) * 4, eos_token_ids=(7, 8))
GEMMA3 = replace(
    LLAMA,
    architecture="gemma3",
    windows=(8, 8, 8, 0),
    qk_norm=True,
    tied_embeddings=True,
    local_rope=RopeConfig(1e4),
    attention_scale=20**-0.5,
    embedding_scale=8.0,
    output_norms=True,
    activation="gelu_tanh",
    logit_softcap=30.0,
)


@pytest.mark.parametrize(
    "model",
    [
        LLAMA,
        replace(LLAMA, rope=RopeConfig(1e4, "linear", 4.0), qkv_bias=True, output_bias=True),
        replace(LLAMA, max_context=8192, rope=RopeConfig(1e4, "yarn", 4.0, original_max_position_embeddings=2048)),
        replace(LLAMA, architecture="qwen2", qkv_bias=True, tied_embeddings=True),
        replace(LLAMA, architecture="qwen3", qk_norm=True),
        replace(GEMMA3, rope=RopeConfig(1e6, "linear", 8.0)),
    ],
)
def test_configs_read_as_they_were(model: ModelConfig) -> None:
    again = from_hf(hf_config(model))
    assert replace(again, norm_offset=0.0) == model
    assert again.norm_offset == norm_shift(model)


@pytest.mark.parametrize(
    ("model", "has_divisors", "message"),
    [
        (LLAMA, True, "divisors"),
        (replace(LLAMA, windows=(8,) * 4), False, "window"),
        (replace(LLAMA, qkv_bias=True), False, "biases of Q, K and V alone"),
    ],
)
def test_what_no_config_can_tell(model: ModelConfig, has_divisors: bool, message: str) -> None:
    with pytest.raises(StartupError, match=message):
        hf_config(model, has_divisors)


def test_shards(tmp_path: Path) -> None:
    """A new shard begins before a tensor that doesn't fit; a tensor larger than a shard has its own."""
    sizes = {"a": 5, "b": 5, "c": 30, "d": 1}
    tensors = {name: torch.full((size,), float(n)) for n, (name, size) in enumerate(sizes.items())}
    assert write_tensors(tmp_path, tensors.items(), 40) == 4 * 41
    names = [f"model-{n:05}-of-00003.safetensors" for n in (1, 2, 3)]
    assert sorted(file.name for file in tmp_path.iterdir()) == [*names, "model.safetensors.index.json"]
    places = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert places == {"a": names[0], "b": names[0], "c": names[1], "d": names[2]}
    assert all(torch.equal(load_file(tmp_path / places[name])[name], tensor) for name, tensor in tensors.items())


def test_modules_of_gemma3() -> None:
    found = [module_name(f"layers.2.{part}", GEMMA3) for part in ("attn_out_norm", "mlp_norm", "mlp_out_norm")]
    norms = ("post_attention", "pre_feedforward", "post_feedforward")
    assert found == [f"model.layers.2.{name}_layernorm" for name in norms]
    assert module_name("layers.2.mlp_norm", LLAMA) == "model.layers.2.post_attention_layernorm"
