"""Linear layers y = x W^T + b, by how the weight is kept. Each takes x `[n, in]` in the compute dtype to `[n, out]`."""

import warnings
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.w4_format import SYMMETRIC_ZERO, W4Weight, unpack_nibbles

_CHUNK = 1 << 18  # elements widened at a time: what stays in a core's cache
INT4_GROUPS, INT4_ROWS = (256, 128, 64, 32), 16
"""What torch's int4 kernel takes: elements of a row that share a scale and a zero; a divisor of the rows."""


class Linear(Protocol):
    """A linear layer with its weight inside."""

    def __call__(self, x: Tensor) -> Tensor:
        """X `[n, in]` to `[n, out]`, same dtype."""
        ...


class DenseLinear:
    """The weight as it is, `[out, in]` in the compute dtype."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        return F.linear(x, self.weight, self.bias)


class PackedLinear:
    """A bfloat16 weight in oneDNN's blocked layout: about half the time of F.linear at few rows (CPU)."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._packed, self._bias = torch.ops.mkldnn._reorder_linear_weight(weight, 16), bias
        self._linear = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        y: Tensor = self._linear(x, self._packed, self._bias, "none", [], "")
        return y


class Int8Linear:
    """int8 per output row, bfloat16 activations (CPU): w = codes * scale. Activations are not rounded."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Weight `[out, in]`, any float dtype."""
        self._codes, self._bias = torch.empty(weight.shape, dtype=torch.int8), bias
        self._scale = torch.empty(len(weight), dtype=torch.bfloat16)
        for start in range(0, len(weight), step := max(1, _CHUNK // weight.shape[1])):
            rows = weight[start : start + step].float()
            scale = (rows.abs().amax(1) / 127).clamp_min(1e-12).bfloat16()
            codes = rows.div_(scale.float()[:, None]).round_().clamp_(-127, 127)
            self._scale[start : start + step], self._codes[start : start + step] = scale, codes

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        y = torch._weight_int8pack_mm(x, self._codes, self._scale)
        return y if self._bias is None else y + self._bias


class Int8DynamicLinear:
    """int8 weights per output row, activations in two 8-bit pieces (FBGEMM, x86): for a wide head and few rows.

    FBGEMM quantises float rows with one scale for all. So rows come as integers, in two pieces (one would lose
    accuracy), below a guard row that makes that scale exactly 1: no row depends on its neighbours, finite or not.
    """

    def __init__(self, weight: Tensor) -> None:
        """Take a weight `[out, in]` of any float dtype."""
        scale = (weight.float().abs().amax(1) / 127).clamp_min(1e-12)
        zeros = torch.zeros(len(scale), dtype=torch.int64)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch 2.13 announces the removal of quantised tensors
            codes = torch.quantize_per_channel(weight.float(), scale, zeros, 0, torch.qint8)
            self._packed = torch.ops.quantized.linear_prepack(codes, None)
        self._guard = torch.zeros(1, weight.shape[1])
        self._guard[0, :2] = torch.tensor([-128.0, 127.0])

    @staticmethod
    def is_available() -> bool:
        """Whether this build and CPU have it; without VNNI its products can saturate."""
        vnni = torch.cpu.get_capabilities().get("avx512_vnni", False)
        return bool(vnni) and "fbgemm" in torch.backends.quantized.supported_engines

    def __call__(self, x: Tensor) -> Tensor:
        """Like `Linear`, but to float32; rows that are not finite give rows of NaN."""
        rows = x.float()
        unit = rows.abs().amax(-1, keepdim=True) / 127
        scaled = (rows / unit).nan_to_num_()
        coarse = scaled.round()
        fine = ((scaled - coarse) * 254).round_()
        y: Tensor = torch.ops.quantized.linear_dynamic(torch.cat((self._guard, coarse, fine)), self._packed, False)
        return y[1 : 1 + len(x)].add_(y[1 + len(x) :], alpha=1 / 254).mul_(unit)


class Int4Linear:
    """4 bits with a scale and a zero per group, bfloat16 activations (CPU): w = (codes - zeros) * scales + minima.

    The codes are the file's own; torch's kernel wants scales and zeros in bfloat16, so those are rounded.
    """

    def __init__(self, weight: W4Weight, minima: Tensor | None = None, bias: Tensor | None = None) -> None:
        """Take a weight that `int4_group` takes; minima float32 `[out, groups]`."""
        self._group = int4_group(weight.shape, weight.group_size)
        self._packed = torch.empty_like(weight.codes)  # packed in blocks of 64 rows
        pack = torch.ops.aten._convert_weight_to_int4pack_for_cpu
        for start in range(0, len(weight.codes), step := max(64, _CHUNK // weight.shape[1] // 64 * 64)):
            self._packed[start : start + step] = pack(unpack_nibbles(weight.codes[start : start + step]).int(), 1)
        scales = weight.scales.float()
        offsets = scales * 0 if weight.zeros is None else (SYMMETRIC_ZERO - weight.zeros.float()) * scales
        if minima is not None:
            offsets += minima
        factors = torch.stack((scales.T, offsets.T), -1).bfloat16()  # the kernel: (code - 8) * scale + offset
        self._factors = factors.repeat_interleave(weight.group_size // self._group, 0).contiguous()
        self._order, self._bias = None if weight.order is None else weight.order.long(), bias

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        if self._order is not None:
            x = x[:, self._order]
        y: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, self._packed, self._group, self._factors)
        return y if self._bias is None else y + self._bias


def int4_group(shape: tuple[int, ...], group_size: int) -> int:
    """The group size in which `Int4Linear` takes a weight `[out, in]` in groups of `group_size`; 0: not at all."""
    if not group_size or shape[0] % INT4_ROWS:
        return 0
    return next((size for size in INT4_GROUPS if group_size % size == 0), 0)


class JoinedLinear:
    """Layers with the same input, their outputs side by side."""

    def __init__(self, parts: Sequence[Linear]) -> None:
        self._parts = parts

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        return torch.cat([part(x) for part in self._parts], -1)


class HybridLinear:
    """Two forms of one weight: one for few rows (decode), one for many."""

    def __init__(self, few: Linear, many: Linear, rows: int) -> None:
        """`few` takes up to `rows` rows."""
        self._few, self._many, self._rows = few, many, rows

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        return self._few(x) if len(x) <= self._rows else self._many(x)
