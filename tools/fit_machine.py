"""A cost model of the machine that an engine ran on, fitted to a record of it (`--record`).

A step's time is from its plan to the next one's, if that followed at once: so what the loop does beside the model is in
it. A step counts by the inverse of the time that is expected of it: so the sum of all comes out right, however they
scatter, and long steps don't decide alone.
"""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine_core.capacity import Capacity
from engine_core.plan import StepPlan
from engine_core.recorder import Added, CopiesLanded, Planned
from tools.replay import BadRecord, open_record
from tools.virtual_engine import Machine

ROUNDS = 8  # until expected times settle
SHORTEST = 1e-6  # seconds; copies without a model take none
Array = NDArray[np.float64]
KNOTS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # decode rows where the curve may bend


@dataclass
class Samples:
    """What a record says about speed. Seconds."""

    capacity: Capacity
    steps: list[tuple[list[float], float]] = field(default_factory=list)  # `amounts`, time
    copies: list[tuple[int, float]] = field(default_factory=list)  # blocks that landed together, time

    def add(self, other: "Samples") -> None:
        """Take in those of another record of such an engine."""
        self.steps += other.steps
        self.copies += other.copies


def amounts(plan: StepPlan) -> list[float]:
    """Decode rows, prefill tokens, context tokens of decode rows, and (prefill tokens x tokens before them)."""
    counts = [(row.start, len(row.tokens)) for row in plan.prefills]
    return [
        float(len(plan.decodes)),
        float(sum(count for _, count in counts)),
        float(sum(row.start for row in plan.decodes)),
        float(sum(count * (start + count / 2) for start, count in counts)),
    ]


def read_samples(path: Path) -> Samples:
    """Replay a record. Raises BadRecord, msgspec.DecodeError, OSError."""
    feeder, entries = open_record(path)
    samples = Samples(feeder.scheduler.capacity)
    before: tuple[list[float], float] | None = None  # a step whose end isn't known yet, and its start
    for entry in entries:
        if entry is None:
            break
        if isinstance(entry, Added) and not feeder.scheduler.has_work:
            before = None  # the engine was idle since
        if difference := feeder.feed(entry):
            raise BadRecord(f"{path} is of another scheduler:\n{difference}")
        match entry:
            case Planned(now=now):
                has_rows = feeder.plan is not None and feeder.plan.num_tokens > 0
                if before is not None and has_rows:
                    samples.steps.append((before[0], now - before[1]))
                before = (amounts(feeder.plan), now) if feeder.plan is not None and has_rows else None
            case CopiesLanded(copies=copies, ok=True, seconds=seconds):
                samples.copies.append((len(copies), seconds))
    return samples


def fit(samples: Samples) -> Machine:
    """The cost model; what there was no sample of is free."""
    features, seconds = (np.array(column) for column in zip(*samples.steps, strict=True))
    rows = features[:, 0]
    knots = np.array([0, *(knot for knot in KNOTS if 0 < knot < rows.max()), max(1.0, rows.max())])
    shares = np.stack([np.interp(rows, knots, unit) for unit in np.eye(len(knots))], 1)
    costs = _solve(np.hstack([shares, features[:, 1:]]), seconds)
    latency, per_block = 0.0, 0.0
    if samples.copies:
        blocks, times = np.array(samples.copies, float).T
        latency, per_block = _solve(np.stack([np.ones_like(blocks), blocks], 1), times)
    capacity = samples.capacity
    bandwidth = capacity.block_bytes / per_block if per_block else 1e15
    token, read, attend = costs[len(knots) :]
    return Machine(
        step=0.0,
        row=0.0,
        token=token,
        read=read,
        attend=attend,
        latency=latency,
        bandwidth=bandwidth,
        duplex=bandwidth,
        block_bytes=capacity.block_bytes,
        prefill_chunk_tokens=capacity.prefill_chunk_tokens,
        max_running=capacity.max_running,
        block_size=capacity.block_size,
        curve=tuple((int(knot), cost) for knot, cost in zip(knots, costs, strict=False)),
    )


def _solve(features: Array, seconds: Array) -> list[float]:
    """Costs that are not negative: the most negative one is left out until there is none."""
    used = np.flatnonzero(features.any(0))
    while len(used):
        expected = np.full(len(seconds), seconds.mean())
        for _ in range(ROUNDS):
            weights = 1 / np.sqrt(np.maximum(expected, SHORTEST))
            found = np.linalg.lstsq(features[:, used] * weights[:, None], seconds * weights)[0]
            expected = features[:, used] @ found
        if found.min() >= 0:
            break
        used = np.delete(used, found.argmin())
    costs = np.zeros(features.shape[1])
    if len(used):
        costs[used] = found
    return [float(cost) for cost in costs]
