"""The decoder: Llama, Mistral, Qwen2 and Qwen3 differ only in biases, Q/K norms, windows and RoPE."""

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from engine_core.batch import Batch
from engine_core.model.config import ModelConfig
from engine_core.model.quantized import LinearMaker
from engine_core.model.rope import rope_frequencies, rope_table
from engine_core.model.weights import Weights
from kernels.attention import attention
from kernels.elementwise import rms_norm, rope, silu_mul
from kernels.kv_ops import LayerKV, PagedKV
from kernels.linear import Linear


@dataclass(frozen=True)
class _Layer:
    attn_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    window: int


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
        """`loaded` is told how many bytes of the file were read, piece by piece."""
        self.config, self._dtype = config, make.dtype
        self._heads, self._kv_heads = config.num_heads, config.num_kv_heads
        self._scale = config.head_dim**-0.5
        self._frequencies, self._rope_factor = rope_frequencies(config.rope, config.head_dim, rope_divisors)

        def vector(name: str) -> Tensor:
            loaded(weights.bytes_of(name))
            return weights.dense(name).to(make.dtype)

        def linear(*names: str) -> Linear:
            made = make(weights, names)
            loaded(sum(map(weights.bytes_of, names)))
            return made

        def layer(number: int) -> _Layer:
            at = f"layers.{number}."
            return _Layer(
                attn_norm=vector(at + "attn_norm"),
                qkv=linear(at + "q", at + "k", at + "v"),
                q_norm=vector(at + "q_norm") if config.qk_norm else None,
                k_norm=vector(at + "k_norm") if config.qk_norm else None,
                o=linear(at + "o"),
                mlp_norm=vector(at + "mlp_norm"),
                gate_up=linear(at + "gate", at + "up"),
                down=linear(at + "down"),
                window=config.windows[number],
            )

        self._embedding = vector("embed")
        self._layers = [layer(number) for number in range(config.num_layers)]
        self._norm = vector("norm")
        self._head = make.head(self._embedding if config.tied_embeddings else vector("head"))

    def forward(self, batch: Batch, kv: PagedKV) -> Tensor:
        """Run all layers, writing and reading `kv`; returns hidden states `[n, hidden]`, not yet normed."""
        hidden = F.embedding(batch.tokens, self._embedding)
        cos, sin = (t.to(self._dtype) for t in rope_table(self._frequencies, self._rope_factor, batch.positions))
        for layer, layer_kv in zip(self._layers, kv.layers, strict=True):
            x = rms_norm(hidden, layer.attn_norm, self.config.rms_norm_eps)
            x = self._attend(layer, x, layer_kv, cos, sin, batch)
            hidden += layer.o(x)
            x = rms_norm(hidden, layer.mlp_norm, self.config.rms_norm_eps)
            hidden += layer.down(silu_mul(layer.gate_up(x)))
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 logits `[r, vocab]` of hidden states `[r, hidden]`."""
        return self._head(rms_norm(hidden, self._norm, self.config.rms_norm_eps)).float()

    def _attend(self, layer: _Layer, x: Tensor, kv: LayerKV, cos: Tensor, sin: Tensor, batch: Batch) -> Tensor:
        heads, kv_heads, width = self._heads, self._kv_heads, self.config.head_dim
        qkv = layer.qkv(x).view(len(x), -1, width)
        qk = qkv[:, : heads + kv_heads]
        if layer.q_norm is not None and layer.k_norm is not None:
            eps = self.config.rms_norm_eps
            qk[:, :heads] = rms_norm(qk[:, :heads], layer.q_norm, eps)
            qk[:, heads:] = rms_norm(qk[:, heads:], layer.k_norm, eps)
        rope(qk, cos, sin)
        kv.write(batch.write_index, qkv[:, heads:])
        out = attention(qk[:, :heads], kv, batch.attention[layer.window], self._scale)
        return out.reshape(len(x), -1)
