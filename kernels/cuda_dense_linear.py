"""Which kernel a dense linear layer takes on a GPU, by how many rows there are."""

import contextlib

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.compiler import KernelError
from kernels.cuda_elementwise import silu_mul
from kernels.cuda_linear import FEW_ROWS, FewRowsLinear, OneRowLinear
from kernels.cuda_linear_sm90 import MOST_ROWS, HopperLinear

_LEAST_TILE = 24  # rows of a weight that a block has: with fewer, too little is on the bus at once
_MOST_WHOLE = 64  # rows for which a layer without a gate is about as fast as cuBLAS though it isn't in parts


class CudaDenseLinear:
    """y = x W^T + bias, whichever way is fastest: kernels of our own for few rows, cuBLAS for many."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, gated: bool = False) -> None:
        """Arguments are those of `OneRowLinear`."""
        self._weight, self._bias, self._gated = weight, bias, gated
        self._one = OneRowLinear(weight, bias, gated)
        self._few: FewRowsLinear | None = None
        self._hopper: HopperLinear | None = None
        with contextlib.suppress(KernelError):  # another GPU, or another shape
            self._few = FewRowsLinear(weight, bias, gated=gated)
        with contextlib.suppress(KernelError):
            self._hopper = HopperLinear(weight, bias, gated=gated)

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        rows = len(x)
        if rows == 1:
            return self._one(x)
        if self._few and rows <= FEW_ROWS:
            return self._few(x)
        most = MOST_ROWS if self._gated else _MOST_WHOLE
        if self._hopper and FEW_ROWS < rows <= most and self._hopper.tile_rows >= _LEAST_TILE:
            return self._hopper(x)
        y = F.linear(x, self._weight, self._bias)
        return silu_mul(y, in_pairs=True) if self._gated else y

    def parts(self, x: Tensor) -> Tensor:
        """As a call; but where that is faster in float32 parts `[slices, n, out]`, for `add_rms_norm` and `WriteKV`."""
        if self._hopper and FEW_ROWS < len(x) <= MOST_ROWS and not self._gated:
            return self._hopper.parts(x)
        return self(x)


class CudaGatedLinear(CudaDenseLinear):
    """silu(x G^T) * (x U^T) of a gate and what it lets through, `[n, in]` to `[n, out]`: one kernel for few rows."""

    def __init__(self, gate_up: Tensor) -> None:
        """gate_up `[2 * out, in]`, the gate above; out and in are multiples of 8. KernelError if they aren't."""
        if len(gate_up) % 16:
            raise KernelError(f"gate_up: {tuple(gate_up.shape)}: half of its rows must be a multiple of 8")
        super().__init__(torch.stack(gate_up.chunk(2), 1).flatten(0, 1), gated=True)
