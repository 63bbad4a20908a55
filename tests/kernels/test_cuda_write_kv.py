"""The write kernel against torch: rotation, bias, norms, quantisation, and nothing written elsewhere."""

import pytest
import torch

from kernels.cuda_attention import WriteKV
from kernels.cuda_layout import plain_layout
from tools.kv_cases import decode, encode, rows_of

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

EIGHT_BIT = ("int8", "e4m3", "e5m2", "e4m3_scaled")
OWN = {torch.float16: "fp16", torch.bfloat16: "bf16"}


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    y = x.float()
    y = (y * (y.square().mean(-1, keepdim=True) + eps).rsqrt()).to(x.dtype)
    return y * weight


def rotate(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    cos, sin = cos_sin[:, None].chunk(2, -1)
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


@pytest.mark.parametrize("dtype", OWN)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("tokens", [1, 7, 1500])
def test_write(dtype: torch.dtype, head_dim: int, tokens: int) -> None:
    q_heads, kv_heads, block_size, own = 6, 2, 16, OWN[dtype]
    torch.manual_seed(tokens)
    for k_format, v_format in [(own, own), *((f, f) for f in EIGHT_BIT), (own, "int8")]:
        layout = plain_layout(k_format, v_format, 3, kv_heads, head_dim, block_size, 1)
        blocks = -(-tokens // block_size) + 2
        pool = torch.full((blocks, layout.block_stride), 0xA5, dtype=torch.uint8, device="cuda")
        before = pool.clone()
        qkv = torch.randn(tokens, q_heads + 2 * kv_heads, head_dim, device="cuda").to(dtype)
        qkv[0, q_heads + kv_heads] = 0  # a zero row of V
        bias = torch.randn((q_heads + 2 * kv_heads) * head_dim, device="cuda").to(dtype)
        bias[(q_heads + kv_heads) * head_dim :] = 0
        weights = [torch.randn(head_dim, device="cuda").to(dtype) for _ in range(2)]
        slots = torch.randperm(blocks * block_size, device="cuda")[:tokens]
        if tokens > 1:
            slots[-1] = -1
        positions = torch.randint(0, 4096, (tokens,), device="cuda")
        angles = torch.arange(4096, device="cuda")[:, None] * 10000 ** -torch.arange(0, 1, 2 / head_dim, device="cuda")
        cos_sin = torch.cat((angles.cos(), angles.sin()), 1).float()

        x = qkv + bias.view(-1, head_dim)
        q = rotate(norm(x[:, :q_heads], weights[0], 1e-6), cos_sin[positions])
        k = rotate(norm(x[:, q_heads : q_heads + kv_heads], weights[1], 1e-6), cos_sin[positions])
        v = x[:, q_heads + kv_heads :]
        out = qkv[:, :q_heads]  # in place
        WriteKV(k_format, v_format, head_dim, dtype, torch.device("cuda"))(
            layout, pool, qkv, out, slots, positions, cos_sin, bias, *weights
        )
        step = 2**-7 if dtype == torch.bfloat16 else 2**-10
        torch.testing.assert_close(out.float(), q.float(), rtol=step, atol=4 * step)  # large terms may cancel
        written = slots >= 0
        index = slots[written] // block_size, slice(None), slots[written] % block_size
        for part, kv_format, wanted in (("k", k_format, k), ("v", v_format, v)):
            data, scales = rows_of(pool, layout, part)
            got = decode(
                data[index], None if scales is None else scales[index].contiguous().view(torch.float16), kv_format
            )
            ideal = decode(*encode(wanted[written], kv_format), kv_format)
            # A rotation's last bit may differ, and then a code may be its neighbour.
            coarse = {"int8": 0.0, "e4m3": 2**-3, "e4m3_scaled": 2**-3, "e5m2": 2**-2}.get(kv_format, step)
            top = wanted[written].double().abs().amax(-1, keepdim=True) * (1 if kv_format != "int8" else 0.02 / step)
            assert ((got - ideal).abs() <= coarse * ideal.abs() + step * top).all()
            assert ((got - ideal).norm() / ideal.norm()) < 2e-3
            if part == "v":
                assert torch.equal(got, ideal)
            data[index] = 0xA5
            if scales is not None:
                scales[index] = 0xA5
        assert torch.equal(pool, before)


def test_extreme_values() -> None:
    values = torch.tensor(
        [0.0, -0.0, 448.0, 449.0, 465.0, 1e4, -6e4, 6e4, 2**-9, 2**-10, 1.5 * 2**-10, 2**-17, float("nan")]
    )
    row = torch.zeros(1, 3, 64, device="cuda", dtype=torch.bfloat16)
    row[0, 2, : len(values)] = values.to(torch.bfloat16)
    zero = torch.zeros(1, dtype=torch.int64, device="cuda")
    cos_sin = torch.cat((torch.ones(1, 32), torch.zeros(1, 32)), 1).cuda()
    for kv_format in EIGHT_BIT:
        layout = plain_layout(kv_format, kv_format, 1, 1, 64, 16, 0)
        pool = torch.zeros((1, layout.block_stride), dtype=torch.uint8, device="cuda")
        WriteKV(kv_format, kv_format, 64, torch.bfloat16, torch.device("cuda"))(
            layout, pool, row, torch.empty_like(row[:, :1]), zero, zero, cos_sin
        )
        data, scales = rows_of(pool, layout, "v")
        got = decode(data[0, 0, 0], None if scales is None else scales[0, 0, 0].view(torch.float16), kv_format)
        assert got[len(values) - 1].isnan()
        if scales is None:
            ideal = decode(*encode(row[0, 2], kv_format), kv_format)
            finite = ~ideal.isnan()
            assert torch.equal(got[finite], ideal[finite])


def test_codes_of_every_bfloat16() -> None:
    """All 65,536 values through the cast, in hardware and software, saturating."""
    every = torch.arange(65536, device="cuda").to(torch.uint16).view(torch.bfloat16).view(1024, 1, 64)
    qkv = every.expand(-1, 3, -1).contiguous()
    slots = torch.arange(1024, device="cuda")
    cos_sin = torch.cat((torch.ones(1, 32), torch.zeros(1, 32)), 1).cuda()
    for kv_format in ("e4m3", "e5m2"):
        layout = plain_layout(kv_format, kv_format, 1, 1, 64, 16, 0)
        pool = torch.zeros((64, layout.block_stride), dtype=torch.uint8, device="cuda")
        WriteKV(kv_format, kv_format, 64, torch.bfloat16, torch.device("cuda"))(
            layout, pool, qkv, torch.empty_like(qkv[:, :1]), slots, torch.zeros_like(slots), cos_sin
        )
        data, _ = rows_of(pool, layout, "v")
        got = decode(data[:, 0].reshape(1024, 64), None, kv_format)
        ideal = decode(*encode(every[:, 0], kv_format), kv_format)
        assert torch.equal(got.isnan(), ideal.isnan())
        assert torch.equal(got[~got.isnan()], ideal[~got.isnan()])
