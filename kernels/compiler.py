"""NVRTC: from a `.cu` file and macros to machine code, with a cache on disk. Needs no GPU and no toolkit headers.

Our own includes are put into the source text, so the cache key covers them. NVRTC comes with `cuda-bindings`, which
the CUDA builds of torch bring, or with CuPy.
"""

import functools
import hashlib
import importlib
import os
import re
import tempfile
import warnings
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

SOURCES = Path(__file__).parent / "cuda"
OLDEST = 80  # compute capability 8.0: cp.async and bfloat16 on the tensor cores
_INCLUDE = re.compile(r'^#include "([\w.]+)"\n', re.MULTILINE)


class KernelError(RuntimeError):
    """A kernel can't be compiled, loaded or launched here; the message says why."""


@dataclass(frozen=True)
class Variant:
    """One translation unit: a file of `kernels/cuda` and its macros; `only` names the one target it is for, if any."""

    file: str
    macros: tuple[tuple[str, int], ...] = ()
    only: str | None = None

    @property
    def entry(self) -> str:
        """The kernel's name: that of the file."""
        return self.file.removesuffix(".cu")

    @property
    def is_early(self) -> bool:
        """Whether it may start before the kernel ahead of it has ended: it waits for that by itself (common.cuh)."""
        return "wait_for_previous();" in (SOURCES / self.file).read_text(encoding="utf-8")


@dataclass(frozen=True)
class Binary:
    """Machine code (cubin) or PTX, and what the assembler said."""

    image: bytes
    log: str

    @property
    def registers(self) -> int:
        """Registers per thread, the most of any kernel in it; 0 for PTX."""
        return max((int(n) for n in re.findall(r"Used (\d+) registers", self.log)), default=0)

    @property
    def spill_bytes(self) -> int:
        """Bytes of registers that are stored to local memory, and of arrays that live there."""
        return sum(map(int, re.findall(r"(\d+) bytes (?:stack frame|spill stores)", self.log)))


class _Nvrtc(Protocol):
    """The few calls of NVRTC that are needed."""

    version: tuple[int, int]
    architectures: tuple[int, ...]

    def compile(self, source: str, name: str, options: tuple[str, ...], ptx: bool) -> tuple[bool, bytes, str]: ...


class _BindingsNvrtc:
    """NVRTC through cuda-bindings."""

    def __init__(self) -> None:
        nvrtc: Any = importlib.import_module("cuda.bindings.nvrtc")
        self._nvrtc = nvrtc
        self.version = tuple(self._checked(nvrtc.nvrtcVersion()))
        self.architectures = tuple(self._checked(nvrtc.nvrtcGetSupportedArchs())[0])

    def _checked(self, result: tuple[Any, ...]) -> tuple[Any, ...]:
        if result[0] != self._nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise KernelError(f"NVRTC: {result[0]!r}")
        return result[1:]

    def compile(self, source: str, name: str, options: tuple[str, ...], ptx: bool) -> tuple[bool, bytes, str]:
        nvrtc, checked = self._nvrtc, self._checked
        (program,) = checked(nvrtc.nvrtcCreateProgram(source.encode(), name.encode(), 0, [], []))
        encoded = [option.encode() for option in options]
        (result,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        log = bytearray(checked(nvrtc.nvrtcGetProgramLogSize(program))[0])
        checked(nvrtc.nvrtcGetProgramLog(program, log))
        image = bytearray()
        if result == nvrtc.nvrtcResult.NVRTC_SUCCESS:
            size, read = (
                (nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX) if ptx else (nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
            )
            image = bytearray(checked(size(program))[0])
            checked(read(program, image))
        checked(nvrtc.nvrtcDestroyProgram(program))
        return bool(image), bytes(image), bytes(log).rstrip(b"\0").decode(errors="replace")


class _CupyNvrtc:
    """NVRTC through CuPy's own bindings, which ask no device."""

    def __init__(self) -> None:
        nvrtc: Any = importlib.import_module("cupy_backends.cuda.libs.nvrtc")
        self._nvrtc = nvrtc
        self.version = tuple(nvrtc.getVersion())
        self.architectures = tuple(nvrtc.getSupportedArchs())

    def compile(self, source: str, name: str, options: tuple[str, ...], ptx: bool) -> tuple[bool, bytes, str]:
        nvrtc = self._nvrtc
        program = nvrtc.createProgram(source, name, (), ())
        try:
            nvrtc.compileProgram(program, options)
            image = nvrtc.getPTX(program) if ptx else nvrtc.getCUBIN(program)
            return True, image, nvrtc.getProgramLog(program)
        except nvrtc.NVRTCError:
            return False, b"", nvrtc.getProgramLog(program)
        finally:
            nvrtc.destroyProgram(program)


@functools.cache
def load_nvrtc() -> _Nvrtc:
    """Find NVRTC. Raises KernelError, naming the packages, if there is none."""
    reasons = []
    for bindings in (_BindingsNvrtc, _CupyNvrtc):
        try:
            return bindings()
        except (ImportError, OSError, RuntimeError) as error:  # RuntimeError: the bindings are there, the library isn't
            reasons.append(str(error).splitlines()[0])
    raise KernelError(
        "NVRTC, the CUDA run-time compiler, is missing: install cuda-bindings and nvidia-cuda-nvrtc, or CuPy "
        f"({'; '.join(reasons)})"
    )


def target_of(capability: int, gpu: str = "GPU", driver: str = "unknown") -> str:
    """What to compile for on compute capability `capability` (80 for 8.0): `sm_N`, or `compute_N` for PTX.

    A GPU that NVRTC does not know yet gets the newest PTX that NVRTC knows, and the driver finishes the work.
    Raises KernelError if the GPU is too old.
    """
    nvrtc = load_nvrtc()
    if capability < max(OLDEST, min(nvrtc.architectures)):
        version = ".".join(map(str, nvrtc.version))
        raise KernelError(
            f"{gpu} has compute capability {capability / 10:.1f}; the kernels need {OLDEST / 10:.1f} or newer and "
            f"NVRTC {version} {min(nvrtc.architectures) / 10:.1f} or newer (driver: CUDA {driver})"
        )
    known = max(a for a in nvrtc.architectures if a <= capability)
    return f"sm_{known}" if known // 10 == capability // 10 else f"compute_{known}"


@functools.cache
def read_source(file: str) -> str:
    """The text of a file of `kernels/cuda`, with our includes inside it, each once."""
    seen = {file}

    def inline(match: re.Match[str]) -> str:
        name = match[1]
        if name in seen:
            return ""
        seen.add(name)
        return _INCLUDE.sub(inline, (SOURCES / name).read_text(encoding="utf-8").replace("#pragma once\n", ""))

    return _INCLUDE.sub(inline, (SOURCES / file).read_text(encoding="utf-8"))


class Cache:
    """Binaries by key: in memory, and on disk in a directory of this user's own where one can be written."""

    def __init__(self, directory: Path | None) -> None:
        self._memory: dict[str, Binary] = {}
        self._directory = directory
        if directory is not None:
            try:
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                if directory.stat().st_uid != os.getuid():
                    raise PermissionError(f"{directory} belongs to another user")
            except OSError as error:
                self._memory_only(error)

    def _memory_only(self, error: OSError) -> None:
        if self._directory is not None:  # one warning, however many kernels follow
            self._directory = None
            warnings.warn(f"compiled kernels are kept in memory only: {error}", RuntimeWarning, stacklevel=2)

    def get(self, key: str) -> Binary | None:
        """What was stored under `key`, or None; a damaged file counts as none."""
        if key not in self._memory and self._directory is not None:
            try:
                data = (self._directory / key).read_bytes()
            except OSError:
                return None
            digest, size, body = data[:32], int.from_bytes(data[32:36], "little"), data[36:]
            if hashlib.sha256(body).digest() != digest:
                return None
            self._memory[key] = Binary(body[size:], body[:size].decode())
        return self._memory.get(key)

    def put(self, key: str, binary: Binary) -> None:
        """Store; other processes see the whole file or none."""
        self._memory[key] = binary
        if self._directory is None:
            return
        log = binary.log.encode()
        body = log + binary.image
        try:
            handle, name = tempfile.mkstemp(dir=self._directory)
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(hashlib.sha256(body).digest() + len(log).to_bytes(4, "little") + body)
                os.replace(name, self._directory / key)
            except OSError:
                os.unlink(name)
                raise
        except OSError as error:
            self._memory_only(error)


@functools.cache
def user_cache() -> Cache:
    """The cache of this user: `$XDG_CACHE_HOME/pagetide/kernels`."""
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # no home directory
        return Cache(None)
    return Cache(base / "pagetide" / "kernels")


def compile_variant(variant: Variant, target: str, cache: Cache | None = None) -> Binary:
    """Compile for `sm_N` (cubin) or `compute_N` (PTX). Raises KernelError with the compiler's words."""
    nvrtc, cache = load_nvrtc(), cache or user_cache()
    source = read_source(variant.file)
    target = variant.only or target
    ptx = target.startswith("compute_")
    options = (
        f"--gpu-architecture={target}",
        "--std=c++17",
        "--restrict",
        *([] if ptx else ["--ptxas-options=-v"]),
        *(f"-D{name}={value}" for name, value in variant.macros),
    )
    key = hashlib.sha256(repr((nvrtc.version, options, source)).encode()).hexdigest()
    found = cache.get(key)
    if found is None:
        good, image, log = nvrtc.compile(source, variant.file, options, ptx)
        if not good:
            raise KernelError(f"{variant.file} {dict(variant.macros)} for {target}:\n{log}")
        found = Binary(image, log)
        cache.put(key, found)
    return found


def build(jobs: Iterable[tuple[Variant, str]], threads: int | None = None, cache: Cache | None = None) -> list[Binary]:
    """Compile (variant, target) pairs side by side; NVRTC releases the GIL. Raises the first KernelError."""
    with ThreadPoolExecutor(threads or os.cpu_count()) as pool:
        return list(pool.map(lambda job: compile_variant(job[0], job[1], cache), jobs))
