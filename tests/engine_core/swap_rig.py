"""The real scheduler, a real model of tiny size and real copies, in step with each other; copies land when told to.

Every token is computed alone, as a row of its own. So its KV and logits are a function of the tokens before it and of
nothing else: neither batch mates nor the cut of a prompt into chunks can tip a near tie, and equal means equal.
"""

import json
import random
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

import torch
from safetensors.torch import save_file

from engine_core.capacity import Capacity
from engine_core.model_runner import ModelRunner, load_runner
from engine_core.plan import Copy, Landed, Row, StepPlan, StepResult
from engine_core.request import Motion, Request, State
from engine_core.scheduler import Outcome, Scheduler
from engine_core.swap import SwapPolicy
from engine_core.transfer import CpuTransfer, HostPool
from protocol.config import EngineConfig
from protocol.messages import SamplingParams

VOCAB, HIDDEN, INNER, LAYERS, HEADS, HEAD_DIM = 128, 32, 48, 2, 2, 16
BLOCK_SIZE = 4
POOL = 64  # blocks that the runner has; a rig uses the first of them, the undisturbed run the last
CALM_BLOCKS = 16
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 1,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}


def load_tiny(folder: Path, kv_cache_dtype: str) -> ModelRunner:
    """A Llama with random weights, in FP32."""
    draw = torch.Generator().manual_seed(5)
    shapes = {"q_proj": (HEADS * HEAD_DIM, HIDDEN), "k_proj": (HEAD_DIM, HIDDEN), "v_proj": (HEAD_DIM, HIDDEN)}
    shapes |= {"o_proj": (HIDDEN, HEADS * HEAD_DIM)}
    linears = {f"self_attn.{name}": shape for name, shape in shapes.items()}
    linears |= {"mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN), "mlp.down_proj": (HIDDEN, INNER)}
    tensors = {"model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN, generator=draw)}
    tensors["model.norm.weight"] = torch.ones(HIDDEN)
    for layer in range(LAYERS):
        for name, shape in linears.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = torch.randn(shape, generator=draw) * 0.4
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = torch.ones(HIDDEN)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG))
    config = EngineConfig(
        model=str(folder), dtype="fp32", threads=1, kv_cache_dtype=kv_cache_dtype, num_blocks=POOL,
        block_size=BLOCK_SIZE, max_cache=CALM_BLOCKS * BLOCK_SIZE, prefix_cache=False,
    )  # fmt: skip
    runner = load_runner(config)
    runner.store.pool.fill_(0xFF)  # NaN in every float format
    return runner


def compute(runner: ModelRunner, plan: StepPlan, newest: dict[int, int]) -> StepResult:
    """A step, token by token. `newest` holds the last token of each request; the next step may only know of it."""
    tokens = []
    for row in (*plan.decodes, *plan.prefills):
        for position, token in enumerate(row.tokens, row.start):
            samples = row.samples and position == row.start + len(row.tokens) - 1
            known = newest[row.request_id] if token < 0 else token
            blocks = row.blocks[: position // BLOCK_SIZE + 1]
            one = replace(row, tokens=[known], start=position, blocks=blocks, samples=samples)
            sampled = runner.launch(StepPlan(plan.step, [one], [])).tokens().tokens
            if samples:
                newest[row.request_id] = sampled[0]
                tokens += sampled
    return StepResult(tokens)


def undisturbed(runner: ModelRunner, request: Request) -> list[int]:
    """What a request's tokens are when it is alone in a pool that holds it."""
    known = list(request.prompt)
    blocks = list(range(POOL - CALM_BLOCKS, POOL))
    while len(known) < len(request.prompt) + request.max_tokens:
        done = 0 if len(known) == len(request.prompt) else len(known) - 1
        position = len(known) - len(request.prompt)
        row = Row(request.id, known[done:], done, blocks, True, request.sampling, position, request.prompt)
        known += compute(runner, StepPlan(0, [], [row]), {}).tokens
    return known[len(request.prompt) :]


class Rig:
    """One scheduler over the first `num_blocks` blocks of a runner's pool, and a host pool of its own."""

    def __init__(
        self, runner: ModelRunner, num_blocks: int, host_blocks: int, policy: SwapPolicy, overlap: bool = False
    ) -> None:
        """With `overlap`, a step is planned before the tokens of the one before it are known."""
        assert num_blocks <= POOL - CALM_BLOCKS
        self.runner, self._overlap = runner, overlap
        context = CALM_BLOCKS * BLOCK_SIZE
        capacity = Capacity(num_blocks, BLOCK_SIZE, context, max_running=6, prefill_chunk_tokens=8)
        self.scheduler = Scheduler(capacity, [], policy)
        self.scheduler.pool.grow_host(host_blocks)
        image_bytes = runner.store.layout.image_bytes
        self.host = HostPool(image_bytes, host_blocks * image_bytes)
        assert self.host.made.wait(10)
        self._woken = threading.Semaphore(0)
        self._tickets = {out: threading.Semaphore(0) for out in (True, False)}
        self.transfer = CpuTransfer(runner.store.pool, self.host, self._woken.release, self._gate)
        self.in_flight: dict[bool, deque[Copy]] = {True: deque(), False: deque()}
        self.failing: set[int] = set()  # tags of copies that are to fail
        self.sums: dict[int, bytes] = {}  # of images, by tag
        self.round_trips = 0
        self.newest: dict[int, int] = {}
        self.ended_in: dict[int, State] = {}  # the states in which requests got their last tokens
        self._computed: tuple[StepPlan, StepResult] | None = None
        self.now, self._ids = 0.0, 0

    def _gate(self, copy: Copy) -> None:
        assert self._tickets[copy.out].acquire(timeout=20)
        if copy.tag in self.failing:
            raise RuntimeError("told to fail")

    def _sum(self, copy: Copy) -> bytes:
        return blake2b(self.runner.store.pool[copy.device].numpy().tobytes()).digest()

    def add(
        self, prompt: list[int], max_tokens: int, temperature: float = 0.0, priority: int = 0, stop: int = -1
    ) -> Request:
        self._ids += 1
        stops = [stop] if stop >= 0 else []
        sampling = SamplingParams(temperature=temperature, seed=self._ids, ignore_eos=True, stop_token_ids=stops)
        request = Request(self._ids, prompt, sampling, max_tokens, self.now, priority=priority)
        self.scheduler.add(request)
        return request

    def step(self) -> list[Outcome]:
        """One turn of the step loop, without landings."""
        self.now += 0.01
        plan = self.scheduler.schedule(self.now)
        self.scheduler.check()
        previous, self._computed = self._computed, None
        if plan is not None:
            self.start(plan.copies)
            if plan.num_tokens:
                self._computed = plan, compute(self.runner, plan, self.newest)
        outcomes = self._commit(previous)
        if not self._overlap:
            outcomes += self._commit(self._computed)
            self._computed = None
        return outcomes

    def _commit(self, step: tuple[StepPlan, StepResult] | None) -> list[Outcome]:
        if step is None:
            return []
        states = {request.id: request.state for request in self.scheduler.requests.values()}
        outcomes = self.scheduler.commit(*step, self.now, 0.01)
        self.ended_in |= {one.request.id: states[one.request.id] for one in outcomes if one.finish}
        self.scheduler.check()
        return outcomes

    def start(self, copies: list[Copy]) -> None:
        """Start copies; what they fill is poison until then."""
        for copy in copies:
            self.in_flight[copy.out].append(copy)
            if copy.out:
                self.sums[copy.tag] = self._sum(copy)
            else:
                self.runner.store.pool[copy.device] = 0xFF
        self.transfer.start(copies)

    def land(self, out: bool, count: int = 1) -> None:
        """Let copies of one direction go, wait for them, check their bytes, and tell the scheduler."""
        for _ in range(min(count, len(self.in_flight[out]))):
            self._tickets[out].release()
            assert self._woken.acquire(timeout=20), "nothing landed"
            copy = self.in_flight[out].popleft()
            (landed,) = self.transfer.landed()
            assert landed.copies == [copy]
            if out:
                assert self._sum(copy) == self.sums[copy.tag], "a block was written while it was copied"
            elif landed.ok:
                assert self._sum(copy) == self.sums[copy.tag], "an image came back as another"
                self.round_trips += 1
            self.tell(landed)

    def tell(self, landed: Landed) -> None:
        """Tell the scheduler."""
        self.scheduler.land(landed, self.now)
        self.scheduler.check()

    def land_all(self) -> None:
        for out in (True, False):
            self.land(out, len(self.in_flight[out]))

    def step_until(self, request: Request, state: State) -> None:
        """Copies in only land when they have to, so that each state can be seen."""
        for _ in range(500):
            if request.state is state:
                return
            self.land(True, 0 if state is State.SWAPPING_OUT else len(self.in_flight[True]))
            self.land(False, 0 if state is State.SWAPPING_IN else len(self.in_flight[False]))
            if request.state is not state:
                self.step()
        raise AssertionError(f"never {state.name}, but {request.state.name}")

    def finish(self, until: Callable[[], bool] = lambda: False) -> None:
        """Step until nothing is left to do."""
        for _ in range(5000):
            if until() or not (self.scheduler.has_work or any(self.in_flight.values()) or self._computed):
                return
            self.land_all()
            self.step()
        raise AssertionError("no end in sight")

    def assert_nothing_is_left(self) -> None:
        """By the counts of both pools; `check` has proved by id that they are of different places."""
        pool = self.scheduler.pool
        assert not self.scheduler.requests
        assert (pool.free + pool.cached, pool.moving, pool.coming) == (pool.num_blocks, 0, 0)
        assert pool.host_room == pool.host_blocks, "a host place is still claimed"

    def swap_out(self, request: Request) -> None:
        """Begin to swap a request out, now."""
        assert self.scheduler.residency.swap_out(request)
        self.start(self.scheduler.pool.copies)
        self.scheduler.pool.copies = []
        self.scheduler.check()

    def evict(self) -> None:
        """Overwrite what nobody holds: what is swapped out has to come in again."""
        pool = self.scheduler.pool
        taken = pool.allocate(pool.available)
        for block in taken:
            self.runner.store.pool[block.device] = 0xFF
        pool.release(taken)
        self.scheduler.check()

    def tamper(self, request: Request, how: str) -> None:
        """Make the host pool hold something else than the scheduler believes."""
        slots = [block.host for block in request.table if block.motion is Motion.STILL]
        tags = self.host.tags
        if how == "retagged":
            tags[slots[0]] += 1 << 40
        elif how == "lost":
            del tags[slots[0]]
        else:
            one, other = (self.host.images(slot, 1) for slot in slots[:2])
            one[:], other[:] = other.copy(), one.copy()
            tags[slots[0]], tags[slots[1]] = tags[slots[1]], tags[slots[0]]

    def close(self) -> None:
        for tickets in self._tickets.values():
            tickets.release(1000)
        self.transfer.close()


def random_request(rig: Rig, draw: random.Random) -> Request:
    """Greedy or seeded, of one of three prompt families or of none."""
    family = draw.randrange(6)
    prompt = [(7 * n + family) % VOCAB for n in range(draw.choice((4, 8, 11)))] if family < 3 else []
    prompt += draw.choices(range(VOCAB), k=draw.randint(1, 20))
    return rig.add(prompt, draw.randint(2, 14), draw.choice((0.0, 0.9)), draw.choice((0, 0, 0, 1)))
