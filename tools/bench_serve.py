"""Load on an OpenAI server over HTTP, at a rate or a concurrency: latencies, the longest gaps, goodput under SLOs.

    python -m tools.bench_serve [--rate 4 | --concurrency 8] [--requests 100] [--trace FILE.csv|FILE.jsonl] [--shrink 1]
        [--max-new-tokens 256] [--slo-ttft 1.0] [--slo-tpot 0.1] [--slo-gap 1.0] [--output FILE.json]
        [--url http://HOST:PORT --model NAME --vocab-size N] [--checkpoint MODEL, and the other flags of an engine]

Without `--url` it starts a `pagetide serve` of its own. Requests are streams of /v1/completions with token ids as
prompts, greedy, EOS ignored, so that each has the tokens that the trace says.

* **Trace**: an Azure LLM inference trace (CSV) or a Mooncake trace (JSONL, whose hash ids say which prompts begin
  alike), else synthetic. Lengths are divided by `--shrink`, prompts cut so that they fit in `--max-cache` together with
  answers of `--max-new-tokens` at most.
* **Load**: `--rate` requests a second, at the trace's arrivals scaled to that mean: nobody waits for answers (open
  loop). Or `--concurrency` clients, each with its next request when its last one has ended (closed loop).
* **SLOs**: a request is good if its time to first token, its mean time per token and its longest gap all keep their
  limits. Goodput is good requests a second.

Times are of the lines as they come to the client. A server that merges tokens into one event shows the gap of events.
Each of `--iterations` takes the next `--requests` of the trace. An API key comes from PAGETIDE_API_KEY.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import uvloop

from tools.measurement import (
    Column,
    Figures,
    checked,
    config_of,
    parser_of,
    print_table,
    save,
    server,
    spread,
)
from tools.traces import HASHED_TOKENS, TraceRequest, read_trace, synthetic_trace

KEY = os.environ.get("PAGETIDE_API_KEY", "")  # not an option: the report has those
TIMEOUT = 900.0  # seconds of a request
LIMIT = 1 << 20  # bytes of a line at most
COUNTERS = ("requests_swapped", "requests_recomputed", "requests_failed", "prefix_cache_hit_tokens")
COLUMNS: list[Column] = [
    ("", "name", "s"), ("p50", "p50", ".3f"), ("p95", "p95", ".3f"), ("p99", "p99", ".3f"), ("max", "max", ".3f"),
    ("SLO", "slo", "g"), ("kept", "kept", ".1%"),
]  # fmt: skip


@dataclass
class Call:
    """One request and what its client saw. Times are CLOCK_MONOTONIC seconds."""

    prompt: list[int]
    max_tokens: int
    due: float = 0.0  # after the start
    sent: float = 0.0
    times: list[float] = field(default_factory=list)  # of events with text
    tokens: int = 0  # of its answer, by the server's count
    error: str = ""

    @property
    def ttft(self) -> float:
        return self.times[0] - self.sent if self.times else float("nan")

    @property
    def tpot(self) -> float:
        """Seconds per token after the first; 0 if there is none."""
        return (self.times[-1] - self.times[0]) / (self.tokens - 1) if self.tokens > 1 else 0.0

    @property
    def longest_gap(self) -> float:
        return max((after - before for before, after in zip(self.times, self.times[1:], strict=False)), default=0.0)


# -- what is asked ---------------------------------------------------------------------------------------------------


def make_calls(trace: Sequence[TraceRequest], options: argparse.Namespace, vocab_size: int) -> list[Call]:
    """A trace's requests with tokens, lengths and arrivals as the options say."""
    first, last = trace[0].arrival, trace[-1].arrival
    scale = (len(trace) - 1) / options.rate / (last - first) if options.rate and last > first else 1.0
    calls = []
    for request in trace:
        answer = max(1, min(request.answer_tokens // options.shrink, options.max_new_tokens))
        length = max(1, min(request.prompt_tokens // options.shrink, options.max_cache - answer))
        prompt = prompt_of(request, length, options.shrink, vocab_size)
        calls.append(Call(prompt, answer, (request.arrival - first) * scale))
    return calls


def prompt_of(request: TraceRequest, length: int, shrink: int, vocab_size: int) -> list[int]:
    """Tokens that are equal where the trace's hash ids are."""
    ids = request.hash_ids or (-1 - request.number,)
    share = max(1, HASHED_TOKENS // shrink) if request.hash_ids else length
    tokens: list[int] = []
    for number in ids:
        tokens += random.Random(number).choices(range(vocab_size), k=min(share, length - len(tokens)))
    rest = random.Random(f"{request.number} rest").choices(range(vocab_size), k=length - len(tokens))
    return tokens + rest


# -- asking ----------------------------------------------------------------------------------------------------------


async def ask(call: Call, url: str, model: str) -> None:
    """Send a request on a connection of its own and note when its text comes."""
    body = {
        "model": model, "prompt": call.prompt, "max_tokens": call.max_tokens, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    data = json.dumps(body).encode()
    place = urlsplit(url)
    head = (
        f"POST {place.path}/v1/completions HTTP/1.1\r\nHost: {place.netloc}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\nConnection: close\r\n" + (f"Authorization: Bearer {KEY}\r\n" if KEY else "")
    )
    call.sent = time.monotonic()
    try:
        reader, writer = await asyncio.open_connection(place.hostname, place.port or 80, limit=LIMIT)
        try:
            writer.write(head.encode() + b"\r\n" + data)
            async with asyncio.timeout(TIMEOUT):
                await _read(call, reader)
        finally:
            writer.close()
    except TimeoutError:
        call.error = f"no end within {TIMEOUT:.0f} s"
    except OSError as error:
        call.error = f"connection: {error.strerror or error}"


async def _read(call: Call, reader: asyncio.StreamReader) -> None:
    """Each event is a line; sizes of chunks are lines, too, and passed over."""
    status = (await reader.readline()).split(b" ")
    code = status[1].decode() if len(status) > 1 else "no answer"
    is_done, usage = False, b""
    async for line in reader:
        if not line.startswith(b"data: "):
            continue
        if line.startswith(b"data: [DONE]"):
            is_done = True
        elif b'"finish_reason":null' in line or b'"finish_reason": null' in line:
            call.times.append(time.monotonic())
        elif b'"error"' in line[:16]:
            call.error = json.loads(line[6:])["error"]["code"]
        elif b'"usage"' in line:
            usage = line
    if code != "200":
        call.error = f"HTTP {code}"
    elif not call.error and not (is_done and usage):
        call.error = "the stream broke off"
    elif usage:
        call.tokens = (json.loads(usage[6:]).get("usage") or {}).get("completion_tokens", 0)


async def run_load(calls: Sequence[Call], url: str, model: str, options: argparse.Namespace) -> float:
    """Send all; the seconds that it took."""
    started = time.monotonic()
    if options.rate:

        async def send(call: Call) -> None:
            await asyncio.sleep(started + call.due - time.monotonic())
            await ask(call, url, model)

        await asyncio.gather(*map(send, calls))
    else:
        left = iter(calls)

        async def client() -> None:
            for call in left:
                await ask(call, url, model)

        await asyncio.gather(*(client() for _ in range(options.concurrency)))
    return time.monotonic() - started


# -- what came of it -------------------------------------------------------------------------------------------------


def summarize(calls: Sequence[Call], seconds: float, options: argparse.Namespace) -> Figures:
    """Latencies of the requests that ended well, and goodput among all."""
    done = [call for call in calls if not call.error]
    limits = {"ttft": options.slo_ttft, "tpot": options.slo_tpot, "longest_gap": options.slo_gap}
    good = sum(all(getattr(call, name) <= limit for name, limit in limits.items()) for call in done)
    kept = {
        f"{name}_kept": sum(getattr(call, name) <= limit for call in done) / len(calls)
        for name, limit in limits.items()
    }
    values = {name: [getattr(call, name) for call in done] for name in limits}
    return {
        "requests": len(calls),
        "completed": len(done),
        "errors": dict(Counter(call.error for call in calls if call.error)),
        "seconds": seconds,
        "requests_per_second": len(done) / seconds,
        "tokens_per_second": sum(call.tokens for call in done) / seconds,
        "prompt_tokens": sum(len(call.prompt) for call in calls),
        "answer_tokens": sum(call.tokens for call in done),
        "good": good,
        "goodput_per_second": good / seconds,
        "goodput_share": good / len(calls),
        **kept,
        **{key: value for name, some in values.items() for key, value in spread(f"{name}_s", some).items()},
        "samples": {f"{name}_s": some for name, some in values.items()},
    }


def report(figures: Figures, options: argparse.Namespace) -> None:
    limits = {"ttft": options.slo_ttft, "tpot": options.slo_tpot, "longest_gap": options.slo_gap}
    names = {"ttft": "first token, s", "tpot": "per token, s", "longest_gap": "longest gap, s"}
    rows = [
        {"name": names[name], "slo": limit, "kept": figures[f"{name}_kept"]}
        | {what: figures[f"{name}_s_{what}"] for what in ("p50", "p95", "p99", "max")}
        for name, limit in limits.items()
    ]
    print_table(rows, COLUMNS)
    print(
        f"{figures['completed']} of {figures['requests']} done in {figures['seconds']:.1f} s: "
        f"{figures['requests_per_second']:.2f} requests/s, {figures['tokens_per_second']:.1f} tokens/s, "
        f"goodput {figures['goodput_per_second']:.2f} requests/s ({figures['goodput_share']:.1%})"
    )
    for error, count in figures["errors"].items():
        print(f"{count} x {error}")


@contextmanager
def target(options: argparse.Namespace) -> Iterator[str]:
    """The server's address."""
    if options.url:
        yield options.url.rstrip("/").removesuffix("/v1")
        return
    with server(config_of(options), options.api_servers) as url:
        yield url


def get(url: str) -> dict[str, Any]:
    """A GET's JSON; empty if there is none."""
    headers = {"authorization": f"Bearer {KEY}"} if KEY else {}
    try:
        answer = httpx.get(url, headers=headers, trust_env=False)
        return dict(answer.json()) if answer.status_code == 200 else {}
    except (httpx.HTTPError, ValueError):
        return {}


def _model_at(url: str) -> str:
    found = get(f"{url}/v1/models").get("data")
    if not found:
        raise SystemExit(f"error: {url} names no model; is it there, and is PAGETIDE_API_KEY its key?")
    return str(found[0]["id"])


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__, max_cache=1024, max_new_tokens=256, iterations=1)
    parser.add_argument("--url", default="", help="of a server that runs; the default is one of our own")
    parser.add_argument("--model", default="", help="its name there; the default is the first of /v1/models")
    parser.add_argument("--vocab-size", type=int, default=0, help="token ids of prompts; a Pagetide tells by itself")
    parser.add_argument("--api-servers", type=int, default=1)
    parser.add_argument("--rate", type=float, default=0.0, help="requests a second")
    parser.add_argument("--concurrency", type=int, default=0, help="clients; the default is 4 of them")
    parser.add_argument("--trace", type=Path, help="CSV or JSONL; the default is synthetic")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--shrink", type=int, default=1, help="divide all lengths by this")
    for name, limit in (("ttft", 1.0), ("tpot", 0.1), ("gap", 1.0)):
        parser.add_argument(f"--slo-{name}", type=float, default=limit, help="seconds")
    options = checked(parser, arguments)
    if options.in_process:
        parser.error("--in-process: there is no engine behind HTTP in one process")
    if options.rate and options.concurrency:
        parser.error("give --rate or --concurrency, not both")
    if min(options.requests, options.shrink) < 1 or min(options.rate, options.concurrency) < 0:
        parser.error("--requests, --shrink, --rate or --concurrency is out of range")
    options.concurrency = options.concurrency or (0 if options.rate else 4)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    count = options.iterations * options.requests
    trace = read_trace(options.trace) if options.trace else synthetic_trace(max(2, count))
    if len(trace) < count:
        raise SystemExit(f"error: {options.trace} has {len(trace)} requests, not {count}")
    with target(options) as url:
        before = get(f"{url}/status")  # only a Pagetide has it
        vocab_size = options.vocab_size or before.get("model", {}).get("vocab_size", 1000)
        model = options.model or _model_at(url)
        uvloop.run(ask(Call([1, 2, 3], 2), url, model))  # a warm-up
        calls, seconds = list[Call](), 0.0
        for begin in range(0, count, options.requests):
            some = make_calls(trace[begin : begin + options.requests], options, vocab_size)
            seconds += uvloop.run(run_load(some, url, model, options))
            calls += some
        after = get(f"{url}/status")
    figures = summarize(calls, seconds, options)
    report(figures, options)
    if after:
        before, after = before["counters"], after["counters"]
        counts = {name: int(after[f"{name}_total"] - before[f"{name}_total"]) for name in COUNTERS}
        print(", ".join(f"{name.replace('_', ' ')} {count}" for name, count in counts.items()))
        figures |= {"engine": counts}
    save(options, figures)
    return int(figures["completed"] != figures["requests"])


if __name__ == "__main__":
    sys.exit(main())
