"""Configs: what is understood, and that all else is refused by name."""

import json
import struct
from pathlib import Path
from typing import Any

import gguf
import pytest

from engine_core.model.config import RopeConfig, from_gguf, from_hf, load_model_config
from engine_core.model.gguf_file import GGUFFile
from protocol.errors import StartupError

CONFIGS = Path(__file__).parents[2] / "data" / "configs"
BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": []}, "architectures"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ({"rope_scaling": {"rope_type": "yarn", "type": "linear", "factor": 2.0}}, "rope_scaling type"),
        ({"rope_scaling": {"factor": 2.0}}, "factor without a type"),
        ({"rope_scaling": {"type": "linear"}}, "lacks factor"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "surprise": 1}}, "surprise"),
        ({"sliding_window": 128}, "sliding_window"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "KV heads"),
        ({"hidden_size": "many"}, "wrong type"),
        ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "layer_types": ["x"] * 4}, "layer_types"),
    ],
)
def test_refusals(change: dict[str, Any], named: str) -> None:
    with pytest.raises(StartupError, match=named):
        from_hf(BASE | change)


def test_missing_key_is_named() -> None:
    with pytest.raises(StartupError, match="hidden_size"):
        from_hf({key: value for key, value in BASE.items() if key != "hidden_size"})


def test_defaults_and_harmless_keys() -> None:
    config = from_hf(BASE | {"use_cache": True, "pretraining_tp": 1, "torch_dtype": "bfloat16", "new_flag": False})
    assert (config.num_kv_heads, config.head_dim, config.rope.theta, config.windows) == (4, 16, 10000.0, (0, 0, 0, 0))


def test_windows() -> None:
    assert from_hf(BASE | {"architectures": ["MistralForCausalLM"], "sliding_window": 8}).windows == (8,) * 4
    qwen = BASE | {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 8, "max_window_layers": 3}
    assert from_hf(qwen).windows == (0,) * 4
    assert from_hf(qwen | {"use_sliding_window": True}).windows == (0, 0, 0, 8)


def test_yarn_extends_the_context() -> None:
    rope = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    assert from_hf(BASE | {"rope_scaling": rope}).max_context == 8192


@pytest.mark.parametrize("count", [0, 10**12, "many"])
def test_layer_counts_that_are_none(count: Any) -> None:
    with pytest.raises(StartupError, match="num_hidden_layers"):
        from_hf(BASE | {"num_hidden_layers": count})


@pytest.mark.parametrize("bad", ["two", -1, [2, None]])
def test_eos_ids_that_are_none(tmp_path: Path, bad: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": bad}))
    with pytest.raises(StartupError, match="not a token id"):
        load_model_config(tmp_path)


def test_eos_ids_of_both_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BASE | {"eos_token_id": 5}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 5, 9]}))
    assert load_model_config(tmp_path).eos_token_ids == (5, 7, 9)


GEMMA3_1B: dict[str, Any] = {  # the keys and sizes of Gemma 3 1B
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "vocab_size": 262144,
}


def test_gemma3() -> None:
    config = from_hf(GEMMA3_1B)
    assert config.windows == ((512,) * 5 + (0,)) * 4 + (512, 512)
    assert (config.rope.theta, config.local_rope) == (1e6, RopeConfig(1e4))
    assert config.tied_embeddings and config.output_norms and config.embedding_scale == 1152**0.5
    scaled = from_hf(GEMMA3_1B | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}})
    assert (scaled.rope.factor, scaled.local_rope) == (8.0, RopeConfig(1e4))


@pytest.mark.parametrize(
    ("key", "value"),
    [("attn_logit_softcapping", 50.0), ("use_bidirectional_attention", True), ("hidden_activation", "gelu")],
)
def test_gemma3_refusals(key: str, value: Any) -> None:
    with pytest.raises(StartupError, match=key):
        from_hf(GEMMA3_1B | {key: value})


@pytest.mark.parametrize("name", ["qwen2.5-3b", "qwen2.5-7b", "llama-3.1-8b"])
def test_published_configs_load(name: str) -> None:
    config = load_model_config(CONFIGS / name)
    assert config.head_dim == 128
    assert config.qkv_bias == name.startswith("qwen")
    assert config.rope.kind == ("llama3" if name.startswith("llama") else "default")


def write_gguf(path: Path, arch: str = "llama", **keys: Any) -> GGUFFile:
    writer = gguf.GGUFWriter(path, arch)
    sizes = {"block_count": 1, "context_length": 64, "embedding_length": 8, "feed_forward_length": 8}
    for key, value in (sizes | {"attention.head_count": 2} | keys).items():
        name = key if key.startswith("tokenizer.") else f"{arch}.{key}"
        if isinstance(value, str):
            writer.add_string(name, value)
        else:
            (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(name, value)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_array("tokenizer.ggml.tokens", [f"token {n}" for n in range(3000)])
    writer.add_array("tokenizer.ggml.token_type", [1] * 3000)
    writer.add_string("last", "key")
    import numpy as np

    writer.add_tensor("token_embd.weight", np.zeros((4, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUFFile(path)


def test_gguf_file_skips_long_arrays(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf")
    assert file.metadata["last"] == "key"
    assert file.array_length("tokenizer.ggml.tokens") == 3000
    assert "tokenizer.ggml.tokens" not in file.metadata
    assert file.tensors["token_embd.weight"].shape == (4, 8)


@pytest.mark.parametrize(
    ("arch", "keys", "named"),
    [
        ("gemma", {}, "gemma"),
        ("llama", {"expert_count": 8}, "llama.expert_count"),
        ("llama", {"rope.scaling.type": "longrope", "rope.scaling.factor": 4.0}, "longrope"),
        ("llama", {"rope.dimension_count": 2}, "rope.dimension_count"),
        ("llama", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("llama", {"block_count": 2**32 - 1}, "block_count"),
        ("llama", {"block_count": 0}, "block_count"),
        ("llama", {"block_count": "many"}, "block_count"),
    ],
)
def test_gguf_refusals(tmp_path: Path, arch: str, keys: dict[str, Any], named: str) -> None:
    with pytest.raises(StartupError, match=named):
        from_gguf(write_gguf(tmp_path / "m.gguf", arch, **keys))


def test_gguf_gemma3(tmp_path: Path) -> None:
    """Files of before the pattern was a key; the 27B has 62 layers, and queries scaled by hidden_size / heads."""
    keys = {"block_count": 62, "attention.sliding_window": 16, "attention.key_length": 2, "attention.value_length": 2}
    keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    config = from_gguf(write_gguf(tmp_path / "m.gguf", "gemma3", **keys))
    assert config.windows == (((16,) * 5 + (0,)) * 11)[:62]
    assert (config.attention_scale, config.norm_offset) == (0.5, 0.0)
    assert (config.rope.theta, config.rope.factor, config.local_rope) == (1e6, 8.0, RopeConfig(1e4))


def test_gguf_eos_and_rope(tmp_path: Path) -> None:
    ids = {f"tokenizer.ggml.{name}_token_id": value for name, value in (("eos", 106), ("eot", 107), ("eom", 108))}
    config = from_gguf(write_gguf(tmp_path / "m.gguf", **ids, **{"rope.scaling.factor": 4.0}))
    assert config.eos_token_ids == (106, 107, 108)
    assert (config.rope.kind, config.rope.factor, config.tied_embeddings) == ("linear", 4.0, True)


@pytest.mark.parametrize("cut", [3, 100, -20])
def test_damaged_gguf(tmp_path: Path, cut: int) -> None:
    write_gguf(tmp_path / "m.gguf")
    (tmp_path / "cut.gguf").write_bytes((tmp_path / "m.gguf").read_bytes()[:cut])
    with pytest.raises(StartupError, match=r"cut\.gguf is not a readable GGUF"):
        GGUFFile(tmp_path / "cut.gguf")


def test_an_array_longer_than_any_offset(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    content = bytearray((tmp_path / "m.gguf").read_bytes())
    start = content.index(b"tokenizer.ggml.token_type") + len("tokenizer.ggml.token_type") + 8  # its two types
    content[start : start + 8] = b"\xff" * 8
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(StartupError, match="not a readable GGUF"):
        GGUFFile(tmp_path / "m.gguf")


@pytest.mark.parametrize("alignment", [0, 32.0, "eight"])
def test_alignments_that_are_none(tmp_path: Path, alignment: float | str) -> None:
    content = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)
    content += struct.pack("<Q", 17) + b"general.alignment"
    values = {
        0: struct.pack("<II", 4, 0),
        32.0: struct.pack("<If", 6, 32.0),
        "eight": struct.pack("<IQ", 8, 5) + b"eight",
    }
    (tmp_path / "m.gguf").write_bytes(content + values[alignment])
    with pytest.raises(StartupError, match="not a readable GGUF"):
        GGUFFile(tmp_path / "m.gguf")
