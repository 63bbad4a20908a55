"""Checkpoints in GPTQ, AWQ and compressed-tensors form: logits, bytes, and what is refused."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine_core.memory import describe_plan
from engine_core.model.quantization import read_quantization
from engine_core.open_model import open_model
from engine_core.plan import StepPlan
from protocol.config import EngineConfig
from protocol.errors import StartupError

from .conftest import Oracle
from .test_decoder import TOLERANCE, make_row, open_runner, prompt, step_logits
from .w4_writer import Format, quantization_config, write_w4

CT = "compressed-tensors"
FORMATS = [
    Format("gptq", 32),
    Format("gptq", 64, symmetric=True, shards=3),
    Format("gptq", 128, version=2),
    Format("gptq", -1, desc_act=True),
    Format("gptq", 32, desc_act=True, head=True),
    Format("gptq", 64, version=2, desc_act=True),
    Format("awq", 32, head=True),
    Format("awq", 128, shards=2),
    Format("awq", -1),
    Format(CT, 32),
    Format(CT, 128, symmetric=True, head=True),
    Format(CT, -1, symmetric=True),
    Format(CT, 64, desc_act=True, shards=2),
]


@contextmanager
def as_written(made: Oracle, folder: Path, form: Format) -> Iterator[None]:
    """The oracle with the weights that its checkpoint in `form` has."""
    before = {name: tensor.clone() for name, tensor in made.model.state_dict().items()}
    made.model.load_state_dict(write_w4(made.model, folder, form))
    try:
        yield
    finally:
        made.model.load_state_dict(before)


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_formats(oracle: Callable[[str], Oracle], tmp_path: Path, form: Format) -> None:
    """FP32 dequantises and equals transformers with those weights; bfloat16 keeps the bits and stays close."""
    made = oracle("wide")
    with as_written(made, tmp_path, form):
        ids = prompt(24)
        expected = made.logits(ids)
        (logits,) = step_logits(open_runner(tmp_path), [], [make_row(1, ids, 0, 24, [5, 1])])
        torch.testing.assert_close(logits, expected, **TOLERANCE)
        runner = open_runner(tmp_path, dtype="bf16", weights="int4")
        (many,) = step_logits(runner, [], [make_row(1, ids, 0, 24, [0, 1])])
        few = torch.cat([step_logits(runner, [make_row(2, ids, n, 1, [2, 3])], [])[0] for n in range(24)])
        for logits in (many, few):
            assert (logits - expected).norm() / expected.norm() < 0.06


@pytest.mark.parametrize("method", ["gptq", "awq", CT])
@pytest.mark.parametrize("case", ["llama-tied-bias", "mistral-window", "qwen2", "qwen3", "gemma3"])
def test_architectures(oracle: Callable[[str], Oracle], tmp_path: Path, case: str, method: str) -> None:
    made = oracle(case)
    with as_written(made, tmp_path, Format(method)):
        ids = prompt(40)
        (logits,) = step_logits(open_runner(tmp_path), [], [make_row(1, ids, 0, 40, [5, 1, 3])])
        torch.testing.assert_close(logits, made.logits(ids), **TOLERANCE)


DATA = Path(__file__).parents[2] / "data" / "w4"


@pytest.mark.parametrize("name", ["gptq", "gptq_v2", "awq", CT, f"{CT}-asymmetric"])
def test_checkpoints_that_the_libraries_wrote(name: str) -> None:
    """Weights as each library dequantises them, in float16 (see make.py there); the model runs with them."""
    weights = open_folder(DATA / name).weights
    for part, expected in load_file(DATA / name / "expected.safetensors").items():
        assert weights.group_size(f"layers.0.{part}") == (expected.shape[1] if name == "gptq_v2" else 32)
        torch.testing.assert_close(weights.dense(f"layers.0.{part}"), expected.float(), rtol=1e-3, atol=1e-6)
    assert (weights.four_bit("layers.0.q", torch.device("cpu")).packed.order is not None) == (name == "gptq")
    logits = step_logits(open_runner(DATA / name), [], [make_row(1, prompt(24), 0, 24, [0, 1])])[0]
    assert logits.isfinite().all()


@pytest.fixture
def folder(oracle: Callable[[str], Oracle], tmp_path: Path) -> Path:
    write_w4(oracle("llama").model, tmp_path, Format("gptq", 32))
    return tmp_path


def open_folder(folder: Path, **options: Any) -> Any:
    return open_model(EngineConfig(model=str(folder), **options), torch.device("cpu"))


def change(folder: Path, changes: dict[str, torch.Tensor | None]) -> None:
    tensors = load_file(folder / "model.safetensors") | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / "model.safetensors")


def test_biases_of_zeros_are_left_out_and_others_are_not(folder: Path) -> None:
    name = "model.layers.0.mlp.up_proj.bias"
    change(folder, {name: torch.zeros(96)})
    open_folder(folder)
    change(folder, {name: torch.ones(96)})
    with pytest.raises(StartupError, match=r"unknown tensors layers\.0\.up\.bias"):
        open_folder(folder)


def test_names_and_places_of_old_checkpoints(folder: Path) -> None:
    """gptq_model-4bit-32g.safetensors, and what AutoGPTQ wrote beside config.json."""
    (folder / "model.safetensors").rename(folder / "gptq_model-4bit-32g.safetensors")
    config = json.loads((folder / "config.json").read_text())
    beside = config.pop("quantization_config")
    del beside["quant_method"]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "quantize_config.json").write_text(json.dumps(beside))
    assert open_folder(folder).weights.group_size("layers.0.q") == 32


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("qzeros", None, r"layers\.0\.up lacks qzeros"),
        ("scales", torch.zeros(3, 96), "3 groups in 64 input features; its config says 32"),
        ("scales", torch.zeros(1, 96), "1 groups in 64 input features; its config says 32"),
        ("scales", torch.zeros(0, 96), r"layers\.0\.up lacks scales"),
        ("scales", torch.zeros(()), r"layers\.0\.up has parts of the wrong shape"),
        ("qweight", torch.zeros(8, dtype=torch.int32), r"layers\.0\.up has parts of the wrong shape"),
        ("qweight", torch.zeros(8, 96, dtype=torch.int16), "type I16"),
        ("qweight", torch.zeros(8, 95, dtype=torch.int32), r"layers\.0\.up is \(95, 64\), not \(96, 64\)"),
    ],
)
def test_wrong_tensors_are_named(folder: Path, name: str, tensor: torch.Tensor | None, message: str) -> None:
    change(folder, {f"model.layers.0.mlp.up_proj.{name}": tensor})
    with pytest.raises(StartupError, match=message):
        open_folder(folder)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("g_idx", torch.zeros(64, dtype=torch.int32), r"layers\.1\.gate: g_idx does not put 32"),
        ("qzeros", torch.zeros(2, 11, dtype=torch.int32), r"layers\.1\.gate: zeros"),
    ],
)
def test_wrong_data_is_named(folder: Path, name: str, tensor: torch.Tensor, message: str) -> None:
    change(folder, {f"model.layers.1.mlp.gate_proj.{name}": tensor})
    with pytest.raises(StartupError, match=message):
        open_runner(folder)


@pytest.mark.parametrize(
    ("part", "tensor", "message"),
    [
        ("weight_shape", torch.tensor(96), "parts of the wrong shape"),
        ("weight_shape", torch.tensor([[96], [64]]), "parts of the wrong shape"),
        ("weight_zero_point", torch.zeros(0, 2, dtype=torch.int32), "lacks weight_zero_point"),
    ],
)
def test_wrong_parts_of_compressed_tensors_are_named(
    oracle: Callable[[str], Oracle], tmp_path: Path, part: str, tensor: torch.Tensor, message: str
) -> None:
    write_w4(oracle("llama").model, tmp_path, Format(CT, 32))
    change(tmp_path, {f"model.layers.0.mlp.up_proj.{part}": tensor})
    with pytest.raises(StartupError, match=message):
        open_folder(tmp_path)


def test_products_beyond_float16_end_the_request(folder: Path) -> None:
    """Logits that are not finite give -1, which the core reports as that request's error; never some token's id."""
    name = "model.layers.1.mlp.down_proj.scales"
    change(folder, {name: torch.full_like(load_file(folder / "model.safetensors")[name], 6e4)})
    for dtype, is_finite in (("fp16", False), ("bf16", True)):
        runner = open_runner(folder, dtype=dtype)
        result = runner.launch(StepPlan(0, [], [make_row(1, prompt(8), 0, 8, [5])])).tokens()
        assert (result.tokens[0] >= 0) == is_finite


def test_packed_tensors_without_a_config_are_unknown(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": None}))
    with pytest.raises(StartupError, match="g_idx has type int32"):
        open_folder(folder)


@pytest.mark.parametrize(
    ("method", "change", "named"),
    [
        ("gptq", {"quant_method": "bitsandbytes"}, "quant_method = 'bitsandbytes'"),
        ("gptq", {"quant_method": None, "desc_act": None}, "bits = 3"),
        ("gptq", {"bits": 8}, "bits = '8'"),
        ("gptq", {"bits": None}, "bits = 'None'"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format.*marlin"),
        ("gptq", {"format": "gptq_v2"}, "checkpoint_format"),
        ("gptq", {"is_marlin_format": True}, "is_marlin_format"),
        ("gptq", {"group_size": 48}, "group_size = '48'"),
        ("gptq", {"group_size": 0}, "group_size = '0'"),
        ("gptq", {"dynamic": {r"+:.*\.down_proj": {"bits": 8}}}, "dynamic"),
        ("gptq", {"adapter": {"name": "lora"}}, "adapter"),
        ("gptq", {"pack_dtype": "int16"}, "pack_dtype"),
        ("awq", {"version": "gemv"}, "version.*gemv"),
        ("awq", {"backend": "llm-awq"}, "llm-awq"),
        (CT, {"format": "int-quantized"}, "int-quantized"),
        (CT, {"format": None}, "format = 'None'"),
        (CT, {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        (CT, {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        (CT, {"transform_config": {"config_groups": {}}}, "transform_config"),
        (CT, {"config_groups": {}}, "config_groups"),
        (CT, {"config_groups": {"group_0": "W4A16"}}, "group_0 weights"),
        (CT, {"sparsity_config": "dense"}, "sparsity_config"),
    ],
)
def test_what_is_refused(method: str, change: dict[str, Any], named: str) -> None:
    config = quantization_config(Format(method)) | change
    if named == "bits = 3":
        config, named = {"bits": 3}, "quant_method"
    with pytest.raises(StartupError, match=named):
        read_quantization(config)


def test_an_entry_that_is_no_object() -> None:
    with pytest.raises(StartupError, match="not a JSON object"):
        read_quantization("gptq")


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("input_activations", {"num_bits": 8}, "group_0 input_activations"),
        ("weights", None, "group_0 weights"),
        ("format", "nvfp4-pack-quantized", "group_0 format"),
        ("weights.num_bits", 8, "weights num_bits = '8'"),
        ("weights.type", "float", "weights type"),
        ("weights.dynamic", True, "weights dynamic"),
        ("weights.strategy", "tensor", "weights strategy"),
        ("weights.group_size", 24, "group_size"),
        ("weights.block_structure", [128, 128], "block_structure"),
    ],
)
def test_what_is_refused_in_a_group(key: str, value: Any, named: str) -> None:
    config = quantization_config(Format(CT))
    *path, last = key.split(".")
    target = config["config_groups"]["group_0"]
    for part in path:
        target = target[part]
    target[last] = value
    with pytest.raises(StartupError, match=named):
        read_quantization(config)


PUBLISHED: dict[str, dict[str, Any]] = {
    "AutoGPTQ through transformers": {
        "batch_size": 1,
        "bits": 4,
        "block_name_to_quantize": None,
        "cache_block_outputs": True,
        "damp_percent": 0.01,
        "dataset": None,
        "desc_act": False,
        "exllama_config": {"version": 1},
        "group_size": 128,
        "max_input_length": None,
        "model_seqlen": None,
        "module_name_preceding_first_block": None,
        "modules_in_block_to_quantize": None,
        "pad_token_id": None,
        "quant_method": "gptq",
        "sym": True,
        "tokenizer": None,
        "true_sequential": True,
        "use_cuda_fp16": False,
        "use_exllama": True,
    },
    "AutoGPTQ": {
        "bits": 4,
        "damp_percent": 0.01,
        "desc_act": False,
        "group_size": 128,
        "model_file_base_name": "model",
        "model_name_or_path": None,
        "quant_method": "gptq",
        "sym": True,
        "true_sequential": True,
    },
    "AutoAWQ": {
        "bits": 4,
        "group_size": 128,
        "modules_to_not_convert": None,
        "quant_method": "awq",
        "version": "gemm",
        "zero_point": True,
    },
    "compressed-tensors of 2024": {
        "config_groups": {
            "group_0": {
                "input_activations": None,
                "output_activations": None,
                "targets": ["Linear"],
                "weights": {
                    "actorder": None,
                    "block_structure": None,
                    "dynamic": False,
                    "group_size": 128,
                    "num_bits": 4,
                    "observer": "minmax",
                    "observer_kwargs": {},
                    "strategy": "group",
                    "symmetric": True,
                    "type": "int",
                },
            }
        },
        "format": "pack-quantized",
        "global_compression_ratio": 1.23,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "frozen",
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_entries_with_the_keys_of_published_ones(name: str) -> None:
    assert read_quantization(PUBLISHED[name]).group_sizes == {128}


def test_what_says_nothing_of_the_tensors_is_let_through() -> None:
    gptq = quantization_config(Format("gptq")) | {"dynamic": {r"-:.*lm_head": {}}, "is_marlin_format": False}
    assert read_quantization(gptq).gptq_version == 1
    found = quantization_config(Format(CT)) | {"sparsity_config": {"format": "dense", "targets": []}, "version": "0.9"}
    assert read_quantization(found).group_sizes == {32}


def test_plan_counts_4_bit_weights(oracle: Callable[[str], Oracle], tmp_path: Path) -> None:
    """The same with and without the files; 128 elements take 64 bytes, a scale and a zero."""
    write_w4(oracle("wide").model, tmp_path, Format("gptq", 128))
    options = {"model": str(tmp_path), "dtype": "bf16", "num_blocks": 64, "max_cache": 64, "weights": "int4"}
    plan = describe_plan(EngineConfig(**options))
    (tmp_path / "model.safetensors").unlink()
    assert describe_plan(EngineConfig(**options))["weights_bytes"] == plan["weights_bytes"]
    linear = 3 * (128 * (128 + 64 + 64 + 128) + 3 * 128 * 256)
    dense = 2 * (linear + 160 * 128 + 7 * 128)  # layers, embedding, norms
    head = 160 * 128 + 2 * 160 + 2 * 160 * 128
    assert plan["weights_bytes"] == dense + linear // 128 * (64 + 4) + head
