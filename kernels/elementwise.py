"""Norm, rotation and activation."""

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """X / rms(x) * weight over the last dimension: x `[..., d]`, weight `[d]`."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads x `[n, heads, d]` by cos, sin `[n, 1, d]`; the first half of sin carries the minus sign."""
    return torch.addcmul(x * cos, torch.roll(x, x.shape[-1] // 2, -1), sin)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, where gate_up `[n, 2 * d]` holds gate in its first half; returns `[n, d]`."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)
