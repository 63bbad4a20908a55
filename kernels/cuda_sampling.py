"""CUDA twins of the ops of `kernels.sampling`. Sources: `scan_logits.cu`, `sampling.cu`, `top_logprobs.cu` and more.

Logits are float32, float16 or bfloat16 `[R, V]`; rows may be apart. Every call checks before it launches, and may be
captured into a CUDA graph. Without output tensors, results come from torch's allocator. A row's result depends on that
row alone, bit by bit. It differs from float64 arithmetic only where rounding decides: a draw, a nucleus or a min_p
whose border is within about 1e-6 of the mass.
"""

import torch
from torch import Tensor

from kernels.compiler import KernelError, Variant
from kernels.launcher import kernel

PART = 512
MOST_VOCAB = 1024 * PART
_LOGITS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_ROW_THREADS = 512
_SHARED = 96 << 10  # bytes of a block that works on a row
_SLOT = 1024 + 8192 + 1  # Team::SLOT
_MOST_COUNT = 512
_MOST_BLOCKS = 8  # that share a row


def _variant(file: str, dtype: torch.dtype, logprobs: int | None = None) -> Variant:
    other = ("SHARED", _SHARED) if logprobs is None else ("LOGPROBS", logprobs)
    return Variant(file, (("LOGITS", _LOGITS[dtype]), other))


def all_variants() -> list[Variant]:
    """Everything that these ops can ask for."""
    found = []
    for dtype in _LOGITS:
        found += [_variant("scan_logits.cu", dtype, logprobs) for logprobs in (0, 1)]
        found += [_variant(file, dtype) for file in ("sampling.cu", "top_logprobs.cu", "adjust_logits.cu")]
    return found


def adjust(logits: Tensor, row: Tensor, token: Tensor, bias: Tensor, repetition: Tensor, subtract: Tensor) -> None:
    """As `kernels.sampling.adjust`; places with a negative row, or outside the logits, are skipped."""
    _scatter(logits, row, token, (bias, repetition, subtract))


def forbid(logits: Tensor, row: Tensor, token: Tensor) -> None:
    """As `kernels.sampling.forbid`; places with a negative row, or outside the logits, are skipped."""
    _scatter(logits, row, token, ())


class Sampling:
    """Greedy tokens, draws and log-probabilities, over scratch of its own: calls of one instance share one stream."""

    def __init__(self, max_rows: int, vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
        if dtype not in _LOGITS or not 0 < vocab_size <= MOST_VOCAB or not 0 < max_rows <= 65535:
            raise KernelError(f"logits {dtype} [{max_rows}, {vocab_size}]: at most [65535, {MOST_VOCAB}], and floats")
        if device.type != "cuda":
            raise KernelError(f"no CUDA device: {device}")
        self._dtype = dtype
        self._parts = -(-vocab_size // PART)
        self._summary = torch.empty((max_rows, self._parts, 2), dtype=torch.int64, device=device)
        self._maxima = torch.empty((max_rows, 2, self._parts, 32), dtype=dtype, device=device)
        self._arrived = torch.empty(max_rows, dtype=torch.int32, device=device)
        self._above = torch.empty((max_rows, self._parts), dtype=torch.int32, device=device)
        index = self._summary.device.index
        self._scan = kernel(_variant("scan_logits.cu", dtype, 0), "7Pq2i", 128, index)
        self._scan_logprobs = kernel(_variant("scan_logits.cu", dtype, 1), "7Pq2i", 128, index)
        self._sample = kernel(_variant("sampling.cu", dtype), "15Pq2i", _ROW_THREADS, index, _SHARED)
        self._blocks: int = torch.cuda.get_device_properties(device).multi_processor_count
        self._scratch = torch.empty((self._blocks, _SLOT), dtype=torch.int64, device=device)
        self._logprobs = kernel(_variant("top_logprobs.cu", dtype), "9Pq3i", _ROW_THREADS, index, _SHARED)

    def greedy(self, logits: Tensor, out: Tensor | None = None) -> Tensor:
        """As `kernels.sampling.greedy`: int64 `[R]`."""
        parts = self._check(logits)
        out = _result(out, "out", logits, (len(logits),), torch.int64)
        self._run(logits, parts, [0] * 8, out, None)
        return out

    def sample(
        self,
        logits: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        min_p: Tensor,
        uniform: Tensor | tuple[Tensor, Tensor, Tensor],
        out: Tensor | None = None,
        drawn: Tensor | None = None,
    ) -> Tensor:
        """As `kernels.sampling.sample`; `uniform` may be the int64 columns (seed, choice, position) instead.

        `drawn`, float64 `[R]`, takes the uniform numbers that were used.
        """
        parts = self._check(logits)
        rows = (len(logits),)
        columns = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
        for name, column in columns.items():
            _check_packed(name, column, logits, rows, torch.int64 if name == "top_k" else torch.float32)
        if isinstance(uniform, Tensor):
            _check_packed("uniform", uniform, logits, rows, torch.float64)
            source = [uniform.data_ptr(), 0, 0, 0]
        else:
            for name, column in zip(("seed", "choice", "position"), uniform, strict=True):
                _check_packed(name, column, logits, rows, torch.int64)
            source = [0, *(column.data_ptr() for column in uniform)]
        if drawn is not None:
            _check_packed("drawn", drawn, logits, rows, torch.float64)
        out = _result(out, "out", logits, rows, torch.int64)
        self._run(logits, parts, [*(column.data_ptr() for column in columns.values()), *source], out, drawn)
        return out

    def top_logprobs(
        self, logits: Tensor, token: Tensor, count: int, out: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As `kernels.sampling.top_logprobs`, of which `out` are the four results; equal logits rank by token id."""
        parts = self._check(logits)
        rows, vocab = logits.shape
        if not 0 <= count <= min(vocab, _MOST_COUNT):
            raise KernelError(f"{count} log-probabilities of {vocab}; at most {_MOST_COUNT}")
        _check_packed("token", token, logits, (rows,), torch.int64)
        shapes = (
            ((rows,), torch.float32),
            ((rows,), torch.int64),
            ((rows, count), torch.int64),
            ((rows, count), torch.float32),
        )
        given = out or (None, None, None, None)
        own, rank, ids, values = (
            _result(x, "out", logits, shape, dtype) for x, (shape, dtype) in zip(given, shapes, strict=True)
        )
        if rows:
            scanned, above = (self._summary.data_ptr(), self._maxima.data_ptr()), self._above.data_ptr()
            layout = logits.stride(0) * logits.element_size(), vocab, parts
            grid = -(-parts // 8), rows, 1
            self._scan_logprobs(grid, logits.data_ptr(), 0, token.data_ptr(), *scanned, above, 0, *layout)
            results = (x.data_ptr() for x in (own, rank, ids, values))
            own_part = *scanned, above, token.data_ptr()
            self._logprobs((rows, 1, 1), logits.data_ptr(), *own_part, *results, *layout, count)
        return own, rank, ids, values

    def _check(self, logits: Tensor) -> int:
        _check_logits(logits)
        rows, parts = len(self._summary), -(-logits.shape[1] // PART)
        if logits.dtype != self._dtype or len(logits) > rows or not 0 < parts <= self._parts:
            raise KernelError(
                f"logits {logits.dtype} {tuple(logits.shape)}; made for {self._dtype} [{rows}, {self._parts * PART}]"
            )
        if logits.device != self._summary.device:
            raise KernelError(f"logits on {logits.device}; made for {self._summary.device}")
        return parts

    def _run(self, logits: Tensor, parts: int, columns: list[int], out: Tensor, drawn: Tensor | None) -> None:
        rows, vocab = logits.shape
        if not rows:
            return
        pointer, arrived = logits.data_ptr(), self._arrived.data_ptr()
        scanned = self._summary.data_ptr(), self._maxima.data_ptr()
        layout = logits.stride(0) * logits.element_size(), vocab, parts
        self._scan((-(-parts // 8), rows, 1), pointer, columns[0], 0, *scanned, 0, arrived, *layout)
        last = 0 if drawn is None else drawn.data_ptr()
        blocks = max(1, min(self._blocks // rows, _MOST_BLOCKS if columns[0] else 1))
        own = pointer, *scanned, *columns, out.data_ptr(), last, self._scratch.data_ptr(), arrived
        self._sample((blocks, rows, 1), *own, *layout)


def _scatter(logits: Tensor, row: Tensor, token: Tensor, columns: tuple[Tensor, ...]) -> None:
    _check_logits(logits)
    places = (len(row),)
    _check_packed("row", row, logits, places, torch.int64)
    _check_packed("token", token, logits, places, torch.int64)
    for name, column in zip(("bias", "repetition", "subtract"), columns, strict=False):
        _check_packed(name, column, logits, places, torch.float32)
    if not len(row):
        return
    kernel(_variant("adjust_logits.cu", logits.dtype), "6Pq3i", 256, logits.device.index)(
        (-(-len(row) // 256), 1, 1),
        logits.data_ptr(),
        row.data_ptr(),
        token.data_ptr(),
        *([column.data_ptr() for column in columns] or (0, 0, 0)),
        logits.stride(0) * logits.element_size(),
        len(row),
        *logits.shape,
    )


def _result(given: Tensor | None, name: str, like: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if given is None:
        return torch.empty(shape, dtype=dtype, device=like.device)
    _check_packed(name, given, like, shape, dtype)
    return given


def _check_packed(name: str, x: Tensor, like: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if x.dtype != dtype or x.shape != shape or not x.is_contiguous() or x.device != like.device:
        raise KernelError(
            f"{name}: {x.dtype} {tuple(x.shape)} on {x.device}; wanted {dtype} {shape}, packed, on {like.device}"
        )


def _check_logits(logits: Tensor) -> None:
    if logits.dtype not in _LOGITS or logits.dim() != 2 or logits.stride(1) != 1 or not logits.is_cuda:
        raise KernelError(
            f"logits: {logits.dtype} {tuple(logits.shape)} strides {logits.stride()} on {logits.device}; wanted "
            "float32, float16 or bfloat16 [rows, vocabulary], rows packed, on a CUDA device"
        )
