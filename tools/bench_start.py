"""Seconds from `pagetide serve` to its ready line and to the first token of the first request, the model in the cache.

python tools/bench_start.py [--rounds 3] [--output FILE.json]
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import httpx

from tools.local_engine import ROOT

BODY = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "stream": True}


def start_once() -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="pt-") as directory:
        command = [sys.executable, "-m", "frontend", "serve", "--port", "0"]
        environment = os.environ | {"XDG_RUNTIME_DIR": directory}
        started = time.perf_counter()
        server = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        try:
            url = next(line.split()[-1] for line in server.stdout if line.startswith("pagetide serves"))
            ready = time.perf_counter() - started
            with httpx.stream("POST", f"{url}/chat/completions", json=BODY, timeout=30) as answer:
                next(line for line in answer.iter_lines() if '"content":"' in line and '"content":""' not in line)
            return {"ready": ready, "first token": time.perf_counter() - started}
        finally:
            server.send_signal(signal.SIGINT)
            server.stdout.close()
            server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", help="write the figures as JSON")
    options = parser.parse_args()
    rounds = [start_once() for _ in range(options.rounds)]
    for name in rounds[0]:
        print(f"{name:12} {median(one[name] for one in rounds):6.2f} s   (goal for the first token: 6 s)")
    if options.output:
        Path(options.output).write_text(json.dumps({"unit": "s", "rounds": rounds}, indent=1))


if __name__ == "__main__":
    main()
