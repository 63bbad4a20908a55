"""Dense linear layers of up to 128 rows on Hopper, where cuBLAS leaves bandwidth unused. Source: `dense_sm90.cu`."""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.compiler import KernelError, Variant
from kernels.cuda_linear import check_weight, check_x
from kernels.launcher import build_for, kernel, shared_bytes, tensor_map

MOST_ROWS = 128
"""Rows that `HopperLinear` takes at most."""
_TOKENS = 16, 32, 64, 128  # that a kernel is made for
_MOST_SLICES, _GOOD_ROWS, _GOOD_SHARE = 4, 56, 0.75  # the last: of the rows of products that are of a tile
_ROW_GROUPS = 3  # of 64 rows of a weight: a tile's most
_THREADS = _ROW_GROUPS * 128 + 32
_MOST_STAGES = 24
_OVERRUN = 64 * 128  # bytes that a warpgroup may read behind the last stage
_COLUMNS = 64  # of a stage


def _variant(dtype: torch.dtype, tokens: int, gated: bool) -> Variant:
    macros = ("IS_BF16", int(dtype == torch.bfloat16)), ("TOKENS", tokens), ("GATED", int(gated))
    return Variant("dense_sm90.cu", macros, "sm_90a")


def all_variants() -> list[Variant]:
    """Everything that these layers can ask for."""
    kinds = [(dtype, gated) for dtype in (torch.float16, torch.bfloat16) for gated in (False, True)]
    return [_variant(dtype, tokens, gated) for dtype, gated in kinds for tokens in _TOKENS]


class Plan(NamedTuple):
    """How blocks share a weight: `tiles` of `tile_rows` rows, each of them for `slices` blocks."""

    slices: int
    tile_rows: int
    tiles: int


def plan(outs: int, steps: int, blocks: int, most_slices: int) -> Plan:
    """The fewest slices whose tiles keep the bus busy and leave few rows of the products idle, or else the most.

    `steps` is the most that there can be.
    """
    for slices in range(1, min(most_slices, steps) + 1):
        groups = blocks // slices
        rounds = -(-outs // (groups * _ROW_GROUPS * 64))
        rows = -(-outs // (groups * rounds * 8)) * 8
        if rows >= _GOOD_ROWS and rows >= _GOOD_SHARE * -(-rows // 64) * 64:
            break
    return Plan(slices, rows, -(-outs // rows))


class _Way(NamedTuple):
    plan: Plan
    blocks: int
    stages: int
    shared: int  # bytes
    boxes: bytes  # of the weight


class HopperLinear:
    """y = x W^T + bias for x of 1 to `MOST_ROWS` rows, summed in float32."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, slices: int = _MOST_SLICES, gated: bool = False
    ) -> None:
        """Weight `[out, in]` float16 or bfloat16, packed; out and in multiples of 8; bias `[out]` of the same dtype.

        `slices`: the most that `parts` returns. KernelError for other weights, and on other GPUs. `gated`: see
        `OneRowLinear`; there are no parts then.
        """
        check_weight(weight, bias, 8, gated)
        device = weight.device.index
        if torch.cuda.get_device_capability(device) != (9, 0):
            raise KernelError("a dense kernel for Hopper only")
        if weight.shape[0] % 8:
            raise KernelError(f"weight: {tuple(weight.shape)}: rows must be a multiple of 8")
        self._weight, self._bias, self._columns = weight, bias, len(weight) // (1 + gated)
        room = shared_bytes(device) - 512  # barriers
        blocks = torch.cuda.get_device_properties(device).multi_processor_count
        build_for((_variant(weight.dtype, tokens, gated) for tokens in _TOKENS), device)
        self._kernels = {
            tokens: kernel(_variant(weight.dtype, tokens, gated), "128s128s3P8i8x", _THREADS, device, room)
            for tokens in _TOKENS
        }
        self._ways: dict[tuple[int, bool], _Way] = {}
        for is_parts in (False,) if gated else (False, True):
            chosen = plan(weight.shape[0], -(-weight.shape[1] // _COLUMNS), blocks, slices if is_parts else 1)
            boxes = tensor_map(weight, chosen.tile_rows, _COLUMNS)
            used = min(chosen.tiles, blocks // chosen.slices) * chosen.slices
            most = -(-chosen.tiles // (used // chosen.slices)) * -(-weight.shape[1] // (_COLUMNS * chosen.slices))
            for tokens in _TOKENS:
                stage = (chosen.tile_rows + tokens) * 128
                stages = min(most, _MOST_STAGES, (room - 1024 - _OVERRUN) // stage)
                self._ways[tokens, is_parts] = _Way(chosen, used, stages, stages * stage + 1024 + _OVERRUN, boxes)
        self.tile_rows = self._ways[_TOKENS[0], False].plan.tile_rows

    def __call__(self, x: Tensor) -> Tensor:
        """X `[n, in]` to `[n, out]`, same dtype; rows of x may be apart."""
        check_x(x, self._weight, MOST_ROWS)
        out = torch.empty((len(x), self._columns), dtype=x.dtype, device=x.device)
        self._run(x, self._ways[_tokens(x), False], out.data_ptr(), 0)
        return out

    def parts(self, x: Tensor) -> Tensor:
        """X `[n, in]` to float32 `[slices, n, out]`, the sum of which is what a call returns."""
        check_x(x, self._weight, MOST_ROWS)
        way = self._ways[_tokens(x), True]
        sums = torch.empty((way.plan.slices, len(x), len(self._weight)), dtype=torch.float32, device=x.device)
        self._run(x, way, 0, sums.data_ptr())
        return sums

    def _run(self, x: Tensor, way: _Way, out: int, sums: int) -> None:
        rows, (outs, width), tokens = len(x), self._weight.shape, _tokens(x)
        x_rows = -(-rows // 8) * 8
        self._kernels[tokens](
            (way.blocks, 1, 1),
            way.boxes,
            tensor_map(x, x_rows, _COLUMNS),
            0 if self._bias is None else self._bias.data_ptr(),
            out,
            sums,
            rows,
            outs,
            -(-width // _COLUMNS),
            way.plan.slices,
            way.plan.tiles,
            way.plan.tile_rows,
            way.stages,
            x_rows,
            shared_bytes=way.shared,
            threads=-(-way.plan.tile_rows // 64) * 128 + 32,
        )


def _tokens(x: Tensor) -> int:
    return next(most for most in _TOKENS if len(x) <= most)
