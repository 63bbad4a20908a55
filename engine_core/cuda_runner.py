"""Computes steps on a GPU. A step is launched without waiting for it: the next one can be planned while it runs."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine_core.batch import wants_prompt_logprobs
from engine_core.cuda_forward import CudaForward, kernel_layouts
from engine_core.cuda_inputs import StepInputs, StepShape, padded
from engine_core.cuda_sampler import Columns, CudaSampler, PendingLogprobs
from engine_core.cuda_transfer import CudaTransfer
from engine_core.device import open_device
from engine_core.memory import MemoryPlan, plan_memory, refusal
from engine_core.model.decoder import Decoder
from engine_core.open_model import OpenModel, load_decoder, open_model
from engine_core.plan import Row, StepPlan, StepResult
from engine_core.runner import Transfer
from engine_core.sampler import entries
from engine_core.transfer import HostPool
from kernels.compiler import KernelError
from kernels.launcher import probe
from protocol.config import EngineConfig
from protocol.errors import StartupError
from protocol.messages import SamplingParams

_RESULTS = 3  # steps in flight at most
_MARGIN = 256 << 20  # bytes kept free for what CUDA and cuBLAS take later
_LARGE_BUCKET, _HUGE_BUCKET = 16, 64  # rows from one graph's size to the next; beyond _MOST_LARGE the latter
_MOST_LARGE = 128
_FEW_PREFILLS = 32  # prefill rows of a mixed step's graph
_MOST_GRAPHED = 2048  # tokens of one at most: larger steps take the GPU longer than the host takes to launch them


class CudaStep:
    """A step in flight."""

    def __init__(self, tokens: Tensor, logprobs: PendingLogprobs | None) -> None:
        self.passed = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._tokens, self._logprobs = tokens, logprobs
        self.prompt_logprobs: list[tuple[Row, Sequence[int], Columns]] = []  # in pieces, in order

    def tokens(self) -> StepResult:
        """See `StepHandle`."""
        self.passed.synchronize()
        result = StepResult(self._tokens.tolist())
        if self._logprobs is not None:
            result.logprobs = self._logprobs.collect()
        for row, following, columns in self.prompt_logprobs:
            result.prompt_logprobs.setdefault(row.request_id, []).extend(entries(following, columns))
        return result


@dataclass(frozen=True)
class StepGraph:
    """A captured forward pass, and where it leaves what `CudaRunner._compute` returns."""

    graph: torch.cuda.CUDAGraph
    out: Tensor


class CudaRunner:
    """A `Runner` over one decoder and one KV pool. A step is a CUDA graph, by its shape."""

    pool: Tensor  # uint8 [num_blocks, image_bytes]
    _forward: CudaForward

    def __init__(self, decoder: Decoder, model: OpenModel, config: EngineConfig, memory: MemoryPlan) -> None:
        self.model_config, self.memory_plan = decoder.config, memory
        self.vocab_size, self.max_context = model.vocab_size, memory.max_context
        self.eos_token_ids = list(decoder.config.eos_token_ids)
        self.kv_cache_dtype, self.block_bytes = memory.kv.name, memory.kv.block_bytes
        self.layout, self.decoder = model.kv_layout, decoder
        device, rows = decoder.embedding.device, config.max_running
        blocks = -(-memory.max_context // config.block_size)
        self.inputs = StepInputs(rows, rows + config.prefill_chunk_tokens, blocks, config.block_size, device)
        self.sampler = CudaSampler(self.vocab_size, decoder.dtype, self.inputs, self.eos_token_ids)
        self._sampled_at: dict[int, int] = {}  # by request: where the last step left its token
        self._results = [torch.zeros(rows, dtype=torch.int64, pin_memory=True) for _ in range(_RESULTS)]
        self._step = 0
        self.host_pool: HostPool | None = None
        self.start_seconds: dict[str, float] = {}  # by what they were spent on
        self.graphs: dict[StepShape, StepGraph] = {}
        self._sizes = graph_sizes(rows)
        self._mixed_sizes = mixed_sizes(rows + config.prefill_chunk_tokens)
        most = self._mixed_sizes[-1], decoder.config.hidden_size
        self._hidden = torch.empty(most, dtype=decoder.dtype, device=device)  # of a mixed step's graph
        self._largest = largest_step(rows, config.prefill_chunk_tokens, memory.max_context, config.block_size)
        self.use_pool(len(self._largest.prefills[0].blocks))

    def use_pool(self, num_blocks: int) -> None:
        """Allocate a pool in place of the one before it; its graphs are gone."""
        self.graphs.clear()
        if hasattr(self, "pool"):
            del self.pool, self._forward  # the old one goes first, and both hold it
        shape = num_blocks, self.layout.image_bytes
        self.pool = torch.empty(shape, dtype=torch.uint8, device=self.decoder.embedding.device)
        self.num_blocks = num_blocks
        self._forward = CudaForward(self.decoder, self.layout, self.pool, self.inputs, self.max_context)

    def open_transfer(self, budget: int, wake: Callable[[], None], bandwidth_limit: int) -> Transfer:
        """See `LoadedRunner`."""
        host = self.host_pool or HostPool(self.block_bytes, budget, pinned=True)
        return CudaTransfer(self.pool, host, bandwidth_limit=bandwidth_limit)

    @property
    def memory(self) -> dict[str, int]:
        """Bytes by use."""
        return self.memory_plan.by_use()

    @property
    def summary(self) -> str:
        """For the start-up line."""
        spent = ", ".join(f"{what} {seconds:.1f} s" for what, seconds in self.start_seconds.items())
        return f"{self.memory_plan.summary()}; {spent}, {len(self.graphs)} graphs"

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> CudaStep:
        """Start the step: its upload, one graph or forward pass, the sampling, and the tokens' way back."""
        rows = [row for row in (*plan.decodes, *plan.prefills) if row.samples]
        shape = self.shape_of(plan)
        self.inputs.upload(plan, self._sampled_at, shape)
        out = self._replay(shape) if shape in self.graphs else self._compute(shape)
        logits = out[: len(rows)]
        if plan.prefills and rows:
            count = next(size for size in self._sizes if size >= len(rows))  # few shapes
            logits = self.decoder.head(out[self.inputs.ends[:count]])[: len(rows)]
        logprobs = self.sampler.launch(self._soften(logits), rows) if rows else None
        self._sampled_at = {row.request_id: place for place, row in enumerate(rows)}
        self._step += 1
        tokens = self._results[self._step % _RESULTS][: len(rows)]
        tokens.copy_(self.sampler.sampled[: len(rows)], non_blocking=True)
        step = CudaStep(tokens, logprobs)
        if plan.prefills:
            self._add_prompt_logprobs(step, plan, out)
        step.passed.record()
        return step

    def shape_of(self, plan: StepPlan) -> StepShape:
        """The shape that the step is computed in: one of few."""
        if not plan.prefills:
            rows = next(size for size in self._sizes if size >= len(plan.decodes))
            return StepShape(rows, 0, rows)
        return self._mixed_shape(padded(plan.num_tokens), len(plan.prefills))

    def _mixed_shape(self, tokens: int, prefills: int = 1) -> StepShape:
        most = self.inputs.max_rows
        return StepShape(min(most, tokens), min(most, _FEW_PREFILLS) if prefills <= _FEW_PREFILLS else most, tokens)

    def _replay(self, shape: StepShape) -> Tensor:
        self.graphs[shape].graph.replay()
        return self.graphs[shape].out

    def _compute(self, shape: StepShape) -> Tensor:
        """The forward pass: logits of decode rows, or if there are prefills hidden states `[tokens, hidden]`."""
        self._feed(shape.decodes)
        hidden = self._forward(shape)
        return hidden if shape.prefills else self.decoder.head(hidden)

    def _feed(self, decodes: int) -> None:
        """Put tokens that the last step sampled where this one reads them."""
        if decodes:
            feed, tokens = self.inputs.feed[:decodes], self.inputs.tokens[:decodes]
            torch.where(feed >= 0, self.sampler.sampled[feed.clamp(min=0)], tokens, out=tokens)

    def _soften(self, logits: Tensor) -> Tensor:
        cap = self.model_config.logit_softcap
        return logits if not cap else (logits.float() / cap).tanh_().mul_(cap)

    def _add_prompt_logprobs(self, step: CudaStep, plan: StepPlan, hidden: Tensor) -> None:
        at = len(plan.decodes)
        for row in plan.prefills:
            following = list(row.prompt[row.start + 1 : row.start + len(row.tokens) + 1])
            if wants_prompt_logprobs(row) and following:
                for first in range(0, len(following), self.sampler.most_rows):
                    piece = following[first : first + self.sampler.most_rows]
                    logits = self._soften(self.decoder.head(hidden[at + first :][: len(piece)]))
                    step.prompt_logprobs.append(
                        (row, piece, self.sampler.top(logits, piece, row.sampling.prompt_logprobs))
                    )
            at += len(row.tokens)

    @torch.inference_mode()
    def warm_up(self) -> int:
        """Run the largest step there can be; the most bytes that it took beside weights and pool."""
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.launch(self._largest).tokens()
        return torch.cuda.max_memory_allocated() - before

    @property
    def graph_bytes(self) -> int:
        """What the decode graphs' logits will take: each keeps its own."""
        return sum(self._sizes) * self.model_config.vocab_size * self.decoder.dtype.itemsize

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture graphs, the largest first: the smaller ones use its memory."""
        mixed = [self._mixed_shape(tokens) for tokens in reversed(self._mixed_sizes)]
        memory = torch.cuda.graph_pool_handle()
        for shape in (*mixed, *(StepShape(rows, 0, rows) for rows in reversed(self._sizes))):
            self.inputs.upload(StepPlan(0, [], []), {}, shape)
            graph = torch.cuda.CUDAGraph()
            self._compute(shape)  # cuBLAS chooses its kernels outside of the capture
            torch.cuda.current_stream().synchronize()
            # The host pool is being pinned by another thread, which a capture must not mind.
            with torch.cuda.graph(graph, pool=memory, capture_error_mode="thread_local"):
                out = self._compute(shape)
                if shape.prefills:
                    out = self._hidden[: shape.tokens].copy_(out)
            self.graphs[shape] = StepGraph(graph, out)
        # A capture gives back what is cached: what a step of more prefill rows takes is to be there again.
        self.inputs.upload(StepPlan(0, [], []), {}, mixed[0])
        self._compute(mixed[0])


def graph_sizes(max_rows: int) -> list[int]:
    """Rows of the decode graphs, in order; the last takes every step."""
    most = min(max_rows, _MOST_LARGE)
    sizes = [size for size in (1, 2, 4, 8) if size < max_rows] + list(range(_LARGE_BUCKET, most, _LARGE_BUCKET))
    return [*sizes, *range(_MOST_LARGE, max_rows, _HUGE_BUCKET), max_rows]


def mixed_sizes(max_tokens: int) -> list[int]:
    """Tokens of the graphs of mixed steps, in order."""
    sizes = [padded(1)]
    while sizes[-1] < min(max_tokens, _MOST_GRAPHED):
        sizes.append(padded(sizes[-1] + 1))
    return sizes


def largest_step(max_rows: int, chunk_tokens: int, max_context: int, block_size: int) -> StepPlan:
    """The step that takes most memory: of all rows, with all tokens, and whatever one can ask of the sampling."""
    sampling = SamplingParams(logit_bias={0: 1.0}, min_tokens=1, stop_token_ids=[0], logprobs=1, prompt_logprobs=1)
    prefills: list[Row] = []
    while chunk_tokens > 0 and len(prefills) < max_rows:
        ids = [0] * min(chunk_tokens, max_context)
        blocks = list(range(-(-len(ids) // block_size)))
        prefills.append(Row(-1 - len(prefills), ids, 0, blocks, True, sampling, 0, ids))
        chunk_tokens -= len(ids)
    numbers = range(len(prefills), max_rows)
    return StepPlan(0, [Row(-1 - number, [0], 0, [0], True, sampling, 0, [0]) for number in numbers], prefills)


class _Clock:
    """What a start is spent on."""

    def __init__(self, since: float) -> None:
        self._last, self.seconds = since, dict[str, float]()

    def passed(self, what: str) -> None:
        now = time.monotonic()
        self.seconds[what], self._last = now - self._last, now


def load_cuda_runner(
    config: EngineConfig, progress: Callable[[int, int], None], since: float | None = None
) -> CudaRunner:
    """Load `config.model`, size the pool by what is free after a warm-up, capture graphs. Raises StartupError.

    `since`: when the start began (time.monotonic), before this file was imported.
    """
    clock = _Clock(time.monotonic() if since is None else since)
    clock.passed("imports")
    device = open_device(config.device)
    memory: MemoryPlan | None = None
    try:
        probe(device.index or 0)
        model = open_model(config, device)
        if model.maker.dtype == torch.float32:
            raise StartupError("--dtype fp32 is for the CPU: the CUDA kernels compute in bf16 or fp16")
        kernel_layouts(model.kv_layout)
        memory = plan_memory(model, config)
        clock.passed("device")
        return _load(config, model, memory, progress, clock)
    except KernelError as error:
        raise StartupError(f"--device cuda: {error}") from error
    except torch.OutOfMemoryError as error:
        raise StartupError(
            f"the GPU's memory ran out while the model was loaded: {memory.summary() if memory else ''}; lower "
            f"--max-cache, --max-running, --prefill-chunk-tokens or --gpu-memory-utilization ({error})"
        ) from error


def _load(
    config: EngineConfig, model: OpenModel, memory: MemoryPlan, progress: Callable[[int, int], None], clock: _Clock
) -> CudaRunner:
    host_pool = None
    if config.offload_budget >= memory.kv.block_bytes:  # made while the weights load
        host_pool = HostPool(memory.kv.block_bytes, config.offload_budget, pinned=True)
    try:
        return _start(config, model, memory, host_pool, progress, clock)
    except BaseException:
        if host_pool is not None:
            host_pool.close()  # a process that ends while a thread of it pins memory may crash
        raise


def _start(
    config: EngineConfig,
    model: OpenModel,
    memory: MemoryPlan,
    host_pool: HostPool | None,
    progress: Callable[[int, int], None],
    clock: _Clock,
) -> CudaRunner:
    decoder = load_decoder(model, config.model, progress)
    clock.passed("weights")
    runner = CudaRunner(decoder, model, config, memory)
    runner.host_pool = host_pool
    workspace = 2 * runner.warm_up() + runner.graph_bytes  # of steps with graphs and of those without
    clock.passed("kernels and warm-up")
    runner.memory_plan = _fit(runner, config, memory, workspace)
    runner.use_pool(runner.memory_plan.kv.num_blocks)
    runner.capture()
    runner.warm_up()  # torch's allocator has its memory from here on: no step asks the device for more
    clock.passed("pool and graphs")
    runner.start_seconds = clock.seconds
    return runner


def _fit(runner: CudaRunner, config: EngineConfig, plan: MemoryPlan, workspace: int) -> MemoryPlan:
    """The plan with the pool that really fits. Raises StartupError if one context doesn't."""
    torch.cuda.empty_cache()
    block = plan.kv.block_bytes
    free, total = torch.cuda.mem_get_info()
    free += runner.pool.nbytes
    used = plan.free - free  # by weights, buffers, CUDA itself
    budget = min(config.gpu_memory or int(total * config.gpu_memory_utilization), plan.free) - used
    left = max(0, budget - workspace - _MARGIN)
    blocks = config.num_blocks or left // block
    needed = -(-plan.max_context // config.block_size)
    formats = plan.formats
    if not config.num_blocks:
        formats = tuple(replace(kv, num_blocks=left // kv.block_bytes) for kv in formats)
    plan = replace(plan, workspace=workspace, kv=replace(plan.kv, num_blocks=blocks), formats=formats)
    if blocks < needed or plan.kv.pool > free - workspace:
        raise StartupError(refusal(plan, config, left, needed))
    return plan
