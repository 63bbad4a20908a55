"""Names and sizes of KV formats."""

import pytest
import torch

from kernels.kv_format import KVShape, resolve_kv_dtype

QWEN25_3B = KVShape(num_layers=36, num_kv_heads=2, head_dim=128, block_size=16)


@pytest.mark.parametrize("name", ["auto", "fp16", "bf16"])
def test_float_names_mean_the_compute_dtype(name: str) -> None:
    assert resolve_kv_dtype(name, torch.float16).dtype == torch.float16
    assert resolve_kv_dtype(name, torch.float32).name == "fp32"


def test_unknown_name_lists_the_valid_ones() -> None:
    with pytest.raises(ValueError, match="'fp7'; valid names: auto, fp16, bf16"):
        resolve_kv_dtype("fp7", torch.float16)


def test_image_bytes_of_qwen() -> None:
    assert resolve_kv_dtype("auto", torch.float16).image_bytes(QWEN25_3B) == 589_824
