"""CUDA twins of `kernels.elementwise`, and the gather of the embedding. Source: `kernels/cuda/elementwise.cu`.

Activations are float16 or bfloat16, arithmetic is float32. Every call checks before it launches. Without `out` it takes
its result from torch's allocator; either way it can be captured into a CUDA graph.
"""

import torch
from torch import Tensor

from kernels.compiler import KernelError, Variant
from kernels.launcher import kernel

_THREADS, _PARTS_THREADS = 128, 512  # of a block; of one that adds up parts
_RMS_NORM, _ADD_RMS_NORM, _SILU_MUL, _GATHER, _ADD_SLICES, _SILU_MUL_PAIRS = range(6)
_NORMS = _RMS_NORM, _ADD_RMS_NORM, _ADD_SLICES
_VECTORS = (1, 2, 4, 8, 16)
MOST_WIDTH = 8 * _THREADS * _VECTORS[-1]
"""The widest row that a norm takes."""


def _variant(op: int, dtype: torch.dtype, vectors: int = 1) -> Variant:
    macros = (("OP", op), ("IS_BF16", int(dtype == torch.bfloat16)), ("VECTORS", vectors))
    return Variant("elementwise.cu", macros)


def _threads(op: int) -> int:
    return _PARTS_THREADS if op == _ADD_SLICES else _THREADS


def all_variants() -> list[Variant]:
    """Everything that these ops can ask for."""
    found = []
    for dtype in (torch.float16, torch.bfloat16):
        norms = ((op, vectors) for op in _NORMS for vectors in _VECTORS)
        found += [_variant(op, dtype, vectors) for op, vectors in norms if 8 * _threads(op) * vectors <= MOST_WIDTH]
        found += [_variant(op, dtype) for op in (_SILU_MUL, _SILU_MUL_PAIRS, _GATHER)]
    return found


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """X / rms(x) * weight over the last dimension: x `[n, d]`, weight `[d]`; rows may be apart. `out` may be x."""
    return _norm(_RMS_NORM, x, None, weight, eps, out)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """Add x `[n, d]` to residual `[n, d]` in place and return the norm of the sum. `out` may be x.

    X may also be float32 `[slices, n, d]`, packed: then all slices are added.
    """
    return _norm(_ADD_RMS_NORM if x.dim() == 2 else _ADD_SLICES, x, residual, weight, eps, out)


def silu_mul(gate_up: Tensor, out: Tensor | None = None, in_pairs: bool = False) -> Tensor:
    """silu(gate) * up, `[n, d]`: gate is the first half of gate_up `[n, 2 * d]`, or every other column (`in_pairs`)."""
    width = gate_up.shape[-1] // 2
    _check_rows("gate_up", gate_up, len(gate_up), 2 * width, gate_up.dtype)
    if width % 8:
        raise KernelError(f"gate_up: half of {2 * width} is no multiple of 8")
    out = _output(out, gate_up, len(gate_up), width)
    _launch(_SILU_MUL_PAIRS if in_pairs else _SILU_MUL, gate_up, out)
    return out


def embedding(ids: Tensor, table: Tensor, out: Tensor | None = None) -> Tensor:
    """Rows `ids` int64 `[n]` of table `[v, d]`, as `[n, d]`. A row of NaN for an id outside the table."""
    if ids.dtype != torch.int64 or ids.dim() != 1 or not ids.is_contiguous() or ids.device != table.device:
        raise KernelError(f"ids: {ids.dtype} {tuple(ids.shape)} on {ids.device}; wanted int64 [n] on {table.device}")
    _check_rows("table", table, len(table), table.shape[-1], table.dtype)
    out = _output(out, table, len(ids), table.shape[-1])
    _launch(_GATHER, table, out, other=ids)
    return out


def _norm(op: int, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor | None) -> Tensor:
    if not 2 <= x.dim() <= 3:
        raise KernelError(f"x: {tuple(x.shape)}")
    rows, width, like = *x.shape[-2:], x if residual is None else residual
    if op == _ADD_SLICES:
        if x.dtype != torch.float32 or x.dim() != 3 or not x.is_contiguous() or not x.is_cuda:
            raise KernelError(f"x: {x.dtype} {tuple(x.shape)} on {x.device}; wanted float32, packed, on a CUDA device")
    else:
        _check_rows("x", x, rows, width, like.dtype)
    if residual is not None:
        _check_rows("residual", residual, rows, width, like.dtype)
    _check_rows("weight", weight.unsqueeze(0), 1, width, like.dtype)
    if width > MOST_WIDTH:
        raise KernelError(f"x: rows of {width}; {MOST_WIDTH} at most")
    out = _output(out, like, rows, width)
    vectors = next(count for count in _VECTORS if 8 * _threads(op) * count >= width)
    _launch(op, x, out, residual, weight, eps, vectors)
    return out


def _output(out: Tensor | None, like: Tensor, rows: int, width: int) -> Tensor:
    if out is None:
        return torch.empty((rows, width), dtype=like.dtype, device=like.device)
    _check_rows("out", out, rows, width, like.dtype)
    return out


def _check_rows(name: str, x: Tensor, rows: int, width: int, dtype: torch.dtype) -> None:
    """Rows may be apart; 16-byte accesses must be aligned."""
    if (
        dtype not in (torch.float16, torch.bfloat16)
        or x.dtype != dtype
        or x.shape != (rows, width)
        or x.stride(1) != 1
        or (width | x.stride(0)) % 8
        or x.data_ptr() % 16
        or not x.is_cuda
    ):
        raise KernelError(
            f"{name}: {x.dtype} {tuple(x.shape)} strides {x.stride()} on {x.device}; wanted {dtype} (float16 or "
            f"bfloat16) [{rows}, {width}], width and row stride multiples of 8, 16-byte aligned, on a CUDA device"
        )


def _launch(
    op: int,
    x: Tensor,
    out: Tensor,
    residual: Tensor | None = None,
    other: Tensor | None = None,
    eps: float = 0.0,
    vectors: int = 1,
) -> None:
    rows, width = out.shape
    if rows == 0:
        return
    index = x.device.index
    if any(t is not None and t.device != x.device for t in (out, residual, other)):
        raise KernelError(f"tensors on several devices, the first on {x.device}")
    columns = 1 if op in _NORMS else -(-width // (8 * _THREADS))
    kernel(_variant(op, out.dtype, vectors), "4P4q2if4x", _threads(op), index)(
        (rows, columns, 1),
        x.data_ptr(),
        0 if residual is None else residual.data_ptr(),
        0 if other is None else other.data_ptr(),
        out.data_ptr(),
        x.stride(0),
        0 if residual is None else residual.stride(0),
        out.stride(0),
        len(x),  # rows of a gather's table
        width,
        len(x),  # slices of what comes in parts
        eps,
    )
