"""What a checkpoint's quantization_config says: 4-bit GPTQ, AWQ or compressed-tensors; the rest is refused by name."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from protocol.errors import StartupError

# How the weights were made, or for other programs: says nothing of what the tensors mean.
_HARMLESS = {
    "gptq": (
        "act_group_aware backend batch_size cache_block_outputs damp_auto_increment damp_percent dataset desc_act "
        "disable_exllama exllama_config group_size lm_head max_input_length meta model_file_base_name "
        "model_name_or_path model_seqlen module_name_preceding_first_block modules_in_block_to_quantize mse "
        "block_name_to_quantize pad_token_id static_groups sym tokenizer true_sequential use_cuda_fp16 use_exllama"
    ),
    "awq": (
        "do_fuse exllama_config fuse_max_seq_len group_size lm_head meta modules_to_fuse modules_to_not_convert "
        "damp_percent desc_act sym true_sequential model_seqlen"
    ),
    "compressed-tensors": "config_groups global_compression_ratio ignore version",
    "weights": "actorder group_size observer observer_kwargs scale_dtype strategy symmetric zp_dtype",
    "group": "targets weights",
}
# What these have to say, and what others may say if they are there.
_REQUIRED: dict[str, dict[str, object]] = {
    "gptq": {"bits": 4},
    "awq": {"bits": 4},
    "compressed-tensors": {"format": "pack-quantized"},
    "weights": {"num_bits": 4},
    "group": {},
}
_ONLY: dict[str, dict[str, tuple[object, ...]]] = {
    "gptq": {"pack_dtype": ("int32",)},
    "awq": {"zero_point": (True, False), "backend": ("auto", "autoawq"), "pack_dtype": ("int32",)},
    "compressed-tensors": {"quantization_status": ("compressed", "frozen")},
    "weights": {"type": ("int",)},
    "group": {"format": ("pack-quantized",)},
}
_LAYOUT_KEYS = {"gptq": ("checkpoint_format", "format"), "awq": ("version", "format", "checkpoint_format")}
_LAYOUTS = {"gptq": {"gptq": 1, "gptq_v2": 2}, "awq": {"gemm": 1}}


@dataclass(frozen=True)
class Quantization:
    """Which 4-bit layout the tensors have. Which weights are quantised is seen from the tensors themselves."""

    method: str  # gptq, awq or compressed-tensors
    group_sizes: frozenset[int]  # elements of a row that share a scale; -1: all of them
    gptq_version: int = 1  # 2: zero points are stored as they are, else minus one

    def allows(self, group_size: int, columns: int) -> bool:
        """Whether rows of so many columns may be in groups of this size."""
        return group_size in self.group_sizes or (group_size == columns and -1 in self.group_sizes)

    def group_size(self, columns: int) -> int:
        """Of a row of so many columns, as far as the config alone can tell."""
        return math.gcd(*(columns if size == -1 else size for size in self.group_sizes))


def read_quantization(config: Any) -> Quantization:
    """Read a quantization_config, or AutoGPTQ's quantize_config.json. Raises StartupError."""
    if not isinstance(config, dict):
        raise StartupError("quantization_config is not a JSON object")
    method = config.get("quant_method") or config.get("method") or ("gptq" if "desc_act" in config else None)
    if method not in ("gptq", "awq", "compressed-tensors"):
        raise _refused("quant_method", method, "known: gptq, awq, compressed-tensors")
    given = {key: value for key, value in config.items() if key not in ("quant_method", "method")}
    layouts = {key: value for key in _LAYOUT_KEYS.get(method, ()) if (value := given.pop(key, None)) is not None}
    versions = {_LAYOUTS[method].get(str(value).lower(), 0) for value in layouts.values()} or {1}
    if versions not in ({1}, {2}):
        raise _refused(next(iter(layouts)), layouts, f"known: {', '.join(_LAYOUTS[method])}")
    if _only_skips(given.get("dynamic")):
        del given["dynamic"]
    if isinstance(sparsity := given.get("sparsity_config"), dict) and sparsity.get("format") == "dense":
        del given["sparsity_config"]
    _check(method, "", given)
    if method != "compressed-tensors":
        return Quantization(method, frozenset({_group_size(config.get("group_size", 128))}), *versions)
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise _refused("config_groups", groups)
    return Quantization(method, frozenset(_read_group(name, group) for name, group in groups.items()))


def _only_skips(dynamic: Any) -> bool:
    """Rules of GPTQModel that only leave modules as they are."""
    return isinstance(dynamic, dict) and all(str(rule).startswith("-:") for rule in dynamic)


def _read_group(name: str, group: Any) -> int:
    """The group size of one of compressed-tensors' config_groups."""
    where = f"config_groups {name} "
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        raise _refused(f"{where}weights", weights)
    _check("group", where, group)
    _check("weights", f"{where}weights ", weights)
    strategy = weights.get("strategy")
    if strategy not in ("group", "channel"):
        raise _refused(f"{where}weights strategy", strategy, "known: group, channel")
    return _group_size(weights.get("group_size")) if strategy == "group" else -1


def _check(kind: str, where: str, given: Mapping[str, Any]) -> None:
    for key, wanted in _REQUIRED[kind].items():
        if given.get(key) != wanted:
            raise _refused(where + key, given.get(key), f"known: {wanted}")
    known = {*_HARMLESS[kind].split(), *_REQUIRED[kind]}
    for key, value in given.items():
        if key not in known and value is not None and value not in _ONLY[kind].get(key, (False, {}, [])):
            raise _refused(where + key, value)


def _group_size(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or (value != -1 and (value <= 0 or value % 32)):
        raise _refused("group_size", value, "known: multiples of 32, and -1")
    return value


def _refused(key: str, value: object, why: str = "") -> StartupError:
    text = f"quantization_config: {key} = {str(value)[:200]!r} is not supported"
    return StartupError(text + (f" ({why})" if why else ""))
