"""Tiny random checkpoints made by transformers, the oracle of the model tests."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Kind

SIZES = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
GEMMA3 = {"sliding_window": 9, "sliding_window_pattern": 2, "query_pre_attn_scalar": 20}
GEMMA3 |= {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
LAYERS = ["sliding_attention", "sliding_attention", "full_attention"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "wide": ("Llama", {"hidden_size": 128, "intermediate_size": 256}),  # groups of 128
    "llama-tied-bias": ("Llama", {"tie_word_embeddings": True, "attention_bias": True}),
    "llama3-rope": ("Llama", {"rope_scaling": LLAMA3, "rope_theta": 500000.0}),
    "llama-yarn": ("Llama", {"rope_scaling": YARN}),
    "llama-linear": ("Llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "mistral-window": ("Mistral", {"sliding_window": 9}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True}),
    "gemma3": ("Gemma3", GEMMA3),
    "gemma3-plain": ("Gemma3", {"query_pre_attn_scalar": 32, "sliding_window": 9, "layer_types": LAYERS}),
    "gemma3-softcap": ("Gemma3", GEMMA3 | {"final_logit_softcapping": 3.0, "tie_word_embeddings": False}),
}


@dataclass
class Oracle:
    """A checkpoint on disk and the transformers model that wrote it."""

    folder: Path
    model: Any

    def logits(self, ids: list[int]) -> torch.Tensor:
        """float32 `[n, vocab]`."""
        with torch.inference_mode():
            result: torch.Tensor = self.model(torch.tensor([ids])).logits[0]
        return result


@pytest.fixture(scope="session")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Oracle]:
    made: dict[str, Oracle] = {}

    def make(case: str) -> Oracle:
        if case not in made:
            folder = tmp_path_factory.mktemp(case)
            name, extra = CASES[case]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                import transformers

                torch.manual_seed(sum(map(ord, case)))
                text = "Text" if name == "Gemma3" else ""
                config = getattr(transformers, f"{name}{text}Config")(**SIZES | extra)
                model = getattr(transformers, f"{name}ForCausalLM")(config).float().eval()
                for parameter in model.parameters():  # norms of one and biases of zero would hide mistakes
                    if parameter.ndim == 1:
                        torch.nn.init.uniform_(parameter, 0.5, 1.5)
                model.save_pretrained(folder, max_shard_size="60KB" if case == "qwen3" else "1GB")
            made[case] = Oracle(folder, model)
        return made[case]

    return make


def to_gguf(model: Any, path: Path, kind: Kind, **extra: Any) -> dict[str, torch.Tensor]:
    """Write a model as GGUF, linear weights as `kind`. Returns the state dict as it then reads.

    As llama.cpp's convert_hf_to_gguf.py does it: Q and K of Llamas are permuted, Gemma's norms get their 1.
    """
    config = model.config
    arch = {"mistral": "llama", "gemma3_text": "gemma3"}.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if arch == "gemma3":
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    writer.add_array("tokenizer.ggml.tokens", [f"t{n}" for n in range(config.vocab_size)])
    for key, value in extra.items():
        writer.add_uint32(f"tokenizer.ggml.{key}", value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], config.num_hidden_layers)
    state = model.state_dict()
    for name, tensor in state.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        data = tensor.numpy()
        stored = gguf.quants.quantize(data, kind) if "proj.weight" in name else data
        if "proj.weight" in name and kind != Kind.F32:
            state[name] = torch.from_numpy(gguf.quants.dequantize(stored, kind).copy())
        if arch == "gemma3" and name.endswith("norm.weight"):
            stored = stored + 1
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        if arch == "llama" and heads:
            stored = np.ascontiguousarray(
                stored.reshape(heads, 2, -1, *stored.shape[1:]).swapaxes(1, 2).reshape(stored.shape)
            )
        base, suffix = name.rsplit(".", 1)
        ours = names.get_name(base)
        assert ours is not None
        quantised = kind if "proj.weight" in name and kind not in (Kind.F32, Kind.F16) else None
        writer.add_tensor(f"{ours}.{suffix}", stored, raw_dtype=quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return dict(state)
