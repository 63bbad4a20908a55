"""Weights from a folder of safetensors files, sharded or not."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine_core.model.config import ModelConfig
from engine_core.model.weights import Weight4
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


class SafetensorsWeights:
    """A `Weights` over `model.safetensors`, or over the shards that `model.safetensors.index.json` lists."""

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        """Raises StartupError if a file is missing or damaged, or holds a type other than F32, F16 and BF16."""
        self._layer = _LAYER | ({"post_attention_layernorm": "attn_out_norm"} if config.output_norms else {})
        self._where: dict[str, tuple[Any, str]] = {}
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
        self.total_bytes = sum(self._bytes.values())

    def dense(self, name: str) -> Tensor:  # noqa: D102
        file, theirs = self._where[name]
        tensor: Tensor = file.get_tensor(theirs)
        return tensor

    def has_4bit(self, name: str) -> bool:  # noqa: D102
        return False

    def four_bit(self, name: str) -> Weight4:  # noqa: D102
        raise AssertionError(f"{name} has no 4-bit form")

    def bytes_of(self, name: str) -> int:  # noqa: D102
        return self._bytes[name]

    def _open(self, file: Any, path: Path) -> None:
        for theirs in file.keys():  # noqa: SIM118
            ours = _our_name(theirs, self._layer)
            if ours is None:
                continue
            entry = file.get_slice(theirs)
            if entry.get_dtype() not in _BYTES:
                raise StartupError(f"{path}: {theirs} has type {entry.get_dtype()}, which is not supported")
            self._where[ours] = (file, theirs)
            self.shapes[ours] = tuple(entry.get_shape())
            self._bytes[ours] = _BYTES[entry.get_dtype()] * torch.Size(self.shapes[ours]).numel()


def _files(folder: Path) -> dict[Path, set[str]]:
    """The files to open, with the tensors that the index promises in each."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        path = folder / "model.safetensors"
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
