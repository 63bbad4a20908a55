"""The checkpoints that bench_load writes are as large as asked and load; a load is measured in a process of its own."""

import json
from pathlib import Path

import pytest
import torch

from engine_core.model.config import from_hf
from engine_core.open_model import load_decoder, open_model
from protocol.config import EngineConfig
from tools.bench_load import cached_share, config_of, files, in_process, measure, parser, read_all, write

CPU = torch.device("cpu")
CONFIG = json.loads((Path(__file__).parents[1] / "data/configs/qwen2.5-3b/config.json").read_text())
TINY = CONFIG | {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1}
TINY |= {"vocab_size": 300, "num_hidden_layers": 2, "head_dim": 64}
FORMS = ["bf16", "w4", "q8_0", "q4_0"]


@pytest.mark.parametrize("form", FORMS)
def test_checkpoints_load(tmp_path: Path, form: str) -> None:
    path = write(tmp_path, config_of(TINY, 0.0, form), form, 200_000)
    assert len(files(tmp_path)) == 1 if form.startswith("q") else len(files(tmp_path)) > 1
    read_all(tmp_path)
    assert cached_share(tmp_path) == 1.0
    model = open_model(EngineConfig(model=str(path), dtype="bf16"), CPU)
    progress: list[tuple[int, int]] = []
    load_decoder(model, str(path), lambda done, total: progress.append((done, total)))
    assert progress == sorted(progress)
    assert progress[-1][0] == progress[-1][1] > 0


@pytest.mark.parametrize("form", FORMS)
def test_as_many_layers_as_fill_the_size(form: str) -> None:
    layers = from_hf(config_of(CONFIG, 2.0, form)).num_layers
    assert layers == {"bf16": 9, "w4": 35, "q8_0": 20, "q4_0": 42}[form]
    assert from_hf(config_of(CONFIG, 0.0, form)).num_layers == 36


def test_measuring(tmp_path: Path) -> None:
    model = write(tmp_path, config_of(TINY, 0.0, "bf16"), "bf16", 200_000)
    row = measure(tmp_path, model, "bf16", "dense", parser().parse_args(["--iterations", "1", "--threads", "1"]))
    assert row["cold_ratio"] == row["cold_load"] / row["cold_read"]
    assert row["gigabytes"] * 1e9 == sum(file.stat().st_size for file in files(tmp_path))
    assert min(row["warm_load"], row["cpu"], row["extra_mb"]) >= 0


def test_a_load_that_fails_ends(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="the load ended with 1"):
        in_process(EngineConfig(model=str(tmp_path / "nothing"), threads=1))
