"""Linear layers with 4-bit weights on CUDA. Sources: `w4_matmul.cu`, `w4_matmul_sm90.cu`, `w4_dequantize.cu`.

Products are summed in float32. Every call checks before it launches, takes its result and scratch from torch's
allocator, and can be captured into a CUDA graph. Sums have a fixed order: equal inputs give equal bits.
"""

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.compiler import KernelError, Variant
from kernels.launcher import kernel, shared_bytes, tensor_map
from kernels.w4_packed import DTYPES, GROUPS, PackedW4, macros

FEW = {8: (1, 4), 16: (2, 4), 32: (4, 4)}  # most tokens of a block: token tiles of 8, stages
# Tokens of a tile: warpgroups of 64 outputs each, and sets of them that share the input features out.
HOPPER = {32: (4, 1), 64: (3, 1), 128: (3, 1), 256: (2, 1)}
HOPPER_SMALL = {32: (1, 4), 64: (1, 4), 128: (1, 2), 256: (2, 1)}  # for few outputs
# Beyond, a dense product with the dequantised weight is faster: measured on an H200; a guess for other GPUs.
_MOST_HOPPER_TOKENS, _MOST_FEW_TOKENS = 1024, 64
_MOST_COUNTERS = 8192


def few_variant(base: tuple[tuple[str, int], ...], shape: tuple[int, int]) -> Variant:
    """The kernel for few tokens; shape as in FEW."""
    return Variant("w4_matmul.cu", (*base, *zip(("TOKEN_TILES", "STAGES"), shape, strict=True)))


def hopper_variant(base: tuple[tuple[str, int], ...], tokens: int, groups: tuple[int, int]) -> Variant:
    """The kernel for more tokens on Hopper; groups as in HOPPER."""
    own = ("TOKENS", tokens), ("ROW_GROUPS", groups[0]), ("K_GROUPS", groups[1])
    return Variant("w4_matmul_sm90.cu", (*base, *own), "sm_90a")


def all_variants() -> list[Variant]:
    """Everything that these ops can ask for."""
    found = []
    for dtype in DTYPES:
        for base in (macros(dtype, group, zeros) for group in GROUPS for zeros in (False, True)):
            found += [Variant(file, base) for file in ("w4_repack.cu", "w4_dequantize.cu")]
            found += [few_variant(base, shape) for shape in FEW.values()]
            found += [hopper_variant(base, *shape) for shape in {*HOPPER.items(), *HOPPER_SMALL.items()}]
    return found


@dataclass(frozen=True)
class Gpu:
    """What the plans depend on."""

    multiprocessors: int
    shared_bytes: int  # a block can have
    has_wgmma: bool


@functools.cache
def gpu(device: int) -> Gpu:
    """Of a CUDA device."""
    properties = torch.cuda.get_device_properties(device)
    return Gpu(
        properties.multi_processor_count,
        shared_bytes(device),
        (properties.major, properties.minor) == (9, 0),
    )


def dequantize(weight: PackedW4) -> Tensor:
    """The weight `[out, in]` in its dtype; columns in the order of `weight.order`."""
    rows, columns = weight.out_features, weight.in_features
    out = torch.empty((rows, columns), dtype=weight.dtype, device=weight.codes.device)
    kernel(Variant("w4_dequantize.cu", weight.macros), "3Pf3i", 128, out.device.index)(
        (-(-weight.units // 4), -(-rows // 16), 1),
        weight.codes.data_ptr(),
        weight.records.data_ptr(),
        out.data_ptr(),
        weight.factor,
        columns,
        rows,
        weight.units,
    )
    return out


class W4Linear:
    """y = x W^T + b with a 4-bit W. Calls of one instance share one stream (their scratch is common)."""

    def __init__(self, weight: PackedW4, bias: Tensor | None = None) -> None:
        """Bias `[out]`, in the weight's dtype, on its device. Compiles and loads what calls will launch."""
        if bias is not None and (
            bias.dtype != weight.dtype or bias.shape != (weight.out_features,) or not bias.is_contiguous()
        ):
            raise KernelError(f"bias: {bias.dtype} {tuple(bias.shape)}; wanted {weight.dtype} [{weight.out_features}]")
        self.weight, self.bias = weight, bias
        device = weight.codes.device
        self._gpu = gpu(device.index)
        self._finished = torch.zeros(_MOST_COUNTERS, dtype=torch.int32, device=device)

    def __call__(self, x: Tensor) -> Tensor:
        """X `[n, in]` in the weight's dtype to `[n, out]`; rows of x may be apart."""
        x = self._checked(x)
        tokens = len(x)
        if not tokens:
            return torch.empty((0, self.weight.out_features), dtype=x.dtype, device=x.device)
        if tokens <= 16:
            return self.few(x)
        if self._gpu.has_wgmma and tokens <= _MOST_HOPPER_TOKENS:
            return self.hopper(x)
        return self.few(x) if tokens <= _MOST_FEW_TOKENS else self.dense(x)

    def _checked(self, x: Tensor) -> Tensor:
        weight = self.weight
        if (
            x.dtype != weight.dtype
            or x.dim() != 2
            or x.shape[1] != weight.in_features
            or x.device != weight.codes.device
            or x.stride(1) != 1
            or x.stride(0) % 8
            or x.data_ptr() % 16
        ):
            raise KernelError(
                f"x: {x.dtype} {tuple(x.shape)} strides {x.stride()} on {x.device}; wanted {weight.dtype} [n, "
                f"{weight.in_features}], rows a multiple of 16 bytes apart, aligned so, on {weight.codes.device}"
            )
        return x if weight.order is None else x.index_select(1, weight.order)

    # The three ways below take features in the order of the weight's columns.

    def few(self, x: Tensor, shape: tuple[int, int] | None = None, splits: int = 0, blocks: int = 0) -> Tensor:
        """By mma.sync, weights streamed: for few tokens."""
        weight, tokens = self.weight, len(x)
        token_tiles, stages = shape or FEW[next((most for most in FEW if tokens <= most), max(FEW))]
        warps = 8 if token_tiles == 4 or self._gpu.shared_bytes < 128 * 1024 else 12 if weight.group == 32 else 16
        record = weight.records.shape[-1]
        shared = self._gpu.shared_bytes - 1024
        free = shared - warps * (stages * (1024 + 16 * record) + token_tiles * 1024)
        slice_units = (free // min(tokens, token_tiles * 8) - 16) // 128
        splits = max(splits, -(-weight.units // slice_units))
        pairs = -(-weight.out_features // 32)
        blocks = blocks or min(pairs, max(1, self._gpu.multiprocessors // splits))
        chunks = -(-tokens // (token_tiles * 8))
        out = torch.empty((tokens, weight.out_features), dtype=x.dtype, device=x.device)
        partial = None
        if splits > 1:
            partial = torch.empty((splits, tokens, weight.out_features), dtype=torch.float32, device=x.device)
        kernel(few_variant(weight.macros, (token_tiles, stages)), "7P2qf5i", warps * 32, x.device.index, shared)(
            (blocks, splits, chunks),
            weight.codes.data_ptr(),
            weight.records.data_ptr(),
            x.data_ptr(),
            0 if self.bias is None else self.bias.data_ptr(),
            out.data_ptr(),
            0 if partial is None else partial.data_ptr(),
            self._finished.data_ptr(),
            x.stride(0),
            out.stride(0),
            weight.factor,
            tokens,
            weight.in_features,
            weight.out_features,
            weight.units,
            pairs,
        )
        return out

    def hopper(self, x: Tensor, tile: tuple[int, tuple[int, int]] | None = None, blocks: int = 0) -> Tensor:
        """By wgmma: for tens to hundreds of tokens."""
        weight, tokens = self.weight, len(x)
        if tile is None:
            most = next((most for most in HOPPER if tokens <= most), max(HOPPER))
            is_small = weight.out_features <= 128 * self._gpu.multiprocessors
            tile = most, (HOPPER_SMALL if is_small else HOPPER)[most]
        tile_tokens, (row_groups, k_groups) = tile
        threads, sums = row_groups * k_groups * 128, (k_groups - 1) * tile_tokens * row_groups * 256
        stage = tile_tokens * 256 + row_groups * 2 * (2048 + weight.records.stride(0) * 2 // weight.units)
        stage = -(-stage // 1024) * 1024
        shared = 1024 + min(12, (224 * 1024 - sums) // stage) * stage + sums
        row_blocks, token_blocks = -(-weight.out_features // (64 * row_groups)), -(-tokens // tile_tokens)
        blocks = blocks or min(self._gpu.multiprocessors, row_blocks * token_blocks * weight.units // 2)
        wide = -(-weight.out_features // 2) * 2  # two outputs are stored at once
        out = torch.empty((tokens, wide), dtype=x.dtype, device=x.device)
        size = blocks * 2 * tile_tokens * row_groups * 64
        partial = torch.empty(size, dtype=torch.float32, device=x.device)
        variant = hopper_variant(weight.macros, *tile)
        kernel(variant, "128s6Pqf6i44x", threads + 128, x.device.index, shared)(
            (blocks, 1, 1),
            tensor_map(x, tile_tokens, 64),
            weight.codes.data_ptr(),
            weight.records.data_ptr(),
            0 if self.bias is None else self.bias.data_ptr(),
            out.data_ptr(),
            partial.data_ptr(),
            self._finished.data_ptr(),
            out.stride(0),
            weight.factor,
            tokens,
            weight.out_features,
            weight.units // 2,
            weight.row_tiles // 2,
            row_blocks,
            token_blocks,
        )
        return out[:, : weight.out_features]

    def dense(self, x: Tensor) -> Tensor:
        """Dequantise, then a dense product."""
        return F.linear(x, dequantize(self.weight), self.bias)
