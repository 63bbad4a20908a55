"""Computes steps with torch: loads a model, owns its KV pool, runs StepPlans."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine_core.batch import Batch, build_batch, wants_prompt_logprobs
from engine_core.device import StepThreads, give_back_memory, keep_freed_memory, open_device
from engine_core.kv_store import KVStore
from engine_core.memory import MemoryPlan, plan_memory
from engine_core.model.decoder import Decoder
from engine_core.open_model import load_decoder, open_model
from engine_core.plan import Row, StepPlan, StepResult
from engine_core.runner import Transfer
from engine_core.sampler import Sampler
from engine_core.transfer import CpuTransfer, HostPool
from protocol.config import EngineConfig
from protocol.messages import SamplingParams, TopLogprobs


@dataclass(frozen=True)
class FinishedStep:
    """The handle of a step that was computed at launch, as the CPU does."""

    result: StepResult

    def tokens(self) -> StepResult:
        """See `StepHandle`."""
        return self.result


class ModelRunner:
    """A `Runner` over one decoder and one KV pool."""

    def __init__(
        self,
        decoder: Decoder,
        store: KVStore,
        memory: MemoryPlan,
        vocab_size: int,
        dtype: torch.dtype,
        threads: StepThreads,
    ) -> None:
        self.model_config = decoder.config
        self.eos_token_ids = list(decoder.config.eos_token_ids)
        self.vocab_size, self.max_context, self.num_blocks = vocab_size, memory.max_context, memory.kv.num_blocks
        self.memory, self.summary = memory.by_use(), memory.summary()
        self.kv_cache_dtype, self.block_bytes = memory.kv.name, memory.kv.block_bytes
        self.store, self.threads = store, threads
        self.decoder, self._dtype = decoder, dtype
        self._windows = frozenset(decoder.config.windows)
        self._sampler = Sampler(vocab_size, store.pool.device, self.eos_token_ids)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> FinishedStep:
        """Run the forward pass and sample. The plan's block tables are read here and not kept."""
        self.threads.use_for(plan.num_tokens)
        batch, hidden = self.forward(plan)
        rows = [*plan.decodes, *plan.prefills]
        sampling = [(row, end) for row, end in zip(rows, batch.ends, strict=True) if row.samples]
        result = StepResult([])
        if sampling:
            logits = self.decoder.logits(hidden[[end - 1 for _, end in sampling]])
            result.tokens, result.logprobs = self._sampler(logits, [row for row, _ in sampling])
        for row, end in zip(rows, batch.ends, strict=True):
            if wants_prompt_logprobs(row) and row.prompt and row.start + 1 < len(row.prompt):
                result.prompt_logprobs[row.request_id] = self._prompt_logprobs(row, hidden[end - len(row.tokens) : end])
        return FinishedStep(result)

    def open_transfer(self, budget: int, wake: Callable[[], None], bandwidth_limit: int) -> Transfer:
        """The host pool of at most `budget` bytes, which is made while requests already run, and the copies."""
        return CpuTransfer(self.store.pool, HostPool(self.block_bytes, budget), wake, bandwidth_limit=bandwidth_limit)

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> tuple[Batch, Tensor]:
        """The step without its sampling: the batch and its hidden states `[n, hidden]`, for `decoder.logits`."""
        batch = build_batch(plan, self.store.kv, self._windows, self._dtype)
        return batch, self.decoder.forward(batch, self.store.kv)

    def _prompt_logprobs(self, row: Row, hidden: Tensor) -> list[TopLogprobs]:
        following = row.prompt[row.start + 1 : row.start + len(hidden) + 1]
        logits = self.decoder.logits(hidden[: len(following)])
        return self._sampler.prompt_logprobs(logits, following, row.sampling.prompt_logprobs)

    def warm_up(self) -> None:
        """Run small steps on block 0: the first request doesn't pay for lazy set-up, and the threads are chosen."""
        sampling = SamplingParams(temperature=0.0)

        def step(tokens: int) -> None:
            rows = [Row(number, [0], 0, [0], True, sampling, 0) for number in range(tokens)]
            self.launch(StepPlan(0, rows, [])).tokens()

        step(1)
        self.threads.measure(step, self.model_config.num_layers)


def load_runner(config: EngineConfig, progress: Callable[[int, int], None] = lambda done, total: None) -> ModelRunner:
    """Load `config.model` and allocate the pool. Raises StartupError. `progress` gets bytes done and in total."""
    device = open_device(config.device)
    threads = StepThreads(config.threads)
    keep_freed_memory()
    model = open_model(config, device)
    memory = plan_memory(model, config)
    decoder = load_decoder(model, config.model, progress)
    give_back_memory()
    store = KVStore(model.kv_layout, memory.kv.num_blocks, device)
    runner = ModelRunner(decoder, store, memory, model.vocab_size, model.maker.dtype, threads)
    runner.warm_up()
    return runner
