import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kernels import sampling

INF, NAN = math.inf, math.nan


def draw(
    logits: Tensor,
    uniform: list[float],
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> list[int]:
    """Sample with the same parameters in each row."""
    rows = len(logits)
    tokens: list[int] = sampling.sample(
        logits,
        torch.full((rows,), temperature),
        torch.full((rows,), top_k),
        torch.full((rows,), top_p),
        torch.full((rows,), min_p),
        torch.tensor(uniform, dtype=torch.float64),
    ).tolist()
    return tokens


def counted(count: int, seed: int = 0) -> Tensor:
    positions = torch.arange(count)
    return sampling.uniforms(torch.full_like(positions, seed), torch.zeros_like(positions), positions)


def candidates(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> dict[int, float]:
    """Weights of the tokens that the filters leave, the slow and obvious way."""
    row = torch.tensor(logits)
    weights = ((row - row.max()) / torch.tensor(temperature).item()).exp().tolist()
    ranked = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    ranked = [token for token in ranked if weights[token] >= min_p]
    if 0 < top_k < len(logits):
        ranked = ranked[:top_k]
    if top_p < 1:
        goal, mass, count = top_p * math.fsum(weights[token] for token in ranked), 0.0, 0
        for token in ranked:
            mass, count = mass + weights[token], count + 1
            if mass >= goal:
                break
        ranked = ranked[:count]
    return {token: weights[token] for token in sorted(ranked)}


# -- Philox ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [  # known-answer vectors of Random123 (kat_vectors, philox4x32 10)
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_known_answers(counter: list[int], key: list[int], words: list[int]) -> None:
    columns = sampling.philox4x32(torch.tensor([counter, [7] * 4]).T, torch.tensor([key, [1, 2]]).T)
    assert columns[:, 0].tolist() == words


def test_uniforms_are_in_range_and_uniform() -> None:
    draws = counted(100_000)
    assert draws.dtype == torch.float64
    assert 0 <= draws.min() < 1e-3
    assert 1 - 1e-3 < draws.max() < 1
    counts = torch.histc(draws, 100, 0, 1)
    assert float(((counts - 1000) ** 2 / 1000).sum()) < 99 + 5 * math.sqrt(2 * 99)


def test_uniforms_use_all_of_seed_choice_and_position() -> None:
    base = (5, 0, 0)
    keys = [base, (5, 1, 0), (5, 0, 1), (6, 0, 0), (5 + 2**32, 0, 0), (2**63 - 1, 0, 0), (0, 5, 0), (0, 0, 5)]
    draws = sampling.uniforms(*torch.tensor(keys).T).tolist()
    assert len(set(draws)) == len(keys)


@given(st.lists(st.tuples(*[st.integers(0, 2**63 - 1)] * 3), min_size=2, max_size=9))
def test_a_draw_does_not_depend_on_its_neighbours(keys: list[tuple[int, int, int]]) -> None:
    together = sampling.uniforms(*torch.tensor(keys).T).tolist()
    alone = [sampling.uniforms(*torch.tensor([key]).T).item() for key in keys]
    assert together == alone


# -- greedy ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [1, 7, 256, 300, 1024])
def test_greedy_is_the_first_of_the_best(vocab: int) -> None:
    logits = torch.randint(-3, 3, (40, vocab), generator=torch.Generator().manual_seed(vocab)).float()
    expected = [row.index(max(row)) for row in logits.tolist()]
    assert sampling.greedy(logits).tolist() == expected


@pytest.mark.parametrize("vocab", [300, 512])
def test_rows_that_are_not_finite_give_no_token(vocab: int) -> None:
    logits = torch.randn(6, vocab, generator=torch.Generator().manual_seed(1))
    logits[0, 299] = NAN
    logits[1, 3] = INF
    logits[2, 3] = -INF
    logits[3] = -INF
    logits[4, 0], logits[4, 1] = NAN, INF
    for tokens in (sampling.greedy(logits).tolist(), draw(logits, [0.5] * 6)):
        assert tokens[0] == tokens[1] == tokens[3] == tokens[4] == -1
        assert tokens[2] >= 0
        assert tokens[5] >= 0


def test_padding_beyond_the_vocabulary_is_not_looked_at_through_a_view() -> None:
    logits = torch.zeros(3, 640)
    logits[:, 512:] = NAN
    logits[:, 300] = 9.0
    assert sampling.greedy(logits[:, :512]).tolist() == [300] * 3
    assert draw(logits[:, :512], [0.5] * 3, top_p=0.1) == [300] * 3


# -- filters and draws -------------------------------------------------------------------------------------------


@given(
    logits=st.lists(st.integers(-40, 40).map(lambda n: n / 4) | st.just(-INF), min_size=1, max_size=40),
    uniform=st.floats(0, 1, exclude_max=True),
    temperature=st.sampled_from([0.01, 0.3, 1.0, 1.7, 100.0]),
    top_k=st.integers(-1, 45),
    top_p=st.sampled_from([0.0, 1e-9, 0.3, 0.77, 0.95, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    sortable=st.sampled_from([1, 4, 2048]),
)
def test_sample_equals_the_obvious_way(
    logits: list[float], uniform: float, temperature: float, top_k: int, top_p: float, min_p: float, sortable: int
) -> None:
    if max(logits) == -INF:
        return
    top_p, min_p, temperature = (torch.tensor(value).item() for value in (top_p, min_p, temperature))  # as float32
    left = candidates(logits, temperature, top_k, top_p, min_p)
    total, mass = math.fsum(left.values()), 0.0
    middles = {}  # a uniform that has to give just this token
    for token, weight in left.items():
        if weight > 1e-9 * total:
            middles[token] = (mass + weight / 2) / total
        mass += weight
    uniforms = [uniform, *middles.values()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "_SORTABLE", sortable)  # so that the narrowing is used on few tokens too
        first, *others = draw(
            torch.tensor([logits]).expand(len(uniforms), -1), uniforms, temperature, top_k, top_p, min_p
        )
    assert others == list(middles)
    below = math.fsum(weight for token, weight in left.items() if token < first)
    assert below - 1e-9 <= uniform * total <= below + left[first] + 1e-9
    assert left[first] > 0


@pytest.mark.parametrize("spread", [0.01, 1.0, 6.0])
@pytest.mark.parametrize("top_p", [0.1, 0.9, 0.999])
@pytest.mark.parametrize("top_k", [0, 3000, 10])
def test_filters_on_a_large_vocabulary(spread: float, top_p: float, top_k: int) -> None:
    logits = torch.randn(1, 20_000, generator=torch.Generator().manual_seed(3)) * spread
    left = candidates(logits[0].tolist(), 1.0, top_k, torch.tensor(top_p).item(), 0.0)
    first, last = draw(logits, [0.0], top_k=top_k, top_p=top_p), draw(logits, [1 - 2**-53], top_k=top_k, top_p=top_p)
    assert first == [min(left)]
    assert last == [max(left)]


@pytest.mark.parametrize("temperature", [0.0, 1e-7, 1e-5, 1e-4])
@pytest.mark.parametrize("top_p", [1e-4, 1.0])
def test_a_tiny_temperature_is_greedy(temperature: float, top_p: float) -> None:
    logits = torch.tensor([[-11.06, 11.06, 11.05, -3e38, -INF]]).expand(64, -1)
    assert draw(logits, counted(64).tolist(), temperature=temperature, top_p=top_p) == [1] * 64
    assert draw(torch.tensor([[2e38, 3e38]]), [0.0], temperature=temperature, top_p=top_p) == [1]


@pytest.mark.parametrize(
    "filters", [{"top_p": 0.0}, {"top_p": 1e-9}, {"top_k": 1}, {"min_p": 1.0}, {"top_p": 0.0, "top_k": 3, "min_p": 1.0}]
)
def test_the_best_token_survives_every_filter(filters: dict[str, float]) -> None:
    logits = torch.randn(32, 1000, generator=torch.Generator().manual_seed(4))
    assert draw(logits, counted(32).tolist(), temperature=100.0, **filters) == logits.argmax(-1).tolist()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "filters", [{"top_k": -1}, {"top_k": 0}, {"top_k": 10}, {"top_k": 11}, {"top_p": 1.0}, {"min_p": 0.0}]
)
def test_filters_that_are_off_leave_all_tokens(filters: dict[str, float]) -> None:
    uniform = [(token + 0.5) / 10 for token in range(10)]
    assert draw(torch.zeros(10, 10), uniform, **filters) == list(range(10))  # type: ignore[arg-type]


def test_equal_logits_rank_by_id() -> None:
    logits = torch.zeros(64, 5000)
    uniform = counted(64).tolist()
    assert set(draw(logits, uniform, top_k=2)) == {0, 1}
    assert set(draw(logits, uniform, top_p=2 / 5000)) == {0, 1}


def test_the_largest_uniform_stays_on_tokens_with_a_weight() -> None:
    logits = torch.tensor([[1.0, 1.0, 1.0, -200.0, -INF]])
    assert draw(logits, [1 - 2**-53]) == [2]
    assert draw(logits, [0.0]) == [0]
    assert draw(logits.flip(-1), [0.0]) == [2]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [(1.0, 0, 1.0, 0.0), (0.7, 0, 0.9, 0.0), (1.5, 12, 1.0, 0.0), (1.0, 0, 1.0, 0.1), (1.3, 20, 0.8, 0.02)],
)
def test_draws_follow_the_distribution(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    draws = 20_000
    logits = torch.randn(50, generator=torch.Generator().manual_seed(5)) * 1.5
    left = candidates(logits.tolist(), temperature, top_k, top_p, min_p)
    uniform = counted(draws, seed=11).tolist()
    tokens = torch.tensor(draw(logits.expand(draws, -1), uniform, temperature, top_k, top_p, min_p))
    counts = tokens.bincount(minlength=50).tolist()
    assert sum(counts[token] for token in left) == draws
    total = math.fsum(left.values())
    expected = {token: draws * weight / total for token, weight in left.items()}
    chi_square = sum((counts[token] - mean) ** 2 / mean for token, mean in expected.items())
    freedom = len(left) - 1
    assert freedom > 5
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("vocab", [501, 49152])  # the larger is split among threads
def test_a_row_does_not_depend_on_the_batch(vocab: int) -> None:
    generator = torch.Generator().manual_seed(6)
    rows = 9
    logits = torch.randn(rows, vocab, generator=generator) * 0.5
    columns = [
        torch.rand(rows, generator=generator) * 2,
        torch.randint(0, vocab, (rows,), generator=generator) * torch.tensor([0, 1, 0] * 3),
        torch.rand(rows, generator=generator).clamp(0.5) + torch.tensor([0, 0, 1] * 3),  # every third is off
        torch.rand(rows, generator=generator) * 0.01,
        counted(rows),
    ]
    together = sampling.sample(logits, *columns)
    order = torch.randperm(rows, generator=generator)
    shuffled = sampling.sample(logits[order], *(column[order] for column in columns))
    assert torch.equal(shuffled, together[order])
    for row in range(rows):
        alone = sampling.sample(logits[row : row + 1], *(column[row : row + 1] for column in columns))
        assert alone.item() == together[row]
    index = torch.tensor([3] * 5)  # whoever sits beside it, wherever it sits
    assert sampling.sample(logits[index], *(column[index] for column in columns)).tolist() == [together[3].item()] * 5


# -- adjustments -------------------------------------------------------------------------------------------------


def test_adjust_adds_bias_then_penalises() -> None:
    logits = torch.tensor([[4.0, -4.0, 1.0, 7.0], [2.0, 0.0, -INF, 7.0]])
    columns = ([0.0, 0.0, -2.0, 0.0, 0.0], [2.0, 2.0, 3.0, 1.0, 2.0], [0.5, 0.5, 0.0, 1.5, 1.0])
    row, token = torch.tensor([[0, 0, 0, 1, 1], [0, 1, 2, 0, 2]])
    sampling.adjust(logits, row, token, *(torch.tensor(column) for column in columns))
    assert logits.tolist() == [[1.5, -8.5, -3.0, 7.0], [0.5, 0.0, -INF, 7.0]]


def test_adjust_and_forbid_hide_nothing_that_is_not_finite() -> None:
    logits = torch.tensor([[NAN, INF, 0.0]])
    place = torch.tensor([0, 0]), torch.tensor([0, 1])
    ones = torch.ones(2)
    sampling.adjust(logits, *place, -100 * ones, 100 * ones, ones)
    assert sampling.greedy(logits).tolist() == [-1]
    sampling.forbid(logits, *place)
    assert sampling.greedy(logits).tolist() == [-1]


def test_forbid_takes_a_place_twice() -> None:
    logits = torch.zeros(2, 3)
    sampling.forbid(logits, torch.tensor([1, 1, 1]), torch.tensor([0, 0, 2]))
    assert logits.tolist() == [[0, 0, 0], [-INF, 0, -INF]]


# -- log-probabilities -------------------------------------------------------------------------------------------


def test_top_logprobs_are_those_of_a_softmax() -> None:
    logits = torch.randn(150, 300, generator=torch.Generator().manual_seed(7)) * 3
    token = torch.arange(150)
    own, rank, ids, values = sampling.top_logprobs(logits, token, 5)
    reference = logits.double().log_softmax(-1)
    assert torch.allclose(own.double(), reference[token, token], atol=1e-5)
    assert torch.equal(ids, logits.topk(5).indices)
    assert torch.allclose(values.double(), reference.gather(-1, ids), atol=1e-5)
    ranks = [sorted(row, reverse=True).index(row[index]) + 1 for index, row in enumerate(logits.tolist())]
    assert rank.tolist() == ranks


def test_logprobs_are_always_numbers() -> None:
    logits = torch.tensor([[0.0, -INF, -INF], [NAN, 0.0, 0.0], [INF, 0.0, 0.0], [-INF] * 3])
    own, rank, _, values = sampling.top_logprobs(logits, torch.tensor([1, 1, 1, 1]), 3)
    assert own.isfinite().all()
    assert values.isfinite().all()
    assert own[0] == sampling.LOGPROB_FLOOR
    assert values[0].tolist() == [0.0, sampling.LOGPROB_FLOOR, sampling.LOGPROB_FLOOR]
    assert rank[0] == 2


def test_no_best_ids_are_given_when_none_are_asked() -> None:
    own, _, ids, values = sampling.top_logprobs(torch.zeros(2, 4), torch.tensor([0, 3]), 0)
    assert own.tolist() == pytest.approx([-math.log(4)] * 2)
    assert ids.shape == values.shape == (2, 0)


def test_logprobs_do_not_depend_on_the_batch() -> None:
    logits = torch.randn(70, 49152, generator=torch.Generator().manual_seed(8))
    token = torch.arange(70)
    together = sampling.top_logprobs(logits, token, 4)
    for row in (0, 5, 69):
        alone = sampling.top_logprobs(logits[row : row + 1].clone(), token[row : row + 1], 4)
        assert all(torch.equal(a[0], t[row]) for a, t in zip(alone, together, strict=True))
