"""The weights of a decoder by our own names, whatever file they come from.

Names: `embed`, `norm`, `head`, and for each layer `layers.N.` + `attn_norm`, `q`, `k`, `v`, `o`, `q_norm`, `k_norm`,
`attn_out_norm`, `mlp_norm`, `gate`, `up`, `down`, `mlp_out_norm`; a bias is the name + `.bias`. Linear
weights are `[out, in]`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine_core.model.config import ModelConfig
from kernels.w4_format import W4Weight
from protocol.errors import StartupError

_CHUNK, _LARGE_CHUNK = 1 << 18, 1 << 24  # elements; for a GPU


@dataclass(frozen=True)
class Weight4:
    """A weight in the file's own 4 bits: w = (codes - zeros) * scales + minima, group by group."""

    packed: W4Weight
    minima: Tensor | None = None  # float32 [out, groups]; of Q4_1, where all zeros are 0

    def dequantize(self, out: Tensor) -> None:
        """Write the weight, computed in float32, to `out` `[out, in]`; in parts: on the CPU what its cache holds."""
        packed = self.packed
        step = max(1, (_CHUNK if out.device.type == "cpu" else _LARGE_CHUNK) // packed.shape[1])
        for start in range(0, packed.shape[0], step):
            rows = slice(start, start + step)
            zeros = None if packed.zeros is None else packed.zeros[rows]
            part = W4Weight(packed.codes[rows], packed.scales[rows], zeros, packed.order, packed.group_size)
            if self.minima is None:
                out[rows] = part.dequantize(out.dtype)
            else:
                wide = part.dequantize(torch.float32).view(part.shape[0], -1, part.group_size)
                out[rows] = wide.add_(self.minima[rows, :, None]).view(part.shape)


class Weights(Protocol):
    """An open checkpoint. `shapes` lists what it holds; `total_bytes` is what reading all of it reads."""

    total_bytes: int

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape by name."""
        ...

    def dense(self, name: str) -> Tensor:
        """The tensor as float16, bfloat16 or float32, in transformers' order of rows, in host memory."""
        ...

    def read_to(self, name: str, out: Tensor) -> None:
        """Write what `dense` gives to a contiguous tensor of its shape, of any dtype, on any device."""
        ...

    def will_need(self, name: str) -> None:
        """Have the system read the tensor into its cache meanwhile."""
        ...

    def group_size(self, name: str) -> int:
        """Elements of a row that share a scale in `four_bit`; 0 if there is no such form of this weight."""
        ...

    def four_bit(self, name: str, device: torch.device) -> Weight4:
        """The weight without dequantising it, on the device. Raises StartupError."""
        ...

    def bytes_of(self, name: str) -> int:
        """Bytes of the tensor in the file, with its scales."""
        ...


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a model of this shape needs."""
    hidden, inner, width = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_heads * width, config.num_kv_heads * width
    shapes: dict[str, tuple[int, ...]] = {"embed": (config.vocab_size, hidden), "norm": (hidden,)}
    if not config.tied_embeddings:
        shapes["head"] = (config.vocab_size, hidden)
    layer: dict[str, tuple[int, ...]] = {"attn_norm": (hidden,), "mlp_norm": (hidden,)}
    layer |= {"q": (q, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, q)}
    layer |= {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    if config.qkv_bias:
        layer |= {"q.bias": (q,), "k.bias": (kv,), "v.bias": (kv,)}
    if config.output_bias:
        layer["o.bias"] = (hidden,)
    if config.output_norms:
        layer |= {"attn_out_norm": (hidden,), "mlp_out_norm": (hidden,)}
    if config.qk_norm:
        layer |= {"q_norm": (width,), "k_norm": (width,)}
    for number in range(config.num_layers):
        shapes |= {f"layers.{number}.{name}": shape for name, shape in layer.items()}
    return shapes


def check_shapes(expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> None:
    """Raise StartupError naming the tensors that are missing, unknown or of the wrong shape."""
    wrong = [
        f"{name} is {found[name]}, not {shape}" for name, shape in expected.items() if found.get(name, shape) != shape
    ]
    for problem, names in (
        ("lacks", [name for name in expected if name not in found]),
        ("has unknown tensors", [name for name in found if name not in expected]),
        ("has tensors of the wrong shape:", wrong),
    ):
        if names:
            raise StartupError(f"the model file {problem} {_some(names)}")


def _some(names: Iterable[str], count: int = 5) -> str:
    listed = list(names)
    more = f" and {len(listed) - count} more" if len(listed) > count else ""
    return ", ".join(listed[:count]) + more
