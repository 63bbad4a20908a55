import re
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from frontend import options
from protocol.config import EngineConfig
from protocol.errors import StartupError
from protocol.messages import SamplingParams


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("1073741824", 1 << 30),
        ("512b", 512),
        ("4GiB", 4 << 30),
        ("4gib", 4 << 30),
        ("4G", 4 << 30),
        ("4Gi", 4 << 30),
        ("4GB", 4_000_000_000),
        ("1.5 MiB", 3 << 19),
        (" 2k ", 2048),
        ("1TiB", 1 << 40),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert options.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "4GBi", "-1G", "4 G B", "4ib", "1e9", "4PiB", "4,5G"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        options.parse_size(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (98_362_432, "93.8 MiB"),
        (4 << 30, "4.00 GiB"),
        (5 << 40, "5120.00 GiB"),
    ],
)
def test_sizes_for_people(size: int, text: str) -> None:
    assert options.format_size(size) == text


def parse(arguments: list[str]) -> tuple[EngineConfig | SamplingParams, str]:
    """What a command with the shared options gets."""
    app = typer.Typer()
    got = []

    @app.command()
    @options.takes(options.engine_config)
    def first(config: EngineConfig, host: str = "here") -> None:
        """First."""
        got.append((config, host))

    @app.command()
    @options.takes(options.sampling_params)
    def second(sampling: SamplingParams, host: str = "here") -> None:
        """Second."""
        got.append((sampling, host))

    result = CliRunner().invoke(app, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return got[0]


def test_no_options_give_the_configuration_s_own_defaults() -> None:
    assert parse(["first"]) == (EngineConfig(model="smollm2-135m"), "here")


def test_every_engine_option_reaches_the_configuration() -> None:
    arguments = (
        "first m.gguf --host there --kv-cache-dtype fp16 --block-size 32 --max-cache 4096 --prefill-chunk-tokens 256 "
        "--no-prefix-cache --num-blocks 99 --gpu-memory 4GiB --max-running 8 --dtype bf16 --weights int8 --device cuda "
        "--threads 2 --served-model-name a --served-model-name b --no-cpu-offload --max-cpu-offload-mb 7 "
        "--preemption swap --max-pause 0.25 --record r.jsonl --swap-every 3 "
        "--copy-bandwidth-limit 6GB --load-format dummy"
    )
    expected = EngineConfig(
        model="m.gguf",
        served_model_name="a",
        model_aliases=["b"],
        device="cuda",
        dtype="bf16",
        weights="int8",
        kv_cache_dtype="fp16",
        block_size=32,
        max_cache=4096,
        num_blocks=99,
        gpu_memory=4 << 30,
        copy_bandwidth_limit=6_000_000_000,
        load_format="dummy",
        max_running=8,
        prefill_chunk_tokens=256,
        prefix_cache=False,
        threads=2,
        cpu_offload=False,
        max_cpu_offload_mb=7,
        preemption="swap",
        max_pause=0.25,
        record="r.jsonl",
        swap_every=3,
    )
    assert parse(arguments.split()) == (expected, "there")


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--block-size", "0", "--block-size 0 is out of range: 1 to 256"),
        ("--max-cpu-offload-mb", "-1", "--max-cpu-offload-mb -1 is out of range: 0 to 16777216"),
        ("--swap-every", "-1", "--swap-every -1 is out of range"),
        ("--max-pause", "0", "--max-pause 0.0 is out of range: more than 0, at most 3600 seconds"),
        ("--max-pause", "nan", "--max-pause nan is out of range"),
        ("--preemption", "abort", "--preemption 'abort' is not one of auto, swap, recompute"),
    ],
)
def test_a_bad_engine_option_is_named_with_what_is_allowed(option: str, value: str, message: str) -> None:
    with pytest.raises(StartupError, match=re.escape(message)):
        parse(["first", option, value])


@pytest.mark.parametrize(
    ("changes", "budget"),
    [
        ({}, 2048 << 20),
        ({"max_cpu_offload_mb": 3}, 3 << 20),
        ({"max_cpu_offload_mb": 0}, 0),
        ({"cpu_offload": False}, 0),
        ({"preemption": "recompute"}, 0),
        ({"preemption": "swap"}, 2048 << 20),
    ],
)
def test_the_budget_is_what_all_swap_options_leave(changes: dict[str, Any], budget: int) -> None:
    assert EngineConfig(model="m", **changes).offload_budget == budget


def test_sampling_options() -> None:
    arguments = (
        "second --max-tokens 5 --temperature 0.5 --top-p 0.9 --top-k 40 --min-p 0.1 --repetition-penalty 1.1 "
        "--seed 7 --ignore-eos"
    )
    expected = SamplingParams(
        max_tokens=5, temperature=0.5, top_p=0.9, top_k=40, min_p=0.1, repetition_penalty=1.1, seed=7, ignore_eos=True
    )
    assert parse(arguments.split()) == (expected, "here")


def test_a_seed_is_drawn_if_none_is_given() -> None:
    seeds = {options.sampling_params().seed for _ in range(4)}
    assert len(seeds) == 4


@pytest.mark.parametrize(
    ("served", "load_format", "name"),
    [("", "auto", "tiny"), ("", "dummy", "tiny-dummy"), ("a", "dummy", "a-dummy"), ("a-dummy", "dummy", "a-dummy")],
)
def test_dummy_weights_show_in_the_name(served: str, load_format: str, name: str) -> None:
    config = EngineConfig(model="m", served_model_name=served, load_format=load_format)
    assert config.name_for_clients("tiny") == name
