"""Norm, rotation and activation."""

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """X / rms(x) * weight over the last dimension: x `[..., d]`, weight `[d]`."""
    if x.dtype == torch.bfloat16 and len(x) == 1:
        # torch composes rms_norm of ten ops on the CPU; [x, -x] has mean 0 and variance mean(x^2), so one op does it.
        width = x.shape[-1]
        return F.layer_norm(torch.cat((x, -x), -1), (2 * width,), None, None, eps)[..., :width] * weight
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads x `[n, heads, d]` in place by cos, sin `[n, 1, d]`; the first half of sin carries the minus sign."""
    return torch.addcmul(x * cos, torch.roll(x, x.shape[-1] // 2, -1), sin, out=x)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, where gate_up `[n, 2 * d]` holds gate in its first half; returns `[n, d]`."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)
