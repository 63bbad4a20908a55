"""The device of the model: its dtype, threads, memory."""

import ctypes
import os
import sys

import torch

from protocol.errors import StartupError

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def open_device(name: str) -> torch.device:
    """The torch device of `--device`. Raises StartupError if there is none."""
    if name == "cpu":
        return torch.device("cpu")
    raise StartupError(f"--device {name} is not supported yet")


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


def set_threads(count: int) -> None:
    """Use `count` CPU threads in torch; 0: as many as there are cores for us, at most 8."""
    torch.set_num_threads(count or min(len(os.sched_getaffinity(0)), 8))


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
