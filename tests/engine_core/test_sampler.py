import math
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest
import torch
from torch import Tensor

from engine_core.plan import Row
from engine_core.sampler import Sampler
from kernels import sampling
from protocol.messages import SamplingParams, unpack_i32

VOCAB = 300
EOS = 2
CPU = torch.device("cpu")


def make_row(
    request_id: int = 0,
    position: int = 0,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    sampling: SamplingParams | None = None,
) -> Row:
    return Row(request_id, [1], 0, [0], True, sampling or SamplingParams(), position, prompt, output)


def make_logits(rows: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


@pytest.fixture
def sampler() -> Sampler:
    return Sampler(VOCAB, CPU, [EOS])


def seen_by_the_draw(sampler: Sampler, logits: Tensor, rows: list[Row], monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """The logits as they are when the tokens are chosen."""
    seen: list[Tensor] = []
    for name in ("greedy", "sample"):
        original = getattr(sampling, name)
        monkeypatch.setattr(sampling, name, lambda x, *c, f=original: (seen.append(x.clone()), f(x, *c))[1])
    sampler(logits.clone(), rows)
    monkeypatch.undo()
    return seen[0]


# -- draws -------------------------------------------------------------------------------------------------------


def test_no_rows(sampler: Sampler) -> None:
    assert sampler(torch.empty(0, VOCAB), []) == ([], {})


def test_all_greedy_takes_the_short_way(sampler: Sampler, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sample", "uniforms", "adjust", "forbid", "top_logprobs"):
        monkeypatch.setattr(sampling, name, None)
    logits = make_logits(4)
    rows = [make_row(index, sampling=SamplingParams(temperature=0.0)) for index in range(4)]
    assert sampler(logits.clone(), rows) == (logits.argmax(-1).tolist(), {})


@pytest.mark.parametrize("params", [SamplingParams(seed=42), SamplingParams(seed=42, top_p=0.8, top_k=50, choice=3)])
@pytest.mark.parametrize("at", [0, 5])
def test_a_seeded_row_does_not_depend_on_its_neighbours(sampler: Sampler, params: SamplingParams, at: int) -> None:
    """Fails as soon as a draw reads the batch, the row's index, or another row's seed (failure report B3)."""
    others = [SamplingParams(seed=7), SamplingParams(temperature=0.0), SamplingParams(seed=2**62, min_p=0.1)]
    for position in range(20):
        logits = make_logits(1, seed=position)
        alone = sampler(logits.clone(), [make_row(9, position, sampling=params)])[0]
        rows = [make_row(i, position + i, [5, 6], [7], others[i % 3]) for i in range(8)]
        rows[at] = make_row(9, position, sampling=params)
        batch = make_logits(8, seed=100 + position)
        batch[at] = logits
        assert sampler(batch, rows)[0][at] == alone[0]


@pytest.mark.parametrize("field", ["seed", "choice", "position"])
def test_draws_change_with_each_part_of_the_key(sampler: Sampler, field: str) -> None:
    logits = torch.zeros(1, VOCAB).expand(16, -1).clone()
    rows = []
    for index in range(16):
        key = {"seed": 1, "choice": 1, "position": 1, field: index}
        position = key.pop("position")
        rows.append(make_row(index, position, sampling=SamplingParams(**key)))
    assert len(set(sampler(logits, rows)[0])) > 10


def test_greedy_and_drawing_rows_in_one_batch(sampler: Sampler) -> None:
    logits = make_logits(6)
    rows = [make_row(i, 4, sampling=SamplingParams(temperature=float(i % 2), seed=i)) for i in range(6)]
    tokens = sampler(logits.clone(), rows)[0]
    assert tokens[0::2] == logits.argmax(-1).tolist()[0::2]
    assert tokens[1::2] != logits.argmax(-1).tolist()[1::2]


def test_a_row_that_is_not_finite_fails_alone(sampler: Sampler) -> None:
    params = SamplingParams(seed=3, logprobs=2, min_tokens=5, stop_token_ids=[9], logit_bias={8: -100.0})
    clean = make_logits(4)
    rows = [make_row(i, sampling=params) for i in range(4)]
    expected, expected_logprobs = sampler(clean.clone(), rows)
    for place, value in ((EOS, math.nan), (9, math.inf), (8, math.inf)):
        broken = clean.clone()
        broken[1, place] = value
        tokens, logprobs = sampler(broken, rows)
        assert tokens == [expected[0], -1, *expected[2:]]
        assert logprobs == {key: entry for key, entry in expected_logprobs.items() if key != 1}


def test_ids_above_the_tokenizer_are_never_sampled(sampler: Sampler) -> None:
    padded = torch.full((2, VOCAB + 20), 50.0)
    padded[:, :VOCAB] = make_logits(2)
    rows = [make_row(i, sampling=SamplingParams(temperature=float(i), logprobs=20)) for i in range(2)]
    tokens, logprobs = sampler(padded, rows)
    assert max(tokens) < VOCAB
    assert all(max(unpack_i32(entry.top_ids)) < VOCAB for entry in logprobs.values())
    assert logprobs[0].logprob > -5  # padding takes no probability


# -- bias, penalties, min_tokens ---------------------------------------------------------------------------------


def test_bias_and_penalties_in_order(sampler: Sampler, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(
        temperature=0.0,
        logit_bias={10: 3.0, 11: -3.0, 12: 1.0},
        repetition_penalty=2.0,
        presence_penalty=0.5,
        frequency_penalty=0.25,
    )
    prompt, output = [10, 20, 20, 21], [11, 21, 21, 22, 20]
    logits = make_logits(3)
    expected = logits.clone()
    row = expected[1]
    for token, bias in params.logit_bias.items():
        row[token] += bias
    for token in {*prompt, *output}:
        row[token] = row[token] / 2 if row[token] > 0 else row[token] * 2
    for token in set(output):
        row[token] -= 0.5 + 0.25 * output.count(token)
    rows = [make_row(index, sampling=SamplingParams(temperature=0.0)) for index in range(3)]
    rows[1] = make_row(1, len(output), prompt, output, params)
    assert torch.allclose(seen_by_the_draw(sampler, logits, rows, monkeypatch), expected, atol=1e-6)


def test_penalties_kept_up_equal_penalties_made_anew(sampler: Sampler, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(logit_bias={3: 1.0}, repetition_penalty=1.3, presence_penalty=0.1, frequency_penalty=0.7)
    prompt, output = [3, 4, 5, 4], list[int]()
    rows = [make_row(1, 0, prompt, output, params), make_row(2, 0, [9], output, params)]
    for step, token in enumerate([4, 100, 100, 3, 4, 100, 7]):
        logits = make_logits(2, seed=step)
        kept = seen_by_the_draw(sampler, logits, [replace(row, position=step) for row in rows], monkeypatch)
        anew = seen_by_the_draw(Sampler(VOCAB, CPU), logits, rows, monkeypatch)
        assert torch.equal(kept, anew)
        output.append(token)


def test_a_reused_id_starts_over(sampler: Sampler, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = make_logits(1)
    first = SamplingParams(presence_penalty=2.0, repetition_penalty=2.0, logit_bias={1: 50.0})
    prompt, output = [3], [4, 5]
    for row in (
        make_row(1, 2, prompt, [6, 7, 8], first),
        make_row(1, 2, [9], output, first),
        make_row(1, 2, prompt, output[:1], first),
        make_row(1, 2, prompt, output, SamplingParams(frequency_penalty=1.0)),
        make_row(1, 0, (), (), SamplingParams()),
    ):
        sampler(logits.clone(), [make_row(1, 2, prompt, output, first)])
        anew = seen_by_the_draw(Sampler(VOCAB, CPU), logits, [row], monkeypatch)
        assert torch.equal(seen_by_the_draw(sampler, logits, [row], monkeypatch), anew)


def test_nothing_is_kept_of_requests_that_are_gone(sampler: Sampler) -> None:
    for request_id in range(50):
        sampler(make_logits(1), [make_row(request_id, sampling=SamplingParams(presence_penalty=1.0))])
    assert len(sampler._adjustments) == 1
    sampler(make_logits(1), [make_row(51)])
    assert not sampler._adjustments


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_min_tokens_keeps_the_answer_from_ending(sampler: Sampler, ignore_eos: bool) -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, EOS], logits[0, 7], logits[0, 8] = 30.0, 20.0, 10.0
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, min_tokens=3, stop_token_ids=[7], ignore_eos=ignore_eos)
        tokens = [sampler(logits.clone(), [make_row(0, at, sampling=params)])[0][0] for at in range(5)]
        assert tokens == [8, 8, 8, EOS, EOS]


# -- log-probabilities -------------------------------------------------------------------------------------------


def test_logprobs_are_the_models_own(sampler: Sampler) -> None:
    """Before bias, penalties, temperature and filters: those would show here."""
    logits = make_logits(3)
    bent = SamplingParams(temperature=0.5, top_k=1, logit_bias={9: 100.0}, repetition_penalty=2.0, logprobs=5)
    rows = [
        make_row(10, 2, [9, 4], [5, 6], bent),
        make_row(11, sampling=SamplingParams(temperature=0.0)),
        make_row(12, sampling=SamplingParams(temperature=0.0, logprobs=0)),
    ]
    tokens, logprobs = sampler(logits.clone(), rows)
    reference = logits.double().log_softmax(-1)
    assert tokens[0] == 9
    assert list(logprobs) == [10, 12]
    entry = logprobs[10]
    assert entry.token == 9
    assert entry.logprob == pytest.approx(reference[0, 9].item(), abs=1e-5)
    assert entry.rank == int((logits[0] > logits[0, 9]).sum()) + 1
    assert list(unpack_i32(entry.top_ids)) == logits[0].topk(5).indices.tolist()
    assert entry.top_logprobs == pytest.approx(reference[0].topk(5).values.tolist(), abs=1e-5)
    assert (logprobs[12].rank, logprobs[12].top_ids, logprobs[12].top_logprobs) == (1, b"", [])


def test_logprobs_of_impossible_tokens_survive_json(sampler: Sampler) -> None:
    logits = torch.full((1, VOCAB), -math.inf)
    logits[0, 4] = 1.0
    entry = sampler(logits, [make_row(1, sampling=SamplingParams(logprobs=3))])[1][1]
    values = msgspec.json.decode(msgspec.json.encode(entry.top_logprobs))
    assert values == [0.0, -9999.0, -9999.0]


def test_prompt_logprobs(sampler: Sampler) -> None:
    logits = make_logits(130)
    following = list(range(130))
    entries = sampler.prompt_logprobs(logits, following, 2)
    reference = logits.double().log_softmax(-1)
    assert [entry.token for entry in entries] == following
    assert [entry.logprob for entry in entries] == pytest.approx(reference.diagonal().tolist()[:130], abs=1e-5)
    assert [list(unpack_i32(entry.top_ids)) for entry in entries] == logits.topk(2).indices.tolist()
    assert sampler.prompt_logprobs(logits[:0], [], 2) == []
