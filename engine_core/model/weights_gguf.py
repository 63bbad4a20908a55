"""Weights from a GGUF file: dequantised, in part by the gguf library; Q4_0 and Q4_1 also come as they are."""

import math
import re

import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from engine_core.model.config import ModelConfig
from engine_core.model.gguf_file import GGUFFile
from engine_core.model.reading import Stored
from engine_core.model.weights import Weight4
from kernels.w4_format import W4Weight
from protocol.errors import StartupError

_GLOBAL = {"token_embd.weight": "embed", "output_norm.weight": "norm", "output.weight": "head"}
LAYER = {
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
_FLOATS = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
_GROUP = 32  # elements of a row that share a scale in Q4_0, Q4_1 and Q8_0
_CHUNK, _LARGE_CHUNK = 1 << 18, 1 << 24  # elements dequantised at a time: what a core's cache holds; for a GPU
_CPU = torch.device("cpu")
ROPE_DIVISORS = "rope_freqs.weight"


class GGUFWeights:
    """A `Weights` over a GGUF file. Raises StartupError for tensor types that are not supported."""

    def __init__(self, file: GGUFFile, config: ModelConfig) -> None:
        self._file, self._config = file, config
        self._names = {_our_name(name): name for name in file.tensors if name != ROPE_DIVISORS}
        self.shapes = {ours: file.tensors[theirs].shape for ours, theirs in self._names.items()}
        self.total_bytes = sum(file.tensors[name].nbytes for name in self._names.values())
        for tensor in file.tensors.values():
            if tensor.kind.name not in _TYPES or (len(tensor.shape) < 2 and tensor.kind not in _FLOATS):
                raise StartupError(f"{file.path}: {tensor.name} has type {tensor.kind.name}, which is not supported")

    @property
    def rope_divisors(self) -> Tensor | None:
        """`[head_dim / 2]`, if the file brings them. Raises StartupError."""
        if ROPE_DIVISORS not in self._file.tensors:
            return None
        if (shape := self._file.tensors[ROPE_DIVISORS].shape) != (self._config.head_dim // 2,):
            raise StartupError(f"{ROPE_DIVISORS} is {shape}, and head_dim is {self._config.head_dim}")
        return self._stored(ROPE_DIVISORS).read()

    def dense(self, name: str) -> Tensor:  # noqa: D102
        kind = self._file.tensors[self._names[name]].kind
        self.read_to(name, out := torch.empty(self.shapes[name], dtype=_FLOATS.get(kind, torch.float32)))
        return out

    def read_to(self, name: str, out: Tensor) -> None:  # noqa: D102
        kind = self._file.tensors[self._names[name]].kind
        if self.group_size(name):
            self.four_bit(name, out.device).dequantize(out)
        elif kind in _FLOATS and not self._is_interleaved(name):
            self._stored(self._names[name]).read_to(out)
        elif kind in _FLOATS:
            out.copy_(self._rows(name, out.device))
        else:
            on_device = kind == GGMLQuantizationType.Q8_0
            data = self._rows(name, out.device if on_device else _CPU)
            width = _CHUNK if out.device.type == "cpu" else _LARGE_CHUNK
            for start in range(0, len(out), step := max(1, width // out.shape[-1])):
                rows = data[start : start + step]
                wide = _dequantize_q8_0(rows) if on_device else torch.from_numpy(dequantize(rows.numpy(), kind))
                out[start : start + step] = wide

    def will_need(self, name: str) -> None:  # noqa: D102
        self._stored(self._names[name]).will_need()

    def group_size(self, name: str) -> int:  # noqa: D102
        is_4bit = self._file.tensors[self._names[name]].kind in (GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1)
        return _GROUP if is_4bit else 0

    def four_bit(self, name: str, device: torch.device) -> Weight4:  # noqa: D102
        is_q4_0 = self._file.tensors[self._names[name]].kind == GGMLQuantizationType.Q4_0
        data = self._rows(name, device)
        header = 2 if is_q4_0 else 4  # scale; scale and minimum, float16
        groups = data.view(len(data), -1, header + _GROUP // 2)
        even, odd = groups[..., header::2], groups[..., header + 1 :: 2]  # byte i: element i and, above it, i + 16
        codes = torch.cat((even & 15 | odd << 4, even >> 4 | odd & 240), -1).view(len(data), -1)
        factors = groups[..., :header].contiguous().view(torch.float16)
        scales = factors[..., 0].contiguous()
        if is_q4_0:
            return Weight4(W4Weight(codes, scales, None, None, _GROUP))
        return Weight4(
            W4Weight(codes, scales, torch.zeros_like(scales, dtype=torch.uint8), None, _GROUP), factors[..., 1].float()
        )

    def bytes_of(self, name: str) -> int:  # noqa: D102
        return self._file.tensors[self._names[name]].nbytes

    def _stored(self, theirs: str) -> Stored:
        """The tensor as it lies in the file; quantised rows as their bytes."""
        tensor = self._file.tensors[theirs]
        if tensor.kind in _FLOATS:
            return Stored(self._file.file, _FLOATS[tensor.kind], tensor.shape, tensor.offset)
        width = tensor.nbytes // math.prod(tensor.shape[:-1])
        return Stored(self._file.file, torch.uint8, (*tensor.shape[:-1], width), tensor.offset)

    def _is_interleaved(self, name: str) -> bool:
        """Llama files hold Q and K with the rows of each head in the order of interleaved RoPE."""
        part = name.split(".")[2] if name.startswith("layers.") else ""
        return self._config.architecture == "llama" and part in ("q", "k")

    def _rows(self, name: str, device: torch.device) -> Tensor:
        """The tensor as `_stored` has it, with the rows in transformers' order."""
        data = self._stored(self._names[name]).read(device)
        if not self._is_interleaved(name):
            return data
        return data.view(-1, self._config.head_dim // 2, 2, *data.shape[1:]).transpose(1, 2).reshape(data.shape)


def _dequantize_q8_0(rows: Tensor) -> Tensor:
    """uint8 `[n, bytes]`, a float16 scale and 32 int8 in each block, to float32 `[n, in]`."""
    blocks = rows.view(len(rows), -1, 2 + _GROUP)
    scales = blocks[..., :2].contiguous().view(torch.float16).float()
    return (blocks[..., 2:].view(torch.int8) * scales).flatten(1)


def _our_name(name: str) -> str:
    if name in _GLOBAL:
        return _GLOBAL[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if not match or match[2] not in LAYER:
        return name  # check_shapes names it
    return f"layers.{match[1]}.{LAYER[match[2]]}" + (".bias" if match[3] == "bias" else "")
