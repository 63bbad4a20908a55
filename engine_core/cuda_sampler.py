"""Sampling on the GPU: nothing here waits for the device."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine_core.cuda_inputs import StepInputs
from engine_core.plan import Row
from engine_core.sampler import Sampler, entries, first
from kernels import cuda_sampling
from kernels.cuda_sampling import Sampling
from kernels.sampling import GREEDY_BELOW
from protocol.messages import TopLogprobs

Columns = tuple[Tensor, Tensor, Tensor, Tensor]
_LEAST_ROWS = 64  # of log-probabilities at once: a prompt's would take long one by one


class CudaSampler(Sampler):
    """Samples into one device buffer, where the next step finds the tokens."""

    def __init__(self, vocab_size: int, dtype: torch.dtype, inputs: StepInputs, eos_token_ids: Sequence[int]) -> None:
        device = inputs.tokens.device
        super().__init__(vocab_size, device, eos_token_ids, cuda_sampling)
        self._inputs = inputs
        self.sampled = torch.zeros(inputs.max_rows, dtype=torch.int64, device=device)
        self.most_rows = max(inputs.max_rows, _LEAST_ROWS)
        self._by_dtype = {kind: Sampling(self.most_rows, vocab_size, kind, device) for kind in {dtype, torch.float32}}

    def launch(self, logits: Tensor, rows: Sequence[Row]) -> "PendingLogprobs | None":
        """Sample from logits `[R, V]` of the rows that sample, into `sampled[:R]`; parameters are the inputs'."""
        logits = logits[:, : self._vocab_size]
        asked = [index for index, row in enumerate(rows) if row.sampling.logprobs >= 0]
        places = self._column(asked) if asked else None
        raw = None if places is None else logits.index_select(0, places).float()
        if self.changes_logits(rows):
            logits = logits.float()
            self.change_logits(logits, rows)
        count, inputs, ops = len(rows), self._inputs, self._by_dtype[logits.dtype]
        tokens = self.sampled[:count]
        if all(row.sampling.temperature < GREEDY_BELOW for row in rows):
            ops.greedy(logits, tokens)
        else:
            at = slice(count)
            ops.sample(
                logits,
                inputs.temperature[at],
                inputs.top_k[at],
                inputs.top_p[at],
                inputs.min_p[at],
                (inputs.seed[at], inputs.choice[at], inputs.position[at]),
                tokens,
            )
        if places is None or raw is None:
            return None
        most = min(max(rows[index].sampling.logprobs for index in asked), self._vocab_size)
        chosen = tokens.index_select(0, places).clamp(min=0)
        return PendingLogprobs([rows[index] for index in asked], self._top_of(raw, chosen, most), to_host(chosen))

    def top(self, logits: Tensor, tokens: Sequence[int], count: int) -> Columns:
        """Log-probabilities of tokens and of the `count` best, given logits `[T, V]`; T is `most_rows` at most.

        They are on the host once the step has passed.
        """
        logits = logits[:, : self._vocab_size].float()
        return self._top_of(logits, self._column(tokens), min(count, self._vocab_size))

    def _top_of(self, logits: Tensor, tokens: Tensor, count: int) -> Columns:
        own, rank, ids, values = map(to_host, self._by_dtype[torch.float32].top_logprobs(logits, tokens, count))
        return own, rank, ids, values

    def _sent(self, column: Tensor) -> Tensor:
        return column.pin_memory().to(self._device, non_blocking=True)


def to_host(x: Tensor) -> Tensor:
    """A copy in pinned memory, of which to read nothing before the stream has got there."""
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda).copy_(x, non_blocking=True)


@dataclass(frozen=True)
class PendingLogprobs:
    """Log-probabilities of the tokens of some rows, on their way to the host."""

    rows: Sequence[Row]
    columns: Columns
    tokens: Tensor

    def collect(self) -> dict[int, TopLogprobs]:
        """By request id, once the step has passed."""
        found = entries(self.tokens.tolist(), self.columns)
        return {
            row.request_id: first(entry, row.sampling.logprobs) for row, entry in zip(self.rows, found, strict=True)
        }
