"""What a layer is made of, on a played GPU: a gate and what it lets through as one."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine_core.model.quantized import LinearMaker
from kernels import cuda_linear_w4, w4_packed
from kernels.w4_format import W4Weight

GROUP, ROWS, COLUMNS = 32, 8, 64


def four_bit(seed: int, zeros: bool = False, order: bool = False, group: int = GROUP) -> W4Weight:
    torch.manual_seed(seed)
    return W4Weight(
        torch.randint(0, 256, (ROWS, COLUMNS // 2), dtype=torch.uint8),
        torch.rand(ROWS, COLUMNS // group),
        torch.randint(0, 16, (ROWS, COLUMNS // group), dtype=torch.uint8) if zeros else None,
        torch.randperm(COLUMNS, dtype=torch.int32) if order else None,
        group,
    )


class Checkpoint:
    """A gate and what it lets through, in 4 bits."""

    def __init__(self, gate: W4Weight, up: W4Weight, **more: tuple[int, ...]) -> None:
        self.parts = {"gate": gate, "up": up}
        self.shapes = {"gate": (ROWS, COLUMNS), "up": (ROWS, COLUMNS)} | {
            k.replace("_", "."): v for k, v in more.items()
        }

    def group_size(self, name: str) -> int:
        return self.parts[name].group_size

    def four_bit(self, name: str, device: torch.device) -> Any:
        return SimpleNamespace(packed=self.parts[name])


@pytest.fixture(autouse=True)
def played(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(w4_packed, "pack", lambda weight, dtype: weight)
    monkeypatch.setattr(cuda_linear_w4, "W4Linear", lambda weight, bias, gated: (weight, bias, gated))


def gated(checkpoint: Checkpoint, dtype: torch.dtype = torch.float16, device: str = "cuda") -> Any:
    return LinearMaker("int4", dtype, torch.device(device)).gated(checkpoint, ["gate", "up"])  # type: ignore[arg-type]


def test_rows_of_both_are_in_turn() -> None:
    gate, up = four_bit(0, zeros=True), four_bit(1)
    weight, bias, is_gated = gated(Checkpoint(gate, up))
    assert bias is None and is_gated
    for part, rows in ((gate, slice(0, None, 2)), (up, slice(1, None, 2))):
        assert torch.equal(weight.codes[rows], part.codes) and torch.equal(weight.scales[rows], part.scales)
    assert torch.equal(weight.zeros[::2], gate.zeros) and (weight.zeros[1::2] == 8).all()


def test_what_cannot_be_one_layer_is_none() -> None:
    plain = four_bit(0)
    for other in (four_bit(1, order=True), four_bit(1, group=64)):
        assert gated(Checkpoint(plain, other)) is None
        assert gated(Checkpoint(other, plain)) is None
    order = four_bit(1, order=True)
    assert gated(Checkpoint(order, order)) is not None
    assert gated(Checkpoint(plain, plain, gate_bias=(ROWS,))) is None
    assert gated(Checkpoint(plain, plain), dtype=torch.float32) is None
    assert gated(Checkpoint(plain, plain), device="cpu") is None
    odd = Checkpoint(plain, plain)
    odd.shapes["gate"] = odd.shapes["up"] = (ROWS + 1, COLUMNS)
    assert gated(odd) is None
