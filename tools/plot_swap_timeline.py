"""A picture of swapping: who computed and who was swapped out, every token, and where the KV blocks were meanwhile.

    python -m tools.plot_swap_timeline RECORD picture.png [--begin SECONDS] [--end SECONDS]
    python -m tools.plot_swap_timeline --run picture.png [--requests 5] [--model MODEL] [--copy-bandwidth-limit BYTES]

RECORD is what an engine with `--record FILE` has written: the real scheduler runs again on it, without a model, and
tells states and pools at each event. `--run` makes a record of its own: real processes on the CPU, requests that begin
a quarter of a second apart, and a pool with half of the blocks that they need. Copies of so few blocks take about a
millisecond; the limit makes them slow enough to be seen. Needs matplotlib.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from engine_core.recorder import Added
from engine_core.request import NOWHERE, Block, Motion, Request, State
from engine_core.scheduler import Scheduler
from frontend.engine_client import EngineClient
from frontend.models import DEFAULT_MODEL, local_path
from protocol.config import EngineConfig
from tools.local_engine import LocalEngine
from tools.replay import BadRecord, Entry, open_record
from tools.streams import Stream, random_prompts, run_stream

MOST_LANES = 60
BLOCK_SIZE = 16
APART = 0.25  # seconds between the requests of --run
MAX_PAUSE = 1.0
SLOW_LINK = 48 << 20  # bytes/s of its copies
INK, QUIET, MOVING = "#22313f", "#8a97a3", "#f08c2e"
STATES = {  # what they are called, and their colours
    State.WAITING: ("waiting", "#e3e7ea"),
    State.PREFILL: ("prefill", "#8fb8de"),
    State.DECODE: ("decode", "#2f74b5"),
    State.SWAPPING_OUT: ("moving", MOVING),
    State.SWAPPED: ("swapped out", "#f9dcc0"),
    State.SWAPPING_IN: ("moving", MOVING),
}


@dataclass
class Lane:
    """One request. Times are the core's clock, in seconds."""

    request: Request
    phases: list[tuple[State, float, float]] = field(default_factory=list)  # what, from, to
    tokens: list[float] = field(default_factory=list)
    state: State = State.WAITING
    since: float = 0.0

    def look(self, now: float) -> None:
        """Note what has changed."""
        request = self.request
        if request.state is not self.state:
            begun = max(self.since, min(request.since, now))
            self.phases.append((self.state, self.since, begun))
            self.state, self.since = request.state, begun
        self.tokens += [now] * (len(request.output) - len(self.tokens))

    @property
    def pause(self) -> float:
        """The longest time between two tokens."""
        return max((after - before for before, after in zip(self.tokens, self.tokens[1:], strict=False)), default=0.0)


@dataclass(frozen=True)
class Pools:
    """How many blocks were where at a time. A moving block has a place in both pools."""

    time: float
    held: int  # on the device, by running requests
    cached: int  # on the device, nobody's now
    moving: int
    claimed: int  # in host memory, of swapped requests
    copies: int  # in host memory, still good and of blocks that are on the device, or of prefixes


@dataclass
class Timeline:
    """What a record shows."""

    lanes: list[Lane]
    pools: list[Pools]
    num_blocks: int
    block_bytes: int
    swapped: int
    recomputed: int


def read_timeline(path: Path) -> Timeline:
    """Replay a record. Raises BadRecord, msgspec.DecodeError, OSError."""
    feeder, entries = open_record(path)
    scheduler, now = feeder.scheduler, 0.0
    lanes: dict[int, Lane] = {}
    pools: list[Pools] = []
    for entry in entries:
        if entry is None:
            break
        if difference := feeder.feed(entry):
            raise BadRecord(f"{path} is of another scheduler:\n{difference}")
        now = max(now, _time_of(entry))
        if isinstance(entry, Added):
            lanes[entry.id] = Lane(scheduler.requests[entry.id], since=entry.arrival)
        for lane in lanes.values():
            if lane.state is not State.FINISHED:
                lane.look(now)
        if now:
            pools.append(_count(scheduler, now))
    for lane in lanes.values():
        if lane.state is not State.FINISHED:
            lane.phases.append((lane.state, lane.since, now))
    counts = scheduler.counts
    capacity = scheduler.capacity
    return Timeline(
        list(lanes.values()), pools, capacity.num_blocks, capacity.block_bytes, counts.swapped, counts.recomputed
    )


def _time_of(entry: Entry) -> float:
    return entry.arrival if isinstance(entry, Added) else float(getattr(entry, "now", 0.0))


def _count(scheduler: Scheduler, now: float) -> Pools:
    pool = scheduler.pool
    claimed = sum(block.host != NOWHERE and block.motion is Motion.STILL for block in _blocks(scheduler.paused))
    return Pools(
        time=now,
        held=pool.num_blocks - pool.free - pool.cached - pool.moving,
        cached=pool.cached,
        moving=pool.moving,
        claimed=claimed,
        copies=pool.host_used - pool.moving - claimed,
    )


def _blocks(requests: Sequence[Request]) -> set[Block]:
    return {block for request in requests for block in request.table}


# -- the picture ---------------------------------------------------------------------------------------------------


def draw(timeline: Timeline, path: Path, begin: float = 0.0, end: float = float("inf"), note: str = "") -> None:
    """Write the picture of the seconds `begin` to `end` after the first arrival as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    zero = min((lane.since if not lane.phases else lane.phases[0][1]) for lane in timeline.lanes)
    last = max((phase[2] for lane in timeline.lanes for phase in lane.phases), default=zero) - zero
    end = min(end, last)
    lanes = [lane for lane in timeline.lanes if lane.phases and lane.phases[0][1] - zero < end]
    lanes = [lane for lane in lanes if lane.phases[-1][2] - zero > begin][:MOST_LANES]
    height = max(1.6, 0.4 * len(lanes)) if len(lanes) <= 12 else min(12.0, 4.0 + 0.15 * len(lanes))
    style: Any = {
        "font.size": 9,
        "axes.edgecolor": QUIET,
        "text.color": INK,
        "axes.labelcolor": INK,
        "xtick.color": INK,
    }
    with pyplot.rc_context(style):
        figure, (upper, lower) = pyplot.subplots(
            2, 1, figsize=(10, height + 3.4), sharex=True, layout="constrained", height_ratios=(height, 2.3)
        )
        _draw_requests(upper, lanes, zero)
        _draw_pools(lower, timeline, zero)
        figure.suptitle(_title(timeline, lanes), x=0.01, ha="left", fontsize=12, color=INK)
        lower.set_xlabel("seconds" + (f"      ({note})" if note else ""))
        lower.set_xlim(begin, end + (end - begin) * 0.004)
        for axes in (upper, lower):
            axes.spines[["top", "right"]].set_visible(False)
            axes.tick_params(length=0)
        figure.savefig(path, dpi=110)
        pyplot.close(figure)


def _title(timeline: Timeline, lanes: Sequence[Lane]) -> str:
    tokens = sum(len(lane.tokens) for lane in lanes)
    again = f", {timeline.recomputed} recomputes" if timeline.recomputed else ", no token computed twice"
    pool = f"a pool of {timeline.num_blocks} blocks"
    count = f"{len(lanes)}" if len(lanes) == len(timeline.lanes) else f"{len(lanes)} of {len(timeline.lanes)}"
    return f"{count} requests in {pool}: {tokens} tokens, {timeline.swapped} swaps{again}"


def _draw_requests(axes: Any, lanes: Sequence[Lane], zero: float) -> None:
    """A lane per request: its phases as bars, its tokens as ticks in them."""
    for number, lane in enumerate(lanes):
        for state, (_, colour) in STATES.items():
            spans = [(a - zero, b - a) for what, a, b in lane.phases if what is state and b > a]
            axes.broken_barh(spans, (number - 0.34, 0.68), color=colour, linewidth=0)
        times = [time - zero for time in lane.tokens]
        axes.vlines(times, number - 0.34, number + 0.1, color="white", linewidth=0.6)
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    are_few = len(lanes) <= 12
    axes.set_yticks(range(len(lanes)) if are_few else [], [_label(lane) for lane in lanes] if are_few else [])
    axes.spines["left"].set_visible(False)
    _legend(axes, {**dict(STATES.values()), "a token": "white"})


def _label(lane: Lane) -> str:
    times = f"{lane.request.swaps} swap{'s' * (lane.request.swaps != 1)}"
    return f"{len(lane.tokens)} tokens, {times}\nlongest gap {lane.pause:.2f} s"


def _legend(axes: Any, colours: dict[str, str]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=colour, edgecolor=QUIET, linewidth=0.4, label=name) for name, colour in colours.items()]
    axes.legend(
        handles=handles, loc="lower right", bbox_to_anchor=(1.0, 1.0), fontsize=8, frameon=False, ncols=len(handles),
        handlelength=1.2, handleheight=0.9, columnspacing=1.2, borderaxespad=0.2,
    )  # fmt: skip


def _draw_pools(axes: Any, timeline: Timeline, zero: float) -> None:
    """The device pool upwards, the host pool downwards."""
    times, pools = [pools.time - zero for pools in timeline.pools], timeline.pools
    above = {
        "held by those that run": (STATES[State.DECODE][1], [p.held for p in pools]),
        "moving": (MOVING, [p.moving for p in pools]),
        "cached": ("#cfd8df", [p.cached for p in pools]),
    }
    below = {
        "moving": (MOVING, [p.moving for p in pools]),
        "of swapped requests": (STATES[State.SWAPPED][1], [p.claimed for p in pools]),
        "spare copies": ("#eceff1", [p.copies for p in pools]),
    }
    for layers, sign in ((above, 1), (below, -1)):
        base = [0] * len(times)
        for colour, values in layers.values():
            top = [lower + sign * value for lower, value in zip(base, values, strict=True)]
            axes.fill_between(times, base, top, step="post", color=colour, linewidth=0)
            base = top
    axes.axhline(timeline.num_blocks, color=INK, linewidth=0.9, linestyle=(0, (4, 3)))
    axes.axhline(0, color=INK, linewidth=0.9)
    deepest = max((p.moving + p.claimed + p.copies for p in pools), default=0)
    axes.set_ylim(-1.05 * max(deepest, timeline.num_blocks / 4), 1.05 * timeline.num_blocks)
    axes.yaxis.set_major_formatter(lambda value, _: f"{abs(value):.0f}")
    axes.set_ylabel("blocks")
    for word, height in (("device pool", 0.97), ("host pool", 0.03)):
        axes.text(
            1.005, height, word, transform=axes.transAxes, rotation=90, fontsize=9, color=INK,
            va="top" if height > 0.5 else "bottom",
        )  # fmt: skip
    _legend(axes, {name: colour for name, (colour, _) in (above | below).items()})


# -- a run of its own ----------------------------------------------------------------------------------------------


def make_streams(count: int) -> list[Stream]:
    """Requests of different sizes, the same each time."""
    prompts = random_prompts(7, [64 + 48 * (number % 3) for number in range(count)])
    return [Stream(prompt, 96 - 16 * (number % 2)) for number, prompt in enumerate(prompts)]


def record_run(model: Path, path: Path, streams: Sequence[Stream], limit: int, **options: Any) -> None:
    """Serve `streams` in half of the blocks that they need, and write the record. Raises RuntimeError if one fails."""
    need = sum(-(-(len(stream.prompt) + stream.max_tokens) // BLOCK_SIZE) for stream in streams)
    config = EngineConfig(
        model=str(model),
        block_size=BLOCK_SIZE,
        num_blocks=need // 2,
        max_cache=max(len(stream.prompt) + stream.max_tokens for stream in streams),
        preemption="swap",
        prefix_cache=False,
        max_pause=MAX_PAUSE,
        threads=1,
        copy_bandwidth_limit=limit,
        record=str(path),
        **options,
    )

    async def scenario(client: EngineClient) -> None:
        running = []
        for stream in streams:
            running.append(asyncio.create_task(run_stream(client, stream)))
            await asyncio.sleep(APART)
        await asyncio.gather(*running)

    with tempfile.TemporaryDirectory(prefix="pt-") as directory:
        engine = LocalEngine(Path(directory), config)
        try:
            engine.run(scenario, 300)
        finally:
            engine.stop()
    if failed := [stream.error for stream in streams if not stream.is_complete]:
        raise RuntimeError(f"{len(failed)} requests failed: {failed[0]}")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.plot_swap_timeline", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("record", type=Path, nargs="?", metavar="RECORD")
    parser.add_argument("picture", type=Path, metavar="PNG")
    parser.add_argument("--begin", type=float, default=0.0, help="seconds after the first arrival")
    parser.add_argument("--end", type=float, default=float("inf"))
    parser.add_argument("--run", action="store_true", help="make a small run instead of reading RECORD")
    parser.add_argument("--requests", type=int, default=5, help="of --run: 3 to 8")
    parser.add_argument("--model", type=Path, default=local_path(DEFAULT_MODEL), help="of --run: GGUF file or folder")
    parser.add_argument("--copy-bandwidth-limit", type=int, default=SLOW_LINK, help="of --run: bytes/s, 0: none")
    options = parser.parse_args(arguments)
    if options.run == (options.record is not None):
        parser.error("give either a RECORD or --run")
    if not 3 <= options.requests <= 8:
        parser.error(f"--requests {options.requests} is out of range: 3 to 8")
    if options.run and options.model is None:
        parser.error("--run needs --model, or the default model: run `pagetide pull`")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    note = ""
    try:
        with tempfile.TemporaryDirectory() as folder:
            if options.run:
                options.record = Path(folder) / "record"
                limit = options.copy_bandwidth_limit
                record_run(options.model, options.record, make_streams(options.requests), limit)
                note = f"copies slowed down to {limit / 1e6:.0f} MB/s, to be seen" if limit else ""
            timeline = read_timeline(options.record)
    except (BadRecord, msgspec.DecodeError, OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if not timeline.lanes:
        print("error: nobody has asked for anything in this record", file=sys.stderr)
        return 2
    draw(timeline, options.picture, options.begin, options.end, note)
    return 0


if __name__ == "__main__":
    sys.exit(main())
