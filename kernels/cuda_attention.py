"""CUDA attention over block images, and the write into them. Sources: `kernels/cuda`.

Every call checks shapes, dtypes, strides and alignment before it launches, allocates nothing, reads lengths and tables
on the device only, and can be captured into a CUDA graph.
"""

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.compiler import KernelError, Variant
from kernels.launcher import Kernel, kernel

FORMATS = {"fp16": 0, "bf16": 1, "int8": 2, "e4m3": 3, "e5m2": 4, "e4m3_scaled": 5}
HEAD_DIMS = (64, 96, 128, 256)
_SIXTEEN_BIT = {"fp16": torch.float16, "bf16": torch.bfloat16}
_SCALED = ("int8", "e4m3_scaled")
_TILE = 16  # keys of one warp's step in decode attention
_LEAST_TILES = 8  # fewer per block and the merge costs more than the reading


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
        if self.block_size < _TILE or self.block_size & (self.block_size - 1):
            raise KernelError(f"block size {self.block_size} is no power of two from {_TILE} up")
        if any(n % 16 for n in (self.block_stride, self.k_offset, self.v_offset)):
            raise KernelError(f"block stride and offsets of K and V must be multiples of 16 bytes: {self}")
        if (self.k_scale_offset | self.v_scale_offset) % 2:
            raise KernelError(f"scales must be aligned to 2 bytes: {self}")

    @property
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


def variant(file: str, k_format: str, v_format: str, head_dim: int, dtype: torch.dtype, row_tiles: int = 0) -> Variant:
    """The translation unit of an attention or write kernel; `row_tiles` is for decode attention."""
    for name in (k_format, v_format):
        if _SIXTEEN_BIT.get(name, dtype) != dtype:
            raise KernelError(f"KV format {name} with compute dtype {dtype}")
    macros = {
        "HEAD_DIM": head_dim,
        "K_FORMAT": FORMATS[k_format],
        "V_FORMAT": FORMATS[v_format],
        "QUERY_BF16": int(dtype == torch.bfloat16),
    }
    if row_tiles:
        macros["ROW_TILES"] = row_tiles
    return Variant(file, tuple(macros.items()))


def all_variants() -> list[Variant]:
    """Everything that attention and KV writes can ask for, the small kernels beside them included."""
    found = [Variant("probe.cu"), Variant("decode_plan.cu")]
    eight_bit = [name for name in FORMATS if name not in _SIXTEEN_BIT]
    for own, dtype in _SIXTEEN_BIT.items():
        pairs = [(own, own), *((name, name) for name in eight_bit), *((own, name) for name in eight_bit)]
        for (k, v), head_dim in itertools.product(pairs, HEAD_DIMS):
            found += [variant(file, k, v, head_dim, dtype) for file in ("write_kv.cu", "prefill_attention.cu")]
            tiles = (1,) if head_dim > 128 else (1, 2)
            found += [variant("decode_attention.cu", k, v, head_dim, dtype, t) for t in tiles]
    return found


def _require(good: bool, what: str) -> None:
    if not good:
        raise KernelError(what)


def _check_heads(name: str, x: Tensor, heads: int, head_dim: int, dtype: torch.dtype) -> None:
    """Tokens may be apart; heads and elements are packed; 4-byte accesses must be aligned."""
    _require(
        x.dtype == dtype
        and x.dim() == 3
        and x.shape[1:] == (heads, head_dim)
        and x.stride()[1:] == (head_dim, 1)
        and x.stride(0) % 2 == 0
        and x.data_ptr() % 4 == 0
        and x.is_cuda,
        f"{name}: {x.dtype} {tuple(x.shape)} strides {x.stride()} on {x.device}; "
        f"wanted {dtype} [tokens, {heads}, {head_dim}], heads packed",
    )


def _check_vector(name: str, x: Tensor, least: int, dtype: torch.dtype) -> None:
    _require(
        x.dtype == dtype and x.dim() == 1 and len(x) >= least and x.is_contiguous() and x.is_cuda,
        f"{name}: {x.dtype} {tuple(x.shape)} on {x.device}; wanted {dtype} [{least}]",
    )


def _check_pool(pool: Tensor, layout: KVLayout) -> None:
    _require(
        pool.dtype == torch.uint8
        and pool.dim() == 2
        and pool.shape[1] == layout.block_stride
        and pool.stride() == (layout.block_stride, 1)
        and pool.data_ptr() % 16 == 0
        and pool.is_cuda,
        f"pool: {pool.dtype} {tuple(pool.shape)} strides {pool.stride()}; wanted uint8 [blocks, {layout.block_stride}]",
    )


def _check_batch(tables: Tensor, lengths: Tensor, query_start: Tensor) -> int:
    _require(
        tables.dtype == torch.int32 and tables.dim() == 2 and tables.stride(1) == 1 and tables.is_cuda,
        f"tables: {tables.dtype} {tuple(tables.shape)}; wanted int32 [batch, blocks]",
    )
    batch = len(tables)
    _check_vector("lengths", lengths, batch, torch.int32)
    _check_vector("query_start", query_start, batch + 1, torch.int32)
    return batch


class WriteKV:
    """Bias, q and k norm, RoPE, quantisation and the write into block images, in one launch."""

    def __init__(self, k_format: str, v_format: str, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._head_dim, self._kinds = dtype, head_dim, (k_format, v_format)
        unit = variant("write_kv.cu", k_format, v_format, head_dim, dtype)
        self._kernel = kernel(unit, "9P7q5if", 128, _index(device))

    def __call__(
        self,
        layout: KVLayout,
        pool: Tensor,
        qkv: Tensor,
        query_out: Tensor,
        slots: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        bias: Tensor | None = None,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        norm_eps: float = 1e-6,
    ) -> None:
        """Write K and V of qkv `[n, q_heads + 2 * kv_heads, head_dim]` into the pool, and the rotated q to query_out.

        query_out `[n, q_heads, head_dim]` may be the q part of qkv itself. slots int64 `[n]`: block * block_size +
        slot, negative for no write. positions int64 `[n]` index cos_sin float32 `[positions, head_dim]` (cosines of
        the head_dim / 2 frequencies, then sines). bias: as one row of qkv, flat; norms `[head_dim]`; compute dtype.
        """
        tokens, width = len(qkv), self._head_dim
        heads = qkv.shape[1] - 2 * layout.num_kv_heads
        _require(
            (layout.k_format, layout.v_format, layout.head_dim) == (*self._kinds, width), f"not this kernel's: {layout}"
        )
        _check_pool(pool, layout)
        _check_heads("qkv", qkv, heads + 2 * layout.num_kv_heads, width, self._dtype)
        _check_heads("query_out", query_out, heads, width, self._dtype)
        _require(len(query_out) >= tokens, "query_out has fewer tokens than qkv")
        _check_vector("slots", slots, tokens, torch.int64)
        _check_vector("positions", positions, tokens, torch.int64)
        _require(
            cos_sin.dtype == torch.float32
            and cos_sin.shape[1:] == (width,)
            and cos_sin.is_contiguous()
            and cos_sin.is_cuda,
            f"cos_sin: {cos_sin.dtype} {tuple(cos_sin.shape)}; wanted float32 [positions, {width}]",
        )
        for name, x, size in (
            ("bias", bias, qkv.shape[1] * width),
            ("q_norm", q_norm, width),
            ("k_norm", k_norm, width),
        ):
            if x is not None:
                _check_vector(name, x, size, self._dtype)
        if tokens == 0:
            return
        all_heads = qkv.shape[1]
        # Few tokens: spread the heads over warps. Many: a warp keeps its cosines for several heads.
        per_warp = 1 if tokens * all_heads <= 8192 else 4
        self._kernel(
            (-(-tokens // 4), -(-all_heads // per_warp), 1),
            qkv.data_ptr(),
            query_out.data_ptr(),
            pool.data_ptr(),
            slots.data_ptr(),
            positions.data_ptr(),
            cos_sin.data_ptr(),
            *(0 if x is None else x.data_ptr() for x in (bias, q_norm, k_norm)),
            qkv.stride(0),
            query_out.stride(0),
            *layout.offsets,
            tokens,
            heads,
            layout.num_kv_heads,
            layout.block_size.bit_length() - 1,
            per_warp,
            norm_eps,
        )


class DecodeAttention:
    """Attention of a few query rows per request. `plan` once per step, then one call per layer.

    Holds the plan and the scratch of the merge, so calls of one instance must follow each other on one stream.
    """

    def __init__(
        self,
        k_format: str,
        v_format: str,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        max_requests: int,
        max_queries: int = 1,
        window: int = 0,
        scale: float | None = None,
        least_tiles: int = _LEAST_TILES,
    ) -> None:
        _require(num_heads % num_kv_heads == 0, f"{num_heads} query heads on {num_kv_heads} KV heads")
        self._kinds, self._heads, self._kv_heads = (k_format, v_format, head_dim), num_heads, num_kv_heads
        self._group, self._dtype, self._window = num_heads // num_kv_heads, dtype, window
        self._scale = (head_dim**-0.5 if scale is None else scale) * math.log2(math.e)
        rows = self._group * max_queries
        row_tiles = 2 if rows > 8 and head_dim <= 128 else 1
        self._row_blocks = -(-rows // (8 * row_tiles))
        self.max_requests, self.max_queries, self._least_tiles = max_requests, max_queries, least_tiles
        index = _index(device)
        unit = variant("decode_attention.cu", k_format, v_format, head_dim, dtype, row_tiles)
        self._kernel = kernel(unit, "10P7q6if", 128, index)
        self._planner = kernel(Variant("decode_plan.cu"), "3P5i", 1024, index)
        self._grid = _resident_blocks(self._kernel, index)
        fragments = 2 * self._grid * row_tiles * 32 * 4
        self._plan = torch.zeros(4 + 4 * self._grid + max_requests + 1, dtype=torch.int32, device=device)
        self._part_out = torch.empty(fragments * head_dim // 16, dtype=torch.float32, device=device)
        self._part_max_sum = torch.empty(fragments // 8, dtype=torch.float32, device=device)
        self._counters = torch.zeros(max_requests * num_kv_heads * self._row_blocks, dtype=torch.int32, device=device)

    def plan(self, lengths: Tensor, query_start: Tensor) -> None:
        """Cut the batch into work. lengths int32 `[batch]`, query_start int32 `[batch + 1]`, read on the device."""
        batch = len(lengths)
        _require(batch <= self.max_requests, f"{batch} requests; made for {self.max_requests}")
        _check_vector("lengths", lengths, batch, torch.int32)
        _check_vector("query_start", query_start, batch + 1, torch.int32)
        self._planner(
            (1, 1, 1),
            lengths.data_ptr(),
            query_start.data_ptr(),
            self._plan.data_ptr(),
            batch,
            self._kv_heads * self._row_blocks,
            self._grid,
            self._window,
            self._least_tiles,
        )

    def __call__(
        self,
        layout: KVLayout,
        pool: Tensor,
        query: Tensor,
        out: Tensor,
        tables: Tensor,
        lengths: Tensor,
        query_start: Tensor,
    ) -> None:
        """Attend with query `[tokens, heads, head_dim]` into out (same shape) for what was planned.

        tables int32 `[batch, blocks]`; lengths int32 `[batch]` count a request's keys, those of its queries included:
        its i-th query of q sees the first length - q + i + 1. query_start int32 `[batch + 1]`: at most max_queries
        tokens for each request. A request of length 0 gets zeros.
        """
        _require((layout.k_format, layout.v_format, layout.head_dim) == self._kinds, f"not this kernel's: {layout}")
        _check_pool(pool, layout)
        _check_heads("query", query, self._heads, layout.head_dim, self._dtype)
        _check_heads("out", out, self._heads, layout.head_dim, self._dtype)
        batch = _check_batch(tables, lengths, query_start)
        _require(batch <= self.max_requests, f"{batch} requests; made for {self.max_requests}")
        self._kernel(
            (self._grid, 1, 1),
            query.data_ptr(),
            out.data_ptr(),
            pool.data_ptr(),
            tables.data_ptr(),
            lengths.data_ptr(),
            query_start.data_ptr(),
            self._plan.data_ptr(),
            self._part_out.data_ptr(),
            self._part_max_sum.data_ptr(),
            self._counters.data_ptr(),
            *layout.offsets,
            query.stride(0),
            out.stride(0),
            tables.stride(0),
            self._kv_heads,
            self._group,
            self._row_blocks,
            (layout.block_size // _TILE).bit_length() - 1,
            self._window,
            self._scale,
        )


class PrefillAttention:
    """Causal attention of chunks of prompts."""

    def __init__(
        self,
        k_format: str,
        v_format: str,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        window: int = 0,
        scale: float | None = None,
    ) -> None:
        _require(num_heads % num_kv_heads == 0, f"{num_heads} query heads on {num_kv_heads} KV heads")
        self._kinds, self._heads, self._kv_heads = (k_format, v_format, head_dim), num_heads, num_kv_heads
        self._group, self._dtype, self._window = num_heads // num_kv_heads, dtype, window
        self._scale = (head_dim**-0.5 if scale is None else scale) * math.log2(math.e)
        keys = 32 if head_dim > 128 else 64
        unit = variant("prefill_attention.cu", k_format, v_format, head_dim, dtype)
        self._kernel = kernel(unit, "6P7q5if", 256, _index(device), 4 * keys * (head_dim * 2 + 16))

    def __call__(
        self,
        layout: KVLayout,
        pool: Tensor,
        query: Tensor,
        out: Tensor,
        tables: Tensor,
        lengths: Tensor,
        query_start: Tensor,
        most_queries: int,
    ) -> None:
        """As DecodeAttention, for any number of queries per request; `most_queries` bounds them all."""
        _require((layout.k_format, layout.v_format, layout.head_dim) == self._kinds, f"not this kernel's: {layout}")
        _check_pool(pool, layout)
        _check_heads("query", query, self._heads, layout.head_dim, self._dtype)
        _check_heads("out", out, self._heads, layout.head_dim, self._dtype)
        batch = _check_batch(tables, lengths, query_start)
        self._kernel(
            (-(-most_queries * self._group // 128), self._kv_heads, batch),
            query.data_ptr(),
            out.data_ptr(),
            pool.data_ptr(),
            tables.data_ptr(),
            lengths.data_ptr(),
            query_start.data_ptr(),
            *layout.offsets,
            query.stride(0),
            out.stride(0),
            tables.stride(0),
            self._kv_heads,
            self._group,
            layout.block_size.bit_length() - 1,
            self._window,
            self._scale,
        )


def _index(device: torch.device) -> int:
    _require(device.type == "cuda", f"no CUDA device: {device}")
    return torch.cuda.current_device() if device.index is None else device.index


def _resident_blocks(compiled: Kernel, device: int) -> int:
    multiprocessors: int = torch.cuda.get_device_properties(device).multi_processor_count
    return multiprocessors * compiled.blocks_per_multiprocessor()
