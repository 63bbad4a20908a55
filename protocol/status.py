"""What the engine core says of itself: the heartbeat."""

from protocol.messages import Limits, Message, ModelInfo, Part, Role


class PeerInfo(Part, frozen=True):
    """A process that is connected to the core."""

    role: Role
    identity: str
    pid: int
    endpoint: str


class CpuOffload(Part, frozen=True):
    """The swapping of KV to host memory."""

    enabled: bool = False
    payload_bytes: int = 0  # block images in the host pool, those being copied included
    budget_bytes: int = 0  # --max-cpu-offload-mb
    max_swapped_requests: int = 0  # at once, since the start
    copying_blocks: int = 0  # in flight, both ways
    host_pool_bytes: int = 0  # made so far of the budget


class CoreStatus(Message, frozen=True):
    """The core's heartbeat, published several times a second; only the newest value matters.

    `step_age` counts from the last end of a step or idle moment: with work pending, a large one means a hanging loop.
    """

    identity: str
    pid: int
    time: float  # unix seconds
    uptime: float
    step: int
    step_age: float
    model: ModelInfo
    limits: Limits
    waiting: int
    waiting_tokens: int
    running: int
    peers: list[PeerInfo]
    gauges: dict[str, float] = {}  # point-in-time values by metric name
    counters: dict[str, float] = {}  # monotonic totals by metric name
    memory: dict[str, int] = {}  # bytes by use, as the start-up line lists them
    swapped: int = 0  # requests that are swapped out
    cpu_offload: CpuOffload = CpuOffload()
