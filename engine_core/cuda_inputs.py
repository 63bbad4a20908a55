"""What a step's kernels read of its rows: filled in pinned memory, uploaded at once, at addresses that never change."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_core.plan import UNKNOWN, Row, StepPlan
from protocol.messages import SamplingParams

_RING = 3  # uploads in flight at most; a buffer is written again only when its upload has passed
_ALIGNMENT = 16


class StepShape(NamedTuple):
    """What a step computes, idle rows and tokens included: decode rows, prefill rows, tokens of both."""

    decodes: int
    prefills: int
    tokens: int


def padded(tokens: int) -> int:
    """The tokens of a step with prefill rows, idle ones included: few shapes; of more than 256 at most a fifth idle."""
    tile = 64 if tokens <= 512 else 128 if tokens <= 1024 else 256
    return -(-tokens // tile) * tile


class StepInputs:
    """Device tensors of a step: tokens of decode rows first, then prefill chunks. What is beyond a step's own is idle.

    By token (`max_tokens` at most): `tokens`, `positions`, `slots` (block * block_size + slot; -1: not written), int64.
    By row (`max_rows`): `feed` (of a decode row: index into the last step's sampled tokens, or -1), `ends` (last token
    of the i-th row that samples; 0 beyond them), `top_k`, `seed`, `choice`, `position`, int64; `temperature`, `top_p`,
    `min_p`, float32; `query_start` (first token of the i-th prefill row, and the end of the last), int32.
    By decode row, then from `max_rows` on by prefill row: `lengths` (keys, those of the row's own tokens included;
    0: idle), `tables` `[2 * max_rows, max_blocks]`, int32.
    """

    def __init__(self, max_rows: int, max_tokens: int, max_blocks: int, block_size: int, device: torch.device) -> None:
        max_tokens = padded(max_tokens)
        self.max_rows, self._block_size = max_rows, block_size
        by_token, by_row = (max_tokens,), (max_rows,)
        fields: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            **dict.fromkeys(("tokens", "positions", "slots"), (torch.int64, by_token)),
            **dict.fromkeys(("feed", "ends", "top_k", "seed", "choice", "position"), (torch.int64, by_row)),
            **dict.fromkeys(("temperature", "top_p", "min_p"), (torch.float32, by_row)),
            "query_start": (torch.int32, (max_rows + 1,)),
            "lengths": (torch.int32, (2 * max_rows,)),
            "tables": (torch.int32, (2 * max_rows, max_blocks)),  # last: only the rows in use are uploaded
        }
        places, end = {}, 0
        for name, (dtype, shape) in fields.items():
            places[name] = end
            end += -(-int(np.prod(shape)) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT

        def views(buffer: Tensor) -> dict[str, Tensor]:
            return {
                name: buffer[places[name] :][: int(np.prod(shape)) * dtype.itemsize].view(dtype).view(shape)
                for name, (dtype, shape) in fields.items()
            }

        self._tables_at, self._row_bytes = places["tables"], max_blocks * 4
        self._device = torch.zeros(end, dtype=torch.uint8, device=device)
        for name, view in views(self._device).items():
            setattr(self, name, view)
        is_cuda = device.type == "cuda"
        self._pinned = [torch.zeros(end, dtype=torch.uint8, pin_memory=is_cuda) for _ in range(_RING)]
        self._views = [{name: view.numpy() for name, view in views(buffer).items()} for buffer in self._pinned]
        self._params: list[list[SamplingParams]] = [[] for _ in range(_RING)]  # that each has, by row
        self._passed = [torch.cuda.Event() for _ in range(_RING * is_cuda)]  # type: ignore[no-untyped-call]
        self._turn = 0
        self._mirror = np.zeros((2 * max_rows, max_blocks), dtype=np.int32)  # block tables of requests seen lately
        self._known: dict[int, tuple[int, Sequence[int], int]] = {}  # by request: row in it, the table, its length

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    feed: Tensor
    ends: Tensor
    top_k: Tensor
    seed: Tensor
    choice: Tensor
    position: Tensor
    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    query_start: Tensor
    lengths: Tensor
    tables: Tensor

    def upload(self, plan: StepPlan, sampled_at: Mapping[int, int], shape: StepShape) -> None:
        """Fill in a plan and start its way to the device, in two pieces if there are prefills, idle up to `shape`.

        `sampled_at` says where in the last step's sampled tokens a request's is.
        """
        self._turn = (self._turn + 1) % _RING
        if self._passed:
            self._passed[self._turn].synchronize()  # long passed: the step after next is the first to need it
        host = self._views[self._turn]
        rows, decodes = [*plan.decodes, *plan.prefills], len(plan.decodes)
        tables = self._mirror[self._mirror_rows(rows)]
        host["tables"][:decodes], host["tables"][self.max_rows :][: len(plan.prefills)] = (
            tables[:decodes],
            tables[decodes:],
        )
        self._fill_decodes(host, plan.decodes, sampled_at)
        self._fill_prefills(host, plan)
        host["lengths"][decodes : shape.decodes], host["feed"][decodes : shape.decodes] = 0, -1
        idle = slice(plan.num_tokens, shape.tokens)
        host["tokens"][idle] = host["positions"][idle] = 0
        host["slots"][idle] = -1
        self._fill_sampling(host, [row for row in rows if row.samples])
        self._send(0, self._tables_at + decodes * self._row_bytes)
        if plan.prefills:
            self._send(self._tables_at + self.max_rows * self._row_bytes, len(plan.prefills) * self._row_bytes)
        if self._passed:
            self._passed[self._turn].record()

    def _send(self, first: int, size: int) -> None:
        part = slice(first, first + size)
        self._device[part].copy_(self._pinned[self._turn][part], non_blocking=True)

    def _mirror_rows(self, rows: Sequence[Row]) -> list[int]:
        """Bring the mirror up to date with the rows' block tables, which only grow; where they are in it."""
        found = []
        for row in rows:
            blocks, known = row.blocks, self._known.get(row.request_id)
            if known is None or known[1] is not blocks:
                place = known[0] if known else self._free_row(rows)
                done = 0
            else:
                place, _, done = known
            if done < len(blocks):
                self._mirror[place, done : len(blocks)] = blocks[done:]
                self._known[row.request_id] = place, blocks, len(blocks)
            found.append(place)
        return found

    def _free_row(self, rows: Sequence[Row]) -> int:
        if len(self._known) == len(self._mirror):
            current = {row.request_id for row in rows}
            self._known = {request: known for request, known in self._known.items() if request in current}
        taken = {known[0] for known in self._known.values()}
        return next(place for place in range(len(self._mirror)) if place not in taken)

    def _fill_decodes(self, host: dict[str, NDArray[Any]], rows: Sequence[Row], sampled_at: Mapping[int, int]) -> None:
        count, size = len(rows), self._block_size
        if not count:
            return
        starts = [row.start for row in rows]
        tokens = [row.tokens[0] for row in rows]
        host["tokens"][:count] = tokens
        host["feed"][:count] = [
            sampled_at[row.request_id] if token == UNKNOWN else -1 for row, token in zip(rows, tokens, strict=True)
        ]
        host["positions"][:count] = starts
        host["lengths"][:count] = [start + 1 for start in starts]
        host["slots"][:count] = [
            row.blocks[start // size] * size + start % size for row, start in zip(rows, starts, strict=True)
        ]

    def _fill_prefills(self, host: dict[str, NDArray[Any]], plan: StepPlan) -> None:
        at = len(plan.decodes)
        size = self._block_size
        ends = list(range(at))
        host["query_start"][0] = at
        for number, row in enumerate(plan.prefills, self.max_rows):
            stop = row.start + len(row.tokens)
            here = slice(at, at + len(row.tokens))
            positions = np.arange(row.start, stop)
            host["tokens"][here] = row.tokens
            host["positions"][here] = positions
            host["slots"][here] = host["tables"][number][positions // size] * size + positions % size
            host["lengths"][number] = stop
            at = here.stop
            host["query_start"][number - self.max_rows + 1] = at
            if row.samples:
                ends.append(at - 1)
        host["query_start"][len(plan.prefills) + 1 :] = at
        host["ends"][: len(ends)], host["ends"][len(ends) :] = ends, 0

    def _fill_sampling(self, host: dict[str, NDArray[Any]], rows: Sequence[Row]) -> None:
        count = len(rows)
        params = [row.sampling for row in rows]
        if params != self._params[self._turn]:  # mostly the very same
            self._params[self._turn] = params
            for name in ("temperature", "top_p", "min_p", "top_k", "seed", "choice"):
                host[name][:count] = [getattr(one, name) for one in params]
        host["position"][:count] = [row.position for row in rows]
