"""The pool's real size; which layers keep K in 16 bits."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from engine_core.kv_store import KVStore, outlier_layers, parse_layers
from engine_core.model.weights import Weight4
from kernels.kv_format import KVShape, block_layout, resolve_kv_dtype


@pytest.mark.parametrize(("name", "size"), [("auto", 589_824), ("int8", 299_520), ("fp8", 294_912), ("e5m2", 294_912)])
def test_the_pool_is_what_the_layout_says(name: str, size: int) -> None:
    layout = block_layout(KVShape(36, 2, 128, 16), resolve_kv_dtype(name, torch.float16), torch.float16)
    store = KVStore(layout, 3, torch.device("cpu"))
    assert store.pool.untyped_storage().nbytes() == 3 * size
    assert store.pool.shape == (3, size)


@pytest.mark.parametrize(("text", "layers"), [("none", ()), ("0,27", (0, 27)), ("3", (3,)), ("5, 2,5", (2, 5))])
def test_lists_of_layers(text: str, layers: tuple[int, ...]) -> None:
    assert parse_layers(text, 28) == layers


@pytest.mark.parametrize("text", ["", "28", "-1", "0,x", "0;1", "1.5", "0,,1"])
def test_bad_lists_are_named(text: str) -> None:
    with pytest.raises(ValueError, match=f"'{text}' is not auto, none or a list of layers from 0 to 27"):
        parse_layers(text, 28)


class Biases:
    """Weights of which only the key biases are asked."""

    total_bytes = 0

    def __init__(self, norms: list[list[float]]) -> None:
        """Norms by layer and KV head."""
        self._norms = norms

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {f"layers.{n}.k.bias": (len(heads) * 4,) for n, heads in enumerate(self._norms)}

    def dense(self, name: str) -> Tensor:
        heads = self._norms[int(name.split(".")[1])]
        return torch.tensor([[0.0, -norm, 0.0, 0.0] for norm in heads]).flatten()

    def group_size(self, name: str) -> int:
        return 0

    def four_bit(self, name: str) -> Weight4:
        raise NotImplementedError

    def bytes_of(self, name: str) -> int:
        return 0


def test_outliers_are_measured_by_kv_head_against_the_median_layer() -> None:
    """As in Qwen2.5-7B: the first and the last layer, in one of their heads."""
    norms = [[605.0, 9.0], [22.0, 20.0], [21.0, 23.0], [25.0, 200.0], [3.0, 921.0]]
    assert outlier_layers(Biases(norms), 5, 2) == ()  # the median layer has 200
    norms[3] = [25.0, 24.0]
    assert outlier_layers(Biases(norms), 5, 2) == (0, 4)
    assert outlier_layers(Biases([[1.0, 1.0]] * 4), 4, 2) == ()
    assert outlier_layers(Biases([[0.0, 0.0]] * 4), 4, 2) == ()
    assert outlier_layers(Biases([]), 4, 2) == ()  # a model without key biases
