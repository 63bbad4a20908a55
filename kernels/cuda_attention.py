"""CUDA attention over block images, and the write into them. Sources: `kernels/cuda`.

Every call checks shapes, dtypes, strides and alignment before it launches, allocates nothing, reads lengths and tables
on the device only, and can be captured into a CUDA graph.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from kernels.compiler import KernelError, Variant
from kernels.cuda_layout import (
    HOPPER_HEAD_DIMS,
    HOPPER_PREFILL,
    HOPPER_WARPS,
    TILE,
    KVLayout,
    Places,
    check_batch,
    check_heads,
    check_vector,
    prefill_tile,
    variant,
)
from kernels.launcher import device_target, kernel

_FEW_HEADS = 8  # of KV, in a batch: for no more, a second block on a multiprocessor costs more than it reads


class WriteKV:
    """Bias, q and k norm, RoPE, quantisation and the write into block images, in one launch."""

    def __init__(self, k_format: str, v_format: str, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._head_dim, self._places = dtype, head_dim, Places(k_format, v_format, head_dim)
        unit = variant("write_kv.cu", k_format, v_format, head_dim, dtype)
        self._kernel = kernel(unit, "9P8q6if", 128, _index(device))

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

        qkv may come in float32 parts `[parts, n, ...]`, packed, to be added up. query_out `[n, q_heads, head_dim]`
        may be the q part of qkv itself. slots int64 `[n]`: block * block_size + slot, negative for no write. positions
        int64 `[n]` index cos_sin float32 `[positions, head_dim]` (cosines of the head_dim / 2 frequencies, then sines).
        bias: as one row of qkv, flat; norms `[head_dim]`; compute dtype.
        """
        parts, part_stride = (len(qkv), qkv.stride(0)) if qkv.dim() == 4 else (0, 0)
        if parts and not qkv.is_contiguous():
            raise KernelError(f"qkv: parts with strides {qkv.stride()}; wanted them packed")
        qkv = qkv[0] if parts else qkv
        tokens, width = len(qkv), self._head_dim
        heads = qkv.shape[1] - 2 * layout.num_kv_heads
        self._places.check(layout, pool)
        check_heads("qkv", qkv, qkv.shape[1], width, torch.float32 if parts else self._dtype)
        check_heads("query_out", query_out, heads, width, self._dtype)
        check_vector("slots", slots, tokens, torch.int64)
        check_vector("positions", positions, tokens, torch.int64)
        self._check_angles(cos_sin)
        if len(query_out) < tokens:
            raise KernelError(f"query_out: {len(query_out)} tokens; wanted {tokens}")
        if tokens == 0:
            return
        extras = {"bias": (bias, qkv.shape[1] * width), "q_norm": (q_norm, width), "k_norm": (k_norm, width)}
        groups, per_warp = self._split(tokens, qkv.shape[1])
        self._kernel(
            (-(-tokens // 4), -(-groups // per_warp), 1),
            qkv.data_ptr(),
            query_out.data_ptr(),
            pool.data_ptr(),
            slots.data_ptr(),
            positions.data_ptr(),
            cos_sin.data_ptr(),
            *self._addresses(extras),
            qkv.stride(0),
            part_stride,
            query_out.stride(0),
            *layout.offsets,
            tokens,
            heads,
            layout.num_kv_heads,
            layout.block_size.bit_length() - 1,
            per_warp,
            parts,
            norm_eps,
        )

    def _check_angles(self, x: Tensor) -> None:
        width = self._head_dim
        if x.dtype != torch.float32 or x.shape[1:] != (width,) or not x.is_contiguous():
            raise KernelError(f"cos_sin: {x.dtype} {tuple(x.shape)}; wanted float32 [positions, {width}]")
        if not x.is_cuda or x.data_ptr() % 16:
            raise KernelError(f"cos_sin: on {x.device}, at {x.data_ptr():#x}; wanted 16-byte aligned, on a CUDA device")

    def _addresses(self, extras: dict[str, tuple[Tensor | None, int]]) -> Iterator[int]:
        """0 for what isn't there. Each comes with its size."""
        for name, (x, size) in extras.items():
            if x is not None:
                check_vector(name, x, size, self._dtype)
                if x.data_ptr() % 16:
                    raise KernelError(f"{name} must be 16-byte aligned")
            yield 0 if x is None else x.data_ptr()

    def _split(self, tokens: int, heads: int) -> tuple[int, int]:
        """Groups of heads that lie in a warp at once, and how many of them a warp takes, one after the other."""
        lanes = 4 if self._head_dim <= 64 else 8 if self._head_dim <= 128 else 16
        groups = -(-heads * lanes // 32)
        # Few tokens: spread the groups over warps. Many: a warp keeps its cosines for several.
        return groups, 1 if tokens * groups <= 4096 else -(-groups // -(-groups // 5))


class DecodeAttention:
    """Attention of a few query rows per request. `plan` once per step, then one call per layer.

    Holds the plan and the scratch of the merge, so calls of one instance must follow each other on one stream. Blocks
    wait for each other, all resident at once: two such calls at the same time, on two streams, could wait forever.
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
    ) -> None:
        if num_heads % num_kv_heads:
            raise KernelError(f"{num_heads} query heads on {num_kv_heads} KV heads")
        self._places = Places(k_format, v_format, head_dim, num_kv_heads)
        self._heads, self._kv_heads, self._head_dim = num_heads, num_kv_heads, head_dim
        self._group, self._dtype, self._window = num_heads // num_kv_heads, dtype, window
        self._scale = (head_dim**-0.5 if scale is None else scale) * math.log2(math.e)
        rows = self._group * max_queries
        row_tiles = 2 if rows > 8 and head_dim <= 128 else 1
        self._row_blocks = -(-rows // (8 * row_tiles))
        self.max_requests, self.max_queries = max_requests, max_queries
        index = _index(device)
        unit = variant("decode_attention.cu", k_format, v_format, head_dim, dtype, row_tiles)
        self._warps = 4 if head_dim * row_tiles > 128 else 8
        self._kernel = kernel(unit, "8P7q6i2f", 32 * self._warps, index)
        self._kernel.leave_the_rest_to_l1()
        self._planner = kernel(Variant("decode_plan.cu"), "3P6i", 1024, index)
        self._multiprocessors = _multiprocessors(index)
        self._grid = self._multiprocessors * self._kernel.blocks_per_multiprocessor()
        words = 2 * self._grid * row_tiles * head_dim * 16  # 2 KiB a row tile and 16 elements
        self._plan = torch.zeros(4 + 8 * self._grid + max_requests + 1, dtype=torch.int32, device=device)
        self._parts = torch.full((words,), -1, dtype=torch.int32, device=device)  # each launch leaves it so
        self._scratch = self._plan.data_ptr(), self._parts.data_ptr()
        self._is_planned = False  # just now

    def plan(self, tables: Tensor, lengths: Tensor, query_start: Tensor) -> None:
        """Take a batch and cut it into work; its values are read on the device, now and by the calls.

        tables int32 `[batch, blocks]`; lengths int32 `[batch]` count a request's keys, those of its queries included:
        its i-th query of q sees the first length - q + i + 1. query_start int32 `[batch + 1]`: at most max_queries
        tokens for each request. One of length 0 is idle: nothing is written for it.
        """
        batch = check_batch(tables, lengths, query_start)
        if batch > self.max_requests:
            raise KernelError(f"{batch} requests; made for {self.max_requests}")
        self._batch = tables, lengths, query_start
        self._pointers = tables.data_ptr(), lengths.data_ptr(), query_start.data_ptr()
        heads = self._kv_heads * self._row_blocks
        self._blocks = self._grid if batch * heads > _FEW_HEADS else min(self._grid, self._multiprocessors)
        self._planner(
            (1, 1, 1),
            *self._pointers[1:],
            self._plan.data_ptr(),
            batch,
            heads,
            self._blocks,
            self._multiprocessors,
            self._warps,
            self._window,
        )
        self._is_planned = True

    def __call__(self, layout: KVLayout, pool: Tensor, query: Tensor, out: Tensor) -> None:
        """Attend with query `[tokens, heads, head_dim]` into out (same shape) for what was planned."""
        self._places.check(layout, pool)
        check_heads("query", query, self._heads, self._head_dim, self._dtype)
        check_heads("out", out, self._heads, self._head_dim, self._dtype)
        self._kernel(
            (self._blocks, 1, 1),
            query.data_ptr(),
            out.data_ptr(),
            pool.data_ptr(),
            *self._pointers,
            *self._scratch,
            *layout.offsets,
            query.stride(0),
            out.stride(0),
            self._batch[0].stride(0),
            self._kv_heads,
            self._group,
            self._row_blocks,
            (layout.block_size // TILE).bit_length() - 1,
            self._window,
            self._scale,
            1 / self._group,
            # Two blocks on a multiprocessor wait for each other, and may not fit in the shared memory that the kernels
            # before left as they had it. A plan is read before the wait, so the first call after it isn't early.
            early=self._blocks <= self._multiprocessors and not self._is_planned,
        )
        self._is_planned = False


class PrefillAttention:
    """Causal attention of chunks of prompts. `portable`: without the instructions that only Hopper has."""

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
        portable: bool = False,
    ) -> None:
        if num_heads % num_kv_heads:
            raise KernelError(f"{num_heads} query heads on {num_kv_heads} KV heads")
        self._places = Places(k_format, v_format, head_dim, num_kv_heads)
        self._heads, self._kv_heads, self._head_dim = num_heads, num_kv_heads, head_dim
        self._group, self._dtype, self._window = num_heads // num_kv_heads, dtype, window
        self._scale = (head_dim**-0.5 if scale is None else scale) * math.log2(math.e)
        index = _index(device)
        self._multiprocessors = _multiprocessors(index)
        file = "prefill_attention.cu"
        choices: tuple[int, ...] = (4,)
        if device_target(index) == "sm_90" and head_dim in HOPPER_HEAD_DIMS and not portable:
            file, choices = HOPPER_PREFILL, HOPPER_WARPS
        self._kernels = []  # with their query rows, fewest first
        for warps in choices:
            _, rows, shared_bytes = prefill_tile(file, head_dim, warps)
            unit = variant(file, k_format, v_format, head_dim, dtype, warps=warps)
            self._kernels.append((rows, kernel(unit, "6P7q6if", 32 * warps, index, shared_bytes)))

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
        """Attend as DecodeAttention does, for any number of queries per request, none included.

        query_start's values may begin anywhere: rows of query before and after theirs are left alone.
        """
        self._places.check(layout, pool)
        check_heads("query", query, self._heads, self._head_dim, self._dtype)
        check_heads("out", out, self._heads, self._head_dim, self._dtype)
        batch = check_batch(tables, lengths, query_start)
        # The kernel with the larger blocks is the faster one if they are enough to fill the device.
        rows, launch = self._kernels[-1]
        row_count = len(query) * self._group
        if -(-row_count // rows) * self._kv_heads < self._multiprocessors:
            rows, launch = self._kernels[0]
        launch(
            (-(-row_count // rows) + batch, self._kv_heads, 1),
            query.data_ptr(),
            out.data_ptr(),
            pool.data_ptr(),
            tables.data_ptr(),
            lengths.data_ptr(),
            query_start.data_ptr(),
            *layout.offsets,
            query.stride(0),
            out.stride(0),
            batch,
            tables.stride(0),
            self._kv_heads,
            self._group,
            layout.block_size.bit_length() - 1,
            self._window,
            self._scale,
        )


def _index(device: torch.device) -> int:
    if device.type != "cuda":
        raise KernelError(f"no CUDA device: {device}")
    return torch.cuda.current_device() if device.index is None else device.index


def _multiprocessors(device: int) -> int:
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count
