"""Error of attention over stored K/V, against attention over the K/V before they were stored, both in FP64.

So what is measured is the storage format alone. On synthetic keys, a bias on few channels before the rotation imitates
Qwen2.5's key bias: in the 7B its norm is about 605 and 921 in the first and the last layer, and about 22 in the median
layer (llama.cpp #21385).
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from engine_core.model import decoder
from engine_core.model.config import RopeConfig
from engine_core.model.rope import rope_frequencies, rope_table
from engine_core.model_runner import ModelRunner
from engine_core.plan import Row, StepPlan
from kernels.attention import AttentionPlan, attention
from kernels.elementwise import rope
from kernels.kv_format import resolve_kv_dtype
from kernels.kv_ops import LayerKV
from protocol.messages import SamplingParams

BIAS_NORMS = (0, 22, 60, 120, 300, 600, 921)
SEEDS = 8
PLACEMENTS = {"slow": (48, 64), "any": (0, 64)}  # RoPE pairs that can hold outliers; the fastest is pair 0
_KEYS, _WIDTH, _THETA = 4096, 128, 1e6
_QUERIES, _HEADS = 8, 8
_QUERY_SIZE = 1.6  # logits then have a standard deviation of 1.6 if there is no bias
_OUTLIERS = (2, 4, 8, 16)  # channels that have a bias; the seeds take turns
_16BIT = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Case:
    """Queries `[n, heads, d]` at the last n positions of keys and values `[T, kv_heads, d]`, float32."""

    query: Tensor
    key: Tensor
    value: Tensor

    @cached_property
    def exact(self) -> Tensor:
        """Attention over the keys and values as they are."""
        return self.attend(self.key, self.value)

    def attend(self, key: Tensor, value: Tensor) -> Tensor:
        """Causal attention over other keys and values; float64 `[kv_heads, group, n, d]`."""
        count, keys, width = len(self.query), len(key), key.shape[-1]
        query = self.query.double().view(count, key.shape[1], -1, width)
        scores = torch.einsum("nkgd,tkd->kgnt", query, key.double()) * width**-0.5
        unseen = torch.ones(count, keys, dtype=torch.bool).triu(keys - count + 1)
        return torch.einsum("kgnt,tkd->kgnd", scores.masked_fill(unseen, float("-inf")).softmax(-1), value.double())


@dataclass(frozen=True)
class Storage:
    """The `--kv-cache-dtype` of V, and that of K."""

    value: str
    key: str

    def __str__(self) -> str:
        return self.value if self.key == self.value else f"{self.value}, K {self.key}"

    def error(self, case: Case) -> float:
        """Norm of the output's error over the norm of the output."""
        stored = case.attend(_stored(self.key, case.key), _stored(self.value, case.value))
        return float((stored - case.exact).norm() / case.exact.norm())


def storages(formats: list[str]) -> list[Storage]:
    """The 16-bit formats, then each smaller one of `formats`, then these with K in each 16-bit format."""
    smaller = [name for name in formats if name not in ("auto", *_16BIT)]
    mixed = [Storage(name, key) for key in _16BIT for name in smaller]
    return [*(Storage(name, name) for name in (*_16BIT, *smaller)), *mixed]


def model_errors(runner: ModelRunner, ids: list[int], formats: list[str]) -> dict[str, list[float]]:
    """Errors by storage and layer, for a model that computes in float32."""
    cases = _capture(runner, ids)
    return {str(storage): [storage.error(case) for case in cases] for storage in storages(formats)}


def synthetic_errors(formats: list[str], seeds: int = SEEDS) -> list[dict[str, Any]]:
    """Errors over the seeds, by bias norm, placement of the outliers and storage."""
    found = []
    for norm in BIAS_NORMS:
        for placement, (low, high) in PLACEMENTS.items():
            cases = [_outliers(seed, norm, low, high) for seed in range(seeds)]
            for storage in storages(formats):
                errors = [storage.error(case) for case in cases]
                found.append({"bias_norm": norm, "outliers": placement, "storage": str(storage), "errors": errors})
    return found


def _stored(name: str, x: Tensor) -> Tensor:
    """What of x `[T, kv_heads, d]` is left once it was stored; float32.

    16-bit formats round x first; the others take and give float32, as kernels do that scale in registers.
    """
    codec = resolve_kv_dtype(name, _16BIT.get(name, torch.float32))
    return codec.decode(*codec.encode(x.reshape(-1, x.shape[-1])), torch.float32).view(x.shape)


def _capture(runner: ModelRunner, ids: list[int]) -> list[Case]:
    """What each layer's attention is asked when `ids` are prefilled as one chunk, K and V in the compute dtype."""
    cases: list[Case] = []

    def record(query: Tensor, layer: LayerKV, plan: AttentionPlan, scale: float) -> Tensor:
        shape = (plan.shape.num_kv_heads, -1, plan.shape.head_dim)
        kept = (x.view(shape).transpose(0, 1) for x in layer.read(plan.chunks[0].index, query.dtype))
        cases.append(Case(query.clone(), *kept))
        return attention(query, layer, plan, scale)

    table = list(range(-(-len(ids) // runner.store.layout.shape.block_size)))
    with mock.patch.object(decoder, "attention", record):
        runner.forward(StepPlan(0, [], [Row(0, ids, 0, table, False, SamplingParams(), 0)]))
    return cases


def _outliers(seed: int, norm: float, low: int, high: int) -> Case:
    """Normal keys, plus a bias of `norm` on a few channels of RoPE pairs [low, high), rotated by position."""
    random = torch.Generator().manual_seed(seed)
    bias = torch.zeros(_WIDTH)
    count = _OUTLIERS[seed % len(_OUTLIERS)]
    half = torch.randint(2, (count,), generator=random) * (_WIDTH // 2)
    channels = low + torch.randperm(high - low, generator=random)[:count] + half
    weights = torch.randn(count, generator=random)
    bias[channels] = weights * norm / weights.norm()
    key = torch.randn(_KEYS, 1, _WIDTH, generator=random) + bias
    frequencies, factor = rope_frequencies(RopeConfig(theta=_THETA), _WIDTH)
    rope(key, *rope_table(frequencies, factor, torch.arange(_KEYS)))
    query = _QUERY_SIZE * torch.randn(_QUERIES, _HEADS, _WIDTH, generator=random)
    return Case(query, key, torch.randn(key.shape, generator=random))
