"""transformers as a peer in benchmarks: a Llama GGUF's dequantised weights in bfloat16, decoded in a plain loop.

The loop calls the model itself, not `generate`, which is a little slower.
"""

import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from engine_core.model.config import from_gguf
from engine_core.model.gguf_file import GGUFFile
from engine_core.model.weights_gguf import GGUFWeights

_PARTS = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
}


def load(path: Path) -> Any:
    """The model, tied embeddings assumed."""
    file = GGUFFile(path)
    config = from_gguf(file)
    weights = GGUFWeights(file, config)
    state = {"model.embed_tokens.weight": weights.dense("embed"), "model.norm.weight": weights.dense("norm")}
    for number in range(config.num_layers):
        for ours, theirs in _PARTS.items():
            state[f"model.layers.{number}.{theirs}.weight"] = weights.dense(f"layers.{number}.{ours}")
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model: Any = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            max_position_embeddings=config.max_context,
            rms_norm_eps=config.rms_norm_eps,
            rope_theta=config.rope.theta,
            tie_word_embeddings=True,
        )
    )
    model.load_state_dict(state)
    return model.to(torch.bfloat16).eval()


class Peer:
    """Speeds in tokens per second."""

    def __init__(self, path: Path, threads: int = 0) -> None:
        """`threads` is 0 for torch's default."""
        if threads:
            torch.set_num_threads(threads)
        self.version = transformers.__version__
        self._model = load(path)

    def decode(self, prompts: list[list[int]], tokens: int) -> float:
        """Decode `tokens` tokens after prompts of equal length, over all streams, the prefill left out."""
        with torch.inference_mode():
            out = self._forward(torch.tensor(prompts), None)
            started = time.perf_counter()
            for _ in range(tokens):
                out = self._forward(out.logits[:, -1:].argmax(-1), out.past_key_values)
            return len(prompts) * tokens / (time.perf_counter() - started)

    def prefill(self, prompt: list[int]) -> float:
        """Prefill one prompt."""
        with torch.inference_mode():
            started = time.perf_counter()
            self._forward(torch.tensor([prompt]), None)
            return len(prompt) / (time.perf_counter() - started)

    def _forward(self, ids: torch.Tensor, cache: Any) -> Any:
        return self._model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
