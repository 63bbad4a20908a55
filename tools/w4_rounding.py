"""Rounding a weight to 4 bits: to the nearest code, or column by column as GPTQ does, with searched scales.

A group's scale (and zero point) is the one of a grid that makes the least squared error, weighed by how much the
input features vary if that is known. GPTQ: Frantar et al. 2022, https://arxiv.org/abs/2210.17323; here with columns
in the order of their importance and groups that stay where they are, so files need no g_idx.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.w4_format import SYMMETRIC_ZERO, W4Weight, pack_nibbles

SHRINK = torch.linspace(0.5, 1.0, 26).tolist()  # of the range that a group's codes span
_ROWS = 1 << 20  # elements searched at once
_DAMPING = 0.01  # of the mean of the Hessian's diagonal
_BLOCK = 128  # columns whose error is carried on together


@dataclass(frozen=True)
class Options:
    """What a rounded weight is like."""

    group_size: int
    symmetric: bool
    dtype: torch.dtype  # of the scales


def round_weight(weight: Tensor, options: Options, hessian: Tensor | None = None) -> W4Weight:
    """Round `[out, in]`; `hessian` float32 `[in, in]`, the mean of x x^T over inputs x, chooses GPTQ.

    Raises ValueError if the group size doesn't divide `in`.
    """
    weight, columns = weight.float(), weight.shape[1]
    size = columns if options.group_size == -1 else options.group_size
    if columns % size:
        raise ValueError(f"{columns} input features can't be in groups of {size}")
    importance = torch.ones(columns) if hessian is None else hessian.diagonal().clamp_min(1e-12)
    step = max(1, _ROWS // columns)
    found = [_search(rows, size, options, importance) for rows in torch.split(weight, step)]
    scales, zeros = (torch.cat(parts) for parts in zip(*found, strict=True))
    if hessian is None:
        codes = _nearest(weight.view(len(weight), -1, size), scales.float()[..., None], zeros[..., None]).flatten(1)
    else:
        codes = _gptq(weight, scales.float(), zeros, size, hessian)
    packed = pack_nibbles(codes.to(torch.uint8))
    return W4Weight(packed, scales, None if options.symmetric else zeros.to(torch.uint8), None, size)


def _nearest(weight: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    return (weight / scales + zeros).round_().clamp_(0, 15)


def _search(weight: Tensor, size: int, options: Options, importance: Tensor) -> tuple[Tensor, Tensor]:
    """Scales in their dtype and zeros as floats, `[out, groups]`."""
    groups, weigh = weight.view(len(weight), -1, size), importance.view(-1, size)
    low, high = groups.amin(-1).clamp_max(0), groups.amax(-1).clamp_min(0)
    best = torch.full(low.shape, float("inf"))
    scales, zeros = torch.ones(low.shape, dtype=options.dtype), torch.full(low.shape, float(SYMMETRIC_ZERO))
    for shrink in SHRINK:
        if options.symmetric:
            tried, zero = torch.maximum(high / 7, -low / 8) * shrink, zeros
        else:
            tried = (high - low) * shrink / 15
            zero = (-low * shrink / tried.clamp_min(1e-30)).round_().clamp_(0, 15)
        rounded = torch.where(tried.to(options.dtype) == 0, 1, tried).to(options.dtype)  # a group of zeros
        wide = rounded.float()[..., None]
        values = (_nearest(groups, wide, zero[..., None]) - zero[..., None]) * wide
        error = (values - groups).square_().mul_(weigh).sum(-1)
        better = error < best
        best = torch.where(better, error, best)
        scales = torch.where(better, rounded, scales)
        zeros = torch.where(better, zero, zeros)
    return scales, zeros


def _gptq(weight: Tensor, scales: Tensor, zeros: Tensor, size: int, hessian: Tensor) -> Tensor:
    """Codes as floats. Each column's error is made up for by the columns that are not rounded yet."""
    order = hessian.diagonal().argsort(descending=True)
    left, groups = weight[:, order].clone(), order // size
    hessian = hessian[order][:, order].clone()
    silent = hessian.diagonal() == 0  # features that calibration never saw
    hessian.diagonal()[silent] = 1
    hessian.diagonal().add_(_DAMPING * hessian.diagonal().mean())
    inverse = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(hessian)), upper=True)
    codes = torch.empty_like(left)
    for start in range(0, left.shape[1], _BLOCK):
        end = min(start + _BLOCK, left.shape[1])
        errors = torch.empty(len(left), end - start)
        for column in range(start, end):
            scale, zero = scales[:, groups[column]], zeros[:, groups[column]]
            code = _nearest(left[:, column], scale, zero)
            error = (left[:, column] - (code - zero) * scale) / inverse[column, column]
            left[:, column + 1 : end] -= error[:, None] * inverse[column, column + 1 : end]
            codes[:, column], errors[:, column - start] = code, error
        left[:, end:] -= errors @ inverse[start:end, end:]
    natural = torch.empty_like(codes)
    natural[:, order] = codes
    return natural
