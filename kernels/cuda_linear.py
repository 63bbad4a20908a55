"""Dense linear layers for few rows, where cuBLAS leaves bandwidth unused. Sources: `one_row.cu`, `few_rows.cu`."""

import torch
from torch import Tensor

from kernels.compiler import KernelError, Variant
from kernels.launcher import kernel, shared_bytes

FEW_ROWS = 8
"""Rows that `FewRowsLinear` takes at most: beyond them x takes too much of the shared memory."""
_SLICES = (1, 2, 4, 8)
_WARPS, _FEW_WARPS = 4, 16
_STEP = 32  # columns of a weight; a tile is 16 rows


def _variant(dtype: torch.dtype, gated: bool) -> Variant:
    return Variant("one_row.cu", (("IS_BF16", int(dtype == torch.bfloat16)), ("GATED", int(gated))))


def _few_variant(dtype: torch.dtype, slices: int, gated: bool) -> Variant:
    macros = ("IS_BF16", int(dtype == torch.bfloat16)), ("SLICES", slices), ("GATED", int(gated))
    return Variant("few_rows.cu", macros, "sm_90a")


def all_variants() -> list[Variant]:
    """Everything that these layers can ask for."""
    kinds = [(dtype, gated) for dtype in (torch.float16, torch.bfloat16) for gated in (False, True)]
    few = [_few_variant(dtype, slices, gated) for dtype, gated in kinds for slices in _SLICES]
    return [*(_variant(*kind) for kind in kinds), *few]


def check_weight(weight: Tensor, bias: Tensor | None, multiple: int, gated: bool = False) -> None:
    """Raise KernelError unless weight is float16 or bfloat16 `[out, in]`, packed, in a multiple of `multiple`.

    `gated`: its rows are pairs, and there is no bias.
    """
    if (
        weight.dtype not in (torch.float16, torch.bfloat16)
        or weight.dim() != 2
        or weight.shape[1] % multiple
        or not weight.is_contiguous()
        or weight.data_ptr() % 16
        or not weight.is_cuda
    ):
        raise KernelError(f"weight: {weight.dtype} {tuple(weight.shape)} strides {weight.stride()}")
    if gated and (len(weight) % 2 or bias is not None):
        raise KernelError(f"a gate and what it lets through: {tuple(weight.shape)}; wanted rows in pairs, and no bias")
    if bias is not None and (
        bias.dtype != weight.dtype
        or bias.shape != weight.shape[:1]
        or not bias.is_contiguous()
        or bias.device != weight.device
    ):
        raise KernelError(f"bias: {bias.dtype} {tuple(bias.shape)} for a weight {tuple(weight.shape)}")


def check_x(x: Tensor, weight: Tensor, most_rows: int) -> None:
    """Raise KernelError unless x is `[1 to most_rows, in]` and rows are aligned to 16 bytes."""
    if (
        x.dtype != weight.dtype
        or x.dim() != 2
        or not 1 <= len(x) <= most_rows
        or x.shape[1] != weight.shape[1]
        or x.stride(1) != 1
        or x.stride(0) % 8
        or x.data_ptr() % 16
        or x.device != weight.device
    ):
        raise KernelError(
            f"x: {x.dtype} {tuple(x.shape)} strides {x.stride()} on {x.device}; wanted {weight.dtype} "
            f"[1 to {most_rows}, {weight.shape[1]}], rows a multiple of 16 bytes apart, on {weight.device}"
        )


class OneRowLinear:
    """y = x W^T + bias for x `[1, in]`, summed in float32."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, gated: bool = False) -> None:
        """Weight `[out, in]` float16 or bfloat16, contiguous; in a multiple of 8; bias `[out]` of the same dtype.

        `gated`: rows of weight are a gate's and what it lets through, in turn, and there is no bias; y is then
        silu(gate) * up, `[1, out / 2]`.
        """
        check_weight(weight, bias, 8, gated)
        self._weight, self._bias, self._columns = weight, bias, len(weight) // (1 + gated)
        self._kernel = kernel(_variant(weight.dtype, gated), "4P2i", 32 * _WARPS, weight.device.index)

    def __call__(self, x: Tensor) -> Tensor:
        """X `[1, in]` to `[1, out]`, same dtype."""
        check_x(x, self._weight, 1)
        columns, width = self._columns, self._weight.shape[1]
        out = torch.empty((1, columns), dtype=x.dtype, device=x.device)
        bias = 0 if self._bias is None else self._bias.data_ptr()
        self._kernel(
            (-(-columns // _WARPS), 1, 1), x.data_ptr(), self._weight.data_ptr(), bias, out.data_ptr(), columns, width
        )
        return out


def _parts(tiles: int) -> int:
    """How many of a block's warps share each of its tiles, so that none is idle for long."""
    if tiles <= _FEW_WARPS:
        return _FEW_WARPS // tiles
    rounds = {parts: -(-tiles // (_FEW_WARPS // parts)) / parts for parts in range(1, _FEW_WARPS + 1)}
    return min(rounds, key=lambda parts: rounds[parts] + 0.01 * parts)  # their sums take room and time


class FewRowsLinear:
    """y = x W^T + bias for x of 1 to `FEW_ROWS` rows, summed in float32. For Hopper."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, slices: int = 0, gated: bool = False) -> None:
        """Weight `[out, in]` float16 or bfloat16, contiguous; in a multiple of 32; bias `[out]` of the same dtype.

        `slices`: blocks that share the columns of a row; 0: as few as possible. KernelError if it needs more of them,
        and on other GPUs. `gated`: see `OneRowLinear`; out is a multiple of 8 then.
        """
        check_weight(weight, bias, _STEP, gated)
        self._weight, self._bias, self._columns = weight, bias, len(weight) // (1 + gated)
        device, most_shared = weight.device.index, shared_bytes(weight.device.index) - 1024
        if torch.cuda.get_device_capability(device) != (9, 0):
            raise KernelError("a few rows at once: for Hopper only")
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        steps, tiles = weight.shape[1] // _STEP, -(-weight.shape[0] // 16)
        for count in [slices] if slices else _SLICES:
            unit = _few_variant(weight.dtype, count, gated)
            self._kernel = kernel(unit, "4Pq4i", 32 * _FEW_WARPS, device, most_shared)
            x_bytes = FEW_ROWS * (-(-steps // count) | 1) * 2 * _STEP
            groups = min(tiles, multiprocessors if count == 1 else self._kernel.resident_clusters(count, x_bytes))
            if not groups or steps < count:
                continue
            most = -(-tiles // groups)
            self._blocks, self._parts = groups * count, min(_parts(most), steps // count)
            self._shared = x_bytes + (512 * most * self._parts if count > 1 or self._parts > 1 else 0)
            if self._shared <= most_shared:
                return
        raise KernelError(f"weight: {tuple(weight.shape)} is too wide for the shared memory")

    def __call__(self, x: Tensor) -> Tensor:
        """X `[n, in]` to `[n, out]`, same dtype; rows of x may be apart."""
        weight = self._weight
        check_x(x, weight, FEW_ROWS)
        rows, (outs, width) = len(x), weight.shape
        out = torch.empty((rows, self._columns), dtype=x.dtype, device=x.device)
        self._kernel(
            (self._blocks, 1, 1),
            x.data_ptr(),
            weight.data_ptr(),
            0 if self._bias is None else self._bias.data_ptr(),
            out.data_ptr(),
            x.stride(0) * 2,
            rows,
            outs,
            width,
            self._parts,
            shared_bytes=self._shared,
        )
        return out
