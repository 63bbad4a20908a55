"""Checkpoints: tied or not, sharded or not, damaged, and tensors that don't belong."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file

from engine_core.model.config import ModelConfig, RopeConfig
from engine_core.model.gguf_file import GGUFFile
from engine_core.model.weights_gguf import GGUFWeights
from engine_core.open_model import open_model
from protocol.config import EngineConfig
from protocol.errors import StartupError

from .conftest import Oracle

CPU = torch.device("cpu")


@pytest.fixture
def folder(oracle: Callable[[str], Oracle], tmp_path: Path) -> Path:
    """A copy of the tied Qwen2 checkpoint, to be changed."""
    for file in oracle("qwen2").folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def change(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace, add or (None) drop tensors of model.safetensors."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in changes.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, path)


def open_folder(folder: Path) -> ModelConfig:
    return open_model(EngineConfig(model=str(folder)), CPU).config


def test_explicit_head_wins_over_tied(folder: Path) -> None:
    assert open_folder(folder).tied_embeddings
    change(folder, **{"lm_head.weight": torch.randn(160, 64)})
    assert not open_folder(folder).tied_embeddings


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("model.norm.weight", None, "lacks norm"),
        ("model.layers.1.mlp.up_proj.weight", torch.zeros(95, 64), r"layers\.1\.up is \(95, 64\), not \(96, 64\)"),
        ("model.layers.0.mlp.shared.weight", torch.zeros(1), r"unknown tensors model\.layers\.0\.mlp\.shared"),
        ("model.layers.2.self_attn.o_proj.bias", torch.zeros(64), r"unknown tensors layers\.2\.o\.bias"),
        ("model.norm.weight", torch.zeros(64, dtype=torch.int8), "type I8"),
    ],
)
def test_wrong_tensors_are_named(folder: Path, name: str, tensor: torch.Tensor | None, message: str) -> None:
    change(folder, **{name: tensor})
    with pytest.raises(StartupError, match=message):
        open_folder(folder)


def test_computed_frequencies_are_ignored(folder: Path) -> None:
    change(folder, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(16)})
    open_folder(folder)


def test_shards(oracle: Callable[[str], Oracle], folder: Path) -> None:
    source = oracle("qwen3").folder
    assert len(list(source.glob("*.safetensors"))) > 1
    for file in [*folder.glob("*.safetensors"), *source.iterdir()]:
        if file.parent == folder:
            file.unlink()
        else:
            (folder / file.name).write_bytes(file.read_bytes())
    open_folder(folder)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.extra.weight"] = next(iter(content["weight_map"].values()))
    index.write_text(json.dumps(content))
    with pytest.raises(StartupError, match=r"lacks model\.extra\.weight"):
        open_folder(folder)
    sorted(folder.glob("*.safetensors"))[0].write_bytes(b"broken")
    with pytest.raises(StartupError, match="can't read"):
        open_folder(folder)


def test_vocabulary_is_the_tokenizer_s(folder: Path) -> None:
    """A model padded beyond its tokenizer must not sample the padding."""
    tokenizer = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 150, "content": "<x>"}]}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert open_model(EngineConfig(model=str(folder)), CPU).vocab_size == 151


@pytest.mark.parametrize(
    "kind", [Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.BF16, Kind.Q4_0, Kind.Q4_1]
)
def test_gguf_types(tmp_path: Path, kind: Kind) -> None:
    """Every type reads as the gguf library's dequantize; 4-bit codes, scales and minima say the same."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(0).integers(0, 60, (6, 512 // block * size), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen2")
    writer.add_tensor("blk.0.ffn_up.weight", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    config = ModelConfig("qwen2", 8, 512, 6, 1, 1, 1, 512, 1e-5, 8, RopeConfig(), (0,))
    weights = GGUFWeights(GGUFFile(tmp_path / "m.gguf"), config)
    expected = torch.from_numpy(gguf.quants.dequantize(raw, kind))
    torch.testing.assert_close(weights.dense("layers.0.up").float(), expected, rtol=0, atol=0)
    assert weights.group_size("layers.0.up") == (32 if kind in (Kind.Q4_0, Kind.Q4_1) else 0)
    if weights.group_size("layers.0.up"):
        parts = weights.four_bit("layers.0.up", CPU)
        found = parts.packed.dequantize(torch.float32)
        found += 0 if parts.minima is None else parts.minima.repeat_interleave(32, 1)
        torch.testing.assert_close(found, expected)


def test_unsupported_gguf_type_is_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen2")
    writer.add_tensor("blk.0.ffn_up.weight", np.zeros((1, 66), np.uint8), raw_dtype=Kind.IQ2_XXS)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    config = ModelConfig("qwen2", 8, 256, 6, 1, 1, 1, 256, 1e-5, 8, RopeConfig(), (0,))
    with pytest.raises(StartupError, match="IQ2_XXS"):
        GGUFWeights(GGUFFile(tmp_path / "m.gguf"), config)


@pytest.mark.parametrize(
    ("name", "raw", "kind", "message"),
    [
        ("blk.0.attn_norm.weight", np.zeros(18, np.uint8), Kind.Q4_0, "has type Q4_0, which is not supported"),
        ("rope_freqs.weight", np.ones(7, np.float32), Kind.F32, r"is \(7,\), and head_dim is 256"),
    ],
)
def test_vectors_that_make_no_sense(tmp_path: Path, name: str, raw: Any, kind: Kind, message: str) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen2")
    writer.add_tensor(name, raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    config = ModelConfig("qwen2", 8, 256, 6, 1, 1, 1, 256, 1e-5, 8, RopeConfig(), (0,))
    with pytest.raises(StartupError, match=message):
        _ = GGUFWeights(GGUFFile(tmp_path / "m.gguf"), config).rope_divisors


def test_rows_of_whole_blocks_alone(tmp_path: Path) -> None:
    """In all, these two rows have as many elements as three blocks."""
    name = b"blk.0.ffn_up.weight"
    content = struct.pack("<4sIQQ", b"GGUF", 3, 1, 0) + struct.pack("<Q", len(name)) + name
    content += struct.pack("<IQQIQ", 2, 48, 2, Kind.Q4_0, 0)
    (tmp_path / "m.gguf").write_bytes(content + bytes(200))
    with pytest.raises(StartupError, match="has rows of 48"):
        GGUFFile(tmp_path / "m.gguf")
