"""Which KV formats the CUDA kernels know, where a layer lies in a block image, and what the kernels accept."""

import functools
import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.compiler import KernelError, Variant

FORMATS = {"fp16": 0, "bf16": 1, "int8": 2, "e4m3": 3, "e5m2": 4, "e4m3_scaled": 5}
HEAD_DIMS = (64, 96, 128, 256)
_SIXTEEN_BIT = {"fp16": torch.float16, "bf16": torch.bfloat16}
_SCALED = ("int8", "e4m3_scaled")
TILE = 16  # keys of one warp's step in decode attention


@dataclass(frozen=True)
class KVLayout:
    """Where K and V of one layer lie in a pool `uint8[num_blocks, block_stride]`, and how they are stored.

    Offsets are bytes from a block's start: of `[kv_head][slot][head_dim]` elements, and of float16 scales
    `[kv_head][slot]` for the formats that have them. Formats are keys of FORMATS; 16-bit ones are the compute dtype.
    """

    k_format: str
    v_format: str
    num_kv_heads: int
    head_dim: int
    block_size: int
    block_stride: int
    k_offset: int
    v_offset: int
    k_scale_offset: int = 0
    v_scale_offset: int = 0

    def __post_init__(self) -> None:
        if not {self.k_format, self.v_format} <= FORMATS.keys():
            raise KernelError(f"KV formats {self.k_format}, {self.v_format}: known are {', '.join(FORMATS)}")
        if self.head_dim not in HEAD_DIMS:
            raise KernelError(f"head_dim {self.head_dim}: kernels exist for {HEAD_DIMS}")
        if self.block_size < TILE or self.block_size & (self.block_size - 1):
            raise KernelError(f"block size {self.block_size} is no power of two from {TILE} up")
        if any(n % 16 for n in (self.block_stride, self.k_offset, self.v_offset)):
            raise KernelError(f"block stride and offsets of K and V must be multiples of 16 bytes: {self}")
        if (self.k_scale_offset | self.v_scale_offset) % 2:
            raise KernelError(f"scales must be aligned to 2 bytes: {self}")

    @functools.cached_property
    def offsets(self) -> tuple[int, int, int, int, int]:
        """As the kernels take them."""
        return self.block_stride, self.k_offset, self.v_offset, self.k_scale_offset, self.v_scale_offset


def plain_layout(
    k_format: str, v_format: str, num_layers: int, num_kv_heads: int, head_dim: int, block_size: int, layer: int
) -> KVLayout:
    """The layout of a layer in images whose layers are all alike: data of every layer, then scales of every layer."""
    rows = num_kv_heads * block_size
    k_bytes, v_bytes = (rows * head_dim * (2 if f in _SIXTEEN_BIT else 1) for f in (k_format, v_format))
    k_scales, v_scales = (rows * 2 if f in _SCALED else 0 for f in (k_format, v_format))
    data, scales = layer * (k_bytes + v_bytes), num_layers * (k_bytes + v_bytes) + layer * (k_scales + v_scales)
    stride = num_layers * (k_bytes + v_bytes + k_scales + v_scales)
    return KVLayout(
        k_format, v_format, num_kv_heads, head_dim, block_size, stride, data, data + k_bytes, scales, scales + k_scales
    )


HOPPER_PREFILL = "prefill_attention_sm90.cu"
HOPPER_HEAD_DIMS = (64, 128)
HOPPER_WARPS = (8, 16)


def prefill_tile(file: str, head_dim: int, warps: int) -> tuple[int, int, int]:
    """Of a prefill kernel: keys of a tile, query rows of a block, most bytes of shared memory."""
    hopper = file == HOPPER_PREFILL
    # Without Hopper's: two blocks fit in the shared memory of compute capability 8.0, one in that of 8.6.
    keys, rows = (64, 16 * warps) if hopper else (16, 64) if head_dim > 128 else (32, 128)
    raw = -(-keys * head_dim // 16 // (32 * warps)) * 32 * warps * 16
    pitch = head_dim * 2 + (0 if hopper else 16)
    return keys, rows, (4 * keys + rows) * pitch + 2 * raw + (1024 if hopper else 0)


def variant(
    file: str, k_format: str, v_format: str, head_dim: int, dtype: torch.dtype, row_tiles: int = 0, warps: int = 4
) -> Variant:
    """The translation unit of an attention or write kernel; `row_tiles` is for decode, `warps` for prefill."""
    for name in (k_format, v_format):
        if _SIXTEEN_BIT.get(name, dtype) != dtype:
            raise KernelError(f"KV format {name} with compute dtype {dtype}")
    macros = {
        "HEAD_DIM": head_dim,
        "K_FORMAT": FORMATS[k_format],
        "V_FORMAT": FORMATS[v_format],
        "QUERY_BF16": int(dtype == torch.bfloat16),
    }
    if file.startswith("prefill"):
        macros["KEYS"] = prefill_tile(file, head_dim, warps)[0]
    if file == HOPPER_PREFILL:
        macros["WARPS"] = warps
    if row_tiles:
        macros["ROW_TILES"] = row_tiles
    return Variant(file, tuple(macros.items()), "sm_90a" if file == HOPPER_PREFILL else None)


def all_variants() -> list[Variant]:
    """Everything that attention and KV writes can ask for, the small kernels beside them included."""
    found = [Variant("probe.cu"), Variant("decode_plan.cu")]
    eight_bit = [name for name in FORMATS if name not in _SIXTEEN_BIT]
    for own, dtype in _SIXTEEN_BIT.items():
        pairs = [(own, own), *((name, name) for name in eight_bit), *((own, name) for name in eight_bit)]
        for (k, v), head_dim in itertools.product(pairs, HEAD_DIMS):
            found += [variant(file, k, v, head_dim, dtype) for file in ("write_kv.cu", "prefill_attention.cu")]
            if head_dim in HOPPER_HEAD_DIMS:
                found += [variant(HOPPER_PREFILL, k, v, head_dim, dtype, warps=w) for w in HOPPER_WARPS]
            tiles = (1,) if head_dim > 128 else (1, 2)
            found += [variant("decode_attention.cu", k, v, head_dim, dtype, t) for t in tiles]
    return found


def check_heads(name: str, x: Tensor, heads: int, head_dim: int, dtype: torch.dtype) -> None:
    """Tokens may be apart; heads and elements are packed; 16-byte accesses must be aligned."""
    stride = x.stride()
    if (
        x.dtype != dtype
        or x.shape[1:] != (heads, head_dim)
        or stride[1:] != (head_dim, 1)
        or (stride[0] | x.data_ptr() >> 1) & 7
        or not x.is_cuda
    ):
        raise KernelError(
            f"{name}: {x.dtype} {tuple(x.shape)} strides {stride} on {x.device}; "
            f"wanted {dtype} [tokens, {heads}, {head_dim}], heads packed, 16-byte aligned, on a CUDA device"
        )


def check_vector(name: str, x: Tensor, least: int, dtype: torch.dtype) -> None:
    """At least `least` elements in a row."""
    if x.dtype != dtype or x.dim() != 1 or len(x) < least or not x.is_contiguous() or not x.is_cuda:
        raise KernelError(f"{name}: {x.dtype} {tuple(x.shape)} on {x.device}; wanted {dtype} [{least}]")


def check_batch(tables: Tensor, lengths: Tensor, query_start: Tensor) -> int:
    """Check what describes a batch of requests; returns how many there are."""
    if tables.dtype != torch.int32 or tables.dim() != 2 or tables.stride(1) != 1 or not tables.is_cuda:
        raise KernelError(f"tables: {tables.dtype} {tuple(tables.shape)} on {tables.device}; wanted int32 [batch, n]")
    batch = len(tables)
    check_vector("lengths", lengths, batch, torch.int32)
    check_vector("query_start", query_start, batch + 1, torch.int32)
    return batch


class Places:
    """The (layout, pool) pairs that an op accepts; each is checked when it first appears."""

    def __init__(self, k_format: str, v_format: str, head_dim: int, num_kv_heads: int | None = None) -> None:
        self._kinds, self._kv_heads = (k_format, v_format, head_dim), num_kv_heads
        self._seen: dict[int, tuple[KVLayout, Tensor]] = {}

    def check(self, layout: KVLayout, pool: Tensor) -> None:
        """Raise KernelError unless the op was made for this layout and the pool has it."""
        seen = self._seen.get(id(layout))
        if seen is not None and seen[1] is pool:
            return
        heads = self._kv_heads or layout.num_kv_heads
        if (layout.k_format, layout.v_format, layout.head_dim) != self._kinds or layout.num_kv_heads != heads:
            raise KernelError(f"made for {self._kinds} and {heads} KV heads: {layout}")
        shape, stride = tuple(pool.shape), pool.stride()
        if (
            pool.dtype != torch.uint8
            or shape[1:] != (layout.block_stride,)
            or stride != (layout.block_stride, 1)
            or pool.data_ptr() % 16
            or not pool.is_cuda
        ):
            raise KernelError(
                f"pool: {pool.dtype} {shape} strides {stride}; wanted uint8 [blocks, {layout.block_stride}]"
            )
        self._seen[id(layout)] = layout, pool
