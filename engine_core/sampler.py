"""Turns the rows of a step into parameter columns and samples their tokens."""

from array import array
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from engine_core.plan import Row, has_penalties
from kernels import sampling
from protocol.messages import TopLogprobs, pack_i32


class LogitOps(Protocol):
    """The ops that change logits: `kernels.sampling`, or its CUDA twin."""

    def adjust(
        self, logits: Tensor, row: Tensor, token: Tensor, bias: Tensor, repetition: Tensor, subtract: Tensor
    ) -> None:
        """See `kernels.sampling`."""
        ...

    def forbid(self, logits: Tensor, row: Tensor, token: Tensor) -> None:
        """See `kernels.sampling`."""
        ...


class Sampler:
    """Samples one token per row. Keeps nothing that it couldn't make again from the rows.

    Order: logit_bias; repetition penalty (tokens of prompt and output), presence and frequency penalty (output); EOS
    and stop_token_ids are forbidden below min_tokens; temperature, min_p, top_k, top_p. Log-probabilities are those of
    the model, before all of this, so that they compare between requests.
    """

    def __init__(
        self,
        vocab_size: int,
        device: torch.device,
        eos_token_ids: Iterable[int] = (),
        ops: LogitOps = sampling,
    ) -> None:
        """`vocab_size` is the tokenizer's: what a padded model says of higher ids is never looked at."""
        self._vocab_size, self._ops = vocab_size, ops
        self._device = device
        self._eos = [token for token in eos_token_ids if 0 <= token < vocab_size]
        self._adjustments: dict[int, _Adjustments] = {}  # of the rows of the last call

    @torch.inference_mode()
    def __call__(self, logits: Tensor, rows: Sequence[Row]) -> tuple[list[int], dict[int, TopLogprobs]]:
        """Sample from logits float32 `[R, V]`, which it may change; `rows` are the R rows, in order.

        Returns a token per row, -1 where the logits are not finite (NaN or +inf anywhere), and the log-probabilities
        by request id, of the rows that asked for some and got a token.
        """
        logits = logits[:, : self._vocab_size]
        asked = [index for index, row in enumerate(rows) if row.sampling.logprobs >= 0]
        raw = logits[asked] if asked else None  # a copy
        self.change_logits(logits, rows)
        tokens: list[int] = self._choose(logits, rows).tolist()
        if raw is None:
            return tokens, {}
        most = max(rows[index].sampling.logprobs for index in asked)
        entries = self._top(raw, [max(tokens[index], 0) for index in asked], most)
        return tokens, {
            rows[index].request_id: first(entry, rows[index].sampling.logprobs)
            for index, entry in zip(asked, entries, strict=True)
            if tokens[index] >= 0
        }

    @torch.inference_mode()
    def prompt_logprobs(self, logits: Tensor, next_tokens: Sequence[int], top: int) -> list[TopLogprobs]:
        """Log-probabilities of `next_tokens` `[T]` and of the `top` best, given float32 logits `[T, V]`."""
        return self._top(logits[:, : self._vocab_size], next_tokens, top)

    def _choose(self, logits: Tensor, rows: Sequence[Row]) -> Tensor:
        params = [row.sampling for row in rows]
        if all(p.temperature < sampling.GREEDY_BELOW for p in params):
            return sampling.greedy(logits)
        uniform = sampling.uniforms(
            self._column([p.seed for p in params]),
            self._column([p.choice for p in params]),
            self._column([row.position for row in rows]),
        )
        return sampling.sample(
            logits,
            self._column([p.temperature for p in params], torch.float32),
            self._column([p.top_k for p in params]),
            self._column([p.top_p for p in params], torch.float32),
            self._column([p.min_p for p in params], torch.float32),
            uniform,
        )

    def changes_logits(self, rows: Sequence[Row]) -> bool:
        """Whether `change_logits` would do anything."""
        return any(
            row.sampling.logit_bias or has_penalties(row.sampling) or row.position < row.sampling.min_tokens
            for row in rows
        )

    def change_logits(self, logits: Tensor, rows: Sequence[Row]) -> None:
        """Apply bias, penalties and min_tokens to float32 logits `[R, V]`, in place."""
        self._adjust(logits, rows)
        self._forbid(logits, rows)

    def _adjust(self, logits: Tensor, rows: Sequence[Row]) -> None:
        current: dict[int, _Adjustments] = {}
        indices, counts = [], []
        token, bias, repetition, subtract = array("q"), array("f"), array("f"), array("f")
        for index, row in enumerate(rows):
            if not (row.sampling.logit_bias or has_penalties(row.sampling)):
                continue
            known = self._adjustments.get(row.request_id)
            entry = known if known is not None and known.belongs_to(row) else _Adjustments(row)
            entry.update()
            current[row.request_id] = entry
            indices.append(index)
            counts.append(len(entry.token))
            token += entry.token
            bias += entry.bias
            repetition += entry.repetition
            subtract += entry.subtract
        self._adjustments = current
        if token:
            row_index = torch.repeat_interleave(self._column(indices), self._column(counts), output_size=len(token))
            floats = (self._buffer(column, torch.float32) for column in (bias, repetition, subtract))
            self._ops.adjust(logits, row_index, self._buffer(token, torch.int64), *floats)

    def _forbid(self, logits: Tensor, rows: Sequence[Row]) -> None:
        places = [
            (index, token)
            for index, row in enumerate(rows)
            if row.position < row.sampling.min_tokens
            for token in (*self._eos, *row.sampling.stop_token_ids)
        ]
        if places:
            self._ops.forbid(logits, *map(self._column, zip(*places, strict=True)))

    def _top(self, logits: Tensor, tokens: Sequence[int], count: int) -> list[TopLogprobs]:
        if not len(tokens):
            return []
        columns = sampling.top_logprobs(logits, self._column(tokens), min(count, self._vocab_size))
        return entries(tokens, columns)

    def _column(self, values: Sequence[object], dtype: torch.dtype = torch.int64) -> Tensor:
        return self._sent(torch.tensor(values, dtype=dtype))

    def _buffer(self, values: "array[int] | array[float]", dtype: torch.dtype) -> Tensor:
        return self._sent(torch.frombuffer(values, dtype=dtype))

    def _sent(self, column: Tensor) -> Tensor:
        return column.to(self._device)


def entries(tokens: Sequence[int], columns: Sequence[Tensor]) -> list[TopLogprobs]:
    """What `top_logprobs` returned for `tokens`, as messages."""
    return [
        TopLogprobs(token, logprob, pack_i32(ids), values, rank)
        for token, logprob, rank, ids, values in zip(tokens, *(c.tolist() for c in columns), strict=True)
    ]


class _Adjustments:
    """The tokens of one request whose logits change, as parallel columns that follow its output."""

    def __init__(self, row: Row) -> None:
        params = self._params = row.sampling
        self._prompt, self._output = row.prompt, row.output
        self._counts: dict[int, int] = {}  # output tokens taken in so far
        self._taken = 0
        self._place: dict[int, int] = {}
        self.token, self.bias, self.repetition, self.subtract = array("q"), array("f"), array("f"), array("f")
        for token, bias in params.logit_bias.items():
            self.bias[self._at(token)] = bias
        if params.repetition_penalty != 1:
            for token in row.prompt:
                self.repetition[self._at(token)] = params.repetition_penalty

    def belongs_to(self, row: Row) -> bool:
        """Whether these columns were made for an earlier step of `row`: the same lists, which only grow."""
        return (
            self._params is row.sampling
            and self._prompt is row.prompt
            and self._output is row.output
            and self._taken <= len(row.output)
        )

    def update(self) -> None:
        """Take in the output tokens that came since the last call."""
        params = self._params
        if has_penalties(params):
            for token in self._output[self._taken :]:
                place = self._at(token)
                count = self._counts[token] = self._counts.get(token, 0) + 1
                self.repetition[place] = params.repetition_penalty
                self.subtract[place] = params.presence_penalty + params.frequency_penalty * count
            self._taken = len(self._output)

    def _at(self, token: int) -> int:
        place = self._place.setdefault(token, len(self.token))
        if place == len(self.token):
            self.token.append(token)
            self.bias.append(0.0)
            self.repetition.append(1.0)
            self.subtract.append(0.0)
        return place


def first(entry: TopLogprobs, count: int) -> TopLogprobs:
    """`entry` with only the `count` best."""
    return TopLogprobs(entry.token, entry.logprob, entry.top_ids[: 4 * count], entry.top_logprobs[:count], entry.rank)
