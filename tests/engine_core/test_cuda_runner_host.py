"""The host's side of the CUDA executor, without a GPU: sizes, memory, what failures at start are told as."""

import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine_core import cuda_runner as module
from engine_core.cuda_inputs import padded
from engine_core.cuda_runner import CudaRunner, graph_sizes, largest_step, load_cuda_runner, mixed_sizes
from engine_core.memory import MemoryPlan, plan_memory
from engine_core.open_model import OpenModel, open_model
from kernels.compiler import KernelError
from protocol.config import EngineConfig
from protocol.errors import StartupError

QWEN = Path(__file__).parents[1] / "data" / "configs" / "qwen2.5-3b"
MIB = 1 << 20


@pytest.mark.parametrize("rows", [1, 2, 8, 9, 16, 17, 64, 100, 128, 129, 192, 200, 1024])
def test_every_decode_step_has_a_graph(rows: int) -> None:
    sizes = graph_sizes(rows)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == rows
    assert sizes[0] == 1
    for count in range(1, rows + 1):
        taken = next(size for size in sizes if size >= count)
        assert taken - count < max(count, 64 if count > 128 else 16), "too many idle rows"


@pytest.mark.parametrize("most", [1, 64, 65, 640, 1000, 1025, 2048, 9000])
def test_every_mixed_step_has_a_graph_unless_it_is_huge(most: int) -> None:
    sizes = mixed_sizes(most)
    assert sizes == sorted(set(sizes))
    for tokens in range(1, min(most, 2048) + 1):
        assert padded(tokens) in sizes
        assert padded(tokens) - tokens < max(64, 0.25 * tokens), "too many idle tokens"


@pytest.mark.parametrize(
    ("rows", "chunk", "context", "prefills"),
    [(8, 512, 4096, [512]), (8, 512, 200, [200, 200, 112]), (2, 4096, 100, [100, 100]), (1, 32, 64, [32])],
)
def test_the_warm_up_has_as_many_tokens_as_any_step(rows: int, chunk: int, context: int, prefills: list[int]) -> None:
    """Several short prompts may fill a chunk that is longer than the context."""
    plan = largest_step(rows, chunk, context, 16)
    assert [len(row.tokens) for row in plan.prefills] == prefills
    assert len(plan.decodes) + len(plan.prefills) == rows
    assert all(len(row.blocks) * 16 >= len(row.tokens) for row in plan.prefills)
    everybody = [*plan.decodes, *plan.prefills]
    assert len({row.request_id for row in everybody}) == rows
    assert all(row.request_id < 0 for row in everybody), "real requests have other ids"
    assert all(row.sampling.logprobs >= 0 and row.sampling.logit_bias for row in everybody)


class FakeForward:
    def __init__(self, decoder: Any, layout: Any, pool: Tensor, *_: Any) -> None:
        self.pool = pool


def test_the_old_pool_goes_before_there_is_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CudaForward", FakeForward)
    runner: Any = object.__new__(CudaRunner)
    runner.graphs, runner.inputs, runner.max_context = {}, None, 64
    runner.layout = SimpleNamespace(image_bytes=32)
    runner.decoder = SimpleNamespace(embedding=torch.zeros(1))
    runner.use_pool(3)
    old, empty = weakref.ref(runner.pool), torch.empty

    def allocate(*arguments: Any, **options: Any) -> Tensor:
        assert old() is None
        return empty(*arguments, **options)

    monkeypatch.setattr(torch, "empty", allocate)
    runner.use_pool(5)
    assert runner.pool.shape == (5, 32)
    assert runner._forward.pool is runner.pool


def opened(config: EngineConfig) -> tuple[OpenModel, MemoryPlan]:
    model = replace(open_model(config, torch.device("cpu")), free=16 << 30, total=24 << 30)
    return model, plan_memory(model, config)


def fit(monkeypatch: pytest.MonkeyPatch, free: int, workspace: int = 300 * MIB, **options: Any) -> MemoryPlan:
    """What fits when so much is free after loading."""
    config = EngineConfig(model=str(QWEN), dtype="bf16", max_cache=4096, **options)
    _, plan = opened(config)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 24 << 30))
    runner: Any = SimpleNamespace(pool=torch.empty(10 * MIB, dtype=torch.uint8))
    return module._fit(runner, config, plan, workspace)


def test_the_pool_is_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    free = 9 << 30
    plan = fit(monkeypatch, free, gpu_memory_utilization=1.0)
    assert plan.kv.pool <= free + 10 * MIB - 300 * MIB - module._MARGIN < plan.kv.pool + plan.kv.block_bytes
    assert plan.workspace == 300 * MIB
    assert {kv.name: kv.num_blocks for kv in plan.formats}[plan.kv.name] == plan.kv.num_blocks
    capped = fit(monkeypatch, free, gpu_memory=8 << 30)
    used = (16 << 30) - free - 10 * MIB
    assert capped.kv.pool <= (8 << 30) - used - 300 * MIB - module._MARGIN < capped.kv.pool + capped.kv.block_bytes


@pytest.mark.parametrize(
    ("options", "option"), [({}, "--max-cache, --max-running"), ({"num_blocks": 2000}, "lower --num-blocks")]
)
def test_a_pool_that_does_not_fit_is_told_with_all_figures(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, int], option: str
) -> None:
    with pytest.raises(StartupError) as caught:
        fit(monkeypatch, 600 * MIB, **options)
    for word in (
        "4096 tokens",
        "total",
        "free at start",
        "weights",
        "workspace 300.0 MiB",
        "left for the pool",
        option,
    ):
        assert word in str(caught.value)


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as loading asks."""
    monkeypatch.setattr(module, "open_device", lambda name: torch.device("cuda", 0))
    monkeypatch.setattr(module, "probe", lambda device: None)
    monkeypatch.setattr(module, "open_model", lambda config, device: opened(config)[0])


def load(**options: Any) -> None:
    given: dict[str, Any] = {"dtype": "bf16", "max_cache": 512} | options
    config = EngineConfig(model=str(QWEN), device="cuda", **given)
    load_cuda_runner(config, lambda done, total: None)


@pytest.mark.usefixtures("on_a_gpu")
def test_what_ends_a_start_is_told_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(error: Exception) -> Any:
        def raises(*_: Any) -> None:
            raise error

        return raises

    with pytest.raises(StartupError, match="block size 8 is no power of two from 16 up"):
        load(block_size=8)
    with pytest.raises(StartupError, match="--dtype fp32"):
        load(dtype="fp32")
    monkeypatch.setattr(module, "_load", fail(torch.OutOfMemoryError("tried to allocate 2 GiB")))
    with pytest.raises(
        StartupError, match=r"memory ran out .* weights [0-9,.]+ MiB.* lower --max-cache.*tried to allocate"
    ):
        load()
    monkeypatch.setattr(module, "probe", fail(KernelError("no headers")))
    with pytest.raises(StartupError, match="--device cuda: no headers"):
        load()
