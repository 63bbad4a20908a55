"""Which kernel a dense linear layer takes on a GPU, by how many rows there are."""

import contextlib

import torch.nn.functional as F
from torch import Tensor

from kernels.compiler import KernelError
from kernels.cuda_linear import FEW_ROWS, FewRowsLinear, OneRowLinear
from kernels.cuda_linear_sm90 import MOST_ROWS, HopperLinear

_LEAST_TILE = 24  # rows of a weight that a block has: with fewer, too little is on the bus at once


class CudaDenseLinear:
    """y = x W^T + bias, whichever way is fastest: kernels of our own for few rows, cuBLAS for many."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Arguments are those of `OneRowLinear`."""
        self._weight, self._bias = weight, bias
        self._one = OneRowLinear(weight, bias)
        self._few: FewRowsLinear | None = None
        self._hopper: HopperLinear | None = None
        with contextlib.suppress(KernelError):  # another GPU, or another shape
            self._few = FewRowsLinear(weight, bias)
        with contextlib.suppress(KernelError):
            self._hopper = HopperLinear(weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        rows = len(x)
        if rows == 1:
            return self._one(x)
        if self._few and rows <= FEW_ROWS:
            return self._few(x)
        if self._hopper and FEW_ROWS < rows <= MOST_ROWS and self._hopper.tile_rows >= _LEAST_TILE:
            return self._hopper(x)
        return F.linear(x, self._weight, self._bias)

    def parts(self, x: Tensor) -> Tensor:
        """As a call; but where that is faster it comes in float32 parts `[slices, n, out]`, for `add_rms_norm`."""
        if self._hopper and FEW_ROWS < len(x) <= MOST_ROWS:
            return self._hopper.parts(x)
        return self(x)
