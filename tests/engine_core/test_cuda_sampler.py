"""What surrounds the sampling kernels, without a GPU: the kernels' twins stand in for them, and check what they get."""

from typing import Any

import pytest
import torch
from torch import Tensor

from engine_core import cuda_sampler as module
from engine_core.cuda_inputs import StepInputs, StepShape
from engine_core.cuda_sampler import CudaSampler
from engine_core.plan import Row, StepPlan
from kernels import sampling
from protocol.messages import SamplingParams, unpack_i32

VOCAB, ROWS = 50, 4
CPU = torch.device("cpu")


class FakeSampling:
    """kernels.cuda_sampling.Sampling, and its ops that change logits."""

    def __init__(self, max_rows: int, vocab: int, dtype: torch.dtype, device: torch.device) -> None:
        self.max_rows, self.dtype = max_rows, dtype

    def greedy(self, logits: Tensor, out: Tensor) -> None:
        assert logits.dtype == self.dtype
        out.copy_(sampling.greedy(logits.float()))

    def top_logprobs(self, logits: Tensor, tokens: Tensor, count: int) -> Any:
        assert logits.dtype == self.dtype and len(logits) <= self.max_rows and tokens.is_contiguous()
        return sampling.top_logprobs(logits, tokens, count)

    @staticmethod
    def adjust(logits: Tensor, *columns: Tensor) -> None:
        assert logits.dtype == torch.float32 and all(column.is_contiguous() for column in columns)
        sampling.adjust(logits, *columns)

    @staticmethod
    def forbid(logits: Tensor, *columns: Tensor) -> None:
        assert logits.dtype == torch.float32 and all(column.is_contiguous() for column in columns)
        sampling.forbid(logits, *columns)


@pytest.fixture
def sampler(monkeypatch: pytest.MonkeyPatch) -> CudaSampler:
    monkeypatch.setattr(module, "Sampling", FakeSampling)
    monkeypatch.setattr(module, "cuda_sampling", FakeSampling)
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor)
    inputs = StepInputs(ROWS, ROWS + 10, 1, 16, CPU)
    return CudaSampler(VOCAB, torch.bfloat16, inputs, [2, 3])


def make_row(request: int, **sampling: Any) -> Row:
    return Row(request, [1], 0, [0], True, SamplingParams(**{"temperature": 0.0} | sampling), 0)


def make_logits() -> Tensor:
    return (torch.randn(ROWS, VOCAB + 14, generator=torch.Generator().manual_seed(1)) * 3).bfloat16()


def launch(sampler: CudaSampler, logits: Tensor, rows: list[Row]) -> Any:
    sampler._inputs.upload(StepPlan(1, rows, []), {}, StepShape(len(rows), 0, len(rows)))
    return sampler.launch(logits[: len(rows)], rows)


def test_several_forbidden_tokens(sampler: CudaSampler) -> None:
    """The kernels take packed columns only."""
    logits = make_logits()
    logits[:, [2, 3, 7]] = 40.0
    rows = [make_row(1, min_tokens=1, stop_token_ids=[7]), make_row(2), make_row(3, min_tokens=1)]
    launch(sampler, logits, rows)
    allowed = logits[:3, :VOCAB].float()
    allowed[0, [2, 3, 7]] = allowed[2, [2, 3]] = -torch.inf
    assert sampler.sampled[:3].tolist() == allowed.argmax(-1).tolist()
    assert logits[0, 2] == 40.0, "a graph's output was changed"


def test_biased_rows(sampler: CudaSampler) -> None:
    rows = [make_row(1), make_row(2, logit_bias={9: 100.0, 4: -100.0}), make_row(3, logit_bias={8: 100.0})]
    launch(sampler, make_logits(), rows)
    assert sampler.sampled[1:3].tolist() == [9, 8]


def test_each_row_gets_as_many_log_probabilities_as_it_asked_for(sampler: CudaSampler) -> None:
    logits = make_logits()
    rows = [make_row(1, logprobs=1), make_row(2), make_row(3, logprobs=5), make_row(4, logprobs=0)]
    found = launch(sampler, logits, rows).collect()
    assert {request: len(entry.top_logprobs) for request, entry in found.items()} == {1: 1, 3: 5, 4: 0}
    expected = logits[:, :VOCAB].float().log_softmax(-1)
    for request, entry in found.items():
        assert entry.token == expected[request - 1].argmax()
        assert entry.logprob == pytest.approx(expected[request - 1].max().item())
    assert list(unpack_i32(found[3].top_ids)) == expected[2].topk(5).indices.tolist()
