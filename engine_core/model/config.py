"""What a model file says of its architecture. Whatever is not understood is a StartupError, never ignored."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine_core.model.gguf_file import GGUFFile
from engine_core.model.quantization import Quantization, read_quantization
from protocol.errors import StartupError

_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma3ForCausalLM": "gemma3",
}
MAX_LAYERS = 4096  # no model is near it; what is kept per layer stays small whatever a file says
# Keys that say nothing of the forward pass. Anything else that is set and not read below is refused.
_HARMLESS = (
    "_name_or_path architectures attention_dropout auto_map bos_token_id cache_implementation dtype "
    "chunk_size_feed_forward id2label initializer_range is_llama_config label2id model_type output_attentions "
    "output_hidden_states pad_token_id problem_type return_dict tokenizer_class torch_dtype "
    "transformers.js_config transformers_version unsloth_fixed unsloth_version use_cache "
    "_attn_implementation_autoset"
)
_READ = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
    "head_dim hidden_act rms_norm_eps max_position_embeddings rope_theta rope_scaling rope_parameters "
    "attention_bias tie_word_embeddings sliding_window use_sliding_window max_window_layers layer_types "
    "eos_token_id quantization_config"
)
_READ_OF_GEMMA3 = (
    "hidden_activation query_pre_attn_scalar final_logit_softcapping rope_local_base_freq sliding_window_pattern "
    "_sliding_window_pattern"
)
_GEMMA3_THETAS, _GEMMA3_PATTERN = (1e6, 1e4), 6  # RoPE of full and of windowed layers; every 6th layer is a full one
_GEMMA3_27B_LAYERS = 62
_ONLY = {"mlp_bias": False, "pretraining_tp": 1, "partial_rotary_factor": 1.0, "rope_interleaved": False}
_ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        *("factor", "original_max_position_embeddings", "beta_fast", "beta_slow"),
        *("attention_factor", "mscale", "mscale_all_dim", "truncate"),
    ),
}


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding. `kind` is default, linear, llama3 or yarn; the rest are transformers' names and defaults."""

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True)
class ModelConfig:
    """A Llama-style decoder. Sizes are in elements; `windows` are the layers' windows in tokens, 0 for none."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_context: int
    rope: RopeConfig
    windows: tuple[int, ...]
    qkv_bias: bool = False
    output_bias: bool = False  # of the attention's output projection
    qk_norm: bool = False
    tied_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()
    local_rope: RopeConfig | None = None  # of the layers with a window, if theirs differs
    attention_scale: float = 0.0  # 0: 1 / sqrt(head_dim)
    embedding_scale: float = 1.0
    norm_offset: float = 0.0  # what the file's norm weights lack
    output_norms: bool = False  # of attention and MLP, before they are added
    activation: str = "silu"  # or gelu_tanh
    quantization: Quantization | None = None  # of safetensors files
    logit_softcap: float = 0.0  # c * tanh(logits / c); 0: none

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"):
            if getattr(self, name) < 1:
                raise StartupError(f"model config: {name} is {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise StartupError(f"model config: {self.num_heads} heads don't share {self.num_kv_heads} KV heads evenly")
        if self.head_dim < 2 or self.head_dim % 2:
            raise StartupError(f"model config: head_dim is {self.head_dim}")


def load_model_config(path: Path) -> ModelConfig:
    """Read the config of a GGUF file or of a folder with config.json. Raises StartupError."""
    if path.is_dir():
        config, beside = _read_json(path / "config.json"), path / "quantize_config.json"  # of AutoGPTQ
        if beside.exists() and not config.get("quantization_config"):
            config["quantization_config"] = _read_json(beside)
        return from_hf(config, _generation_eos(path))
    return from_gguf(GGUFFile(path))


def from_hf(config: Mapping[str, Any], extra_eos: tuple[int, ...] = ()) -> ModelConfig:
    """Read a transformers config. `extra_eos` are the EOS ids of generation_config.json."""
    architectures = config.get("architectures") or [None]
    architecture = _ARCHITECTURES.get(architectures[0])
    if architecture is None or len(architectures) != 1:
        raise _not_understood("architectures", architectures, f"known: {', '.join(_ARCHITECTURES)}")
    known = {*_HARMLESS.split(), *_READ.split(), *(_READ_OF_GEMMA3.split() if architecture == "gemma3" else ())}
    for key, value in config.items():
        if key in _ONLY:
            if value not in (None, _ONLY[key]):
                raise _not_understood(key, value)
        elif key not in known and value not in (None, False):
            raise _not_understood(key, value)
    key, activation = ("hidden_activation", "gelu_pytorch_tanh") if architecture == "gemma3" else ("hidden_act", "silu")
    if config.get(key, activation) != activation:
        raise _not_understood(key, config[key])
    try:
        model = _from_hf(config, architecture, extra_eos)
        return _gemma3_from_hf(config, model) if architecture == "gemma3" else model
    except KeyError as error:
        raise StartupError(f"config.json lacks {error}") from error
    except (TypeError, ValueError) as error:
        raise StartupError(f"config.json: a value is of the wrong type: {error}") from error


def _from_hf(config: Mapping[str, Any], architecture: str, extra_eos: tuple[int, ...]) -> ModelConfig:
    heads = int(config["num_attention_heads"])
    max_context = int(config["max_position_embeddings"])
    rope = _rope_from_hf(config if architecture != "gemma3" else _gemma3_rope(config), max_context)
    if rope.kind == "yarn":
        max_context = max(max_context, int(rope.original_max_position_embeddings * rope.factor))
    bias = bool(config.get("attention_bias", False))
    return ModelConfig(
        architecture=architecture,
        vocab_size=int(config["vocab_size"]),
        hidden_size=int(config["hidden_size"]),
        intermediate_size=int(config["intermediate_size"]),
        num_layers=_layer_count("num_hidden_layers", config["num_hidden_layers"]),
        num_heads=heads,
        num_kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or int(config["hidden_size"]) // heads),
        rms_norm_eps=float(config["rms_norm_eps"]),
        max_context=max_context,
        rope=rope,
        windows=_windows(config, architecture),
        qkv_bias=bias or architecture == "qwen2",
        output_bias=bias,
        qk_norm=architecture in ("qwen3", "gemma3"),
        tied_embeddings=bool(config.get("tie_word_embeddings", architecture == "gemma3")),
        eos_token_ids=_unique(_id_list(config.get("eos_token_id")) + extra_eos),
        quantization=read_quantization(quantization) if (quantization := config.get("quantization_config")) else None,
    )


def _gemma3_from_hf(config: Mapping[str, Any], model: ModelConfig) -> ModelConfig:
    local = _gemma3_rope(config, "sliding_attention")
    return replace(
        _as_gemma3(model),
        local_rope=_rope_from_hf(local, model.max_context),
        attention_scale=float(config.get("query_pre_attn_scalar") or 256) ** -0.5,
        norm_offset=1.0,
        logit_softcap=float(config.get("final_logit_softcapping") or 0),
    )


def _as_gemma3(model: ModelConfig) -> ModelConfig:
    """What every Gemma 3 has."""
    return replace(model, embedding_scale=model.hidden_size**0.5, output_norms=True, activation="gelu_tanh")


def _gemma3_rope(config: Mapping[str, Any], layers: str = "full_attention") -> Mapping[str, Any]:
    """A config with the RoPE keys of one kind of layers; old configs scale that of full ones only."""
    local = layers == "sliding_attention"
    found = (config.get("rope_parameters") or {}).get(layers)
    theta = config.get("rope_local_base_freq" if local else "rope_theta") or _GEMMA3_THETAS[local]
    scaling = {} if local else config.get("rope_scaling")
    return {"rope_parameters": {"rope_theta": theta} | dict(found or scaling or {})}


def _rope_from_hf(config: Mapping[str, Any], max_position: int) -> RopeConfig:
    scaling = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = float(scaling.pop("rope_theta", None) or config.get("rope_theta") or 10000.0)
    kinds = {kind for key in ("rope_type", "type") if (kind := scaling.pop(key, None)) is not None}
    kind = kinds.pop() if kinds else "default"
    if kinds or kind not in _ROPE_KEYS:
        raise _not_understood("rope_scaling type", kind, f"known: {', '.join(_ROPE_KEYS)}")
    if scaling.pop("partial_rotary_factor", None) not in (None, 1.0):
        raise _not_understood("partial_rotary_factor", "other than 1")
    if kind == "default":
        if scaling.pop("factor", 1.0) != 1.0:
            raise _not_understood("rope_scaling", config.get("rope_scaling"), "a factor without a type")
    elif "factor" not in scaling:
        raise StartupError(f"model config: rope_scaling of type {kind} lacks factor")
    for key, value in scaling.items():
        if key not in _ROPE_KEYS[kind] and value is not None:
            raise _not_understood(f"rope_scaling {key}", value)
    if kind in ("llama3", "yarn"):
        scaling["original_max_position_embeddings"] = int(
            scaling.get("original_max_position_embeddings") or max_position
        )
    return RopeConfig(theta=theta, kind=kind, **{key: value for key, value in scaling.items() if value is not None})


def _windows(config: Mapping[str, Any], architecture: str) -> tuple[int, ...]:
    layers = _layer_count("num_hidden_layers", config["num_hidden_layers"])
    window = int(config.get("sliding_window") or 0)
    if architecture == "llama":
        if window:
            raise _not_understood("sliding_window", window, "of a Llama model")
        return (0,) * layers
    if architecture == "mistral":
        return (window,) * layers
    if architecture == "gemma3":
        pattern = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or _GEMMA3_PATTERN
        slides = [bool(window) for window in _pattern(window, int(pattern), layers)]
    elif config.get("use_sliding_window", False):
        slides = [layer >= int(config.get("max_window_layers", 28)) for layer in range(layers)]  # transformers' default
    else:
        return (0,) * layers
    kinds = config.get("layer_types") or ["sliding_attention" if slide else "full_attention" for slide in slides]
    if len(kinds) != layers or not set(kinds) <= {"sliding_attention", "full_attention"}:
        raise _not_understood("layer_types", kinds)
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def _pattern(window: int, pattern: int, layers: int) -> tuple[int, ...]:
    """Windows of which every `pattern`-th is none."""
    return tuple(window if (layer + 1) % pattern else 0 for layer in range(layers))


def from_gguf(file: GGUFFile) -> ModelConfig:
    """Read the metadata and the tensor list of a GGUF file."""
    metadata = dict(file.metadata)
    architecture = metadata.get("general.architecture")
    if architecture not in ("llama", "qwen2", "qwen3", "gemma3"):
        raise _not_understood("general.architecture", architecture, "known: llama, qwen2, qwen3, gemma3")
    prefix = f"{architecture}."
    keys = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    try:
        config = (_gemma3_from_gguf if architecture == "gemma3" else _from_gguf)(file, architecture, keys)
    except KeyError as error:
        raise StartupError(f"{file.path}: lacks {error}") from error
    except (TypeError, ArithmeticError) as error:
        raise StartupError(f"{file.path}: {error}") from error
    left = {key: value for key, value in keys.items() if value not in (0, False)}
    if left:
        key, value = next(iter(left.items()))
        raise _not_understood(prefix + key, value)
    return config


def _from_gguf(file: GGUFFile, architecture: str, keys: dict[str, Any]) -> ModelConfig:
    """Build the config, taking out of `keys` what is understood."""
    hidden, heads = keys.pop("embedding_length"), keys.pop("attention.head_count")
    kv_heads = keys.pop("attention.head_count_kv", heads)
    layers, context = _layer_count("block_count", keys.pop("block_count")), keys.pop("context_length")
    for name, value in (("attention.head_count", heads), ("attention.head_count_kv", kv_heads)):
        if not isinstance(value, int):
            raise _not_understood(f"{architecture}.{name}", value, "layers that differ")
    head_dim = keys.pop("attention.key_length", None) or hidden // heads
    for name in ("attention.value_length", "rope.dimension_count"):
        if (value := keys.pop(name, head_dim)) != head_dim:
            raise _not_understood(f"{architecture}.{name}", value, f"head_dim is {head_dim}")
    if not keys.pop("attention.causal", True):
        raise _not_understood(f"{architecture}.attention.causal", False)
    keys.pop("vocab_size", None)  # the embedding's rows decide
    return ModelConfig(
        architecture=architecture,
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        hidden_size=hidden,
        intermediate_size=keys.pop("feed_forward_length"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=keys.pop("attention.layer_norm_rms_epsilon"),
        max_context=context,
        rope=_rope_from_gguf(keys, context),
        windows=(keys.pop("attention.sliding_window", 0),) * layers,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        qk_norm=architecture in ("qwen3", "gemma3"),
        tied_embeddings="output.weight" not in file.tensors,
        eos_token_ids=_gguf_eos(file.metadata),
    )


def _gemma3_from_gguf(file: GGUFFile, architecture: str, keys: dict[str, Any]) -> ModelConfig:
    """As llama.cpp's gemma3.cpp reads it: norms have their 1 already, and the 27B has a scale of its own."""
    keys.setdefault("rope.freq_base", _GEMMA3_THETAS[0])
    window, pattern = keys.pop("attention.sliding_window"), keys.pop("attention.sliding_window_pattern", None)
    local, cap = keys.pop("rope.freq_base_swa", _GEMMA3_THETAS[1]), keys.pop("final_logit_softcapping", 0.0)
    model = _as_gemma3(_from_gguf(file, architecture, keys))
    if isinstance(pattern, list):
        windows = tuple(window if slides else 0 for slides in pattern)
    else:
        windows = _pattern(window, pattern or _GEMMA3_PATTERN, model.num_layers)
    scale = (model.hidden_size // model.num_heads) ** -0.5 if model.num_layers == _GEMMA3_27B_LAYERS else 0.0
    return replace(model, windows=windows, local_rope=RopeConfig(local), attention_scale=scale, logit_softcap=cap)


def _rope_from_gguf(keys: dict[str, Any], context: int) -> RopeConfig:
    factor = keys.pop("rope.scaling.factor", None) or keys.pop("rope.scale_linear", None) or 1.0
    kind = keys.pop("rope.scaling.type", "linear" if factor != 1.0 else "none")
    theta = keys.pop("rope.freq_base", 10000.0)
    original = keys.pop("rope.scaling.original_context_length", None) or context
    attention = keys.pop("rope.scaling.attn_factor", 1.0)
    keys.pop("rope.scaling.finetuned", None)
    fast = keys.pop("rope.scaling.yarn_beta_fast", 32.0)
    slow = keys.pop("rope.scaling.yarn_beta_slow", 1.0)
    if kind not in ("none", "linear", "yarn"):
        raise _not_understood("rope.scaling.type", kind, "known: none, linear, yarn")
    if attention != 1.0 and kind != "yarn":
        raise _not_understood("rope.scaling.attn_factor", attention)
    if kind == "none" or factor == 1.0:
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, "linear", factor)
    if attention != 1.0:  # llama.cpp multiplies, transformers replaces: no file seen that needs it
        raise _not_understood("rope.scaling.attn_factor", attention)
    return RopeConfig(theta, "yarn", factor, original_max_position_embeddings=original, beta_fast=fast, beta_slow=slow)


def _gguf_eos(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    names = ("eos_token_id", "eot_token_id", "eom_token_id", "eos_token_ids")
    return _unique(sum((_id_list(metadata.get(f"tokenizer.ggml.{name}")) for name in names), ()))


def _generation_eos(folder: Path) -> tuple[int, ...]:
    path = folder / "generation_config.json"
    return _id_list(_read_json(path).get("eos_token_id")) if path.exists() else ()


def _id_list(value: Any) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if bad := [item for item in ids if not isinstance(item, int) or item < 0]:
        raise StartupError(f"model config: the EOS id {bad[0]!r} is not a token id")
    return tuple(ids)


def _layer_count(name: str, value: Any) -> int:
    if not isinstance(value, int) or not 0 < value <= MAX_LAYERS:
        raise _not_understood(name, value, f"1 to {MAX_LAYERS} layers")
    return value


def _unique(ids: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(ids))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise StartupError(f"can't read {path}: {error}") from error
    if not isinstance(value, dict):
        raise StartupError(f"{path} is not a JSON object")
    return value


def _not_understood(key: str, value: object, why: str = "") -> StartupError:
    return StartupError(f"model config: {key} = {str(value)[:200]!r} is not supported" + (f" ({why})" if why else ""))
