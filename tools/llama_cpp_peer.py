"""llama.cpp as a peer in benchmarks, by its C interface (llama-cpp-python): the file as it is, KV in 16 bits.

The loop calls `llama_decode` itself and takes the largest logit of each sequence. Memory is cleared between runs.
"""

import os
import time
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp import llama_cpp as c

MOST_STREAMS = 16


@c.llama_log_callback
def _silence(level: int, text: bytes, user_data: Any) -> None:
    pass


class Peer:
    """Speeds in tokens per second."""

    def __init__(self, path: Path, threads: int = 0) -> None:
        """`threads` is 0 for one a core. Raises RuntimeError if the file can't be loaded."""
        self.version = llama_cpp.__version__
        c.llama_log_set(_silence, None)
        c.llama_backend_init()
        model = c.llama_model_load_from_file(str(path).encode(), c.llama_model_default_params())
        if not model:
            raise RuntimeError(f"llama.cpp can't load {path.name}")
        params = c.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = MOST_STREAMS * 1024, 2048, 512
        params.n_seq_max, params.kv_unified = MOST_STREAMS, False
        params.n_threads = params.n_threads_batch = threads or len(os.sched_getaffinity(0))
        self._context = c.llama_init_from_model(model, params)
        self._vocab_size = c.llama_vocab_n_tokens(c.llama_model_get_vocab(model))
        self._batch = c.llama_batch_init(params.n_batch, 0, 1)

    def decode(self, prompts: list[list[int]], tokens: int) -> float:
        """Decode `tokens` tokens after prompts of equal length, over all streams, the prefill left out."""
        length = len(prompts[0])
        last = self._forward([(n, at, token) for n, prompt in enumerate(prompts) for at, token in enumerate(prompt)])
        started = time.perf_counter()
        for step in range(tokens):
            last = self._forward([(n, length + step, token) for n, token in enumerate(last)])
        seconds = time.perf_counter() - started
        self._clear()
        return len(prompts) * tokens / seconds

    def prefill(self, prompt: list[int]) -> float:
        """Prefill one prompt."""
        started = time.perf_counter()
        self._forward([(0, at, token) for at, token in enumerate(prompt)])
        seconds = time.perf_counter() - started
        self._clear()
        return len(prompt) / seconds

    def _forward(self, rows: list[tuple[int, int, int]]) -> list[int]:
        """Compute (sequence, position, token) rows in order; the next token of each sequence."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for place, (sequence, position, token) in enumerate(rows):
            is_last = place + 1 == len(rows) or rows[place + 1][0] != sequence
            batch.token[place], batch.pos[place], batch.logits[place] = token, position, is_last
            batch.n_seq_id[place] = 1
            batch.seq_id[place][0] = sequence
        if code := c.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode gave {code}")
        last = [place for place in range(len(rows)) if batch.logits[place]]
        logits = (c.llama_get_logits_ith(self._context, place) for place in last)
        return [int(np.ctypeslib.as_array(row, (self._vocab_size,)).argmax()) for row in logits]

    def _clear(self) -> None:
        c.llama_memory_clear(c.llama_get_memory(self._context), True)
