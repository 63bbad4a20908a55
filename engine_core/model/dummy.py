"""Random weights of the shapes that a config implies, made where they are used: to measure speed with no checkpoint."""

import math
import zlib

import torch
from torch import Tensor

from engine_core.model.config import ModelConfig
from engine_core.model.weights import Weight4, expected_shapes
from kernels.w4_format import W4Weight

_LINEAR = ("q", "k", "v", "o", "gate", "up", "down")
_SMALL = 0.02  # of embeddings and biases, as models are initialised


class DummyWeights:
    """A `Weights` that no file is behind. A tensor depends on its name and the device alone.

    Activations stay finite: matrices have a gain of 1, and norms too. With a `quantization` in the config, the linear
    weights of layers are in 4 bits, symmetric, as the config tells their groups.
    """

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        self.shapes = expected_shapes(config)
        self._quantization, self._device, self._dtype = config.quantization, device, dtype
        self.total_bytes = sum(map(self.bytes_of, self.shapes))

    def dense(self, name: str) -> Tensor:
        """See `Weights`; in the compute dtype, on the device."""
        if self.group_size(name):
            return self.four_bit(name, self._device).packed.dequantize(self._dtype)
        shape = self.shapes[name]
        out = torch.empty(shape, dtype=self._dtype, device=self._device)
        if name.endswith("norm"):
            return out.fill_(1.0)
        is_linear = name.rpartition(".")[2] in _LINEAR
        return out.normal_(0.0, shape[1] ** -0.5 if is_linear else _SMALL, generator=self._generator(name))

    def group_size(self, name: str) -> int:
        """See `Weights`."""
        if self._quantization is None or name.rpartition(".")[2] not in _LINEAR:
            return 0
        return self._quantization.group_size(self.shapes[name][1])

    def read_to(self, name: str, out: Tensor) -> None:
        """See `Weights`."""
        out.copy_(self.dense(name))

    def will_need(self, name: str) -> None:
        """See `Weights`."""

    def four_bit(self, name: str, device: torch.device) -> Weight4:
        """See `Weights`."""
        rows, columns = self.shapes[name]
        size = self.group_size(name)
        codes = torch.empty((rows, columns // 2), dtype=torch.uint8, device=self._device)
        codes.random_(0, 256, generator=self._generator(name))
        deviation = math.sqrt((16**2 - 1) / 12)  # of codes from 0 to 15
        scales = torch.full((rows, columns // size), columns**-0.5 / deviation, dtype=self._dtype, device=self._device)
        return Weight4(W4Weight(codes, scales, None, None, size))

    def bytes_of(self, name: str) -> int:
        """See `Weights`; as if a file held them."""
        elements = math.prod(self.shapes[name])
        size = self.group_size(name)
        return elements // 2 + elements // size * 2 if size else elements * self._dtype.itemsize

    def _generator(self, name: str) -> torch.Generator:
        return torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
