"""Weights from a GGUF file: dequantised by the gguf library; Q4_0 and Q4_1 also come as they are."""

import re
from typing import Any

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray
from torch import Tensor

from engine_core.model.config import ModelConfig
from engine_core.model.gguf_file import GGUFFile
from engine_core.model.weights import Weight4
from kernels.w4_format import W4Weight, pack_nibbles
from protocol.errors import StartupError

_GLOBAL = {"token_embd.weight": "embed", "output_norm.weight": "norm", "output.weight": "head"}
_LAYER = {
    "attn_norm": "attn_norm",
    "attn_q": "q",
    "attn_k": "k",
    "attn_v": "v",
    "attn_output": "o",
    "attn_q_norm": "q_norm",
    "attn_k_norm": "k_norm",
    "post_attention_norm": "attn_out_norm",
    "ffn_norm": "mlp_norm",
    "ffn_gate": "gate",
    "ffn_up": "up",
    "ffn_down": "down",
    "post_ffw_norm": "mlp_out_norm",
}
_TYPES = frozenset(
    ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
)
_GROUP = 32  # elements of a row that share a scale in Q4_0 and Q4_1
ROPE_DIVISORS = "rope_freqs.weight"


class GGUFWeights:
    """A `Weights` over a GGUF file. Raises StartupError for tensor types that are not supported."""

    def __init__(self, file: GGUFFile, config: ModelConfig) -> None:
        self._file, self._config = file, config
        self._names = {_our_name(name): name for name in file.tensors if name != ROPE_DIVISORS}
        self.shapes = {ours: file.tensors[theirs].shape for ours, theirs in self._names.items()}
        self.total_bytes = sum(file.tensors[name].nbytes for name in self._names.values())
        for tensor in file.tensors.values():
            if tensor.kind.name not in _TYPES:
                raise StartupError(f"{file.path}: {tensor.name} has type {tensor.kind.name}, which is not supported")

    @property
    def rope_divisors(self) -> Tensor | None:
        """float32 `[head_dim / 2]`, if the file brings them."""
        return torch.from_numpy(self._file.data(ROPE_DIVISORS).copy()) if ROPE_DIVISORS in self._file.tensors else None

    def dense(self, name: str) -> Tensor:  # noqa: D102
        tensor = self._file.tensors[self._names[name]]
        data = self._rows(name)
        if tensor.kind == GGMLQuantizationType.BF16:
            return torch.from_numpy(data.view(np.uint16).copy()).view(torch.bfloat16)
        if tensor.kind in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
            return torch.from_numpy(data.copy())
        return torch.from_numpy(dequantize(data, tensor.kind))

    def group_size(self, name: str) -> int:  # noqa: D102
        is_4bit = self._file.tensors[self._names[name]].kind in (GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1)
        return _GROUP if is_4bit else 0

    def four_bit(self, name: str) -> Weight4:  # noqa: D102
        is_q4_0 = self._file.tensors[self._names[name]].kind == GGMLQuantizationType.Q4_0
        data = self._rows(name)
        header = 2 if is_q4_0 else 4  # scale; scale and minimum, float16
        groups = data.reshape(data.shape[0], -1, header + _GROUP // 2)
        nibbles = np.concatenate((groups[..., header:] & 15, groups[..., header:] >> 4), axis=-1)
        codes = pack_nibbles(torch.from_numpy(nibbles.reshape(data.shape[0], -1)))
        factors = torch.from_numpy(np.ascontiguousarray(groups[..., :header]).view(np.float16))
        scales = factors[..., 0].contiguous()
        if is_q4_0:
            return Weight4(W4Weight(codes, scales, None, None, _GROUP))
        zeros = torch.zeros(scales.shape, dtype=torch.uint8)
        return Weight4(W4Weight(codes, scales, zeros, None, _GROUP), factors[..., 1].float())

    def bytes_of(self, name: str) -> int:  # noqa: D102
        return self._file.tensors[self._names[name]].nbytes

    def _rows(self, name: str) -> NDArray[Any]:
        """The tensor's data with the rows in transformers' order: Llama files hold Q and K for interleaved RoPE."""
        data = self._file.data(self._names[name])
        part = name.split(".")[2] if name.startswith("layers.") else ""
        if self._config.architecture != "llama" or part not in ("q", "k"):
            return data
        halves = data.reshape(-1, self._config.head_dim // 2, 2, *data.shape[1:])
        return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(data.shape)


def _our_name(name: str) -> str:
    if name in _GLOBAL:
        return _GLOBAL[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if not match or match[2] not in _LAYER:
        return name  # check_shapes names it
    return f"layers.{match[1]}.{_LAYER[match[2]]}" + (".bias" if match[3] == "bias" else "")
