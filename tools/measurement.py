"""What the benchmarks share: their flags, an engine of their own, load, percentiles, tables, JSON."""

import argparse
import asyncio
import json
import os
import random
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from frontend.engine_client import EngineClient
from frontend.launch import PYTHON
from frontend.models import DEFAULT_MODEL, local_path
from protocol.config import EngineConfig
from protocol.lifeline import Lifeline
from tools.environment import describe
from tools.local_engine import ROOT, LocalEngine
from tools.streams import Stream, run_stream

BACKENDS = {"auto": "auto", "w4a16": "int4", "w8a16": "int8", "int8": "int8", "fp16": "dense", "bf16": "dense"}
PREFIX = "pt-"  # of temporary folders: socket paths must be short
_NUMBERS = re.compile(r"\[[-+.,\d\se]+\]")  # in JSON: raw samples go on one line
Figures = dict[str, Any]
Column = tuple[str, str, str]  # heading, key of a row, format


# -- flags -----------------------------------------------------------------------------------------------------------


def parser_of(documentation: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """A parser with the flags that all have; `defaults` are those of the experiment."""
    parser = argparse.ArgumentParser(description=documentation, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=local_path(DEFAULT_MODEL), help="GGUF file or folder")
    parser.add_argument("--load-format", default="auto", help="dummy: random weights from a config.json")
    parser.add_argument("--backend", choices=list(BACKENDS), default="auto", help="how weights are kept")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, or null: no model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=0, help="of the model on a CPU; 0: by measurement")
    parser.add_argument("--max-cache", type=int, default=256, help="tokens of a request at most")
    parser.add_argument("--max-new-tokens", type=int, default=16)
    parser.add_argument("--prefill-chunk-tokens", type=int, default=512)
    parser.add_argument("--block-size", type=int, default=16, help="tokens")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--max-cpu-offload-mb", type=int, default=2048, help="MiB")
    parser.add_argument("--max-pause", type=float, default=EngineConfig(model="").max_pause, help="seconds")
    parser.add_argument("--no-prefix-cache", action="store_true")
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--in-process", action="store_true", help="the step loop in this process, for profilers only")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    parser.set_defaults(**defaults)
    return parser


def numbers(text: str) -> list[int]:
    """A flag's value such as 1,2,4."""
    return [int(part) for part in text.split(",")]


def checked(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options; ends the process if they can't be."""
    options = parser.parse_args(arguments)
    if options.checkpoint is None:
        parser.error("needs --checkpoint, or the default model: run `pagetide pull`")
    for name in ("iterations", "block_size"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)} is out of range: from 1")
    if not 1 <= options.max_new_tokens < options.max_cache:
        parser.error(f"--max-new-tokens {options.max_new_tokens} leaves no prompt in --max-cache {options.max_cache}")
    return options


def config_of(options: argparse.Namespace, **changes: Any) -> EngineConfig:
    """The engine that the flags ask for."""
    config = EngineConfig(
        model=str(options.checkpoint),
        load_format=options.load_format,
        weights=BACKENDS[options.backend],
        device=options.device,
        dtype="fp16" if options.backend == "fp16" and options.dtype == "auto" else options.dtype,
        threads=options.threads,
        max_cache=options.max_cache,
        prefill_chunk_tokens=options.prefill_chunk_tokens,
        block_size=options.block_size,
        kv_cache_dtype=options.kv_cache_dtype,
        max_cpu_offload_mb=options.max_cpu_offload_mb,
        max_pause=options.max_pause,
        prefix_cache=not options.no_prefix_cache,
    )
    return msgspec.structs.replace(config, **changes)


# -- engines ---------------------------------------------------------------------------------------------------------


@contextmanager
def engine(config: EngineConfig, in_process: bool = False) -> Iterator[LocalEngine]:
    """The processes of an engine, without HTTP; with `in_process` all but the core, see `LocalEngine`."""
    with tempfile.TemporaryDirectory(prefix=PREFIX) as directory:
        started = LocalEngine(Path(directory), config, in_process)
        try:
            yield started
        finally:
            started.stop()


@contextmanager
def server(config: EngineConfig, api_servers: int = 1) -> Iterator[str]:
    """A `pagetide serve`; its address. Raises RuntimeError if it doesn't start."""
    lifeline = Lifeline()
    command = [*PYTHON, "frontend", "serve", config.model, "--port", "0", "--api-servers", str(api_servers)]
    with tempfile.TemporaryDirectory(prefix=PREFIX) as directory:
        environment = {**os.environ, **lifeline.environment, "XDG_RUNTIME_DIR": directory}
        process = subprocess.Popen(
            [*command, *command_line(config)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=[lifeline.read_end],
        )
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            if not line.startswith("pagetide serves "):
                raise RuntimeError("`pagetide serve` did not start")
            yield line.split()[-1].removesuffix("/v1")
        finally:
            process.terminate()
            process.wait()
            process.stdout.close()
            lifeline.cut()


def command_line(config: EngineConfig) -> list[str]:
    """The options of `pagetide serve` that give this configuration."""
    default, options = EngineConfig(model=config.model), []
    for name in config.__struct_fields__:
        value, flag = getattr(config, name), "--" + name.replace("_", "-")
        if value == getattr(default, name) or name == "model":
            continue
        if isinstance(value, bool):
            options.append("--no-" + name.replace("_", "-"))  # those that are on by default
        else:
            options += [flag, str(value)]
    return options


# -- load ------------------------------------------------------------------------------------------------------------


def make_streams(client: EngineClient, count: int, lengths: tuple[int, int], seed: int = 0) -> list[Stream]:
    """Requests with distinct prompts of `lengths[0]` tokens, to be answered with `lengths[1]`."""
    draw = random.Random(seed)
    vocabulary = range(client.model.vocab_size)
    return [Stream(draw.choices(vocabulary, k=lengths[0]), lengths[1]) for _ in range(count)]


async def run_all(client: EngineClient, streams: Sequence[Stream], with_notices: bool = False) -> None:
    """Run them at once, each to its end."""
    await asyncio.gather(*(run_stream(client, stream, with_notices=with_notices) for stream in streams))


def token_times(streams: Sequence[Stream]) -> list[float]:
    """Seconds from each token to the next; tokens that came together share their time."""
    return [
        gap / count
        for stream in streams
        for gap, count in zip(stream.gaps, stream.counts[1:], strict=True)
        for _ in range(count)
    ]


# -- figures ---------------------------------------------------------------------------------------------------------


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of all don't exceed; NaN of none."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))] if values else float("nan")


def spread(name: str, values: Sequence[float]) -> Figures:
    """p50, p95, p99 and the largest, as `name_p50` and so on."""
    shares = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "max": 1.0}
    return {f"{name}_{what}": percentile(values, share) for what, share in shares.items()}


def print_table(rows: Sequence[Figures], columns: Sequence[Column]) -> None:
    """One line per row; what a row hasn't got stays empty."""
    cells = [[heading for heading, _, _ in columns]]
    cells += [[_cell(row.get(key), form) for _, key, form in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        padded = [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        print("  ".join([line[0].ljust(widths[0]), *padded]).rstrip())


def _cell(value: Any, form: str) -> str:
    return "" if value is None else "-" if value != value else format(value, form)


def save(options: argparse.Namespace, figures: Figures) -> None:
    """Write figures, options and environment to `--output`, if it was given. Of paths, only the names."""
    if options.output is None:
        return
    settings = {
        name: value.name if isinstance(value, Path) else value
        for name, value in vars(options).items()
        if name != "output"
    }
    report = {"environment": describe(), "options": settings} | figures
    text = json.dumps(_rounded(report), indent=1)
    options.output.write_text(_NUMBERS.sub(lambda found: " ".join(found[0].split()), text) + "\n")


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return None if value != value else round(value, 6)
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list | tuple) else value
