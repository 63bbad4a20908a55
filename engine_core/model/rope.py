"""Rotary frequencies as transformers computes them (modeling_rope_utils.py), in float32 step by step."""

import math

import torch
from torch import Tensor

from engine_core.model.config import RopeConfig


def rope_frequencies(rope: RopeConfig, head_dim: int, divisors: Tensor | None = None) -> tuple[Tensor, float]:
    """Inverse frequencies, float32 `[head_dim / 2]`, and the factor on cos and sin.

    `divisors` is a GGUF's rope_freqs.weight: llama3 scaling, already worked out by the converter.
    """
    frequencies = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    if divisors is not None:
        frequencies = frequencies / divisors.float()
    if rope.kind == "linear":
        return frequencies / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(rope, frequencies), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, frequencies, head_dim), _yarn_attention_factor(rope)
    return frequencies, 1.0


def rope_table(frequencies: Tensor, factor: float, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cos and sin, float32 `[n, 1, head_dim]`, of int64 positions `[n]`.

    The first half of sin is negated: x * cos + roll(x, head_dim / 2) * sin is then the rotation.
    """
    angles = positions.float()[:, None] * frequencies
    cos, sin = angles.cos() * factor, angles.sin() * factor
    return torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]


def _llama3(rope: RopeConfig, frequencies: Tensor) -> Tensor:
    original = rope.original_max_position_embeddings
    wavelength = 2 * math.pi / frequencies
    scaled = torch.where(wavelength > original / rope.low_freq_factor, frequencies / rope.factor, frequencies)
    smooth = (original / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    smoothed = (1 - smooth) * scaled / rope.factor + smooth * scaled
    medium = (wavelength >= original / rope.high_freq_factor) & (wavelength <= original / rope.low_freq_factor)
    return torch.where(medium, smoothed, scaled)


def _yarn(rope: RopeConfig, frequencies: Tensor, head_dim: int) -> Tensor:
    def dimension(rotations: float) -> float:
        original = rope.original_max_position_embeddings
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # no division by zero
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return frequencies / rope.factor * ramp + frequencies * (1 - ramp)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def mscale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)
