"""Time swap copies of scattered blocks on a GPU, beside one large pinned copy of the same run; and the pinning itself.

    python -m tools.bench_copies [--output FILE.json]

GB/s (10^9) by wall time from the start to the last landing, both ways at once in one call; blocks are in random order
in both pools. `host us/block` is what the step loop pays to start them, `landing us/block` to take them in.
"""

import argparse
import json
import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from engine_core.cuda_transfer import CudaTransfer
from engine_core.plan import Copy
from engine_core.transfer import HostPool
from tools.environment import describe

SIZE = 1 << 30
ROUNDS = 5
DEVICE = torch.device("cuda")
GOALS = {"out": 47, "in": 45}


def link() -> dict[str, float]:
    """One contiguous pinned copy of 1 GiB: GB/s each way, and both ways at once in sum."""
    device = [torch.empty(SIZE, dtype=torch.uint8, device=DEVICE) for _ in range(2)]
    host = [torch.empty(SIZE, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]  # type: ignore[no-untyped-call]

    def go(ways: Sequence[int]) -> float:
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for way in ways:
            with torch.cuda.stream(streams[way]):
                target, source = (device[1], host[1]) if way else (host[0], device[0])
                target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        return SIZE * len(ways) / (time.perf_counter() - begun) / 1e9

    return {
        name: median(go(ways) for _ in range(ROUNDS)) for name, ways in {"out": [0], "in": [1], "both": [0, 1]}.items()
    }


class Rig:
    """A transfer over pools of 2 GiB, with every image of the host pool's first half stored."""

    def __init__(self, image: int) -> None:
        self.blocks = SIZE // image
        self.pool = torch.empty((2 * self.blocks, image), dtype=torch.uint8, device=DEVICE)
        begun = time.perf_counter()
        self.host = HostPool(image, 2 * self.blocks * image, pinned=True)
        self.stall = longest_launch(self.host.made)
        self.pinning = time.perf_counter() - begun
        assert self.host.pinned
        self.transfer = CudaTransfer(self.pool, self.host)
        self.image, self._tags = image, 0
        self.run(self.scattered(out=True, half=0))

    def scattered(self, out: bool, half: int) -> list[Copy]:
        """Copies of a half of both pools in random order; those in find what was stored there."""
        hosts, devices = (random.sample(range(half * self.blocks, (half + 1) * self.blocks), self.blocks) for _ in "12")
        if out:
            self._tags += self.blocks
            return [Copy(d, h, self._tags + n, True) for n, (d, h) in enumerate(zip(devices, hosts, strict=True))]
        return [Copy(d, h, self.host.tags[h], False) for d, h in zip(devices, hosts, strict=True)]

    def run(self, copies: list[Copy]) -> tuple[float, float, float]:
        """Seconds to start, of `landed` calls that gave something, and in all."""
        torch.cuda.synchronize()
        landed, landing = 0, 0.0
        begun = time.perf_counter()
        self.transfer.start(copies)
        started = time.perf_counter()
        while landed < len(copies):
            asked = time.perf_counter()
            found = self.transfer.landed()
            if found:
                landing += time.perf_counter() - asked
                landed += sum(len(group.copies) for group in found)
                assert all(group.ok for group in found)
        return started - begun, landing, time.perf_counter() - begun


def longest_launch(until: threading.Event) -> float:
    """Launch a small kernel again and again until the event is set: the longest that one took, in seconds."""
    x, longest = torch.zeros(1, device=DEVICE), 0.0
    x.add_(1)
    while not until.is_set():
        begun = time.perf_counter()
        x.add_(1)
        longest = max(longest, time.perf_counter() - begun)
        time.sleep(1e-4)
    return longest


def scattered(image: int) -> list[dict[str, Any]]:
    """One row per direction."""
    rig = Rig(image)
    cases: dict[str, Callable[[], list[Copy]]] = {
        "out": lambda: rig.scattered(True, 1),
        "in": lambda: rig.scattered(False, 0),
        "both": lambda: [*rig.scattered(True, 1), *rig.scattered(False, 0)],
    }
    rows = []
    for name, make in cases.items():
        times = [rig.run(make()) for _ in range(ROUNDS)]
        count = len(make())
        start, landing, wall = (median(column) for column in zip(*times, strict=True))
        rows.append(
            {
                "KiB": image >> 10,
                "direction": name,
                "GB/s": count * image / wall / 1e9,
                "host us/block": start / count * 1e6,
                "landing us/block": landing / count * 1e6,
            }
        )
    gib = 2 * SIZE / (1 << 30)
    rows.append({"KiB": image >> 10, "pinning s/GiB": rig.pinning / gib, "longest launch ms": rig.stall * 1e3})
    rig.transfer.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    random.seed(0)
    limit = link()
    print("one copy of 1 GiB:", ", ".join(f"{name} {rate:.1f} GB/s" for name, rate in limit.items()))
    rows = [row for image in (288 << 10, 576 << 10) for row in scattered(image)]
    for row in rows:
        if "direction" not in row:
            print(
                f"{row['KiB']} KiB: pinned at {row['pinning s/GiB']:.3f} s/GiB, a launch meanwhile took at most "
                f"{row['longest launch ms']:.2f} ms"
            )
            continue
        goal = GOALS.get(row["direction"])
        beside = f"{row['GB/s'] / limit[row['direction']]:.0%} of the link" + (f", goal {goal}" if goal else "")
        print(
            f"{row['KiB']} KiB {row['direction']:5}{row['GB/s']:7.1f} GB/s ({beside}), host "
            f"{row['host us/block']:.2f} + {row['landing us/block']:.2f} us/block"
        )
    if options.output:
        options.output.write_text(json.dumps({"environment": describe(), "link": limit, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
