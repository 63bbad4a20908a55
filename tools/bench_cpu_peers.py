"""Speed of the engine on the CPU, through its real processes, beside llama.cpp and transformers on the same file.

    python -m tools.bench_cpu_peers [--checkpoint FILE.gguf] [--streams 1,4,8] [--max-new-tokens 128] [--prefill 512]
        [--iterations 3] [--peers llama.cpp,transformers] [--output FILE.json]

Decode is tokens per second over all streams between the first and the last token of a run, and the milliseconds from
one token of a stream to its next; prefill is prompt tokens over the time to the first token. All take turns within each
iteration, and each figure is the median. Absolute figures drift between machines and hours: read the ratios.

A peer is a process of its own, sleeps while others run, and is called in a plain loop, without a server: so only ours
pays for the way through its processes. llama.cpp computes with the file's 4-bit weights and 8-bit activations,
transformers with dequantised weights in bfloat16. A peer that isn't there is skipped: `pip install 'pagetide[peers]'`.
"""

import argparse
import asyncio
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

from frontend.engine_client import EngineClient
from protocol.messages import SamplingParams, TextParams, TokenPrompt, pack_i32
from tools.local_engine import LocalEngine
from tools.measurement import Column, Figures, checked, config_of, engine, numbers, parser_of, print_table, save

PEERS = {"llama.cpp": "tools.llama_cpp_peer", "transformers": "tools.transformers_peer"}
OURS = "pagetide"
SHORT_PROMPT = 8  # tokens
Speeds = dict[str, dict[str, list[float]]]  # by engine and case, tokens per second


def random_prompt(length: int, vocab_size: int) -> list[int]:
    return random.choices(range(vocab_size), k=length)


# -- ours ------------------------------------------------------------------------------------------------------------


async def one_stream(client: EngineClient, prompt: list[int], tokens: int) -> tuple[float, float]:
    """Times of the first and of the last token."""
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    first = 0.0
    async with client.generate(TokenPrompt(pack_i32(prompt)), sampling, TextParams()) as generation:
        async for _ in generation:
            first = first or time.perf_counter()
    return first, time.perf_counter()


class Ours:
    """What a peer offers, by the engine's processes. Speeds in tokens per second."""

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine

    def decode(self, prompts: list[list[int]], tokens: int) -> float:
        async def scenario(client: EngineClient) -> float:
            times = await asyncio.gather(*(one_stream(client, prompt, tokens) for prompt in prompts))
            seconds = max(last for _, last in times) - min(first for first, _ in times)
            return len(prompts) * (tokens - 1) / seconds

        return float(self._engine.run(scenario, 600))

    def prefill(self, prompt: list[int]) -> float:
        async def scenario(client: EngineClient) -> float:
            started = time.perf_counter()
            first, _ = await one_stream(client, prompt, 1)
            return len(prompt) / (first - started)

        return float(self._engine.run(scenario, 600))


# -- peers -----------------------------------------------------------------------------------------------------------


def serve(module: str, path: Path, threads: int, connection: Connection) -> None:
    """A peer's process: say which version it is, or why it isn't there, then answer each call with a speed."""
    try:
        peer = import_module(module).Peer(path, threads)
        peer.decode([[1] * SHORT_PROMPT], 2)  # one built for another machine dies here
    except Exception as error:
        connection.send(("", f"{type(error).__name__}: {error}".partition("\n")[0]))
        return
    connection.send((peer.version, ""))
    while call := connection.recv():
        connection.send(getattr(peer, call[0])(*call[1]))


class RemotePeer:
    """A peer in its process."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def decode(self, *arguments: Any) -> float:
        return self._ask("decode", arguments)

    def prefill(self, *arguments: Any) -> float:
        return self._ask("prefill", arguments)

    def _ask(self, *call: Any) -> float:
        self._connection.send(call)
        return float(self._connection.recv())


@contextmanager
def peers(names: Sequence[str], path: Path, threads: int = 0) -> Iterator[dict[str, RemotePeer]]:
    """Those that are there, by name with version; a line for each other."""
    # What the core gets (engine_core/load.py): else OpenMP threads stall when another process wants a core.
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")
    context = multiprocessing.get_context("spawn")
    found, processes = {}, []
    try:
        for name in names:
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(PEERS[name], path, threads, there), daemon=True)
            process.start()
            there.close()
            processes.append(process)
            try:
                version, error = here.recv()
            except EOFError:
                process.join()
                version, error = "", f"its process ended with {process.exitcode}"
            if error:
                print(f"{name} is skipped: {error}", flush=True)
            else:
                found[f"{name} {version}"] = RemotePeer(here)
        yield found
    finally:
        for process in processes:
            process.terminate()
            process.join()


# -- the comparison --------------------------------------------------------------------------------------------------


def measure(engines: dict[str, Any], options: argparse.Namespace, vocab_size: int) -> Speeds:
    """All figures, engines taking turns, after a short run of each. One whose process ends is left out."""
    speeds: Speeds = {name: {} for name in engines}

    def each(case: str, run: Callable[[Any], float]) -> None:
        for name in list(speeds):
            try:
                speeds[name].setdefault(case, []).append(run(engines[name]))
            except (EOFError, BrokenPipeError):
                print(f"{name} is left out: its process ended at {case}", flush=True)
                del speeds[name]

    for peer in engines.values():
        peer.decode([random_prompt(SHORT_PROMPT, vocab_size)], 8)
    for _ in range(options.iterations):
        for count in options.streams:
            prompts = [random_prompt(SHORT_PROMPT, vocab_size) for _ in range(count)]
            each(f"decode {count}", lambda peer, some=prompts: peer.decode(some, options.max_new_tokens))  # type: ignore[misc]
        prompt = random_prompt(options.prefill, vocab_size)
        each(f"prefill {options.prefill}", lambda peer, one=prompt: peer.prefill(one))  # type: ignore[misc]
    return speeds


def summarize(speeds: Speeds) -> list[Figures]:
    """A row for each case and engine: speed, time per token, and ours over the peer's, the median of rounds."""
    rows = []
    for case, ours in speeds[OURS].items():
        kind, count = case.split()
        for name, cases in speeds.items():
            speed = median(cases[case])
            row = {"case": case, "engine": name, "tokens_per_second": speed}
            if kind == "decode":
                row["ms_per_token"] = 1e3 * int(count) / speed
            if name != OURS:
                row["ratio"] = median(mine / theirs for mine, theirs in zip(ours, cases[case], strict=True))
            rows.append(row)
    return rows


COLUMNS: list[Column] = [
    ("", "case", "s"),
    ("engine", "engine", "s"),
    ("tokens/s", "tokens_per_second", ",.1f"),
    ("ms/token", "ms_per_token", ".2f"),
    ("pagetide / it", "ratio", ".2f"),
]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__, max_new_tokens=128, max_cache=1024)
    parser.add_argument("--streams", type=numbers, default=[1, 4, 8], help="with commas between")
    parser.add_argument("--prefill", type=int, default=512, help="tokens of the prompt")
    parser.add_argument(
        "--peers", type=lambda text: text.split(","), default=list(PEERS), help="with commas between; none: only ours"
    )
    options = checked(parser, arguments)
    options.peers = [name for name in options.peers if name != "none"]
    if unknown := set(options.peers) - set(PEERS):
        parser.error(f"no such peer: {', '.join(sorted(unknown))}; there are: {', '.join(PEERS)}")
    if not 1 <= options.prefill < options.max_cache:
        parser.error(f"--prefill {options.prefill} doesn't fit in --max-cache {options.max_cache}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    config = config_of(options, prefill_chunk_tokens=max(512, options.prefill), prefix_cache=False)
    with (
        peers(options.peers, options.checkpoint, config.threads) as found,
        engine(config, options.in_process) as running,
    ):

        async def vocabulary(client: EngineClient) -> int:
            return client.model.vocab_size

        speeds = measure({OURS: Ours(running)} | found, options, running.run(vocabulary))
    rows = summarize(speeds)
    print_table(rows, COLUMNS)
    save(options, {"rows": rows, "samples": speeds})
    return 0


if __name__ == "__main__":
    sys.exit(main())
