"""Run the real scheduler again on a record of `--record`, without a model, and compare every decision by its hash.

    python -m tools.replay FILE

Exit code 1: it decided otherwise, so it isn't the scheduler of the record, or not deterministic.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from engine_core.plan import Landed, StepPlan, StepResult
from engine_core.recorder import (
    LENGTH,
    VERSION,
    Aborted,
    Added,
    Committed,
    CopiesLanded,
    Grown,
    Header,
    PlanHash,
    Planned,
    planned,
)
from engine_core.request import Request
from engine_core.scheduler import Scheduler
from protocol.messages import unpack_i32

Entry = Header | Added | Aborted | Grown | CopiesLanded | Planned | Committed


class BadRecord(Exception):
    """The file is not a record, or of another version."""


@dataclass
class Replay:
    """What a replay came to."""

    requests: int = 0
    calls: int = 0  # of schedule
    steps: int = 0
    swapped: int = 0
    resumed: int = 0
    recomputed: int = 0
    digest: str = ""
    truncated: bool = False
    difference: str = ""
    unfinished: list[int] = field(default_factory=list)


def read(path: Path) -> Iterator[Entry | None]:
    """Yield a record's entries; None at last if it ends in the middle of one."""
    decoder = msgspec.msgpack.Decoder(Entry)
    with path.open("rb") as file:
        while prefix := file.read(LENGTH.size):
            frame = file.read(LENGTH.unpack(prefix)[0]) if len(prefix) == LENGTH.size else b""
            if not frame or len(frame) < LENGTH.unpack(prefix)[0]:
                yield None
                return
            yield decoder.decode(frame)


def replay(path: Path) -> Replay:
    """Replay a record up to its end or the first difference. Raises BadRecord."""
    outcome = Replay()
    try:
        feeder, entries = open_record(path)
        scheduler = feeder.scheduler
        for entry in entries:
            outcome.truncated = entry is None
            if entry is None:
                break
            outcome.requests += isinstance(entry, Added)
            outcome.calls += isinstance(entry, Planned)
            outcome.difference = feeder.feed(entry)
            if outcome.difference:
                break
    except msgspec.DecodeError as error:
        raise BadRecord(f"{path} is not a record of version {VERSION}: {error}") from error
    outcome.steps, outcome.unfinished = scheduler.step, sorted(scheduler.requests)
    counts = scheduler.counts
    outcome.swapped, outcome.resumed, outcome.recomputed = counts.swapped, counts.resumed, counts.recomputed
    outcome.digest = feeder.digest.hex()
    return outcome


def open_record(path: Path) -> tuple["Feeder", Iterator[Entry | None]]:
    """A scheduler like the one of a record, to be fed with the record's entries. Raises BadRecord, DecodeError."""
    entries = read(path)
    header = next(entries, None)
    if not isinstance(header, Header) or header.version != VERSION:
        raise BadRecord(f"{path} is not a record of version {VERSION}")
    return Feeder(Scheduler(header.capacity, header.eos_token_ids, header.policy)), entries


class Feeder:
    """Tells a scheduler what a record says."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler, self._hash, self.digest = scheduler, PlanHash(), b""
        self.plan: StepPlan | None = None  # what the last call of schedule gave
        self._plans: dict[int, StepPlan] = {}  # not committed yet

    def feed(self, entry: Entry) -> str:
        """Take one entry in; the difference if the scheduler decides otherwise."""
        scheduler = self.scheduler
        match entry:
            case Added():
                scheduler.add(_request(entry))
            case Aborted():
                (scheduler.discard if entry.is_spoilt else scheduler.abort)(entry.id)
            case Grown():
                scheduler.grow_host(entry.host_blocks)
            case CopiesLanded():
                scheduler.land(Landed(entry.copies, entry.ok, entry.seconds), entry.now)
            case Planned():
                return self._plan(entry)
            case Committed():
                plan = self._plans.pop(entry.step)
                self._plans = {step: other for step, other in self._plans.items() if step > entry.step}
                scheduler.commit(plan, StepResult(unpack_i32(entry.tokens).tolist()), entry.now, entry.seconds)
        return ""

    def _plan(self, entry: Planned) -> str:
        plan = self.plan = self.scheduler.schedule(entry.now)
        here = planned(entry.now, plan, self._hash)
        self.digest = here.digest
        if plan is not None and plan.num_tokens:
            self._plans[plan.step] = plan
        return "" if here == entry else f"recorded {_describe(entry)}\nreplayed {_describe(here)}"


def _request(entry: Added) -> Request:
    return Request(
        entry.id,
        unpack_i32(entry.prompt).tolist(),
        entry.sampling,
        entry.max_tokens,
        entry.arrival,
        priority=entry.priority,
        cache_salt=entry.cache_salt,
        output=unpack_i32(entry.output).tolist(),
    )


def _describe(plan: Planned) -> str:
    what = f"step {plan.step}: {plan.rows} rows, {plan.tokens} tokens, {plan.copies} copies"
    return f"at {plan.now:.6f} {what if plan.step >= 0 else 'nothing'}, hash {plan.digest.hex()}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.replay", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("file", type=Path)
    options = parser.parse_args(arguments)
    try:
        outcome = replay(options.file)
    except (BadRecord, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if outcome.truncated:
        print("the record ends in the middle of an entry, as when the engine is killed")
    print(f"requests {outcome.requests}, of which {len(outcome.unfinished)} had not ended")
    print(f"steps {outcome.steps}, calls of schedule {outcome.calls}")
    print(f"swapped {outcome.swapped}, resumed {outcome.resumed}, recomputed {outcome.recomputed}")
    print(f"hash {outcome.digest}")
    if outcome.difference:
        print(f"first difference, after {outcome.calls} calls of schedule:\n{outcome.difference}")
        return 1
    print("every decision is the same")
    return 0


if __name__ == "__main__":
    sys.exit(main())
