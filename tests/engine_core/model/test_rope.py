"""Rotary frequencies equal transformers' (failure report K3)."""

import warnings
from typing import Any

import pytest
import torch

from engine_core.model.config import RopeConfig, from_hf
from engine_core.model.rope import rope_frequencies, rope_table

SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096, "beta_fast": 16.0, "beta_slow": 2.0},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096, "attention_factor": 1.5},
    {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 0.8,
    },
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096, "truncate": False},
]


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: "-".join(map(str, scaling.values())))
def test_frequencies(scaling: dict[str, Any], key: str) -> None:
    sizes = {"vocab_size": 8, "hidden_size": 256, "intermediate_size": 8, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        theirs = LlamaConfig(**sizes, rope_parameters={**scaling, "rope_theta": 500000.0})
        rotary = LlamaRotaryEmbedding(theirs)
    renamed = {key if name == "rope_type" else name: value for name, value in scaling.items()}
    ours = {**sizes, "architectures": ["LlamaForCausalLM"], "rope_theta": 500000.0, "rope_scaling": renamed}
    frequencies, factor = rope_frequencies(from_hf(ours).rope, 128)
    positions = torch.tensor([10, 5000, 20000])
    torch.testing.assert_close(frequencies, rotary.inv_freq, rtol=1e-6, atol=0)
    cos, sin = rotary(torch.zeros(1, 3, 1), positions[None])
    our_cos, our_sin = rope_table(frequencies, factor, positions)
    torch.testing.assert_close(our_cos[:, 0], cos[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(our_sin[:, 0, 64:], sin[0, :, 64:], rtol=0, atol=1e-6)
    torch.testing.assert_close(our_sin[:, 0, :64], -sin[0, :, :64], rtol=0, atol=1e-6)


def test_gguf_divisors_are_llama3() -> None:
    """A GGUF's rope_freqs.weight holds what each frequency is divided by."""
    plain, _ = rope_frequencies(RopeConfig(), 64)
    scaled, _ = rope_frequencies(RopeConfig(kind="llama3", factor=32.0, original_max_position_embeddings=8192), 64)
    found, factor = rope_frequencies(RopeConfig(), 64, plain / scaled)
    torch.testing.assert_close(found, scaled, rtol=1e-6, atol=0)
    assert factor == 1.0
