"""Weights from a folder of safetensors files, sharded or not."""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine_core.model.config import ModelConfig
from engine_core.model.weights import Weight4, expected_shapes
from kernels.w4_format import W4FormatError, from_awq, from_compressed_tensors, from_gptq
from protocol.errors import StartupError

_GLOBAL = {"model.embed_tokens.weight": "embed", "model.norm.weight": "norm", "lm_head.weight": "head"}
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "q",
    "self_attn.k_proj": "k",
    "self_attn.v_proj": "v",
    "self_attn.o_proj": "o",
    "self_attn.q_norm": "q_norm",
    "self_attn.k_norm": "k_norm",
    "post_attention_layernorm": "mlp_norm",
    "pre_feedforward_layernorm": "mlp_norm",
    "post_feedforward_layernorm": "mlp_out_norm",
    "mlp.gate_proj": "gate",
    "mlp.up_proj": "up",
    "mlp.down_proj": "down",
}
_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_PACKED_BYTES = _BYTES | {"I32": 4, "I64": 8}
_PARTS = {  # of a 4-bit weight: by method, those that have to be there, and those that may be
    "gptq": ("qweight qzeros scales", "g_idx"),
    "awq": ("qweight qzeros scales", ""),
    "compressed-tensors": ("weight_packed weight_scale weight_shape", "weight_zero_point weight_g_idx"),
}
_Entry = tuple[Any, str]  # an open file, and the tensor's name in it


class SafetensorsWeights:
    """A `Weights` over `model.safetensors`, or over the shards that `model.safetensors.index.json` lists.

    With a `quantization` in the config, weights may be in its 4-bit form; which ones are is seen from the tensors.
    """

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        """Raises StartupError if a file is missing or damaged, or a tensor is not of a type or form that is known."""
        self._layer = _LAYER | ({"post_attention_layernorm": "attn_out_norm"} if config.output_norms else {})
        self._quantization = config.quantization
        self._where: dict[str, _Entry] = {}
        self._packed: dict[str, dict[str, _Entry]] = {}  # parts of 4-bit weights
        self._group_sizes: dict[str, int] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._bytes: dict[str, int] = {}
        for path, listed in _files(folder).items():
            try:
                file: Any = safe_open(path, framework="pt")
                self._open(file, path)
            except (OSError, SafetensorError) as error:
                raise StartupError(f"can't read {path}: {error}") from error
            missing = listed - set(file.keys())
            if missing:
                raise StartupError(f"{path} lacks {sorted(missing)[0]}, which the index promises")
        for name, parts in self._packed.items():
            try:
                self._check_packed(name, parts)
            except (ValueError, IndexError) as error:
                raise StartupError(f"the 4-bit weight {name} has parts of the wrong shape: {error}") from error
        self._drop_empty_biases(expected_shapes(config))
        self.total_bytes = sum(self._bytes.values())

    def dense(self, name: str) -> Tensor:  # noqa: D102
        if name in self._packed:
            self.four_bit(name).dequantize(out := torch.empty(self.shapes[name]))
            return out
        return _read(self._where[name])

    def group_size(self, name: str) -> int:  # noqa: D102
        return self._group_sizes.get(name, 0)

    def four_bit(self, name: str) -> Weight4:  # noqa: D102
        assert self._quantization is not None, "there are no packed weights without it"
        part, size = {key: _read(entry) for key, entry in self._packed[name].items()}, self._group_sizes[name]
        try:
            if self._quantization.method == "awq":
                packed = from_awq(part["qweight"], part["qzeros"], part["scales"], size)
            elif self._quantization.method == "gptq":
                tensors = part["qweight"], part["qzeros"], part["scales"], part.get("g_idx")
                packed = from_gptq(*tensors, size, self._quantization.gptq_version)
            else:
                scale, zeros = part["weight_scale"], part.get("weight_zero_point")
                packed = from_compressed_tensors(
                    part["weight_packed"], scale, zeros, part["weight_shape"], part.get("weight_g_idx"), size
                )
        except W4FormatError as error:
            raise StartupError(f"{name}: {error}") from error
        return Weight4(packed)

    def bytes_of(self, name: str) -> int:  # noqa: D102
        return self._bytes[name]

    def _open(self, file: Any, path: Path) -> None:
        needed, more = _PARTS[self._quantization.method] if self._quantization else ("", "")
        for theirs in file.keys():  # noqa: SIM118
            module, _, part = theirs.rpartition(".")
            is_packed = part in (*needed.split(), *more.split())
            ours = _our_name(f"{module}.weight" if is_packed else theirs, self._layer)
            if ours is None:
                continue
            entry, known = file.get_slice(theirs), _PACKED_BYTES if is_packed else _BYTES
            if entry.get_dtype() not in known:
                raise StartupError(f"{path}: {theirs} has type {entry.get_dtype()}, which is not supported")
            shape = tuple(entry.get_shape())
            self._bytes[ours] = self._bytes.get(ours, 0) + known[entry.get_dtype()] * math.prod(shape)
            if is_packed:
                self._packed.setdefault(ours, {})[part] = (file, theirs)
            else:
                self._where[ours] = (file, theirs)
                self.shapes[ours] = shape

    def _check_packed(self, name: str, parts: dict[str, _Entry]) -> None:
        """Find shape and group size of a 4-bit weight. Its data is checked when it is read."""
        assert self._quantization is not None
        method = self._quantization.method
        if missing := [part for part in _PARTS[method][0].split() if part not in parts]:
            raise StartupError(f"the 4-bit weight {name} lacks {missing[0]}")
        shapes = {part: tuple(file.get_slice(theirs).get_shape()) for part, (file, theirs) in parts.items()}
        scales = shapes["weight_scale" if method == "compressed-tensors" else "scales"]
        if method == "compressed-tensors":
            rows, columns = _read(parts["weight_shape"]).tolist()
            groups = scales[-1]
        else:
            wide, high = shapes["qweight"]
            rows, columns = (high, 8 * wide) if method == "gptq" else (8 * high, wide)
            groups = scales[0]
        size = columns // max(groups, 1)
        if size * groups != columns or not self._quantization.allows(size, columns):
            wanted = ", ".join(map(str, sorted(self._quantization.group_sizes)))
            raise StartupError(
                f"{name} has {groups} groups in {columns} input features; its config says {wanted} a group"
            )
        self._group_sizes[name], self.shapes[name] = size, (rows, columns)

    def _drop_empty_biases(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """GPTQ checkpoints bring biases of zeros for layers that have none."""
        for name in self._packed:
            bias = f"{name}.bias"
            if bias in self._where and bias not in expected and not _read(self._where[bias]).any():
                del self._where[bias], self.shapes[bias], self._bytes[bias]


def _read(entry: _Entry) -> Tensor:
    tensor: Tensor = entry[0].get_tensor(entry[1])
    return tensor


def _files(folder: Path) -> dict[Path, set[str]]:
    """The files to open, with the tensors that the index promises in each."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        path, others = folder / "model.safetensors", list(folder.glob("*.safetensors"))
        if not path.exists() and len(others) == 1:  # gptq_model-4bit-128g.safetensors and the like
            path = others[0]
        if not path.exists():
            raise StartupError(f"{folder} has neither model.safetensors nor {index.name}")
        return {path: set()}
    try:
        places = json.loads(index.read_text("utf-8"))["weight_map"]
        files: dict[Path, set[str]] = {}
        for name, file in places.items():
            files.setdefault(folder / Path(file).name, set()).add(name)
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise StartupError(f"can't read {index}: {type(error).__name__}: {error}") from error
    return files


def _our_name(name: str, layer: Mapping[str, str]) -> str | None:
    """Our name; their own for an unknown tensor, so that `check_shapes` names it; None for what may be ignored."""
    if name in _GLOBAL:
        return _GLOBAL[name]
    match = re.fullmatch(r"model\.layers\.(\d+)\.([\w.]+)\.(weight|bias|inv_freq)", name)
    if match and match[2] == "self_attn.rotary_emb":  # old checkpoints carry the computed frequencies
        return None
    if not match or match[2] not in layer:
        return name
    return f"layers.{match[1]}.{layer[match[2]]}" + (".bias" if match[3] == "bias" else "")
