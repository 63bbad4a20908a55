"""The memory plan: sizes of a published shape, budgets, and the refusal that lists every figure."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine_core.memory import KVCapacity, describe_plan, plan_memory
from engine_core.open_model import OpenModel, open_model
from protocol.config import EngineConfig
from protocol.errors import StartupError

CONFIGS = Path(__file__).parents[1] / "data" / "configs"
QWEN = EngineConfig(model=str(CONFIGS / "qwen2.5-3b"), dtype="fp16", max_cache=4096)
GIB = 1 << 30


def opened(config: EngineConfig, free: int) -> OpenModel:
    return replace(open_model(config, torch.device("cpu")), free=free, total=2 * free)


def changed(**options: object) -> EngineConfig:
    return EngineConfig(model=QWEN.model, dtype="fp16", **({"max_cache": 4096} | options))  # type: ignore[arg-type]


def test_budget_is_divided_exactly() -> None:
    config = changed(gpu_memory=8 * GIB)
    plan = plan_memory(opened(config, 16 * GIB), config)
    assert plan.kv.block_bytes == 589_824
    assert plan.kv.bytes_per_token == 36_864
    assert plan.weights == 3_085_938_688 * 2  # the model's parameters in FP16
    assert plan.kv.num_blocks == (8 * GIB - plan.weights - plan.workspace) // plan.kv.block_bytes
    assert plan.kv.max_tokens == plan.kv.num_blocks * 16
    assert plan.requests_of(1000) == plan.kv.num_blocks // 63
    assert plan.by_use()["kv_pool"] == plan.kv.num_blocks * 589_824


def test_cpu_pool_is_modest_unless_told() -> None:
    config = changed(max_running=4)
    assert plan_memory(opened(config, 64 * GIB), config).kv.num_blocks == 4 * 256  # four contexts
    config = changed(max_running=64)
    assert plan_memory(opened(config, 64 * GIB), config).kv.pool <= 4 * GIB
    config = changed(num_blocks=300)
    assert plan_memory(opened(config, 64 * GIB), config).kv.num_blocks == 300


@pytest.mark.parametrize(
    ("options", "free", "option"),
    [
        ({"gpu_memory": 6 * GIB}, 16 * GIB, "--gpu-memory"),
        ({}, 6 * GIB, "--max-cache"),
        ({"num_blocks": 10}, 64 * GIB, "--num-blocks"),
        ({"num_blocks": 1 << 20}, 64 * GIB, "--num-blocks"),
    ],
)
def test_refusal_lists_the_figures(options: dict[str, int], free: int, option: str) -> None:
    config = changed(**options)
    with pytest.raises(StartupError) as caught:
        plan_memory(opened(config, free), config)
    message = str(caught.value)
    for word in ("4096 tokens", "total", "free at start", "weights", "workspace", "left for the pool", option):
        assert word in message


def test_context_above_the_model_is_refused() -> None:
    config = changed(max_cache=40_000)
    with pytest.raises(StartupError, match=r"--max-cache 40000 .* 32768"):
        plan_memory(opened(config, 64 * GIB), config)


def test_bad_options_are_startup_errors(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"--kv-cache-dtype.*'fp7'"):
        open_model(changed(kv_cache_dtype="fp7"), torch.device("cpu"))
    with pytest.raises(StartupError, match=r"--kv-16bit-layers: '0,36' .* from 0 to 35"):
        open_model(changed(kv_16bit_layers="0,36"), torch.device("cpu"))
    with pytest.raises(StartupError, match="--weights int4"):
        open_model(changed(weights="int4"), torch.device("cpu"))
    with pytest.raises(StartupError, match="no such model"):
        open_model(EngineConfig(model=str(tmp_path / "none")), torch.device("cpu"))


def test_describe_plan() -> None:
    plan = describe_plan(changed(max_cache=64, num_blocks=64), 100)
    assert (plan["kv_block_bytes"], plan["block_size"], plan["kv_bytes_per_token"]) == (589824, 16, 36864)
    assert (plan["num_blocks"], plan["max_tokens"], plan["requests_at_once"]) == (64, 1024, 9)


def test_a_plan_for_a_card_does_not_look_at_this_machine() -> None:
    plan = describe_plan(changed(max_cache=64, gpu_memory=1 << 40))
    assert plan["free_at_start_bytes"] == plan["total_bytes"] == 1 << 40
    assert plan["kv_pool_bytes"] > 1 << 39


@pytest.mark.parametrize(
    ("name", "size", "per_token"),
    [
        ("auto", 589_824, 36_864),
        ("i8", 299_520, 18_720),
        ("fp8", 294_912, 18_432),
        ("fp8_per_token_head", 299_520, 18_720),
    ],
)
def test_formats_side_by_side(name: str, size: int, per_token: int) -> None:
    """Each format's entry is what the plan says when that format is chosen."""
    options = {"gpu_memory": 12 * GIB, "kv_16bit_layers": "none"}
    plan = describe_plan(changed(kv_cache_dtype=name, **options))
    chosen = {key: plan[key] for key in plan["formats"][0]}
    assert (chosen["kv_block_bytes"], chosen["kv_bytes_per_token"]) == (size, per_token)
    assert chosen["max_tokens"] == 16 * chosen["num_blocks"]
    for other in ("auto", "int8", "fp8_e5m2"):
        assert chosen in describe_plan(changed(kv_cache_dtype=other, **options))["formats"]
    assert [entry["kv_cache_dtype"] for entry in plan["formats"]] == [
        "fp16",
        "int8",
        "fp8_e4m3",
        "fp8_e5m2",
        "fp8_per_token_head",
    ]


def test_layers_in_16_bits_are_counted() -> None:
    plan = describe_plan(changed(kv_cache_dtype="fp8", kv_16bit_layers="35,0", num_blocks=256))
    assert plan["kv_block_bytes"] == 294_912 + 2 * 2 * 16 * 128
    assert plan["kv_16bit_layers"] == "0, 35"
    assert plan["formats"][0]["kv_block_bytes"] == 589_824


def test_auto_says_that_a_config_alone_tells_no_outliers() -> None:
    assert describe_plan(changed(num_blocks=256))["kv_16bit_layers"] == "none known: auto looks at the weights"
    assert describe_plan(changed(num_blocks=256, kv_16bit_layers="none"))["kv_16bit_layers"] == "none"


def test_bytes_per_token_are_exact() -> None:
    assert KVCapacity("int8", 100, 16, 1).bytes_per_token == 6.25
    assert type(KVCapacity("int8", 96, 16, 1).bytes_per_token) is int


def test_start_up_line_compares_the_formats() -> None:
    config = changed(gpu_memory=12 * GIB, kv_cache_dtype="int8", kv_16bit_layers="0,35")
    summary = plan_memory(opened(config, 16 * GIB), config).summary()
    assert "int8 KV pool" in summary
    assert "K in 16 bits in layers: 0, 35; bytes per token (tokens) by format: fp16 36,864 (" in summary
    assert "fp8_e4m3 18,944 (" in summary
