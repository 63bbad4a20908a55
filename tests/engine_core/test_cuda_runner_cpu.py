"""The CUDA executor with the CPU's arithmetic: its inputs, graphs, overlap and sampling, compared with the CPU's own.

The forward pass sees only what the kernels would see: the uploaded inputs. Hidden states of idle tokens are NaN.
"""

import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine_core import cuda_runner as module
from engine_core import cuda_sampler
from engine_core.batch import build_batch
from engine_core.capacity import Capacity
from engine_core.core import LaunchedStep
from engine_core.cuda_inputs import StepInputs, StepShape
from engine_core.cuda_runner import CudaRunner, StepGraph
from engine_core.memory import plan_memory
from engine_core.model.decoder import Decoder
from engine_core.model_runner import load_runner
from engine_core.open_model import open_model
from engine_core.plan import Row, StepPlan
from engine_core.request import Request
from engine_core.scheduler import Scheduler
from engine_core.swap import SwapPolicy
from engine_core.transfer import CpuTransfer
from kernels import sampling
from kernels.elementwise import rms_norm
from kernels.kv_ops import PagedKV
from protocol.config import EngineConfig
from protocol.messages import SamplingParams

TINY = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
    "eos_token_id": [2, 3],
}
_ids = itertools.count(1)


class Forward:
    """Stands in for CudaForward."""

    def __init__(self, decoder: Decoder, layout: Any, pool: Tensor, inputs: StepInputs, max_context: int) -> None:
        self.decoder, self.kv, self.inputs, self.pool = decoder, PagedKV(pool, layout), inputs, pool

    def __call__(self, shape: StepShape) -> Tensor:
        tokens = shape.tokens
        plan, places = self._read(shape.decodes, shape.prefills)
        hidden = torch.full((tokens, self.decoder.config.hidden_size), torch.nan)
        if plan.num_tokens:
            windows = frozenset(self.decoder.config.windows)
            found = self.decoder.forward(build_batch(plan, self.kv, windows, self.decoder.dtype), self.kv)
            hidden[places] = rms_norm(found, self.decoder.norm, self.decoder.config.rms_norm_eps)
        assert (self.inputs.slots[[n for n in range(tokens) if n not in places]] == -1).all()
        return hidden

    def _read(self, decodes: int, prefills: int) -> tuple[StepPlan, list[int]]:
        lengths, starts = self.inputs.lengths.tolist(), self.inputs.query_start.tolist()
        rows: list[Row] = []
        places: list[int] = []
        most = self.inputs.max_rows
        for number in (*range(decodes), *range(most, most + prefills)):
            first, stop = number, number + 1
            if number >= most:
                first, stop = starts[number - most], starts[number - most + 1]
            if not lengths[number] or first == stop:
                continue
            blocks = self.inputs.tables[number, : -(-lengths[number] // 16)].tolist()
            positions = range(lengths[number] - (stop - first), lengths[number])
            assert self.inputs.positions[first:stop].tolist() == list(positions)
            assert self.inputs.slots[first:stop].tolist() == [blocks[p // 16] * 16 + p % 16 for p in positions]
            ids = self.inputs.tokens[first:stop].tolist()
            rows.append(Row(number, ids, positions[0], blocks, True, SamplingParams(), 0))
            places += range(first, stop)
        split = sum(lengths[number] > 0 for number in range(decodes))
        return StepPlan(0, rows[:split], rows[split:]), places


class Kernels:
    """Stands in for the sampling kernels, whose arguments are packed, and for the ops that change logits."""

    def __init__(self, max_rows: int, vocab: int, dtype: torch.dtype, device: torch.device) -> None:
        self.max_rows = max_rows

    def greedy(self, logits: Tensor, out: Tensor) -> None:
        out.copy_(sampling.greedy(logits))

    def sample(self, logits: Tensor, t: Tensor, k: Tensor, p: Tensor, m: Tensor, key: Any, out: Tensor) -> None:
        assert all(column.is_contiguous() for column in (t, k, p, m, *key))
        out.copy_(sampling.sample(logits.clone(), t, k, p, m, sampling.uniforms(*key)))

    def top_logprobs(self, logits: Tensor, tokens: Tensor, count: int) -> Any:
        assert len(logits) <= self.max_rows
        return sampling.top_logprobs(logits, tokens, count)

    adjust = staticmethod(sampling.adjust)
    forbid = staticmethod(sampling.forbid)


class Graph:
    def __init__(self, runner: CudaRunner, shape: StepShape) -> None:
        self.runner, self.shape = runner, shape

    def replay(self) -> None:
        self.runner.graphs[self.shape].out.copy_(self.runner._compute(self.shape))


class Event:
    def record(self) -> None: ...

    def synchronize(self) -> None: ...


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *a, pin_memory=False, **k: zeros(*a, **k))
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor.clone())
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(module, "CudaForward", Forward)
    monkeypatch.setattr(module, "CudaTransfer", lambda pool, host, bandwidth_limit: CpuTransfer(pool, host, int))
    monkeypatch.setattr(cuda_sampler, "Sampling", Kernels)
    monkeypatch.setattr(cuda_sampler, "cuda_sampling", Kernels)

    def runner(is_cuda: bool, **changes: Any) -> Any:
        options: dict[str, Any] = {"num_blocks": 64, "max_cache": 160, "max_running": 6, "prefill_chunk_tokens": 40}
        options |= {"dtype": "fp32", "weights": "dense", "threads": 1, "load_format": "dummy"} | changes
        config = EngineConfig(model=str(tmp_path), **options)
        if not is_cuda:
            return load_runner(config)
        model = open_model(config, torch.device("cpu"))
        memory = plan_memory(model, config)
        assert model.weights is not None
        decoder = Decoder(model.config, model.weights, model.maker, model.rope_divisors)
        made = CudaRunner(decoder, model, config, memory)
        made.launch(made._largest).tokens()
        made.use_pool(memory.kv.num_blocks)
        made.graphs = {
            StepShape(size, 0, size): StepGraph(Graph(made, StepShape(size, 0, size)), torch.empty(size, 300))  # type: ignore[arg-type]
            for size in made._sizes
        }
        mixed = made._mixed_shape(made._mixed_sizes[0])
        made.graphs[mixed] = StepGraph(Graph(made, mixed), torch.empty(mixed.tokens, 64))  # type: ignore[arg-type]
        return made

    return runner


def run(runner: Any, asked: list[dict[str, Any]], overlap: bool, policy: SwapPolicy) -> tuple[list[Any], Scheduler]:
    """All requests at once, through the scheduler, as the step loop would."""
    capacity = Capacity(runner.num_blocks, 16, runner.max_context, 6, 40, block_bytes=runner.block_bytes)
    scheduler = Scheduler(capacity, runner.eos_token_ids, policy)
    transfer = runner.open_transfer(8 << 20, int, 0)
    logprobs: dict[int, list[Any]] = {}
    requests = []
    for number, options in enumerate(asked):
        params = SamplingParams(**{"temperature": 0.0, "ignore_eos": True} | options)
        prompt = [(7 * n + 11 * number + 5) % 300 for n in range(20 + 9 * number)]
        requests.append(Request(next(_ids), prompt, params, 30, time.monotonic()))
        scheduler.add(requests[-1])
    flying: LaunchedStep | None = None

    def collect() -> None:
        if flying is not None:
            result = flying.handle.tokens()
            for request, entry in result.logprobs.items():
                logprobs.setdefault(request, []).append((entry.token, len(entry.top_logprobs)))
            scheduler.commit(flying.plan, result, time.monotonic())

    deadline = time.monotonic() + 50
    while scheduler.has_work:
        assert time.monotonic() < deadline
        for landed in transfer.landed():
            scheduler.land(landed, time.monotonic())
        scheduler.grow_host(transfer.host_blocks)
        if flying is not None and not (overlap and flying.may_plan_ahead):
            collect()
            flying = None
        plan = scheduler.schedule(time.monotonic())
        launched = None
        if plan is not None:
            transfer.start(plan.copies)
            launched = LaunchedStep(plan, runner.launch(plan), 0.0) if plan.num_tokens else None
        collect()
        flying = launched
    scheduler.check()
    transfer.close()
    return [(r.output, logprobs.get(r.id), [e.logprob for e in r.prompt_logprobs]) for r in requests], scheduler


ASKED: list[dict[str, Any]] = [
    {},
    {"min_tokens": 12, "stop_token_ids": list(range(0, 300, 3)), "ignore_eos": False},
    {"temperature": 0.9, "seed": 4, "top_k": 50, "logprobs": 2},
    {"repetition_penalty": 1.2, "presence_penalty": 0.3},
    {"logit_bias": {7: 3.0, 9: -5.0}, "logprobs": 0},
    {"prompt_logprobs": 2, "logprobs": 5},
    {"temperature": 0.7, "seed": 9, "top_p": 0.9, "min_p": 0.01},
    {},
    {"logprobs": 1},
]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("swap_every", [0, 2])
def test_tokens_are_those_of_the_cpu(make: Callable[..., Any], overlap: bool, swap_every: int) -> None:
    """A crowd, in half of the blocks it needs."""
    expected, _ = run(make(False), ASKED, False, SwapPolicy())
    policy = SwapPolicy("swap", max_pause=0.01, swap_every=swap_every)
    found, scheduler = run(make(True, num_blocks=24), ASKED, overlap, policy)
    assert scheduler.counts.failed == 0
    assert scheduler.counts.swapped > 0
    for (*own, prompt), (*theirs, expected_prompt), asked in zip(found, expected, ASKED, strict=True):
        assert own == theirs, asked
        assert prompt == pytest.approx(expected_prompt, abs=1e-3), asked
