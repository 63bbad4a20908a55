"""Loading machine code and launching it on torch's current stream, through the driver and ctypes.

A launch packs its arguments into one C struct, in place, and calls cuLaunchKernelEx: about the cost of the driver call.
"""

import ctypes
import functools
import struct
import threading
from collections.abc import Iterable

import torch
from torch import Tensor

from kernels.compiler import Binary, KernelError, Variant, build, compile_variant, target_of

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_PREFERRED_CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, per cent
_STATIC_SHARED = 1  # CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
_SHARED_OPT_IN = 97  # CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
_SHARED_OF_ALL = 81  # CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR
_RESERVED = 1024  # bytes of shared memory that the driver takes for each block
_LAUNCH_CONFIG = struct.Struct("@7I4xPPI4x")  # CUlaunchConfig: grid, block, shared bytes, stream, attributes, how many
_EARLY = struct.pack("@i4xi60x", 6, 1)  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


@functools.cache
def driver() -> ctypes.CDLL:
    """The CUDA driver. Raises KernelError if there is none."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise KernelError(f"no CUDA driver: {error}") from error
    pointer = ctypes.c_void_p
    library.cuLaunchKernelEx.argtypes = [pointer] * 4
    return library


def check(result: int, what: str) -> None:
    """Raise KernelError, with the driver's name of it, unless a driver call has succeeded."""
    if result:
        name = ctypes.c_char_p()
        driver().cuGetErrorName(result, ctypes.byref(name))
        raise KernelError(f"{what}: {(name.value or b'error').decode()} ({result})")


def _driver_number() -> int:
    version = ctypes.c_int()
    check(driver().cuDriverGetVersion(ctypes.byref(version)), "cuDriverGetVersion")
    return version.value


def driver_version() -> str:
    """The CUDA version that the driver supports, as `13.0`."""
    number = _driver_number()
    return f"{number // 1000}.{number % 1000 // 10}"


@functools.cache
def _starts_early(device: int) -> bool:
    """Whether a kernel may start while the one ahead ends, in captured graphs too: Hopper and later, CUDA 12.3."""
    return torch.cuda.get_device_capability(device) >= (9, 0) and _driver_number() >= 12030


@functools.cache
def device_target(device: int) -> str:
    """What to compile for on CUDA device `device`. Raises KernelError if it is too old."""
    major, minor = torch.cuda.get_device_capability(device)
    return target_of(major * 10 + minor, torch.cuda.get_device_name(device), driver_version())


@functools.cache
def _attribute(which: int, device: int) -> int:
    found = ctypes.c_int()
    check(driver().cuDeviceGetAttribute(ctypes.byref(found), which, device), f"attribute {which} of device {device}")
    return found.value


def shared_bytes(device: int) -> int:
    """The most shared memory that a block can have on CUDA device `device`."""
    return _attribute(_SHARED_OPT_IN, device)


class Kernel:
    """One kernel on one device. Not for two threads at once: a launch writes into the kernel's own argument struct.

    `layout` is the struct's format as of the struct module, with native alignment: that of the C struct in the source.
    `early`: see `Variant.is_early`.
    """

    def __init__(
        self, binary: Binary, entry: str, layout: str, threads: int, device: int, shared_bytes: int, early: bool
    ) -> None:
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # makes the context
            module, function = ctypes.c_void_p(), ctypes.c_void_p()
            check(driver().cuModuleLoadData(ctypes.byref(module), binary.image), f"load {entry}")
            check(driver().cuModuleGetFunction(ctypes.byref(function), module, entry.encode()), f"find {entry}")
        if shared_bytes > 48 * 1024:
            check(
                driver().cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, shared_bytes),
                f"{entry} with {shared_bytes} bytes of shared memory",
            )
        self._module = module  # never unloaded: a captured graph may hold the function
        self._function, self._entry, self._threads, self._shared = function, entry, threads, shared_bytes
        self._struct = struct.Struct("@" + layout)
        self._arguments = ctypes.create_string_buffer(self._struct.size)
        self._parameters = (ctypes.c_void_p * 1)(ctypes.addressof(self._arguments))
        self._pack, self._launch, self._device = self._struct.pack_into, driver().cuLaunchKernelEx, device
        self._stream = torch._C._cuda_getCurrentRawStream
        self._config = ctypes.create_string_buffer(_LAUNCH_CONFIG.size)
        self._attributes = ctypes.create_string_buffer(_EARLY)
        self._rest = ctypes.addressof(self._attributes), int(early and _starts_early(device))

    def blocks_per_multiprocessor(self) -> int:
        """How many blocks of this kernel fit on a multiprocessor at once."""
        blocks = ctypes.c_int()
        check(
            driver().cuOccupancyMaxActiveBlocksPerMultiprocessor(
                ctypes.byref(blocks), self._function, self._threads, ctypes.c_size_t(self._shared)
            ),
            f"occupancy of {self._entry}",
        )
        return blocks.value

    def leave_the_rest_to_l1(self) -> None:
        """Take no more of a multiprocessor's memory for shared memory than the blocks that fit on it use.

        For who reads global memory straight to registers: what is under way lies in L1. By default a kernel that starts
        early takes what the one before it has left.
        """
        used = ctypes.c_int()
        check(driver().cuFuncGetAttribute(ctypes.byref(used), _STATIC_SHARED, self._function), self._entry)
        need = self.blocks_per_multiprocessor() * (used.value + self._shared + _RESERVED)
        percent = min(100, -(-100 * need // _attribute(_SHARED_OF_ALL, self._device)))
        check(driver().cuFuncSetAttribute(self._function, _PREFERRED_CARVEOUT, percent), self._entry)

    def resident_clusters(self, blocks: int, shared_bytes: int) -> int:
        """How many clusters of so many blocks, with so much shared memory each, fit on the device at once."""
        found = ctypes.c_int()
        grid = blocks * 1024, 1, 1
        _LAUNCH_CONFIG.pack_into(self._config, 0, *grid, self._threads, 1, 1, shared_bytes, 0, self._rest[0], 0)
        result = driver().cuOccupancyMaxActiveClusters(ctypes.byref(found), self._function, self._config)
        check(result, f"clusters of {self._entry}")
        return found.value

    def __call__(
        self,
        grid: tuple[int, int, int],
        *arguments: int | float | bytes,
        shared_bytes: int | None = None,
        threads: int | None = None,
        early: bool = True,
    ) -> None:
        """Launch on the current stream of torch; safe in a graph capture.

        `shared_bytes`, `threads`: fewer than the kernel's. `early`: False keeps it until the one before it has ended in
        any case.
        """
        self._pack(self._arguments, 0, *arguments)
        stream = self._stream(self._device)
        shared = self._shared if shared_bytes is None else shared_bytes
        attributes, count = self._rest
        _LAUNCH_CONFIG.pack_into(
            self._config, 0, *grid, threads or self._threads, 1, 1, shared, stream, attributes, count if early else 0
        )
        result = self._launch(self._config, self._function, self._parameters, None)
        if result:
            check(result, f"launch {self._entry} on a grid of {grid}")


_loaded: dict[tuple[Variant, int], Kernel] = {}
_lock = threading.Lock()


def kernel(variant: Variant, layout: str, threads: int, device: int, shared_bytes: int = 0) -> Kernel:
    """The kernel of a variant on a device, compiled and loaded once. Load before any graph capture."""
    found = _loaded.get((variant, device))
    if found is None:
        with _lock:
            binary = compile_variant(variant, device_target(device))
            found = _loaded.setdefault(
                (variant, device),
                Kernel(binary, variant.entry, layout, threads, device, shared_bytes, variant.is_early),
            )
    return found


def build_for(variants: Iterable[Variant], device: int) -> None:
    """Compile side by side what `kernel` will then find in the cache. A model's layers all ask for the same."""
    missing = [variant for variant in variants if (variant, device) not in _loaded]
    if missing:
        build((variant, device_target(device)) for variant in missing)


def tensor_map(x: Tensor, box_rows: int, box_columns: int) -> bytes:
    """A CUtensorMap of x `[rows, columns]`, 16-bit floats, for boxes in rows of 128 bytes with the 128-byte swizzle.

    What a box has outside x is zeros. x must be 16-byte aligned, its rows a multiple of 16 bytes apart.
    """
    store = (ctypes.c_uint64 * 32)()
    at = -(-ctypes.addressof(store) // 64) * 64
    sizes, strides = (ctypes.c_uint64 * 2)(x.shape[1], x.shape[0]), (ctypes.c_uint64 * 1)(x.stride(0) * 2)
    box, steps = (ctypes.c_uint32 * 2)(box_columns, box_rows), (ctypes.c_uint32 * 2)(1, 1)
    kind = 9 if x.dtype == torch.bfloat16 else 6  # CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, _FLOAT16
    swizzle, promotion = 3, 3  # CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B
    address = ctypes.c_void_p(x.data_ptr())
    result = driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(at), kind, 2, address, sizes, strides, box, steps, 0, swizzle, promotion, 0
    )
    check(result, f"tensor map of {tuple(x.shape)}")
    return ctypes.string_at(at, 128)


def probe(device: int) -> None:
    """Compile, load and launch the smallest kernel. Raises KernelError that names what is missing."""
    out = torch.zeros(1, dtype=torch.int32, device=f"cuda:{device}")
    kernel(Variant("probe.cu"), "P", 1, device)((1, 1, 1), out.data_ptr())
    if out.item() != 1:
        raise KernelError(
            f"a kernel for {device_target(device)} runs on {torch.cuda.get_device_name(device)} but writes nothing"
        )
