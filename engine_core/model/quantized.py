"""How each linear weight is kept: dense in the compute dtype, int8, or the file's own 4 bits."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from engine_core.model.weights import Weight4, Weights
from kernels.linear import (
    DenseLinear,
    HybridLinear,
    Int4Linear,
    Int8DynamicLinear,
    Int8Linear,
    JoinedLinear,
    Linear,
    PackedLinear,
    int4_group,
)
from kernels.w4_format import W4Weight
from protocol.errors import StartupError

# Rows up to which a form beats dense bfloat16 (tools/bench_linear.py on Zen 5; AMX moves int8's to 1)
_FEW_ROWS = {"int8": 2, "int4": 4}
_FEW_HEAD_ROWS = 8  # the same for the head in int8
_HEAD_PART = 12 << 10  # rows


Form = tuple[tuple[int, ...], int]  # shape of a weight, and its group size if the file has 4 bits of it; else 0


@dataclass(frozen=True)
class LinearMaker:
    """Makes linear layers as `--weights` and `--dtype` say, and counts their bytes.

    `mode` is dense, int8 or int4. A quantised weight also has a dense form for many rows if `keep_dense`.
    """

    mode: str
    dtype: torch.dtype
    device: torch.device
    keep_dense: bool = True

    def __call__(self, weights: Weights, names: Sequence[str]) -> Linear:
        """One layer of the rows of several weights, with their biases."""
        biases = [weights.dense(name).to(self.device, self.dtype) for name in _biases(weights, names)]
        bias = torch.cat(biases) if biases else None
        if not self._keeps_4bit([_form(weights, name) for name in names]):
            return self._from_dense(self._read(weights, names), bias, None)
        parts = [weights.four_bit(name, self.device) for name in names]
        if self._is_cuda:
            return self._cuda_int4([part.packed for part in parts], bias)
        few = _int4(parts, bias)
        if not self.keep_dense:
            return few
        counts = [part.packed.shape[0] for part in parts]
        dense = torch.empty((sum(counts), parts[0].packed.shape[1]), dtype=self.dtype)
        for part, rows in zip(parts, torch.split(dense, counts), strict=True):
            part.dequantize(rows)
        return self._from_dense(dense, bias, few)

    def gated(self, weights: Weights, names: Sequence[str]) -> Linear | None:
        """A layer that gives silu(gate) * up. None if there is none: on a CPU, and for some weights."""
        rows, columns = weights.shapes[names[0]]
        if not self._is_cuda or self.dtype.itemsize > 2 or rows % 8 or columns % 8 or _biases(weights, names):
            return None
        if not self._keeps_4bit([_form(weights, name) for name in names]):
            from kernels.cuda_dense_linear import CudaGatedLinear

            return CudaGatedLinear(self._read(weights, names))
        parts = [weights.four_bit(name, self.device).packed for name in names]
        return self._cuda_int4(parts, None, gated=True) if _are_alike(parts) else None

    def matrix(self, weights: Weights, name: str) -> Tensor:
        """A weight as a tensor in the compute dtype."""
        return self._read(weights, [name])

    def head(self, weight: Tensor, run_all: Callable[[Sequence[Callable[[], None]]], None]) -> Linear:
        """The head `[vocab, hidden]`; its logits may be float32 whatever the dtype. `run_all` runs tasks at once."""
        if self.mode == "dense" or self._is_cuda or not Int8DynamicLinear.is_available():
            return self._from_dense(weight, None, None)
        made: dict[int, Linear] = {}

        def make(number: int, form: Callable[[Tensor], Linear], rows: Tensor) -> None:
            made[number] = form(rows)

        # FBGEMM packs such parts three times as fast as the whole of a large vocabulary, and they make a smaller peak
        parts = enumerate(torch.split(weight, _HEAD_PART))
        tasks = [partial(make, number, Int8DynamicLinear, rows) for number, rows in parts]
        dense = [partial(make, -1, lambda rows: self._dense(rows, None), weight)] if self.keep_dense else []
        run_all([*dense, *tasks])
        few = JoinedLinear([made[number] for number in range(len(tasks))]) if len(tasks) > 1 else made[0]
        return HybridLinear(few, made[-1], _FEW_HEAD_ROWS) if self.keep_dense else few

    def head_bytes(self, shape: tuple[int, int], tied: bool) -> int:
        """Bytes of the head, beside the embedding if `tied`."""
        is_embedding = tied and (self.mode == "dense" or self._is_cuda) and not self._packs
        return 0 if is_embedding else self.linear_bytes([(shape, 0)])

    def linear_bytes(self, forms: Sequence[Form]) -> int:
        """Bytes of a layer of weights of these forms, without biases."""
        elements = sum(math.prod(shape) for shape, _ in forms)
        dense = elements * self.dtype.itemsize
        if self._is_cuda and self._keeps_4bit(forms):  # scale and zero, 16 bits each
            return sum(math.prod(shape) // 2 + math.prod(shape) // size * 4 for shape, size in forms)
        if self.mode == "dense" or self._is_cuda:
            return dense
        if self._keeps_4bit(forms):  # scale and zero, bfloat16
            few = sum(math.prod(shape) // 2 + math.prod(shape) // int4_group(shape, size) * 4 for shape, size in forms)
        else:
            few = elements + 2 * sum(shape[0] for shape, _ in forms)
        return few + (dense if self.keep_dense else 0)

    def _keeps_4bit(self, forms: Sequence[Form]) -> bool:
        if self._is_cuda:
            return self.mode == "int4" and all(size and size % 32 == 0 for _, size in forms)
        return self.mode == "int4" and all(int4_group(shape, size) for shape, size in forms)

    def _read(self, weights: Weights, names: Sequence[str]) -> Tensor:
        """Weights below each other, in the compute dtype on the device."""
        rows = [weights.shapes[name][0] for name in names]
        out = torch.empty((sum(rows), weights.shapes[names[0]][1]), dtype=self.dtype, device=self.device)
        for name, part in zip(names, torch.split(out, rows), strict=True):
            weights.read_to(name, part)
        return out

    def _from_dense(self, dense: Tensor, bias: Tensor | None, few: Linear | None) -> Linear:
        if self.mode == "dense" or self._is_cuda:
            return self._dense(dense, bias)
        rows = _FEW_ROWS["int4" if few else "int8"]
        few = few or Int8Linear(dense, bias)
        return HybridLinear(few, self._dense(dense, bias), rows) if self.keep_dense else few

    def _dense(self, weight: Tensor, bias: Tensor | None) -> Linear:
        if self._is_cuda and weight.shape[1] % 8 == 0 and self.dtype.itemsize == 2:
            from kernels.cuda_dense_linear import CudaDenseLinear

            return CudaDenseLinear(weight, bias)
        return PackedLinear(weight, bias) if self._packs else DenseLinear(weight, bias)

    def _cuda_int4(self, parts: Sequence[W4Weight], bias: Tensor | None, gated: bool = False) -> Linear:
        from kernels.cuda_linear_w4 import W4Linear
        from kernels.w4_packed import pack

        first = parts[0]
        if not _are_alike(parts):
            biases = [None] * len(parts) if bias is None else torch.split(bias, [part.shape[0] for part in parts])
            return JoinedLinear([self._cuda_int4([part], own) for part, own in zip(parts, biases, strict=True)])
        join = _alternate if gated else torch.cat
        zeros = None if all(part.zeros is None for part in parts) else join([_zeros(part) for part in parts])
        joined = W4Weight(
            join([part.codes for part in parts]),
            join([part.scales for part in parts]),
            zeros,
            first.order,
            first.group_size,
        )
        return W4Linear(pack(joined, self.dtype), None if bias is None else bias.contiguous(), gated)

    @property
    def _is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def _packs(self) -> bool:
        return self.device.type == "cpu" and self.dtype == torch.bfloat16


def _int4(parts: Sequence[Weight4], bias: Tensor | None) -> Linear:
    first = parts[0].packed
    if len({_layout(part) for part in parts}) > 1 or any(not _equal(part.packed.order, first.order) for part in parts):
        biases = [None] * len(parts) if bias is None else torch.split(bias, [part.packed.shape[0] for part in parts])
        return JoinedLinear([Int4Linear(p.packed, p.minima, b) for p, b in zip(parts, biases, strict=True)])
    joined = W4Weight(
        torch.cat([part.packed.codes for part in parts]),
        torch.cat([part.packed.scales for part in parts]),
        torch.cat([_zeros(part.packed) for part in parts]),
        first.order,
        first.group_size,
    )
    minima = [part.minima for part in parts if part.minima is not None]
    return Int4Linear(joined, torch.cat(minima) if minima else None, bias)


def _are_alike(parts: Sequence[W4Weight]) -> bool:
    """Whether they can be one weight."""
    first = parts[0]
    return all(part.group_size == first.group_size and _equal(part.order, first.order) for part in parts)


def _alternate(parts: Sequence[Tensor]) -> Tensor:
    """Rows of all parts in turn."""
    return torch.stack(tuple(parts), 1).flatten(0, 1)


def _biases(weights: Weights, names: Sequence[str]) -> list[str]:
    return [f"{name}.bias" for name in names if f"{name}.bias" in weights.shapes]


def _form(weights: Weights, name: str) -> Form:
    return weights.shapes[name], weights.group_size(name)


def _layout(weight: Weight4) -> tuple[int, torch.dtype, bool]:
    return weight.packed.group_size, weight.packed.scales.dtype, weight.minima is None


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


def _zeros(weight: W4Weight) -> Tensor:
    return weight.zeros if weight.zeros is not None else torch.full_like(weight.scales, 8, dtype=torch.uint8)


def resolve_weights(name: str, dtype: torch.dtype, device: torch.device, file_has_4bit: bool) -> str:
    """The mode of `--weights`: auto is int4 if the file has it, else int8, where that is fast; else dense.

    Raises StartupError for a form that the file or the dtype can't give.
    """
    on_cpu = dtype == torch.bfloat16 and device.type == "cpu"
    takes_4bit = on_cpu or (device.type == "cuda" and dtype != torch.float32)
    if name == "auto":
        return "int4" if file_has_4bit and takes_4bit else "int8" if on_cpu else "dense"
    if (name == "int8" and not on_cpu) or (name == "int4" and not takes_4bit):
        raise StartupError(f"--weights {name} needs --dtype bf16 on the CPU" + " or a GPU" * (name == "int4"))
    if name == "int4" and not file_has_4bit:
        raise StartupError(
            "--weights int4 needs a file with 4-bit weights: GPTQ, AWQ, compressed-tensors, or on the CPU Q4_0 or Q4_1"
        )
    return name
