"""4-bit weights in the layout of the CUDA kernels (`kernels/cuda/w4.cuh`), and the way there from published ones."""

import dataclasses
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.compiler import KernelError, Variant
from kernels.launcher import kernel
from kernels.w4_format import SYMMETRIC_ZERO, W4Weight, awq_zeros, gptq_zeros, order_of

UNIT, ROW_TILE, ROWS = 64, 16, 64  # input features and outputs of a tile; outputs are padded to ROWS
GROUPS = (128, 64, 32)
DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class PackedW4:
    """A weight on a GPU. codes int32 `[pairs of row tiles, units, 2, 32, 4]`; records: scales and zeros."""

    codes: Tensor
    records: Tensor
    factor: float
    order: Tensor | None
    out_features: int
    in_features: int
    group: int
    has_zeros: bool
    dtype: torch.dtype

    @property
    def units(self) -> int:
        """Units of UNIT input features, an even number, the last perhaps padded."""
        return self.codes.shape[1]

    @property
    def row_tiles(self) -> int:
        """Tiles of ROW_TILE outputs, padding included."""
        return 2 * self.codes.shape[0]

    @property
    def macros(self) -> tuple[tuple[str, int], ...]:
        """What every kernel's variant needs to know."""
        return macros(self.dtype, self.group, self.has_zeros)


def macros(dtype: torch.dtype, group: int, has_zeros: bool) -> tuple[tuple[str, int], ...]:
    """Of a weight for activations of `dtype`."""
    return ("IS_BF16", int(dtype == torch.bfloat16)), ("GROUP", group), ("ZEROS", int(has_zeros))


def pack(weight: W4Weight, dtype: torch.dtype) -> PackedW4:
    """A weight that is on a CUDA device, for activations of `dtype`. Raises KernelError."""
    rows, columns = weight.shape
    words = weight.codes.contiguous().view(torch.int32)
    zeros = weight.zeros
    packed = _pack(words, (1, columns // 8), False, None, weight.scales, zeros, (rows, columns), dtype)
    return dataclasses.replace(packed, order=weight.order)


def pack_gptq(
    qweight: Tensor,
    qzeros: Tensor,
    scales: Tensor,
    g_idx: Tensor | None,
    group_size: int,
    version: int,
    dtype: torch.dtype,
) -> PackedW4:
    """GPTQ's tensors, as `w4_format.from_gptq` describes them, without a copy of the codes in between."""
    rows, columns = qweight.shape[1], qweight.shape[0] * 8
    order = None if g_idx is None else order_of(g_idx, columns if group_size == -1 else group_size, columns)
    zeros = gptq_zeros(qzeros, version)
    return _pack(qweight.contiguous(), (rows, 1), False, order, scales.T, zeros, (rows, columns), dtype)


def pack_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor, dtype: torch.dtype) -> PackedW4:
    """AWQ's tensors, as `w4_format.from_awq` describes them, without a copy of the codes in between."""
    rows, columns = qweight.shape[1] * 8, qweight.shape[0]
    return _pack(qweight.contiguous(), (rows // 8, 1), True, None, scales.T, awq_zeros(qzeros), (rows, columns), dtype)


def _pack(
    words: Tensor,
    strides: tuple[int, int],
    by_output: bool,
    order: Tensor | None,
    scales: Tensor,
    zeros: Tensor | None,
    shape: tuple[int, int],
    dtype: torch.dtype,
) -> PackedW4:
    rows, columns = shape
    size = columns // scales.shape[1]
    group = next((g for g in GROUPS if size % g == 0), 0)
    if dtype not in DTYPES or not group or scales.shape != (rows, columns // size) or not words.is_cuda:
        raise KernelError(
            f"4-bit weight {shape} on {words.device}, scales {tuple(scales.shape)}, for {dtype}: wanted a CUDA device, "
            "float16 or bfloat16, and groups of a multiple of 32"
        )
    if zeros is not None and bool((zeros == SYMMETRIC_ZERO).all()):
        zeros = None
    halves, factor = _halves(scales)
    if size > group:  # kernels know no longer groups
        halves = halves.repeat_interleave(size // group, 1)
        zeros = None if zeros is None else zeros.repeat_interleave(size // group, 1)
    halves, zeros = halves.contiguous(), None if zeros is None else zeros.contiguous()
    units, row_tiles = -(-columns // (2 * UNIT)) * 2, -(-rows // ROWS) * (ROWS // ROW_TILE)
    span, per = max(1, group // UNIT), max(1, UNIT // group)
    record = per * (4 if zeros is None else 8)
    codes = torch.empty((row_tiles // 2, units, 2, 32, 4), dtype=torch.int32, device=words.device)
    records = torch.empty((row_tiles // 2, units // span, 2, 8, record), dtype=torch.uint8, device=words.device)
    unit = Variant("w4_repack.cu", macros(dtype, group, zeros is not None))
    kernel(unit, "6P2q5i", 128, words.device.index)(
        (-(-units // 4), row_tiles, 1),
        words.data_ptr(),
        0 if order is None else order.data_ptr(),
        halves.data_ptr(),
        0 if zeros is None else zeros.data_ptr(),
        codes.data_ptr(),
        records.data_ptr(),
        *strides,
        by_output,
        columns,
        rows,
        units,
        columns // group,
    )
    return PackedW4(codes, records, factor, order, rows, columns, group, zeros is not None, dtype)


def _halves(scales: Tensor) -> tuple[Tensor, float]:
    """Scales as float16 times a power of two, exact for all above 2^-25 of the largest."""
    largest = float(scales.abs().max())
    factor = 2.0 ** (math.frexp(largest)[1] - 11) if largest and math.isfinite(largest) else 1.0
    return (scales.float() / factor).half(), factor
