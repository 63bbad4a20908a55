"""The dense kernel for one row: compiles everywhere without spills; on a GPU it agrees with float64."""

import pytest
import torch

from kernels.compiler import KernelError, compile_variant
from kernels.cuda_linear import OneRowLinear, all_variants

gpu = pytest.mark.gpu


@pytest.mark.parametrize("target", ["sm_80", "sm_86", "sm_89", "sm_90"])
def test_it_compiles_without_spills(target: str) -> None:
    for unit in all_variants():
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
