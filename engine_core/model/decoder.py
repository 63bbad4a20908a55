"""The decoder: Llama, Mistral, Qwen2 and Qwen3 differ only in biases, Q/K norms, windows and RoPE.

Gemma 3 also norms what attention and MLP give, scales its embedding, and has a RoPE of its own for windowed layers.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from threading import Lock

import torch
import torch.nn.functional as F
from torch import Tensor

from engine_core.batch import Batch
from engine_core.device import give_back_memory
from engine_core.model.config import ModelConfig, RopeConfig
from engine_core.model.quantized import LinearMaker
from engine_core.model.rope import rope_frequencies, rope_table
from engine_core.model.weights import Weights
from kernels.attention import attention
from kernels.elementwise import rms_norm, rope, silu_mul
from kernels.kv_ops import LayerKV, PagedKV
from kernels.linear import Linear


@dataclass(frozen=True)
class Layer:
    """Weights of one layer."""

    attn_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Linear
    attn_out_norm: Tensor | None
    mlp_norm: Tensor
    gate_up: Linear
    is_gated: bool  # gate_up gives silu(gate) * up, not both
    down: Linear
    mlp_out_norm: Tensor | None
    window: int
    rope: RopeConfig


class _Reader:
    """Makes what a decoder holds, in any thread; `loaded` hears of bytes from one at a time."""

    def __init__(self, config: ModelConfig, weights: Weights, make: LinearMaker, loaded: Callable[[int], None]) -> None:
        self._config, self._weights, self._make = config, weights, make
        self._loaded, self._lock = loaded, Lock()

    def norm(self, name: str) -> Tensor:
        made = (self._weights.dense(name).float() + self._config.norm_offset).to(self._make.device, self._make.dtype)
        self._tell(name)
        return made

    def matrix(self, name: str) -> Tensor:
        made = self._make.matrix(self._weights, name)
        self._tell(name)
        return made

    def linear(self, *names: str) -> Linear:
        made = self._make(self._weights, names)
        self._tell(*names, *(bias for bias in (f"{name}.bias" for name in names) if bias in self._weights.shapes))
        return made

    def gated(self, gate: str, up: str) -> Linear | None:
        made = self._make.gated(self._weights, (gate, up)) if self._config.activation == "silu" else None
        if made is not None:
            self._tell(gate, up)
        return made

    def layer(self, number: int, rope: RopeConfig) -> Layer:
        at, config = f"layers.{number}.", self._config
        norm, linear = self.norm, self.linear
        gated = self.gated(at + "gate", at + "up")
        return Layer(
            attn_norm=norm(at + "attn_norm"),
            qkv=linear(at + "q", at + "k", at + "v"),
            q_norm=norm(at + "q_norm") if config.qk_norm else None,
            k_norm=norm(at + "k_norm") if config.qk_norm else None,
            o=linear(at + "o"),
            attn_out_norm=norm(at + "attn_out_norm") if config.output_norms else None,
            mlp_norm=norm(at + "mlp_norm"),
            gate_up=gated or linear(at + "gate", at + "up"),
            is_gated=gated is not None,
            down=linear(at + "down"),
            mlp_out_norm=norm(at + "mlp_out_norm") if config.output_norms else None,
            window=config.windows[number],
            rope=rope,
        )

    def _tell(self, *names: str) -> None:
        with self._lock:
            self._loaded(sum(map(self._weights.bytes_of, names)))


class Decoder:
    """Weights of one model, in the compute dtype or as `make` keeps them."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        make: LinearMaker,
        rope_divisors: Tensor | None = None,
        loaded: Callable[[int], None] = lambda count: None,
    ) -> None:
        """`loaded` is told how many bytes of the file were read, piece by piece, from any thread, one at a time."""
        self.config, self.dtype = config, make.dtype
        self._heads, self._kv_heads = config.num_heads, config.num_kv_heads
        self.scale = config.attention_scale or config.head_dim**-0.5
        self.embedding_scale = float(torch.tensor(config.embedding_scale, dtype=make.dtype))  # as transformers does
        self._gate = {"silu": silu_mul, "gelu_tanh": gelu_mul}[config.activation]
        local = config.local_rope or config.rope
        ropes = [local if window else config.rope for window in config.windows]
        self.frequencies = {rope: rope_frequencies(rope, config.head_dim, rope_divisors) for rope in set(ropes)}

        read = _Reader(config, weights, make, loaded)
        layers: dict[int, Layer] = {}
        heads: list[Tensor] = []

        def ends() -> None:
            self.embedding, self.norm = read.matrix("embed"), read.norm("norm")
            heads.append(self.embedding if config.tied_embeddings else read.matrix("head"))

        def add(number: int) -> None:
            layers[number] = read.layer(number, ropes[number])

        numbers = range(config.num_layers)
        _side_by_side([ends, *(partial(add, number) for number in numbers)], make.device)
        self.layers = [layers[number] for number in numbers]
        give_back_memory()  # or what layers left behind adds to the head's own peak
        self.head = make.head(heads.pop(), partial(_side_by_side, device=make.device))

    def forward(self, batch: Batch, kv: PagedKV) -> Tensor:
        """Run all layers, writing and reading `kv`; returns hidden states `[n, hidden]`, not yet normed."""
        hidden, tables = self.embed(batch), self.rope_tables(batch)
        for layer, layer_kv in zip(self.layers, kv.layers, strict=True):
            self.run_layer(layer, hidden, layer_kv, tables[layer.rope], batch)
        return hidden

    def embed(self, batch: Batch) -> Tensor:
        """What the first layer takes, `[n, hidden]`."""
        hidden = F.embedding(batch.tokens, self.embedding)
        return hidden if self.embedding_scale == 1 else hidden * self.embedding_scale

    def rope_tables(self, batch: Batch) -> dict[RopeConfig, tuple[Tensor, Tensor]]:
        """Cos and sin, `[n, 1, head_dim]`, of each kind of layer."""
        tables = {rope: rope_table(*found, batch.positions) for rope, found in self.frequencies.items()}
        return {rope: (cos.to(self.dtype), sin.to(self.dtype)) for rope, (cos, sin) in tables.items()}

    def run_layer(self, layer: Layer, hidden: Tensor, kv: LayerKV, table: tuple[Tensor, Tensor], batch: Batch) -> None:
        """Add what a layer computes to `hidden`, in place."""
        eps = self.config.rms_norm_eps
        x = layer.o(self._attend(layer, rms_norm(hidden, layer.attn_norm, eps), kv, *table, batch))
        hidden += x if layer.attn_out_norm is None else rms_norm(x, layer.attn_out_norm, eps)
        x = layer.gate_up(rms_norm(hidden, layer.mlp_norm, eps))
        x = layer.down(x if layer.is_gated else self._gate(x))
        hidden += x if layer.mlp_out_norm is None else rms_norm(x, layer.mlp_out_norm, eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 logits `[r, vocab]` of hidden states `[r, hidden]`."""
        logits = self.head(rms_norm(hidden, self.norm, self.config.rms_norm_eps)).float()
        cap = self.config.logit_softcap
        return logits if not cap else (logits / cap).tanh_().mul_(cap)

    def _attend(self, layer: Layer, x: Tensor, kv: LayerKV, cos: Tensor, sin: Tensor, batch: Batch) -> Tensor:
        heads, kv_heads, width = self._heads, self._kv_heads, self.config.head_dim
        qkv = layer.qkv(x).view(len(x), -1, width)
        qk = qkv[:, : heads + kv_heads]
        if layer.q_norm is not None and layer.k_norm is not None:
            eps = self.config.rms_norm_eps
            qk[:, :heads] = rms_norm(qk[:, :heads], layer.q_norm, eps)
            qk[:, heads:] = rms_norm(qk[:, heads:], layer.k_norm, eps)
        rope(qk, cos, sin)
        kv.write(batch.write_index, qkv[:, heads:])
        out = attention(qk[:, :heads], kv, batch.attention[layer.window], self.scale)
        return out.reshape(len(x), -1)


def _side_by_side(tasks: Sequence[Callable[[], None]], device: torch.device) -> None:
    """Run them, on the CPU one per core at a time: threads that share each small op wait more than they work.

    Beside other busy processes, two threads took 7.6 s for what one did in 4.0 s and, layer by layer, two did in 2.6 s.
    """
    threads = torch.get_num_threads() if device.type == "cpu" else 1

    def one(task: Callable[[], None]) -> None:
        with torch.inference_mode():
            task()

    if threads == 1:
        for task in tasks:
            one(task)
        return
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            list(pool.map(one, tasks))
    finally:
        torch.set_num_threads(threads)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up with tanh's approximation, where gate_up `[n, 2 * d]` holds gate in its first half."""
    gate, up = gate_up.chunk(2, -1)
    return F.gelu(gate, approximate="tanh").mul_(up)
