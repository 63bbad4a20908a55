"""The dense kernel for one row: compiles everywhere without spills; on a GPU it agrees with float64."""

import pytest
import torch

from kernels.compiler import KernelError, compile_variant
from kernels.cuda_linear import FewRowsLinear, OneRowLinear, all_variants

gpu = pytest.mark.gpu


@pytest.mark.parametrize("target", ["sm_80", "sm_86", "sm_89", "sm_90"])
def test_it_compiles_without_spills(target: str) -> None:
    for unit in all_variants():
        if unit.only not in (None, target + "a"):
            continue
        assert compile_variant(unit, target).spill_bytes == 0, unit


@gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2560, 2048), (7, 8), (130, 264), (2048, 11008)])
def test_it_agrees_with_float64(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    generator = torch.Generator("cuda").manual_seed(1)
    weight = torch.randn(shape, generator=generator, device="cuda").to(dtype)
    bias = torch.randn(shape[:1], generator=generator, device="cuda").to(dtype)
    x = torch.full((1, shape[1] + 8), float("nan"), device="cuda", dtype=dtype)[:, : shape[1]]
    x.copy_(torch.randn(x.shape, generator=generator, device="cuda"))
    for own_bias in (None, bias):
        out = OneRowLinear(weight, own_bias)(x)
        expected = x.double() @ weight.double().T + (0 if own_bias is None else own_bias.double())
        error = (out.double() - expected).norm() / expected.norm()
        assert error < (2e-3 if dtype == torch.float16 else 1e-2)


@gpu
def test_what_does_not_fit_is_refused_before_the_launch() -> None:
    weight = torch.zeros(8, 16, device="cuda", dtype=torch.float16)
    layer = OneRowLinear(weight)
    for x in (weight.float()[:1], weight[:2], weight[:1, :8], weight[:0]):
        with pytest.raises(KernelError, match="x: "):
            layer(x)
    for bad in (weight.float(), weight[:, :12], weight.T, weight.cpu()):
        with pytest.raises(KernelError, match="weight: "):
            OneRowLinear(bad)


@gpu
@pytest.mark.parametrize("slices", [0, 1, 2, 4, 8])
@pytest.mark.parametrize("shape", [(2560, 2048), (7, 256), (130, 320), (2048, 11008), (22016, 2048), (40000, 288)])
def test_a_few_rows_agree_with_float64(shape: tuple[int, int], slices: int) -> None:
    generator = torch.Generator("cuda").manual_seed(1)
    for dtype in (torch.float16, torch.bfloat16):
        weight = torch.randn(shape, generator=generator, device="cuda").to(dtype)
        bias = torch.randn(shape[:1], generator=generator, device="cuda").to(dtype)
        for own_bias in (None, bias):
            layer = FewRowsLinear(weight, own_bias, slices)
            for rows in (1, 2, 5, 7, 8):
                x = torch.full((rows, shape[1] + 8), float("nan"), device="cuda", dtype=dtype)[:, : shape[1]]
                x.copy_(torch.randn(x.shape, generator=generator, device="cuda"))
                out = layer(x)
                expected = x.double() @ weight.double().T + (0 if own_bias is None else own_bias.double())
                error = (out.double() - expected).norm() / expected.norm()
                assert error < (2e-3 if dtype == torch.float16 else 1e-2), (rows, error)
                assert torch.equal(layer(x), out), "sums are always added in the same order"


@gpu
def test_what_a_few_rows_can_not_have_is_refused() -> None:
    narrow = torch.zeros(64, 32, device="cuda", dtype=torch.float16)
    assert (FewRowsLinear(narrow)(narrow[:8]) == 0).all()
    with pytest.raises(KernelError, match="x: "):
        FewRowsLinear(narrow)(narrow[:9])
    for weight, slices in ((narrow, 2), (torch.zeros(64, 1 << 17, device="cuda", dtype=torch.float16), 0)):
        with pytest.raises(KernelError, match="too wide"):
            FewRowsLinear(weight, None, slices)
