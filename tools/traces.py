"""Request traces: when requests come, how long prompts and answers are, which prompts begin alike.

Read are the CSV files of the Azure LLM inference traces (TIMESTAMP, ContextTokens, GeneratedTokens) and the JSONL files
of the Mooncake traces (timestamp in ms, input_length, output_length, hash_ids of 512-token blocks).
"""

import csv
import json
import random
import struct
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

HASHED_TOKENS = 512  # per hash id
_DIGEST = struct.Struct("<qq")


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request. Equal hash ids at one place of two prompts mean equal tokens up to there."""

    number: int
    arrival: float  # seconds
    prompt_tokens: int
    answer_tokens: int
    hash_ids: tuple[int, ...] = ()

    def digests(self, block_size: int) -> list[bytes]:
        """A digest for each full block of the prompt; `block_size` divides 512 tokens."""
        count = self.prompt_tokens // block_size
        if not self.hash_ids:
            return [_DIGEST.pack(-1 - self.number, place) for place in range(count)]
        per_id = HASHED_TOKENS // block_size
        return [_DIGEST.pack(self.hash_ids[place // per_id], place % per_id) for place in range(count)]


def read_trace(path: Path) -> list[TraceRequest]:
    """Read a trace; the first request comes at 0. Raises ValueError or KeyError if it is of neither kind."""
    if path.suffix == ".jsonl":
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        rows.sort(key=lambda row: row["timestamp"])
        return [
            TraceRequest(
                number, row["timestamp"] / 1000, row["input_length"], row["output_length"], tuple(row["hash_ids"])
            )
            for number, row in enumerate(rows)
        ]
    with path.open(newline="") as file:
        lines = list(csv.DictReader(file))
    times = [datetime.fromisoformat(line["TIMESTAMP"][:26]).timestamp() for line in lines]
    return [
        TraceRequest(number, time - times[0], int(line["ContextTokens"]), int(line["GeneratedTokens"]))
        for number, (time, line) in enumerate(zip(times, lines, strict=True))
    ]


def synthetic_trace(count: int = 400, seed: int = 1) -> list[TraceRequest]:
    """Poisson arrivals, one a second; lengths as in chats; half of the prompts go on from an earlier one's."""
    rng = random.Random(seed)
    requests: list[TraceRequest] = []
    time, next_id = 0.0, 0
    for number in range(count):
        parent = rng.choice(requests[-20:]) if requests and rng.random() < 0.5 else None
        prefix = parent.hash_ids[: parent.prompt_tokens // HASHED_TOKENS] if parent else ()
        tokens = len(prefix) * HASHED_TOKENS + min(4000, int(rng.lognormvariate(6, 1)) + 1)
        new = -(-tokens // HASHED_TOKENS) - len(prefix)
        ids = (*prefix, *range(next_id, next_id + new))
        next_id += new
        requests.append(TraceRequest(number, time, tokens, min(1000, int(rng.lognormvariate(4.5, 1)) + 1), ids))
        time += rng.expovariate(1.0)
    return requests
