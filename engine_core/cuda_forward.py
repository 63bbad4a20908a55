"""The decoder's layers through the CUDA kernels: what Decoder.forward is on the CPU."""

import torch
from torch import Tensor

from engine_core.cuda_inputs import StepInputs, StepShape
from engine_core.model.decoder import Decoder, gelu_mul
from engine_core.model.rope import rope_table
from kernels.cuda_attention import DecodeAttention, PrefillAttention, WriteKV
from kernels.cuda_dense_linear import CudaDenseLinear
from kernels.cuda_elementwise import add_rms_norm, embedding, rms_norm, silu_mul
from kernels.cuda_layout import KVLayout
from kernels.kv_format import BlockLayout
from kernels.linear import Linear

_GATES = {"silu": silu_mul, "gelu_tanh": gelu_mul}
Kind = tuple[str, str]  # formats of K and V


class CudaForward:
    """One decoder over one pool. Allocates activations only, and can be captured into a CUDA graph."""

    def __init__(
        self, decoder: Decoder, layout: BlockLayout, pool: Tensor, inputs: StepInputs, max_context: int
    ) -> None:
        """`pool` is uint8 `[num_blocks, image_bytes]`. Raises KernelError if the kernels don't know such a model."""
        config = decoder.config
        self.pool, self._decoder, self._inputs = pool, decoder, inputs
        self._eps, self._head_dim, self._heads = config.rms_norm_eps, config.head_dim, config.num_heads
        self._gate = _GATES[config.activation]
        self._layouts = kernel_layouts(layout)
        self._make_ops(decoder, inputs.max_rows)
        self._cos_sin = {
            rope: _cos_sin(*found, max_context, pool.device) for rope, found in decoder.frequencies.items()
        }
        self._starts = torch.arange(inputs.max_rows + 1, dtype=torch.int32, device=pool.device)

    def _make_ops(self, decoder: Decoder, max_rows: int) -> None:
        config, dtype, device = decoder.config, decoder.dtype, self.pool.device
        heads, kv_heads, width = config.num_heads, config.num_kv_heads, config.head_dim
        self._write: dict[Kind, WriteKV] = {}
        self._decode: dict[tuple[Kind, int], DecodeAttention] = {}
        self._prefill: dict[tuple[Kind, int], PrefillAttention] = {}
        for layout, window in zip(self._layouts, config.windows, strict=True):
            k, v = kind = layout.k_format, layout.v_format
            self._write.setdefault(kind, WriteKV(k, v, width, dtype, device))
            if (kind, window) not in self._decode:
                scale = decoder.scale
                self._decode[kind, window] = DecodeAttention(
                    k, v, heads, kv_heads, width, dtype, device, max_rows, window=window, scale=scale
                )
                self._prefill[kind, window] = PrefillAttention(
                    k, v, heads, kv_heads, width, dtype, device, window=window, scale=scale
                )

    def __call__(self, shape: StepShape) -> Tensor:
        """Compute the inputs' first rows of either kind. Returns hidden states `[tokens, hidden]`, normed for the head.

        What is idle is known on the device alone, so a captured pass serves every step that fits into its shape.
        """
        inputs, layers = self._inputs, self._decoder.layers
        decodes, prefills, tokens = shape
        if decodes:
            batch = inputs.tables[:decodes], inputs.lengths[:decodes], self._starts[: decodes + 1]
            for op in self._decode.values():
                op.plan(*batch)
        hidden = embedding(inputs.tokens[:tokens], self._decoder.embedding)
        if self._decoder.embedding_scale != 1:
            hidden *= self._decoder.embedding_scale
        x = rms_norm(hidden, layers[0].attn_norm, self._eps)
        mixed = torch.empty((tokens, self._heads, self._head_dim), dtype=x.dtype, device=x.device)
        for number, layer in enumerate(layers):
            self._attend(number, in_parts(layer.qkv, x), mixed, decodes, prefills)
            x = self._add_norm(layer.o, mixed.view(tokens, -1), hidden, layer.attn_out_norm, layer.mlp_norm)
            following = layers[number + 1].attn_norm if number + 1 < len(layers) else self._decoder.norm
            x = layer.gate_up(x) if layer.is_gated else self._gate(layer.gate_up(x))
            x = self._add_norm(layer.down, x, hidden, layer.mlp_out_norm, following)
        return x

    def _attend(self, number: int, qkv: Tensor, out: Tensor, decodes: int, prefills: int) -> None:
        """Write K and V of a layer, and attend with its queries, of what `in_parts` gives."""
        inputs, layer, layout = self._inputs, self._decoder.layers[number], self._layouts[number]
        kind, tokens = (layout.k_format, layout.v_format), len(out)
        qkv = qkv.view(*qkv.shape[:-1], -1, self._head_dim)
        query = torch.empty_like(out) if qkv.dim() == 4 else qkv[:, : self._heads]
        self._write[kind](
            layout,
            self.pool,
            qkv,
            query,
            inputs.slots[:tokens],
            inputs.positions[:tokens],
            self._cos_sin[layer.rope],
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            norm_eps=self._eps,
        )
        if decodes:  # what is idle of them stays as it is, or is a prefill row's
            self._decode[kind, layer.window](layout, self.pool, query[:decodes], out[:decodes])
        if prefills:
            rows = slice(inputs.max_rows, inputs.max_rows + prefills)
            batch = inputs.tables[rows], inputs.lengths[rows], inputs.query_start[: prefills + 1]
            self._prefill[kind, layer.window](layout, self.pool, query, out, *batch)

    def _add_norm(
        self, linear: Linear, x: Tensor, hidden: Tensor, own_norm: Tensor | None, following: Tensor
    ) -> Tensor:
        """Add what x becomes to hidden, after a norm of its own if it has one, and return the norm that follows."""
        x = in_parts(linear, x) if own_norm is None else rms_norm(linear(x), own_norm, self._eps)
        return add_rms_norm(x, hidden, following, self._eps)


def in_parts(linear: Linear, x: Tensor) -> Tensor:
    """What it makes of x `[n, in]`: `[n, out]`, or float32 parts `[slices, n, out]` that the next kernel adds up."""
    return linear.parts(x) if isinstance(linear, CudaDenseLinear) else linear(x)


def kernel_layouts(layout: BlockLayout) -> list[KVLayout]:
    """The layers of a layout as the kernels know them. Raises KernelError for sizes that they don't know."""
    shape = layout.shape
    return [
        KVLayout(
            layer.k.kernel,
            layer.v.kernel,
            shape.num_kv_heads,
            shape.head_dim,
            shape.block_size,
            layout.image_bytes,
            layer.k_offset,
            layer.v_offset,
            layer.k_scale_offset,
            layer.v_scale_offset,
        )
        for layer in layout.layers
    ]


def _cos_sin(frequencies: Tensor, factor: float, max_context: int, device: torch.device) -> Tensor:
    """Cosines, then sines, float32 `[max_context, head_dim]`."""
    cos, sin = rope_table(frequencies, factor, torch.arange(max_context))
    half = cos.shape[-1] // 2
    return torch.cat((cos[:, 0, :half], sin[:, 0, half:]), -1).contiguous().to(device)
