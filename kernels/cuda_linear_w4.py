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
from kernels.cuda_elementwise import silu_mul
from kernels.launcher import Kernel, build_for, kernel, shared_bytes, tensor_map
from kernels.w4_packed import DTYPES, GROUPS, UNIT, PackedW4, macros

FEW_TOKENS = {8: 1, 16: 2, 32: 4}  # most tokens of a block: token tiles of 8
_STAGES, _SLOT, _HEAD = 4, 1024, 1024  # of w4_matmul.cu: units ahead, bytes of a unit's codes, of sums a token tile
# Tokens of a tile: warpgroups of 64 outputs each, and sets of them that share the input features out.
HOPPER = {16: (4, 1), 32: (4, 1), 64: (3, 1), 128: (3, 1), 256: (2, 1)}
HOPPER_SMALL = {16: (1, 4), 32: (1, 4), 64: (1, 4), 128: (1, 2), 256: (2, 1)}
_HOPPER_SHARED, _MOST_HOPPER_STAGES = 224 * 1024, 12
SMALL = 1 << 25  # weights of a matrix; qkv and o of an 8B model are small
# Beyond, a dense product with the dequantised weight is faster: measured on an H200, a guess for other GPUs.
_MOST_HOPPER_TOKENS, _MOST_SMALL_TOKENS, _MOST_FEW_TOKENS = 1024, 128, 64
_LEAST_HOPPER_TOKENS = 9


def few_variant(base: tuple[tuple[str, int], ...], most: int) -> Variant:
    """The kernel for up to `most` tokens, of FEW_TOKENS, a block."""
    return Variant("w4_matmul.cu", (*base, ("TOKEN_TILES", FEW_TOKENS[most]), ("STAGES", _STAGES)))


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
            found += [few_variant(base, most) for most in FEW_TOKENS]
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
    capability = properties.major, properties.minor
    return Gpu(properties.multi_processor_count, shared_bytes(device), capability == (9, 0))


def few_warps(gpu: Gpu, most: int, group: int) -> int:
    """Warps of a block of the kernel for few tokens: what registers and shared memory allow."""
    if FEW_TOKENS[most] == 4 or gpu.shared_bytes < 128 * 1024:
        return 8
    return 12 if group == 32 else 16


def _rings(gpu: Gpu, most: int, group: int, record: int) -> int:
    """Bytes of shared memory beside x: each warp's units ahead, and its sums."""
    return few_warps(gpu, most, group) * (_STAGES * (_SLOT + 16 * record) + FEW_TOKENS[most] * _HEAD)


def few_grid(gpu: Gpu, most: int, group: int, record: int, tokens: int, units: int, outs: int) -> tuple[int, int, int]:
    """Blocks, slices of the features so that x fits beside the rings in shared memory, and chunks of tokens."""
    free = (gpu.shared_bytes - 1024 - _rings(gpu, most, group, record)) // min(tokens, most)
    slices = -(-units // ((free - 16) // (2 * UNIT)))
    return min(-(-outs // 32), max(1, gpu.multiprocessors // slices)), slices, -(-tokens // most)


def few_shared(gpu: Gpu, most: int, group: int, record: int, tokens: int, units: int, slices: int) -> int:
    """Bytes of shared memory, and no more: in the rest the kernel after it can start."""
    return _rings(gpu, most, group, record) + min(tokens, most) * (-(-units // slices) * 2 * UNIT + 16)


def hopper_shared(tokens: int, groups: tuple[int, int], record_bytes: int) -> int:
    """Bytes of shared memory of the kernel for Hopper; record_bytes: of a pair of row tiles and two units."""
    rows, sets = groups
    sums = (sets - 1) * tokens * rows * 256
    stage = -(-(tokens * 4 * UNIT + rows * 2 * (2 * _SLOT + record_bytes)) // 1024) * 1024
    return 1024 + min(_MOST_HOPPER_STAGES, (_HOPPER_SHARED - sums) // stage) * stage + sums


@functools.cache
def _dequantize_kernel(base: tuple[tuple[str, int], ...], device: int) -> Kernel:
    return kernel(Variant("w4_dequantize.cu", base), "3Pf3i", 128, device)


def dequantize(weight: PackedW4) -> Tensor:
    """The weight `[out, in]` in its dtype; columns in the order of `weight.order`."""
    rows, columns = weight.out_features, weight.in_features
    out = torch.empty((rows, columns), dtype=weight.dtype, device=weight.codes.device)
    _dequantize_kernel(weight.macros, out.device.index)(
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
    """y = x W^T + b with a 4-bit W. All calls belong on one stream: scratch is common, and blocks of a launch wait for
    each other.
    """

    def __init__(self, weight: PackedW4, bias: Tensor | None = None, gated: bool = False) -> None:
        """Bias `[out]`, in the weight's dtype, on its device. Compiles and loads all that calls will launch.

        `gated`: rows of the weight are a gate's and what it lets through, in turn, a multiple of 16 in all; y is then
        silu(gate) * up, `[n, out / 2]`, and there is no bias.
        """
        if gated and (weight.out_features % 16 or bias is not None):
            raise KernelError(f"a gate and what it lets through: {weight.out_features} rows; wanted 16 n, and no bias")
        if bias is not None and (
            bias.dtype != weight.dtype or bias.shape != (weight.out_features,) or not bias.is_contiguous()
        ):
            raise KernelError(f"bias: {bias.dtype} {tuple(bias.shape)}; wanted {weight.dtype} [{weight.out_features}]")
        self.weight, self.bias, self._gated = weight, bias, gated
        device, base = weight.codes.device, weight.macros
        self._gpu, self._record = gpu(device.index), weight.records.shape[-1]
        self._is_small = weight.in_features * weight.out_features <= SMALL
        self._groups = HOPPER_SMALL if self._is_small else HOPPER
        few = {most: few_variant(base, most) for most in FEW_TOKENS}
        hopper = {most: hopper_variant(base, *shape) for most, shape in zip(HOPPER, self._groups.items(), strict=True)}
        build_for([*few.values(), *(hopper.values() if self._gpu.has_wgmma else ())], device.index)
        self._few: dict[int, Kernel] = {}
        for most, variant in few.items():
            threads = 32 * few_warps(self._gpu, most, weight.group)
            self._few[most] = kernel(variant, "7P2qf6i4x", threads, device.index, self._gpu.shared_bytes - 1024)
        self._hopper: dict[int, Kernel] = {}
        for most, variant in hopper.items() if self._gpu.has_wgmma else ():
            rows, sets = self._groups[most]
            shared = hopper_shared(most, (rows, sets), weight.records.stride(0) * 2 // weight.units)
            self._hopper[most] = kernel(variant, "128s6Pqf7i40x", (rows * sets + 1) * 128, device.index, shared)
        _dequantize_kernel(base, device.index)
        counters = max(2 * self._gpu.multiprocessors, max(HOPPER.values())[0] * 4 * self._gpu.multiprocessors)
        self._finished = torch.zeros(counters, dtype=torch.int32, device=device)

    def __call__(self, x: Tensor) -> Tensor:
        """X `[n, in]` in the weight's dtype to `[n, out]`; rows of x may be apart."""
        x = self._checked(x)
        tokens = len(x)
        if not tokens:
            return torch.empty((0, self._columns), dtype=x.dtype, device=x.device)
        if tokens <= (_LEAST_HOPPER_TOKENS - 1 if self._gpu.has_wgmma else _MOST_FEW_TOKENS):
            return self.few(x)
        most = _MOST_SMALL_TOKENS if self._is_small else _MOST_HOPPER_TOKENS
        return self.hopper(x) if self._gpu.has_wgmma and tokens <= most else self.dense(x)

    @property
    def _columns(self) -> int:
        return self.weight.out_features // (1 + self._gated)

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

    def few(self, x: Tensor) -> Tensor:
        """By mma.sync, weights streamed: for up to 64 tokens."""
        weight, tokens, outs = self.weight, len(x), self.weight.out_features
        most = next((most for most in FEW_TOKENS if tokens <= most), max(FEW_TOKENS))
        grid = few_grid(self._gpu, most, weight.group, self._record, tokens, weight.units, outs)
        out = torch.empty((tokens, self._columns), dtype=x.dtype, device=x.device)
        partial = None
        if grid[1] > 1:
            partial = torch.empty((grid[1], tokens, outs), dtype=torch.float32, device=x.device)
        self._few[most](
            grid,
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
            outs,
            weight.units,
            -(-outs // 32),
            self._gated,
            shared_bytes=few_shared(self._gpu, most, weight.group, self._record, tokens, weight.units, grid[1]),
        )
        return out

    def hopper(self, x: Tensor) -> Tensor:
        """By wgmma: for tens to hundreds of tokens."""
        weight, tokens, outs = self.weight, len(x), self.weight.out_features
        most = next((most for most in HOPPER if tokens <= most), max(HOPPER))
        rows = self._groups[most][0]
        row_blocks, token_blocks = -(-outs // (64 * rows)), -(-tokens // most)
        blocks = min(self._gpu.multiprocessors, row_blocks * token_blocks * weight.units // 2)
        wide = -(-self._columns // 2) * 2  # two outputs are stored at once
        out = torch.empty((tokens, wide), dtype=x.dtype, device=x.device)
        partial = torch.empty(blocks * most * rows * 64, dtype=torch.float32, device=x.device)
        self._hopper[most](
            (blocks, 1, 1),
            tensor_map(x, most, UNIT),
            weight.codes.data_ptr(),
            weight.records.data_ptr(),
            0 if self.bias is None else self.bias.data_ptr(),
            out.data_ptr(),
            partial.data_ptr(),
            self._finished.data_ptr(),
            out.stride(0),
            weight.factor,
            tokens,
            outs,
            weight.units // 2,
            weight.row_tiles // 2,
            row_blocks,
            token_blocks,
            self._gated,
        )
        return out[:, : self._columns]

    def dense(self, x: Tensor) -> Tensor:
        """Dequantise, then a dense product."""
        y = F.linear(x, dequantize(self.weight), self.bias)
        return silu_mul(y, in_pairs=True) if self._gated else y
