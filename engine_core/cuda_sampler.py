"""Sampling on the GPU: nothing here waits for the device."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine_core.cuda_inputs import StepInputs
from engine_core.plan import Row
from engine_core.sampler import Sampler, entries
from kernels import cuda_sampling
from kernels.cuda_sampling import Sampling
from kernels.sampling import GREEDY_BELOW
from protocol.messages import TopLogprobs

Columns = tuple[Tensor, Tensor, Tensor, Tensor]


class CudaSampler(Sampler):
    """Samples into one device buffer, where the next step finds the tokens."""

    def __init__(self, vocab_size: int, dtype: torch.dtype, inputs: StepInputs, eos_token_ids: Sequence[int]) -> None:
        device = inputs.tokens.device
        super().__init__(vocab_size, device, eos_token_ids, cuda_sampling)
        self._inputs = inputs
        self.sampled = torch.zeros(inputs.max_rows, dtype=torch.int64, device=device)
        self._by_dtype = {kind: Sampling(inputs.max_rows, vocab_size, kind, device) for kind in {dtype, torch.float32}}

    def launch(self, logits: Tensor, rows: Sequence[Row]) -> "PendingLogprobs | None":
        """Sample from logits `[R, V]` of the rows that sample, into `sampled[:R]`; parameters are the inputs'."""
        logits = logits[:, : self._vocab_size]
        asked = [index for index, row in enumerate(rows) if row.sampling.logprobs >= 0]
        raw = logits[asked].float() if asked else None
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
        if raw is None:
            return None
        most = min(max(rows[index].sampling.logprobs for index in asked), self._vocab_size)
        chosen = tokens[asked].clamp(min=0)
        return PendingLogprobs([rows[index] for index in asked], self.top(raw, chosen, most), chosen)

    def top(self, logits: Tensor, tokens: Tensor, count: int) -> Columns:
        """Log-probabilities of tokens `[T]` and of the `count` best, given float32 logits `[T, V]`."""
        most = len(self.sampled)
        pieces = [slice(start, start + most) for start in range(0, len(logits), most)]
        parts = [self._by_dtype[torch.float32].top_logprobs(logits[at], tokens[at], count) for at in pieces]
        own, rank, ids, values = (torch.cat(columns) for columns in zip(*parts, strict=True))
        return own, rank, ids, values


@dataclass(frozen=True)
class PendingLogprobs:
    """Log-probabilities of the tokens of some rows, still on the device."""

    rows: Sequence[Row]
    columns: Columns
    tokens: Tensor

    def collect(self) -> dict[int, TopLogprobs]:
        """By request id, once the step has passed."""
        found = entries(self.tokens.tolist(), self.columns)
        return {row.request_id: entry for row, entry in zip(self.rows, found, strict=True)}
