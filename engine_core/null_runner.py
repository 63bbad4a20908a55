"""A runner without a model: for benchmarks and fault tests of everything else. `--device null`."""

from collections.abc import Callable, Sequence
from pathlib import Path

from engine_core.model.config import load_model_config
from engine_core.plan import Copy, Landed, StepPlan, StepResult
from protocol.config import EngineConfig

DEFAULT_BLOCKS = 1 << 16
FIRST_TOKEN, TOKENS = 300, 64  # ordinary words in vocabularies of the GPT-2 kind


class NullRunner:
    """Samples the same token for a request's n-th position whatever its prompt. It has no KV and takes no time."""

    def __init__(self, config: EngineConfig) -> None:
        model = load_model_config(Path(config.model))
        self.vocab_size = model.vocab_size
        self.eos_token_ids = list(model.eos_token_ids)
        self.max_context = config.max_cache or model.max_context
        self.num_blocks = config.num_blocks or DEFAULT_BLOCKS
        self.memory: dict[str, int] = {}
        self.block_bytes = 1  # so that a budget is a number of blocks
        self.kv_cache_dtype = "none"
        self.summary = f"no model, {self.num_blocks} blocks that hold nothing"
        self._result = StepResult([])

    def open_transfer(self, budget: int, wake: Callable[[], None], bandwidth_limit: int) -> "NullTransfer":
        """See `LoadedRunner`."""
        return NullTransfer(min(budget, DEFAULT_BLOCKS), wake)

    def launch(self, plan: StepPlan) -> "NullRunner":
        """Choose the tokens."""
        rows = (row for row in (*plan.decodes, *plan.prefills) if row.samples)
        self._result = StepResult([FIRST_TOKEN + (row.request_id + row.position) % TOKENS for row in rows])
        return self

    def tokens(self) -> StepResult:
        """The tokens chosen at launch."""
        return self._result


class NullTransfer:
    """A `Transfer` that moves no bytes: copies have landed by the next `landed()`. It keeps tags as others do."""

    poll_interval = 0.0

    def __init__(self, host_blocks: int, wake: Callable[[], None]) -> None:
        self.host_blocks, self._wake = host_blocks, wake
        self._tags: dict[int, int] = {}
        self._started: list[Copy] = []

    def start(self, copies: Sequence[Copy]) -> None:
        """See `Transfer`."""
        self._started += copies
        if copies:
            self._wake()

    def landed(self) -> list[Landed]:
        """See `Transfer`."""
        copies, self._started = self._started, []
        self._tags.update((copy.host, copy.tag) for copy in copies if copy.out)
        by_ok = {ok: [copy for copy in copies if (self._tags.get(copy.host) == copy.tag) == ok] for ok in (True, False)}
        return [Landed(some, ok, 0.0) for ok, some in by_ok.items() if some]

    def close(self) -> None:
        """See `Transfer`."""
        self._started = []
