"""4-bit weights with a scale, and perhaps a zero point, per group of a row: one form for every published layout.

Nibbles are always widened before arithmetic. Works on any device; the sources say what their tensors mean.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

SYMMETRIC_ZERO = 8
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Nibble i of an AWQ word holds column 8c + AWQ_ORDER[i]."""
_CHUNK = 1 << 24  # elements widened at a time


class W4FormatError(ValueError):
    """The tensors are not a 4-bit weight of this layout; the message says why."""


@dataclass(frozen=True)
class W4Weight:
    """w[i, f] = (code - zero) * scale, for out rows i and input features f.

    codes uint8 `[out, in / 2]`: byte j of a row holds column 2j in its low nibble and column 2j + 1 in the high one.
    scales `[out, groups]`, float16, bfloat16 or float32; zeros uint8 `[out, groups]`, 0 to 15, or None: 8 everywhere.
    A group is `group_size` columns in a row. order int32 `[in]`: column j is input feature order[j] (GPTQ's desc_act
    sorts the columns by group); None: column j is feature j. Raises W4FormatError.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    order: Tensor | None
    group_size: int

    def __post_init__(self) -> None:
        _check(self.codes.dtype == torch.uint8 and self.codes.dim() == 2, f"codes are {_kind(self.codes)}")
        rows, columns = self.shape
        size = self.group_size
        _check(size > 0 and size % 8 == 0 and columns % size == 0, f"{columns} columns in groups of {size}")
        groups = (rows, self.num_groups)
        _check(self.scales.shape == groups and self.scales.is_floating_point(), f"scales are {_kind(self.scales)}")
        zeros, order = self.zeros, self.order
        _check(
            zeros is None or (zeros.shape == groups and zeros.dtype == torch.uint8), "zeros are not uint8, one a group"
        )
        _check(
            order is None or (order.shape == (columns,) and order.dtype == torch.int32),
            "order is not int32, one a column",
        )

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        return self.codes.shape[0], 2 * self.codes.shape[1]

    @property
    def num_groups(self) -> int:
        """Groups of a row."""
        return self.shape[1] // self.group_size

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The weight `[out, in]` in the natural order of features, computed in float32 (float64 if that is asked)."""
        rows, columns = self.shape
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        out = torch.empty((rows, columns), dtype=dtype, device=self.codes.device)
        for start in range(0, rows, step := max(1, _CHUNK // columns)):
            part = slice(start, start + step)
            codes = unpack_nibbles(self.codes[part]).view(-1, self.num_groups, self.group_size)
            zeros = SYMMETRIC_ZERO if self.zeros is None else self.zeros[part, :, None].to(wide)
            values = ((codes.to(wide) - zeros) * self.scales[part, :, None].to(wide)).view(-1, columns)
            if self.order is None:
                out[part] = values
            else:
                out[part, self.order.long()] = values.to(dtype)
        return out


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Nibbles of the last dimension, the lowest first: uint8 `[..., n]` to `[..., 2 n]`, int32 `[..., n]` to 8 n."""
    data = packed.contiguous().view(torch.uint8)
    return torch.stack((data & 15, data >> 4), -1).flatten(-2)


def pack_nibbles(codes: Tensor) -> Tensor:
    """uint8 `[..., 2 n]`, 0 to 15, to uint8 `[..., n]`: the inverse of `unpack_nibbles`."""
    return codes[..., ::2] | codes[..., 1::2] << 4


def from_gptq(
    qweight: Tensor, qzeros: Tensor, scales: Tensor, g_idx: Tensor | None, group_size: int, version: int = 1
) -> W4Weight:
    """GPTQ (AutoGPTQ, GPTQModel).

    qweight int32 `[in / 8, out]`: nibble j (bits 4j to 4j + 3) of word i is input feature 8i + j.
    qzeros int32 `[groups, out / 8]`: nibble j of word i is output 8i + j; version 1 (checkpoint_format "gptq") stores
    zero - 1 modulo 16, so a stored 15 is a zero point of 0; version 2 ("gptq_v2") stores the zero point itself.
    scales `[groups, out]`. g_idx int32 `[in]`: the group of each feature, in any order with desc_act; every group has
    group_size features. group_size -1: one group.
    """
    _check_words(qweight=qweight, qzeros=qzeros)
    zeros = gptq_zeros(qzeros, version)
    return _make(qweight.T.contiguous().view(torch.uint8), scales.T, zeros, g_idx, group_size)


def gptq_zeros(qzeros: Tensor, version: int) -> Tensor:
    """Zero points uint8 `[out, groups]` of `from_gptq`."""
    _check(version in (1, 2), f"GPTQ version {version}; known are 1 and 2")
    zeros = unpack_nibbles(qzeros).T
    return (zeros + 1) & 15 if version == 1 else zeros


def from_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor, group_size: int) -> W4Weight:
    """AWQ ("gemm" version of AutoAWQ).

    qweight int32 `[in, out / 8]`: nibble i of word c is output 8c + (0, 2, 4, 6, 1, 3, 5, 7)[i].
    qzeros int32 `[groups, out / 8]`, the same way, the zero point itself. scales `[groups, out]`.
    """
    _check_words(qweight=qweight, qzeros=qzeros)
    return _make(pack_nibbles(_unpack_awq(qweight).T.contiguous()), scales.T, awq_zeros(qzeros), None, group_size)


def awq_zeros(qzeros: Tensor) -> Tensor:
    """Zero points uint8 `[out, groups]` of `from_awq`."""
    return _unpack_awq(qzeros).T


def from_compressed_tensors(
    weight_packed: Tensor,
    weight_scale: Tensor,
    weight_zero_point: Tensor | None,
    weight_shape: Tensor | tuple[int, int],
    g_idx: Tensor | None,
    group_size: int,
) -> W4Weight:
    """compressed-tensors, format "pack-quantized", 4 bits.

    weight_packed int32 `[out, ceil(in / 8)]`: nibble j of word i is input feature 8i + j, the signed value plus 8.
    weight_scale `[out, groups]`. weight_zero_point int32 `[ceil(out / 8), groups]`, packed along outputs, plus 8 too,
    so that both offsets cancel; None: symmetric. weight_shape: (out, in). g_idx int `[in]`, None or all -1 without
    activation ordering. group_size -1 (strategy "channel"): one group.
    """
    rows, columns = (int(n) for n in weight_shape)
    _check_words(weight_packed=weight_packed)
    _check(columns % 8 == 0 and weight_packed.shape == (rows, columns // 8), f"weight_packed is {_kind(weight_packed)}")
    zeros = None
    if weight_zero_point is not None:
        _check_words(weight_zero_point=weight_zero_point)
        zeros = unpack_nibbles(weight_zero_point.T).T[:rows]
    if g_idx is not None and bool((g_idx == -1).all()):
        g_idx = None
    return _make(weight_packed.contiguous().view(torch.uint8), weight_scale, zeros, g_idx, group_size)


def _make(codes: Tensor, scales: Tensor, zeros: Tensor | None, g_idx: Tensor | None, group_size: int) -> W4Weight:
    columns = 2 * codes.shape[1]
    size = columns if group_size == -1 else group_size
    _check(size > 0 and columns % size == 0, f"{columns} input features in groups of {group_size}")
    order = None if g_idx is None else order_of(g_idx, size, columns)
    if order is not None:
        codes = pack_nibbles(unpack_nibbles(codes)[:, order.long()])
    if zeros is not None:
        zeros = None if bool((zeros == SYMMETRIC_ZERO).all()) else zeros.contiguous()
    return W4Weight(codes, scales.contiguous(), zeros, order, size)


def order_of(g_idx: Tensor, group_size: int, columns: int) -> Tensor | None:
    """Features sorted by group, those of a group in their own order; None if they are sorted already."""
    _check(g_idx.shape == (columns,), f"g_idx is {_kind(g_idx)} for {columns} input features")
    wanted = torch.arange(columns, device=g_idx.device) // group_size
    if torch.equal(g_idx.long(), wanted):
        return None
    found, order = g_idx.long().sort(stable=True)
    _check(torch.equal(found, wanted), f"g_idx does not put {group_size} input features into each group")
    return order.int()


def _unpack_awq(words: Tensor) -> Tensor:
    nibbles = unpack_nibbles(words).view(*words.shape, 8)
    out = torch.empty_like(nibbles)
    out[..., list(AWQ_ORDER)] = nibbles
    return out.flatten(-2)


def _check_words(**tensors: Tensor) -> None:
    for name, x in tensors.items():
        _check(x.dtype == torch.int32 and x.dim() == 2, f"{name} is {_kind(x)}, wanted int32 with two dimensions")


def _kind(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"


def _check(good: bool, problem: str) -> None:
    if not good:
        raise W4FormatError(problem)
