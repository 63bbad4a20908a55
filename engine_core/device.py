"""The device of the model: its dtype, threads, memory."""

import contextlib
import ctypes
import os
import sys
import time
from collections.abc import Callable

import torch

from protocol.errors import StartupError

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def open_device(name: str) -> torch.device:
    """The torch device of `--device`. Raises StartupError if there is none."""
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise StartupError(f"--device {name}: torch {torch.__version__} sees no CUDA device")
    return torch.device("cuda", torch.cuda.current_device())


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of `--dtype`; auto is bfloat16 where the CPU multiplies it natively, else float32."""
    if name != "auto":
        return _DTYPES[name]
    return torch.bfloat16 if device.type != "cpu" or has_fast_bf16() else torch.float32


def has_fast_bf16() -> bool:
    """Whether this CPU has bfloat16 dot products."""
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            flags = next((line for line in file if line.startswith("flags")), "")
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags


class StepThreads:
    """How many CPU threads a step gets: one while it is small, else all.

    Threads meet at a barrier after each op. In a small step that gains little, and costs much when one of them has to
    wait for its core, which in a machine with other busy processes is often: 29 instead of 57 tokens/s on two cores.
    """

    WORTH_SHARING = 400e-6  # seconds of one thread's work in a layer (measured: at 300, two threads gain 20 %)
    _TRIALS = (1, 2, 3, 4, 8, 16)  # tokens in a step

    def __init__(self, count: int) -> None:
        """`count` threads at most; 0: as many as there are cores for us, at most 8."""
        self._most = count or min(len(os.sched_getaffinity(0)), 8)
        self._share_from = 1
        torch.set_num_threads(self._most)

    def measure(self, run_step: Callable[[int], object], num_layers: int) -> None:
        """Find from how many tokens on a step is worth sharing; `run_step(n)` computes one of n tokens."""
        if self._most == 1:
            return
        for tokens in self._TRIALS:
            self._share_from = tokens + 1
            run_step(tokens)
            started = time.perf_counter()
            run_step(tokens)
            if time.perf_counter() - started > self.WORTH_SHARING * num_layers:
                self._share_from = tokens
                return

    def use_for(self, num_tokens: int) -> None:
        """Set torch's threads for a step of so many tokens."""
        torch.set_num_threads(1 if num_tokens < self._share_from else self._most)


def keep_freed_memory() -> None:
    """Tell glibc to keep freed activations instead of returning them: page faults are a third of a prefill's time."""
    if sys.platform == "linux":
        try:
            mallopt = ctypes.CDLL(None).mallopt
        except (OSError, AttributeError):  # not glibc
            return
        m_trim_threshold, m_mmap_threshold = -1, -3
        mallopt(m_mmap_threshold, 1 << 30)
        mallopt(m_trim_threshold, 1 << 30)


def give_back_memory() -> None:
    """Return to the system what the C library keeps of freed memory, after a load: 0.2 to 0.4 GB (measured)."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # not glibc
            ctypes.CDLL(None).malloc_trim(0)


def free_memory(device: torch.device) -> tuple[int, int]:
    """Bytes free and in total on the device; for the CPU, RAM that can be had without swapping."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)
    page = os.sysconf("SC_PAGE_SIZE")
    total = os.sysconf("SC_PHYS_PAGES") * page
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            lines = dict(line.split(":", 1) for line in file)
        return int(lines["MemAvailable"].split()[0]) * 1024, total
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_AVPHYS_PAGES") * page, total
