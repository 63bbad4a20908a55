"""Decode and prefill through ModelRunner against transformers in bfloat16, on a Llama GGUF's dequantised weights.

    python tools/bench_model.py [MODEL.gguf] [--threads 2] [--quality FILE]

Each engine runs in a process of its own, in turn, twice; the best of its runs counts. `--quality` takes a JSON file
like tests/data/smollm2-greedy.json and compares each weights mode with FP32, teacher-forced.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from frontend.models import DEFAULT_MODEL, local_path

STREAMS = (1, 4, 8)
PROMPT, TOKENS, PREFILL, CONTEXT = 32, 64, 512, 1024
MODES = (("bf16", "dense"), ("bf16", "int8"), ("bf16", "int4"), ("fp32", "dense"))


def best(run: Callable[[], float], times: int = 3) -> float:
    return max(run() for _ in range(times))


def ours(model: str, dtype: str, weights: str, threads: int) -> dict[str, float]:
    from engine_core.model_runner import load_runner
    from engine_core.plan import Row, StepPlan
    from protocol.config import EngineConfig
    from protocol.messages import SamplingParams

    started = time.perf_counter()
    runner = load_runner(EngineConfig(model=model, dtype=dtype, weights=weights, threads=threads, max_cache=CONTEXT))
    result = {"load s": time.perf_counter() - started}
    greedy = SamplingParams(temperature=0.0)
    per_request = CONTEXT // 16
    tables = [list(range(n * per_request, (n + 1) * per_request)) for n in range(max(STREAMS))]

    def row(request: int, ids: list[int], start: int) -> Row:
        return Row(request, ids, start, tables[request], True, greedy, 0)

    def prefill() -> float:
        at = time.perf_counter()
        runner.launch(StepPlan(0, [], [row(0, list(range(100, 100 + PREFILL)), 0)])).tokens()
        return PREFILL / (time.perf_counter() - at)

    def decode(streams: int) -> float:
        plan = StepPlan(0, [], [row(n, list(range(100 + n, 100 + n + PROMPT)), 0) for n in range(streams)])
        tokens = runner.launch(plan).tokens().tokens
        at = time.perf_counter()
        for step in range(TOKENS):
            plan = StepPlan(0, [row(n, [tokens[n]], PROMPT + step) for n in range(streams)], [])
            tokens = runner.launch(plan).tokens().tokens
        return streams * TOKENS / (time.perf_counter() - at)

    for streams in STREAMS:
        result[f"decode {streams}"] = best(lambda n=streams: decode(n))  # type: ignore[misc]
    result[f"prefill {PREFILL}"] = best(prefill, 5)
    return result


def peer(model: str, threads: int) -> dict[str, float]:
    import torch

    from tools.transformers_peer import Peer

    torch.set_num_threads(threads)
    started = time.perf_counter()
    loaded = Peer(Path(model))
    result = {"load s": time.perf_counter() - started}
    for streams in STREAMS:
        prompts = [list(range(100 + n, 100 + n + PROMPT)) for n in range(streams)]
        result[f"decode {streams}"] = best(lambda p=prompts: loaded.decode(p, TOKENS))  # type: ignore[misc]
    result[f"prefill {PREFILL}"] = best(lambda: loaded.prefill(list(range(100, 100 + PREFILL))), 5)
    return result


def quality(model: str, cases: str, threads: int) -> list[str]:
    """Top-1 agreement and mean KL(FP32 || mode) in nats over the cases' greedy tokens, one decode row at a time."""
    import torch

    from engine_core.model_runner import load_runner
    from engine_core.plan import Row, StepPlan
    from protocol.config import EngineConfig
    from protocol.messages import SamplingParams

    def logprobs(dtype: str, weights: str, decode: bool) -> torch.Tensor:
        runner = load_runner(
            EngineConfig(model=model, dtype=dtype, weights=weights, threads=threads, max_cache=CONTEXT)
        )
        parts, table = [], list(range(CONTEXT // 16))
        for case in json.loads(Path(cases).read_text())["cases"]:
            prompt, ids = case["prompt_ids"], case["prompt_ids"] + case["greedy_ids"]
            split = len(prompt) if decode else len(ids)
            rows = [(0, split)] + [(at, 1) for at in range(split, len(ids))]
            for start, count in rows:
                row = Row(0, ids[start : start + count], start, table, True, SamplingParams(), 0)
                decodes, chunks = ([row], []) if start else ([], [row])
                hidden = runner.forward(StepPlan(0, decodes, chunks))[1]
                with torch.inference_mode():
                    parts.append(runner.decoder.logits(hidden[max(0, len(prompt) - 1 - start) :]).log_softmax(-1))
        return torch.cat(parts)

    reference = logprobs("fp32", "dense", False)
    lines = []
    for dtype, weights in MODES[:-1]:
        for decode in (True, False):
            found = logprobs(dtype, weights, decode)
            agreement = (found.argmax(-1) == reference.argmax(-1)).float().mean().item()
            kl = (reference.exp() * (reference - found)).sum(-1).mean().item()
            path = "decode" if decode else "prefill"
            lines.append(f"{dtype} {weights:<6}{path:<8} top-1 {agreement:6.1%}   KL {kl:.4f}   {len(found)} positions")
    return lines


def in_process(arguments: list[str]) -> dict[str, float]:
    root = str(Path(__file__).resolve().parent.parent)
    output = subprocess.run(
        [sys.executable, __file__, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": root},
        check=True,
    ).stdout
    result: dict[str, float] = json.loads(output.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=str(local_path(DEFAULT_MODEL)))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--quality", metavar="JSON")
    parser.add_argument("--one", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        dtype, weights = options.one
        run = peer(options.model, options.threads) if dtype == "peer" else None
        print(json.dumps(run or ours(options.model, dtype, weights, options.threads)))
        return
    if options.quality:
        print("\n".join(quality(options.model, options.quality, options.threads)))
        return
    results: dict[str, dict[str, float]] = {}
    for _ in range(options.rounds):
        for dtype, weights in (("peer", "bf16"), *MODES):
            name = "transformers bf16" if dtype == "peer" else f"{dtype} {weights}"
            found = in_process([options.model, "--threads", str(options.threads), "--one", dtype, weights])
            known = results.setdefault(name, found)
            for key, value in found.items():
                known[key] = (min if key == "load s" else max)(known[key], value)
    base = results["transformers bf16"]
    print(
        f"{Path(options.model).name}, {options.threads} threads, tokens/s over the whole batch (ratio to transformers)"
    )
    print(f"{'':<20}" + "".join(f"{key:>18}" for key in base))
    for name, values in results.items():
        cells = [f"{v:.1f}" if key == "load s" else f"{v:.0f} ({v / base[key]:.2f}x)" for key, v in values.items()]
        print(f"{name:<20}" + "".join(f"{cell:>18}" for cell in cells))


if __name__ == "__main__":
    main()
