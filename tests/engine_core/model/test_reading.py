"""Bytes of files: to any dtype, through staging buffers, ahead of the loader, and files that are damaged."""

import json
import struct
from pathlib import Path
from threading import Event

import pytest
import torch
from safetensors.torch import save_file

from engine_core.model import reading
from engine_core.model.reading import ModelFile, ReadAhead, Staging, Stored
from engine_core.model.safetensors_file import Unknown, read_safetensors
from engine_core.open_model import open_model
from protocol.config import EngineConfig
from protocol.errors import StartupError
from tools.bench_load import config_of, write

CPU = torch.device("cpu")
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 300,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}


def test_tensors_are_as_the_library_wrote_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_CONVERTED", 100)
    tensors = {
        "a": torch.randn(33, 7, dtype=torch.bfloat16),
        "b": torch.randn(5, dtype=torch.float16),
        "c": torch.randn(3, 50),
        "d": torch.arange(6).view(2, 3),
        "e": torch.zeros(2, dtype=torch.uint8),
    }
    save_file(tensors, tmp_path / "m.safetensors", {"format": "pt"})
    found = read_safetensors(tmp_path / "m.safetensors")
    assert found.pop("e") == Unknown("U8")
    for name, stored in found.items():
        assert isinstance(stored, Stored)
        expected = tensors[name]
        assert torch.equal(stored.read(), expected)
        assert stored.read().dtype == expected.dtype
        for dtype in (torch.float32, torch.bfloat16):
            stored.read_to(out := torch.empty(expected.shape, dtype=dtype))
            assert torch.equal(out, expected.to(dtype))


@pytest.mark.parametrize("size", [1, 999, 1000, 4000, 12_345])
def test_staging_keeps_the_order_of_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(reading, "_CHUNK", 1000)
    content = torch.randint(0, 256, (13_000,), dtype=torch.uint8)
    (tmp_path / "m").write_bytes(bytes(content.tolist()))
    file, staging = ModelFile(tmp_path / "m"), Staging(pinned=False)
    for offset in (0, 17, 650):
        staging.copy(file, offset, out := torch.zeros(size, dtype=torch.uint8))
        assert torch.equal(out, content[offset : offset + size])
    with pytest.raises(StartupError, match="ended while it was read"):
        staging.copy(file, 13_000 - size + 1, torch.zeros(size, dtype=torch.uint8))


def header(entries: object, data: bytes = b"") -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(**changes: object) -> object:
    return {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "can't read"),
        (b"\xff" * 8, "a header of"),
        (header(b"{"), "can't read"),
        (header([1]), "can't read"),
        (header({"x": {}}), "can't read"),
        (header(entry(shape=["2"]), bytes(8)), "has the shape"),
        (header(entry(shape=[-2]), bytes(8)), "has the shape"),
        (header(entry(shape=[3]), bytes(12)), "has 8 bytes, 12 expected"),
        (header(entry(data_offsets=[-4, 4]), bytes(8)), "has the shape"),
        (header(entry(), bytes(7)), "is the download complete"),
        (header(entry(shape=[1 << 40, 1 << 40], data_offsets=[0, 0])), "has the shape"),  # 2^80 is 0 in 64 bits
        (header(entry(shape=[0, 1 << 62, 1 << 62], data_offsets=[0, 0])), "has the shape"),
    ],
)
def test_damaged_safetensors(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "m.safetensors").write_bytes(content)
    with pytest.raises(StartupError, match=message):
        read_safetensors(tmp_path / "m.safetensors")


def test_reading_ahead_stays_a_bit_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_AHEAD", 100)
    asked = [Event() for _ in range(6)]
    with ReadAhead([(event.set, 60) for event in asked]) as ahead:
        assert asked[1].wait(5)
        assert not asked[2].is_set()
        ahead.loaded(60)
        assert asked[2].wait(5)
        assert not asked[3].is_set()
    assert not asked[3].is_set()


@pytest.mark.parametrize("form", ["bf16", "w4", "q8_0", "q4_0"])
def test_weights_that_go_through_staging_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """The way that a GPU's weights take, with buffers that are smaller than most tensors."""
    path = write(tmp_path, config_of(TINY, 0.0, form), form, 200_000)
    config = EngineConfig(model=str(path), dtype="bf16", weights="dense")

    def load() -> list[torch.Tensor]:
        weights = open_model(config, CPU).weights
        assert weights is not None
        return [weights.dense(name) for name in weights.shapes]

    direct = load()
    monkeypatch.setattr(reading, "_CHUNK", 1000)
    staging = Staging(pinned=False)
    monkeypatch.setattr(ModelFile, "read", lambda file, at, out: staging.copy(file, at, out.view(-1).view(torch.uint8)))
    assert all(map(torch.equal, direct, load()))
