"""The weights of a decoder by our own names, whatever file they come from.

Names: `embed`, `norm`, `head`, and for each layer `layers.N.` + `attn_norm`, `q`, `k`, `v`, `o`, `q_norm`, `k_norm`,
`attn_out_norm`, `mlp_norm`, `gate`, `up`, `down`, `mlp_out_norm`; a bias is the name + `.bias`. Linear
weights are `[out, in]`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from engine_core.model.config import ModelConfig
from protocol.errors import StartupError

GROUP = 32  # elements of a row that share a scale and a minimum in Q4_0 and Q4_1


@dataclass(frozen=True)
class Weight4:
    """A weight in the file's own 4 bits: w = codes * scales + minima, group by group."""

    codes: Tensor  # uint8 [out, in], 0 to 15
    scales: Tensor  # float32 [out, in / 32]
    minima: Tensor  # float32 [out, in / 32]


class Weights(Protocol):
    """An open checkpoint. `shapes` lists what it holds; `total_bytes` is what reading all of it reads."""

    total_bytes: int

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape by name."""
        ...

    def dense(self, name: str) -> Tensor:
        """The tensor as float16, bfloat16 or float32, in transformers' order of rows."""
        ...

    def has_4bit(self, name: str) -> bool:
        """Whether `four_bit` gives this weight."""
        ...

    def four_bit(self, name: str) -> Weight4:
        """The weight without dequantising it."""
        ...

    def bytes_of(self, name: str) -> int:
        """Bytes of the tensor in the file."""
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
