"""How KV is stored in the pool: one small class per format, one resolver, one layout that says where everything lies.

A block image is the bytes of one block in one run: data of every layer, `[layer][K|V][kv_head][slot][head_dim]`, then
the float16 scales of every layer that has them, `[layer][K|V][kv_head][slot]`. Pools are
`uint8[num_blocks, image_bytes]`. A row is the head_dim elements of one token, KV head and K or V.
"""

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

_ALIGNMENT = 16  # bytes, of K, V and blocks: what the CUDA kernels load at once
_MAX_SCALE = torch.finfo(torch.float16).max


@dataclass(frozen=True)
class KVShape:
    """What decides the size of a block, besides the format."""

    num_layers: int
    num_kv_heads: int
    head_dim: int  # even
    block_size: int


@dataclass(frozen=True)
class KVCodec(ABC):
    """A storage format. To add one: a subclass, its place in `_EIGHT_BIT`, and a case in the CUDA kernels' switch."""

    names: tuple[str, ...]  # the name that people see, then other spellings of it
    kernel: str  # the name in kernels.cuda_layout.FORMATS; empty where the kernels have none
    dtype: torch.dtype  # of a stored element; uint8 for 8-bit formats: float8 has no index ops on the CPU
    has_scale: bool = False  # one float16 per row

    @property
    def name(self) -> str:
        """The name that people see."""
        return self.names[0]

    @abstractmethod
    def encode(self, values: Tensor) -> tuple[Tensor, Tensor | None]:
        """Rows `[n, head_dim]` of a float dtype as stored: `[n, head_dim]` of `dtype`, and scales float16 `[n, 1]`."""

    @abstractmethod
    def decode(self, data: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
        """The values of stored rows (contiguous), in `dtype`. May return `data` itself."""


class FloatKV(KVCodec):
    """Elements in the compute dtype, as they are."""

    def encode(self, values: Tensor) -> tuple[Tensor, Tensor | None]:
        """See KVCodec."""
        return values.to(self.dtype), None

    def decode(self, data: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
        """See KVCodec."""
        return data.to(dtype)


class Int8KV(KVCodec):
    """-127 to 127 times a scale, which is the row's largest magnitude / 127, saturated at 65,504.

    So values above 127 * 65,504 are clamped, infinities with them. A row with a NaN gets a NaN scale.
    """

    def encode(self, values: Tensor) -> tuple[Tensor, Tensor | None]:
        """See KVCodec. Rounds to nearest even, under the scale as stored."""
        scales = _row_scales(values, 127)
        codes = _divide(values, scales).round_().clamp_(-127, 127).nan_to_num_()
        return codes.to(torch.int8).view(torch.uint8), scales

    def decode(self, data: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
        """See KVCodec."""
        assert scales is not None
        return data.view(torch.int8).float().mul_(scales.float()).to(dtype)


@dataclass(frozen=True)
class Float8KV(KVCodec):
    """E4M3 (without infinities, up to 448) or E5M2 (up to 57,344), with or without a scale like that of int8.

    Values, infinities included, are clamped to the finite range first, because torch's cast gives NaN (or inf) beyond
    it. NaN stays NaN.
    """

    float8: torch.dtype = torch.float8_e4m3fn

    def encode(self, values: Tensor) -> tuple[Tensor, Tensor | None]:
        """See KVCodec."""
        top, scales = torch.finfo(self.float8).max, None
        if self.has_scale:
            scales = _row_scales(values, top)
            values = _divide(values, scales)
        return values.clamp(-top, top).to(self.float8).view(torch.uint8), scales

    def decode(self, data: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
        """See KVCodec. Exact, before the scale."""
        index = data.flatten().view(torch.int16).int().add_(1 << 15)
        values = _pairs(self.float8, dtype, data.device).index_select(0, index).view(dtype).view(data.shape)
        return values if scales is None else values.float().mul_(scales.float()).to(dtype)


def _row_scales(values: Tensor, top: float) -> Tensor:
    return (values.float().abs().amax(-1, keepdim=True) / top).clamp_(max=_MAX_SCALE).half()


def _divide(values: Tensor, scales: Tensor) -> Tensor:
    """Zero where the scale is: all of the row is zero, or below what a scale can express."""
    return (values.float() / scales.float()).masked_fill_(scales == 0, 0)


@functools.cache
def _pairs(float8: torch.dtype, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The values of two codes, as one integer, by the codes read as int16 + 2^15.

    On the CPU, torch's own conversion of E4M3 takes 8 times as long, and one of single codes 10 times (measured).
    """
    codes = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(float8)
    return codes.to(dtype).view(torch.int32 if dtype.itemsize == 2 else torch.int64).to(device)


_COMPUTE = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
_COMPUTE_NAMES = ("auto", "fp16", "bf16")
_EIGHT_BIT: tuple[KVCodec, ...] = (
    Int8KV(("int8", "i8", "int8_per_token_head"), "int8", torch.uint8, has_scale=True),
    Float8KV(("fp8_e4m3", "fp8", "e4m3"), "e4m3", torch.uint8),
    Float8KV(("fp8_e5m2", "e5m2"), "e5m2", torch.uint8, float8=torch.float8_e5m2),
    Float8KV(("fp8_per_token_head",), "e4m3_scaled", torch.uint8, has_scale=True),
)


def kv_codecs(compute_dtype: torch.dtype) -> tuple[KVCodec, ...]:
    """All formats: the compute dtype first."""
    name = _COMPUTE[compute_dtype]
    return (FloatKV((name,), "" if name == "fp32" else name, compute_dtype), *_EIGHT_BIT)


def resolve_kv_dtype(name: str, compute_dtype: torch.dtype) -> KVCodec:
    """The format of a `--kv-cache-dtype`: `auto`, `fp16` and `bf16` all mean the compute dtype.

    Raises ValueError, listing the valid names, for any other.
    """
    plain, *others = kv_codecs(compute_dtype)
    if name in _COMPUTE_NAMES:
        return plain
    for codec in others:
        if name in codec.names:
            return codec
    valid = [*_COMPUTE_NAMES, *(other for codec in others for other in codec.names)]
    raise ValueError(f"unknown KV cache dtype {name!r}; valid names: {', '.join(valid)}")


@dataclass(frozen=True)
class LayerLayout:
    """How K and V of a layer are stored, and where in a block image: bytes from its start.

    Elements are `[kv_head][slot][head_dim]`, scales float16 `[kv_head][slot]`. The names are those of
    `kernels.cuda_layout.KVLayout`.
    """

    k: KVCodec
    v: KVCodec
    k_offset: int
    v_offset: int
    k_scale_offset: int
    v_scale_offset: int


@dataclass(frozen=True)
class BlockLayout:
    """The block image of a model: one for the budget, the pool, the ops and the planner."""

    shape: KVShape
    codec: KVCodec
    layers: tuple[LayerLayout, ...]
    image_bytes: int


def block_layout(
    shape: KVShape, codec: KVCodec, compute_dtype: torch.dtype, wide_layers: Collection[int] = ()
) -> BlockLayout:
    """Lay out a block in `codec`, with K of `wide_layers` in the compute dtype.

    Offsets of data and the image are multiples of 16 bytes, and of rows: the pool is read as an array of them. What
    padding that takes (none for the usual shapes; at most a row where formats are mixed) is counted.
    """
    rows = shape.num_kv_heads * shape.block_size
    wide = kv_codecs(compute_dtype)[0]
    kinds = [(wide if layer in wide_layers else codec, codec) for layer in range(shape.num_layers)]
    end = 0

    def place(size: int, alignment: int) -> int:
        nonlocal end
        start = -(-end // alignment) * alignment
        end = start + rows * size
        return start

    def row_bytes(part: KVCodec) -> int:
        return shape.head_dim * part.dtype.itemsize

    data = [[place(row_bytes(part), math.lcm(_ALIGNMENT, row_bytes(part))) for part in pair] for pair in kinds]
    scales = [[place(2 * part.has_scale, 2) for part in pair] for pair in kinds]
    unit = math.lcm(_ALIGNMENT, *(row_bytes(part) for pair in kinds for part in pair))
    layers = tuple(LayerLayout(*pair, *d, *s) for pair, d, s in zip(kinds, data, scales, strict=True))
    return BlockLayout(shape, codec, layers, -(-end // unit) * unit)
