"""Each form of a linear layer against a float32 product of the weight that it holds."""

import pytest
import torch

from kernels.linear import DenseLinear, HybridLinear, Int4Linear, Int8DynamicLinear, Int8Linear, Linear, PackedLinear

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
def test_int4(count: int) -> None:
    torch.manual_seed(0)
    codes = torch.randint(0, 16, (OUT, IN), dtype=torch.uint8)
    scales, minima = torch.rand(OUT, IN // 32) + 0.5, torch.randn(OUT, IN // 32) * 4
    weight = codes.float() * scales.repeat_interleave(32, 1) + minima.repeat_interleave(32, 1)
    x = torch.randn(count, IN).bfloat16()
    assert error(Int4Linear(codes, scales, minima)(x), x.float() @ weight.T) < 1e-2


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
