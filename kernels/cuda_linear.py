"""A dense linear layer for one row, where cuBLAS leaves bandwidth unused. Source: `kernels/cuda/one_row.cu`."""

import torch
from torch import Tensor

from kernels.compiler import KernelError, Variant
from kernels.launcher import kernel

_WARPS = 4


def _variant(dtype: torch.dtype) -> Variant:
    return Variant("one_row.cu", (("IS_BF16", int(dtype == torch.bfloat16)),))


def all_variants() -> list[Variant]:
    """Everything that this layer can ask for."""
    return [_variant(dtype) for dtype in (torch.float16, torch.bfloat16)]


class OneRowLinear:
    """y = x W^T + bias for x `[1, in]`, summed in float32."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Weight `[out, in]` float16 or bfloat16, contiguous; in a multiple of 8; bias `[out]` of the same dtype."""
        if (
            weight.dtype not in (torch.float16, torch.bfloat16)
            or weight.dim() != 2
            or weight.shape[1] % 8
            or not weight.is_contiguous()
            or weight.data_ptr() % 16
            or not weight.is_cuda
        ):
            raise KernelError(f"weight: {weight.dtype} {tuple(weight.shape)} strides {weight.stride()}")
        if bias is not None and (bias.dtype != weight.dtype or bias.shape != weight.shape[:1] or not bias.is_cuda):
            raise KernelError(f"bias: {bias.dtype} {tuple(bias.shape)} for a weight {tuple(weight.shape)}")
        self._weight, self._bias = weight, bias
        self._kernel = kernel(_variant(weight.dtype), "4P2i", 32 * _WARPS, weight.device.index, early=True)

    def __call__(self, x: Tensor) -> Tensor:
        """X `[1, in]` to `[1, out]`, same dtype."""
        columns, width = self._weight.shape
        if (
            x.dtype != self._weight.dtype
            or x.shape != (1, width)
            or x.stride(1) != 1
            or x.data_ptr() % 16
            or x.device != self._weight.device
        ):
            raise KernelError(f"x: {x.dtype} {tuple(x.shape)} strides {x.stride()} on {x.device}; wanted [1, {width}]")
        out = torch.empty((1, columns), dtype=x.dtype, device=x.device)
        bias = 0 if self._bias is None else self._bias.data_ptr()
        self._kernel(
            (-(-columns // _WARPS), 1, 1), x.data_ptr(), self._weight.data_ptr(), bias, out.data_ptr(), columns, width
        )
        return out
