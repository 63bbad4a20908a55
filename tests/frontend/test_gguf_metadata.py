from pathlib import Path
from typing import Any

import gguf
import pytest

from frontend.gguf_metadata import read_gguf_metadata
from protocol.errors import StartupError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    writer = gguf.GGUFWriter(tmp_path / "all.gguf", "llama")
    writer.add_uint8("u8", 200)
    writer.add_int16("i16", -3)
    writer.add_float64("f64", 0.25)
    writer.add_uint64("u64", 1 << 40)
    writer.add_bool("flag", True)
    writer.add_string("text", "grüße 🌍")
    writer.add_array("strings", ["a", "", "世界"])
    writer.add_array("ints", [1, -2, 3])
    writer.add_array("floats", [0.5, -1.5])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return tmp_path / "all.gguf"


def test_values_equal_the_gguf_library(file: Path) -> None:
    fields = gguf.GGUFReader(file).fields
    expected: dict[str, Any] = {k: f.contents() for k, f in fields.items() if not k.startswith("GGUF.")}
    assert read_gguf_metadata(file) == expected
    assert expected["strings"] == ["a", "", "世界"]


def test_every_truncation_is_a_startup_error(file: Path) -> None:
    data = file.read_bytes()
    end = data.index(b"floats") + len("floats") + 4 + 4 + 8 + 8
    for size in range(0, end - 1, 3):
        file.write_bytes(data[:size])
        with pytest.raises(StartupError, match="not a readable GGUF file"):
            read_gguf_metadata(file)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"GGML" + data[4:],
        lambda data: data[:4] + b"\x00\x00\x00\x03" + data[8:],  # big-endian version 3
        lambda data: data[:16] + b"\xff" * 8 + data[24:],  # 2**64 - 1 keys
        lambda data: data.replace(b"u8\x00\x00\x00\x00", b"u8\x63\x00\x00\x00"),  # an unknown value type
        lambda data: data.replace(b"strings\x09\x00\x00\x00\x08", b"strings\x09\x00\x00\x00\x0c"),
    ],
)
def test_damage_is_a_startup_error(file: Path, damage: Any) -> None:
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(StartupError):
        read_gguf_metadata(file)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="nothing"):
        read_gguf_metadata(tmp_path / "nothing.gguf")
