"""The write kernel against torch: rotation, bias, norms, quantisation, and nothing written elsewhere."""

import pytest
import torch

from kernels.compiler import KernelError
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


@pytest.mark.parametrize("heads", [(32, 8), (28, 4), (7, 1)])
def test_a_token_depends_on_itself_alone(heads: tuple[int, int]) -> None:
    """Many tokens share their warps' work otherwise than few; neither bias nor norms, not in place."""
    tokens, head_dim, device = 4100, 128, torch.device("cuda")
    qkv = torch.randn(tokens, heads[0] + 2 * heads[1], head_dim, device=device).bfloat16()
    slots, positions = torch.randperm(tokens + 12, device=device)[:tokens], torch.arange(tokens, device=device)
    cos_sin = torch.randn(tokens, head_dim, device=device)
    for k_format, v_format in (("bf16", "bf16"), ("int8", "int8"), ("bf16", "e4m3_scaled")):
        layout = plain_layout(k_format, v_format, 1, heads[1], head_dim, 16, 0)
        write = WriteKV(k_format, v_format, head_dim, torch.bfloat16, device)
        pools = torch.full((2, 257, layout.block_stride), 0xA5, dtype=torch.uint8, device=device).unbind()
        outs = [torch.full_like(qkv[:, : heads[0]], torch.nan) for _ in pools]
        write(layout, pools[0], qkv, outs[0], slots, positions, cos_sin)
        for start in range(0, tokens, 300):
            part = slice(start, start + 300)
            write(layout, pools[1], qkv[part], outs[1][part], slots[part], positions[part], cos_sin)
        assert torch.equal(*pools)
        assert torch.equal(*outs)
        torch.testing.assert_close(outs[0].float(), rotate(qkv[:, : heads[0]], cos_sin).float(), rtol=2**-7, atol=2**-5)


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_parts_are_added_up(parts: int, head_dim: int) -> None:
    """As their sum, rounded, would be written."""
    tokens, heads, kv_heads, device = 61, 6, 2, torch.device("cuda")
    slots, positions = torch.randperm(80, device=device)[:tokens], torch.arange(tokens, device=device)
    cos_sin = torch.randn(tokens, head_dim, device=device)
    x = torch.randn(parts, tokens, heads + 2 * kv_heads, head_dim, device=device)
    for dtype, k_format, v_format in ((torch.bfloat16, "bf16", "bf16"), (torch.float16, "fp16", "int8")):
        layout = plain_layout(k_format, v_format, 1, kv_heads, head_dim, 16, 0)
        norms = torch.randn(2, head_dim, device=device).to(dtype)
        write = WriteKV(k_format, v_format, head_dim, dtype, device)
        pools = torch.full((2, 5, layout.block_stride), 0xA5, dtype=torch.uint8, device=device).unbind()
        total = x[0].clone()
        for part in x[1:]:
            total += part
        outs = torch.full((2, tokens, heads, head_dim), torch.nan, dtype=dtype, device=device).unbind()
        for qkv, pool, out in zip((x, total.to(dtype)), pools, outs, strict=True):
            write(layout, pool, qkv, out, slots, positions, cos_sin, q_norm=norms[0], k_norm=norms[1])
        assert torch.equal(*pools)
        assert torch.equal(*outs)
    for bad in (x.to(dtype), x[..., :-1, :], x.transpose(0, 1).contiguous().transpose(0, 1)[:, ::2]):
        with pytest.raises(KernelError, match="qkv: "):
            write(layout, pools[0], bad, outs[0], slots, positions, cos_sin)


def test_what_is_not_aligned_is_refused() -> None:
    layout = plain_layout("bf16", "bf16", 1, 1, 64, 16, 0)
    pool = torch.zeros((1, layout.block_stride), dtype=torch.uint8, device="cuda")
    qkv = torch.zeros(1, 3, 64, device="cuda", dtype=torch.bfloat16)
    zero = torch.zeros(1, dtype=torch.int64, device="cuda")
    with pytest.raises(KernelError, match="bias must be 16-byte aligned"):
        WriteKV("bf16", "bf16", 64, torch.bfloat16, torch.device("cuda"))(
            layout, pool, qkv, qkv[:, :1], zero, zero, torch.zeros(1, 64, device="cuda"), qkv.new_zeros(193)[1:]
        )


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
