"""What a step's kernels read of its rows: filled in pinned memory, uploaded at once, at addresses that never change."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_core.plan import UNKNOWN, Row, StepPlan

TOKEN_TILE = 64  # tokens of a mixed step are a multiple: cuBLAS looks for a kernel anew at each new shape
_RING = 3  # uploads in flight at most; a buffer is written again only when its upload has passed
_ALIGNMENT = 16


def padded(tokens: int) -> int:
    """The tokens of a step without a graph, idle ones included."""
    return -(-tokens // TOKEN_TILE) * TOKEN_TILE


class StepInputs:
    """Device tensors of a step: decode rows first, then prefill chunks. Rows beyond a step's own are idle.

    By token (`max_tokens` at most): `tokens`, `positions`, `slots` (block * block_size + slot; -1: not written), int64.
    By row (`max_rows`): `feed` (index into the last step's sampled tokens, or -1), `ends` (last token of the i-th row
    that samples; 0 beyond them), `top_k`, `seed`, `choice`, `position`, int64; `temperature`, `top_p`, `min_p`,
    float32; `lengths` (keys, those of the row's own tokens included; 0: idle), `query_start` (of the prefill rows),
    `tables` `[max_rows, max_blocks]`, int32.
    """

    def __init__(self, max_rows: int, max_tokens: int, max_blocks: int, block_size: int, device: torch.device) -> None:
        max_tokens = padded(max_tokens)
        self.max_rows, self._block_size = max_rows, block_size
        by_token, by_row = (max_tokens,), (max_rows,)
        fields: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            **dict.fromkeys(("tokens", "positions", "slots"), (torch.int64, by_token)),
            **dict.fromkeys(("feed", "ends", "top_k", "seed", "choice", "position"), (torch.int64, by_row)),
            **dict.fromkeys(("temperature", "top_p", "min_p"), (torch.float32, by_row)),
            "lengths": (torch.int32, by_row),
            "query_start": (torch.int32, (max_rows + 1,)),
            "tables": (torch.int32, (max_rows, max_blocks)),  # last: only the rows in use are uploaded
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
    lengths: Tensor
    query_start: Tensor
    tables: Tensor

    def upload(self, plan: StepPlan, sampled_at: Mapping[int, int], bucket: int = 0) -> None:
        """Fill in a plan and start its way to the device, with idle rows up to `bucket`, or idle tokens up to `padded`.

        `sampled_at` says where in the last step's sampled tokens a request's is.
        """
        self._turn = (self._turn + 1) % _RING
        if self._passed:
            self._passed[self._turn].synchronize()  # long passed: the step after next is the first to need it
        host = self._views[self._turn]
        rows = [*plan.decodes, *plan.prefills]
        count = max(len(rows), bucket)
        host["tables"][: len(rows)] = self._mirror[self._mirror_rows(rows)]
        self._fill_decodes(host, plan.decodes, sampled_at)
        self._fill_prefills(host, plan)
        if bucket:
            host["lengths"][len(rows) : bucket], host["feed"][len(rows) : bucket] = 0, -1
        idle = slice(plan.num_tokens, bucket or padded(plan.num_tokens))
        host["tokens"][idle] = host["positions"][idle] = 0
        host["slots"][idle] = -1
        self._fill_sampling(host, [row for row in rows if row.samples])
        size = self._tables_at + count * self._row_bytes
        self._device[:size].copy_(self._pinned[self._turn][:size], non_blocking=True)
        if self._passed:
            self._passed[self._turn].record()

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
        first = at = len(plan.decodes)
        size = self._block_size
        ends = list(range(first))
        host["query_start"][0] = 0
        for number, row in enumerate(plan.prefills):
            stop = row.start + len(row.tokens)
            here = slice(at, at + len(row.tokens))
            positions = np.arange(row.start, stop)
            host["tokens"][here] = row.tokens
            host["positions"][here] = positions
            host["slots"][here] = host["tables"][first + number][positions // size] * size + positions % size
            host["lengths"][first + number] = stop
            at = here.stop
            host["query_start"][number + 1] = at - first
            if row.samples:
                ends.append(at - 1)
        host["ends"][: len(ends)], host["ends"][len(ends) :] = ends, 0

    def _fill_sampling(self, host: dict[str, NDArray[Any]], rows: Sequence[Row]) -> None:
        count = len(rows)
        params = [row.sampling for row in rows]
        for name in ("temperature", "top_p", "min_p", "top_k", "seed", "choice"):
            host[name][:count] = [getattr(one, name) for one in params]
        host["position"][:count] = [row.position for row in rows]
