"""A model as a folder that transformers reads: config, tokenizer, safetensors. Also from a GGUF file."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from engine_core.model.config import ModelConfig, RopeConfig
from engine_core.open_model import OpenModel
from frontend.vocab import load_text_model
from protocol.errors import StartupError

SHARD = 4 << 30  # bytes
_CLASSES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "gemma3": "Gemma3"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "mlp_norm": "post_attention_layernorm",
}
_GEMMA3_LAYER = {
    "attn_out_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
}
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
_SENTENCEPIECE = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ],
}


def module_name(name: str, config: ModelConfig) -> str:
    """The module that transformers keeps our `layers.0.q` in, and so on."""
    if name in ("embed", "norm", "head"):
        return {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}[name]
    _, number, part = name.split(".")
    return f"model.layers.{number}.{(_LAYER | (_GEMMA3_LAYER if config.output_norms else {}))[part]}"


def write_tensors(folder: Path, tensors: Iterable[tuple[str, Tensor]], shard_bytes: int = SHARD) -> int:
    """Write shards as they fill up, and their index. Returns the bytes of the tensors."""
    shard: dict[str, Tensor] = {}
    shards: list[list[str]] = []
    size = total = 0

    def flush() -> None:
        save_file(shard, folder / f"part-{len(shards)}", {"format": "pt"})
        shards.append(list(shard))
        shard.clear()

    for name, tensor in tensors:
        if shard and size + tensor.nbytes > shard_bytes:
            flush()
            size = 0
        shard[name] = tensor.contiguous()
        size, total = size + tensor.nbytes, total + tensor.nbytes
    flush()
    names = [f"model-{n + 1:05}-of-{len(shards):05}.safetensors" for n in range(len(shards))]
    if len(shards) == 1:
        names = ["model.safetensors"]
    else:
        places = {tensor: name for name, listed in zip(names, shards, strict=True) for tensor in listed}
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    for number, name in enumerate(names):
        (folder / f"part-{number}").rename(folder / name)
    return total


def write_rest(source: Path, folder: Path, model: OpenModel, changes: dict[str, Any]) -> None:
    """Config with `changes`, tokenizer, chat template. Raises StartupError if no HF config can tell."""
    if source.is_dir():
        config = json.loads((source / "config.json").read_text("utf-8"))
        for file in source.iterdir():
            if file.suffix in (".json", ".jinja", ".model", ".txt", ".md") and not file.name.endswith(".index.json"):
                shutil.copy(file, folder)
    else:
        config = hf_config(model.config, model.rope_divisors is not None)
        _write_tokenizer(source, folder, model.config.eos_token_ids)
    (folder / "config.json").write_text(json.dumps(config | changes, indent=1) + "\n")


def hf_config(config: ModelConfig, has_divisors: bool = False) -> dict[str, Any]:
    """A transformers config of what a GGUF file says."""
    if has_divisors:
        raise StartupError(
            "the file has worked-out RoPE divisors, which no config.json can tell: start from safetensors"
        )
    name = _CLASSES[config.architecture]
    result = {
        "architectures": [f"{name}ForCausalLM"],
        "model_type": "gemma3_text" if name == "Gemma3" else config.architecture,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_context,
        "rope_theta": config.rope.theta,
        "rope_scaling": _rope_scaling(config.rope),
        "tie_word_embeddings": config.tied_embeddings,
        "eos_token_id": list(config.eos_token_ids) or None,
    }
    if config.output_bias or (config.qkv_bias and name != "Qwen2"):
        if not config.output_bias:
            raise StartupError(f"a {name} config can't tell of biases of Q, K and V alone: start from safetensors")
        result["attention_bias"] = True
    if name == "Gemma3":
        kinds = ["sliding_attention" if window else "full_attention" for window in config.windows]
        local = config.local_rope.theta if config.local_rope else config.rope.theta
        scale = config.attention_scale or config.head_dim**-0.5
        result |= {"sliding_window": max(config.windows), "layer_types": kinds, "rope_local_base_freq": local}
        result |= {"query_pre_attn_scalar": round(scale**-2), "final_logit_softcapping": config.logit_softcap or None}
    elif any(config.windows):
        raise StartupError(f"a window in a GGUF file of {name}: start from safetensors")
    return result


def norm_shift(config: ModelConfig) -> float:
    """What our norms have more than transformers' of the same model."""
    return 1.0 - config.norm_offset if config.architecture == "gemma3" else 0.0


def _rope_scaling(rope: RopeConfig) -> dict[str, Any] | None:
    if rope.kind == "default":
        return None
    scaling: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind == "yarn":
        scaling |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
        scaling["original_max_position_embeddings"] = rope.original_max_position_embeddings
    return scaling


def _write_tokenizer(source: Path, folder: Path, eos: tuple[int, ...]) -> None:
    try:
        text = load_text_model(source)
    except StartupError:  # a file without one
        return
    content = json.loads(text.tokenizer.to_str())
    known = text.vocab_size  # beyond it are names that only the loading process knows
    content["decoder"] = _SENTENCEPIECE if content["model"]["byte_fallback"] else _BYTE_LEVEL
    content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] < known]
    (folder / "tokenizer.json").write_text(json.dumps(content, ensure_ascii=False))
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **text.template_tokens}
    config["add_bos_token"] = bool(text.prefix_ids)
    if "default" in text.chat_templates:
        config["chat_template"] = text.chat_templates["default"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False, indent=1))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(eos)}))


def is_16bit(tensor: Tensor) -> bool:
    """Whether a tensor can stay as it is."""
    return tensor.dtype in (torch.float16, torch.bfloat16)
