"""What the core says of itself several times a second: gauges, counters, the CoreStatus that carries them."""

import os
import time
from typing import Protocol

from engine_core.intake import Intake
from engine_core.load import Engine
from engine_core.output import OutputChannel
from engine_core.runner import Transfer
from engine_core.scheduler import Scheduler
from protocol.messages import Limits, ModelInfo
from protocol.status import CoreStatus, CpuOffload, PeerInfo


class Observed(Protocol):
    """What is looked at of an engine core. Times are in seconds, monotonic; counts are since the start."""

    identity: str
    started: float
    last_progress: float
    step_seconds: float
    longest_step: float
    prompt_tokens: int
    generated_tokens: int
    finished: int
    aborted: int
    failed: int
    engine: Engine
    model: ModelInfo
    limits: Limits
    scheduler: Scheduler
    transfer: Transfer | None
    intake: Intake
    output: OutputChannel


def core_status(core: Observed) -> CoreStatus:
    """The heartbeat. Reads what the step loop counts, from any thread; numbers of one message may be a step apart."""
    scheduler, now = core.scheduler, time.monotonic()
    return CoreStatus(
        identity=core.identity,
        pid=os.getpid(),
        time=time.time(),
        uptime=now - core.started,
        step=scheduler.step,
        step_age=now - core.last_progress if scheduler.has_work else 0.0,
        model=core.model,
        limits=core.limits,
        waiting=len(scheduler.waiting),
        waiting_tokens=scheduler.waiting_tokens,
        running=len(scheduler.running),
        peers=_peers(core),
        gauges=_gauges(core),
        counters=_counters(core),
        memory=core.engine.memory,
        swapped=scheduler.residency.swapped,
        cpu_offload=_cpu_offload(core),
    )


def _cpu_offload(core: Observed) -> CpuOffload:
    pool, block_bytes = core.scheduler.pool, core.engine.capacity.block_bytes
    return CpuOffload(
        core.transfer is not None,
        pool.host_used * block_bytes,
        core.engine.offload_budget,
        core.scheduler.counts.most_swapped,
        pool.moving,
        pool.host_blocks * block_bytes,
    )


def _gauges(core: Observed) -> dict[str, float]:
    scheduler, pool, block_bytes = core.scheduler, core.scheduler.pool, core.engine.capacity.block_bytes
    return {
        "kv_blocks_total": pool.num_blocks,
        "kv_blocks_free": pool.free,
        "kv_blocks_cached": pool.cached,
        "kv_blocks_copying": pool.moving,
        "kv_host_blocks_total": pool.host_blocks,
        "kv_host_blocks_used": pool.host_used,
        "requests_waiting": len(scheduler.waiting),
        "requests_running": len(scheduler.running),
        "requests_waiting_tokens": scheduler.waiting_tokens,
        "longest_step_seconds": core.longest_step,
        "swapped_requests": scheduler.residency.swapped,
        "max_swapped_requests": scheduler.counts.most_swapped,
        "cpu_offload_enabled": float(core.transfer is not None),
        "cpu_offload_bytes": pool.host_used * block_bytes,
        "cpu_offload_budget_bytes": core.engine.offload_budget,
    }


def _counters(core: Observed) -> dict[str, float]:
    scheduler, counts = core.scheduler, core.scheduler.counts
    return {
        "steps_total": scheduler.step,
        "step_seconds_total": core.step_seconds,
        "prompt_tokens_total": core.prompt_tokens,
        "generated_tokens_total": core.generated_tokens,
        "requests_accepted_total": core.intake.accepted,
        "requests_rejected_total": core.intake.rejected,
        "requests_finished_total": core.finished,
        "requests_aborted_total": core.aborted,
        "requests_failed_total": core.failed,
        "requests_swapped_total": counts.swapped,
        "requests_resumed_total": counts.resumed,
        "requests_recomputed_total": counts.recomputed,
        "requests_preempted_total": counts.swapped + counts.recomputed,
        "kv_cpu_offload_blocks_total": counts.blocks_out,
        "kv_cpu_offload_bytes_total": counts.blocks_out * core.engine.capacity.block_bytes,
        "kv_cpu_offload_failed_total": counts.failed,
        "kv_cpu_offload_rejected_total": counts.rejected,
        "kv_cpu_reload_blocks_total": counts.blocks_in,
        "kv_stray_copies_total": scheduler.pool.strays,
        "cpu_offload_seconds": counts.seconds_out,
        "cpu_reload_seconds": counts.seconds_in,
        "prefix_cache_hit_tokens_total": scheduler.prefix_hit_tokens,
        "prefix_cache_query_tokens_total": scheduler.prefix_query_tokens,
        "prefix_cache_evicted_blocks_total": scheduler.pool.evictions,
        "wire_dropped_messages_total": core.intake.server.dropped + core.output.server.dropped,
    }


def _peers(core: Observed) -> list[PeerInfo]:
    peers = list(core.intake.server.peers.values()) + list(core.output.server.peers.values())
    return [PeerInfo(p.hello.role, p.hello.identity, p.hello.pid, p.hello.endpoint) for p in peers]
