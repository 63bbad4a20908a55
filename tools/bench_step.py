"""What a step costs the engine core beside the model: schedule, commit, encode, and a detokenizer's decode.

    python tools/bench_step.py [--requests 256] [--steps 300] [--output FILE.json]

One thread, no sockets, a model that costs nothing. `wire` is the encoding and decoding of the StepOutput alone.
"""

import argparse
import json
import time
from statistics import median

from engine_core.capacity import Capacity
from engine_core.output import encode_step
from engine_core.plan import StepResult
from engine_core.request import Request
from engine_core.scheduler import Scheduler
from protocol.codec import Decoder, encode
from protocol.messages import SamplingParams, StepOutput, unpack_i32, unpack_i64


def measure(num_requests: int, steps: int) -> dict[str, float]:
    """Median microseconds per part of a step with `num_requests` decoding requests."""
    capacity = Capacity(num_requests * 64, 16, 4096, num_requests, num_requests * 16)
    scheduler = Scheduler(capacity, [2])
    for request_id in range(num_requests):
        sampling = SamplingParams(ignore_eos=True)
        scheduler.add(Request((1 << 40) + request_id, [request_id + 3] * 16, sampling, 1000, 0.0))
    decoder = Decoder(StepOutput, "bench")
    parts: dict[str, list[float]] = {"schedule": [], "commit": [], "wire": [], "total": []}
    for step in range(steps):
        t0 = time.perf_counter()
        plan = scheduler.schedule(t0)
        t1 = time.perf_counter()
        assert plan is not None
        result = StepResult([5] * num_requests)
        t2 = time.perf_counter()
        outcomes = scheduler.commit(plan, result, t2)
        t3 = time.perf_counter()
        message = decoder.decode(encode(encode_step(plan.step, outcomes, result)))
        columns = unpack_i64(message.ids), unpack_i32(message.tokens), message.finish
        t4 = time.perf_counter()
        assert len(columns[0]) == num_requests
        if step > 5:
            for name, seconds in zip(parts, (t1 - t0, t3 - t2, t4 - t3, t4 - t0), strict=True):
                parts[name].append(seconds * 1e6)
    return {name: median(values) for name, values in parts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--output", help="write the figures as JSON")
    options = parser.parse_args()
    result = measure(options.requests, options.steps)
    for name, value in result.items():
        print(f"{name:10} {value:8.1f} us")
    if options.output:
        with open(options.output, "w") as file:
            json.dump({"requests": options.requests, "unit": "us"} | result, file, indent=1)


if __name__ == "__main__":
    main()
