"""Each form of a linear layer against a float32 product of the weight that it holds."""

import pytest
import torch

from kernels.linear import (
    DenseLinear,
    HybridLinear,
    Int4Linear,
    Int8DynamicLinear,
    Int8Linear,
    JoinedLinear,
    Linear,
    PackedLinear,
    int4_group,
)
from kernels.w4_format import W4Weight

OUT, IN = 96, 64


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.float() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("count", [1, 3, 40])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("form", "limit"), [(DenseLinear, 5e-3), (PackedLinear, 5e-3), (Int8Linear, 1.5e-2)])
def test_forms_of_a_dense_weight(form: type, limit: float, biased: bool, count: int) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(OUT, IN).bfloat16(), torch.randn(count, IN).bfloat16()
    bias = torch.randn(OUT).bfloat16() if biased else None
    expected = x.float() @ weight.float().T + (bias.float() if bias is not None else 0)
    assert error(form(weight, bias)(x), expected) < limit


@pytest.mark.parametrize("count", [1, 3, 40])
@pytest.mark.parametrize("group_size", [32, 64, 128, 384])
@pytest.mark.parametrize("kind", ["symmetric", "zeros", "minima", "order"])
def test_int4(kind: str, group_size: int, count: int) -> None:
    """Zeros of 0 and 15 among them; 384 is split into groups that the kernel takes."""
    torch.manual_seed(0)
    width, groups = 384, 384 // group_size
    codes = torch.randint(0, 256, (OUT, width // 2), dtype=torch.uint8)
    zeros = torch.randint(0, 16, (OUT, groups), dtype=torch.uint8) if kind in ("zeros", "order") else None
    order = torch.randperm(width).int() if kind == "order" else None
    minima = torch.randn(OUT, groups) * 4 if kind == "minima" else None
    bias = torch.randn(OUT).bfloat16()
    packed = W4Weight(codes, torch.rand(OUT, groups) + 0.5, zeros, order, group_size)
    weight, x = packed.dequantize(torch.float32), torch.randn(count, width).bfloat16()
    if minima is not None:
        weight += minima.repeat_interleave(group_size, 1)
    assert error(Int4Linear(packed, minima, bias)(x), x.float() @ weight.T + bias.float()) < 1e-2


def test_what_the_int4_kernel_takes() -> None:
    assert [int4_group((OUT, 512), size) for size in (32, 64, 128, 512, 96, 8, 0)] == [32, 64, 128, 256, 32, 0, 0]
    assert int4_group((OUT + 8, 512), 128) == 0


def test_joined_outputs_stand_in_order() -> None:
    one, other = (DenseLinear(torch.randn(size, IN)) for size in (3, 5))
    x = torch.randn(2, IN)
    assert torch.equal(JoinedLinear([one, other])(x), torch.cat((one(x), other(x)), 1))


@pytest.mark.skipif(not Int8DynamicLinear.is_available(), reason="needs FBGEMM and AVX512-VNNI")
def test_int8_dynamic_keeps_rows_apart() -> None:
    """Rows of very different size, of zeros and of NaN or infinity, each exactly as alone."""
    torch.manual_seed(0)
    weight, x = torch.randn(OUT, IN), torch.randn(6, IN) * torch.tensor([1, 1e-3, 1e3, 0, 1, 1])[:, None]
    x[4, 3], x[5, 2] = float("nan"), float("inf")
    layer = Int8DynamicLinear(weight)
    y = layer(x)
    for row in range(3):
        assert error(y[row], x[row] @ weight.T) < 1e-2
        assert torch.equal(layer(x[row : row + 1])[0], y[row])
    assert y[3].count_nonzero() == 0
    assert not y[4:].isfinite().any()


def test_hybrid_chooses_by_rows() -> None:
    few: Linear = lambda x: torch.zeros(len(x))  # noqa: E731
    many: Linear = lambda x: torch.ones(len(x))  # noqa: E731
    layer = HybridLinear(few, many, 2)
    assert [layer(torch.empty(n, 1))[0].item() for n in (1, 2, 3)] == [0, 0, 1]


def test_zero_row_stays_zero_in_int8() -> None:
    assert Int8Linear(torch.zeros(OUT, IN))(torch.ones(1, IN).bfloat16()).count_nonzero() == 0
