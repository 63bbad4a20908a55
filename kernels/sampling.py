"""Sampling on logits: reference ops in torch, for any device. A CUDA version keeps these signatures.

Logits are float32 `[R, V]`; what differs between rows comes as columns `[R]`, what few rows have as coordinate lists
`[N]`. A row's token is a pure function of that row's logits and parameters, bit by bit: rows that draw are computed one
by one over a buffer of their own, because how torch splits a batch among vector lanes and threads depends on its shape.
"""

import torch
from torch import Tensor

GREEDY_BELOW = 1e-5
"""Temperatures under this mean greedy: dividing by less says nothing that float32 logits can still tell apart."""

LOGPROB_FLOOR = -9999.0
"""Stands for a log-probability of minus infinity, which JSON can't carry."""

_M32 = 0xFFFFFFFF
# Philox4x32 constants: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC11).
_MULTIPLIERS = ((0xD2511F53,), (0xCD9E8D57,))
_WEYL = ((0x9E3779B9,), (0xBB67AE85,))
_ARGMAX_BLOCK = 256
_SORTABLE = 2048
_LOGPROB_ROWS = 64


def philox4x32(counter: Tensor, key: Tensor) -> Tensor:
    """Philox4x32-10: counter `[4, R]` and key `[2, R]` to random words `[4, R]`, all int64 holding 32 bits each."""
    device = counter.device
    multipliers = torch.tensor(_MULTIPLIERS, device=device)
    rounds = torch.arange(10, device=device)[:, None, None]
    keys = (key + rounds * torch.tensor(_WEYL, device=device)) & _M32  # [10, 2, R]
    even, odd = counter[0::2], counter[1::2]  # words 0, 2 and 1, 3
    for round_key in keys.unbind():
        product = (even * multipliers).flip(0)  # wraps in int64, so the sign has to be masked off the high word
        even, odd = (product >> 32) & _M32 ^ odd ^ round_key, product & _M32
    return torch.stack((even, odd), dim=1).flatten(0, 1)


def uniforms(seed: Tensor, choice: Tensor, position: Tensor) -> Tensor:
    """One draw per row, float64 `[R]` in [0, 1) with 53 random bits, from int64 columns `[R]` and nothing else."""
    counter = torch.stack((position & _M32, position >> 32 & _M32, choice & _M32, choice >> 32 & _M32))
    words = philox4x32(counter, torch.stack((seed & _M32, seed >> 32 & _M32)))
    return ((words[0] >> 5) * (1 << 26) + (words[1] >> 6)).double() * 2.0**-53


def adjust(logits: Tensor, row: Tensor, token: Tensor, bias: Tensor, repetition: Tensor, subtract: Tensor) -> None:
    """Change logits `[R, V]` in place at N distinct places `(row, token)`: bias, then penalties.

    `row`, `token` int64 `[N]`; `bias`, `repetition`, `subtract` float32 `[N]`. With x = logit + bias: a positive x is
    divided by `repetition`, any other multiplied (CTRL, arXiv 1909.05858); then `subtract` is taken off, the sum of
    the presence and frequency penalties. No finite value hides a NaN or an infinity.
    """
    x = logits[row, token] + bias
    logits[row, token] = torch.where(x > 0, x / repetition, x * repetition) - subtract


def forbid(logits: Tensor, row: Tensor, token: Tensor) -> None:
    """Send logits `[R, V]` at places `(row, token)`, int64 `[N]`, to -inf in place. NaN and +inf become NaN."""
    logits[row, token] -= torch.inf


def greedy(logits: Tensor) -> Tensor:
    """The first best token of each row, int64 `[R]`; -1 where the row holds NaN or +inf, or nothing but -inf."""
    rows, vocab = logits.shape
    if vocab % _ARGMAX_BLOCK:
        best = logits.argmax(dim=-1, keepdim=True)
    else:  # argmax doesn't vectorise, amax does: find the block first
        blocks = logits.view(rows, vocab // _ARGMAX_BLOCK, _ARGMAX_BLOCK)
        block = blocks.amax(dim=-1).argmax(dim=-1)
        inside = blocks[torch.arange(rows, device=logits.device), block].argmax(dim=-1)
        best = (block * _ARGMAX_BLOCK + inside).unsqueeze(-1)
    # Both treat NaN as the greatest, so the winner alone tells whether the row is finite.
    return torch.where(logits.gather(-1, best).isfinite(), best, -1).squeeze(-1)


def sample(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor) -> Tensor:
    """One token per row, int64 `[R]`; -1 as in `greedy`.

    Columns `[R]`: `temperature`, `top_p`, `min_p` float32, `top_k` int64, `uniform` float64 in [0, 1). Filters run on
    the distribution at that temperature, in the order min_p, top_k, top_p; at least the best token survives each.
    `top_k` outside 1..V-1, `top_p` >= 1 and `min_p` 0 are off; `top_p` 0 leaves the best token. The draw inverts the
    cumulated distribution in vocabulary order.
    """
    tokens = greedy(logits)
    columns = (tokens, temperature, top_k, top_p, min_p, uniform)
    for row, (best, heat, k, p, floor, u) in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        if best >= 0 and heat >= GREEDY_BELOW:
            tokens[row] = _draw(logits[row], best, heat, k, p, floor, u)
    return tokens


def _draw(x: Tensor, best: int, temperature: float, top_k: int, top_p: float, min_p: float, uniform: float) -> Tensor:
    """Draw from one finite row `x` `[V]` whose greatest value is at `best`. Equal logits rank by token id."""
    token: Tensor | None = None  # ids of the candidates, ascending; None: the whole vocabulary
    peak = x[best]
    if 0 < top_k < x.numel():
        token = _highest(x, top_k)
        x = x[token]
    weight = ((x - peak) / temperature).exp_()  # the best has exactly 1
    if min_p > 0:
        token, weight = _keep((weight >= min_p).nonzero().squeeze(-1), token, weight)
    if top_p < 1:
        token, weight = _keep(_nucleus(weight, top_p), token, weight)
    mass = weight.cumsum(0, dtype=torch.float64)
    # Under the total even after rounding, so the first mass above it exists, and its token has a weight.
    target = (mass[-1] * uniform).minimum(torch.nextafter(mass[-1], torch.zeros_like(mass[-1])))
    place = torch.searchsorted(mass, target, right=True)
    return place if token is None else token[place]


def _keep(kept: Tensor, token: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
    return kept if token is None else token[kept], weight[kept]


def _highest(x: Tensor, count: int) -> Tensor:
    """Places of the `count` highest values of `x` `[V]`, ascending; of equal ones the first."""
    if count <= x.numel() // 8:
        last = torch.topk(x, count, sorted=False).values.min()
    else:
        last = x.kthvalue(x.numel() - count + 1).values
    return _at_least(x, last, count)


def _nucleus(weight: Tensor, top_p: float) -> Tensor:
    """Places of the fewest values of `weight` `[V]` with `top_p` of their sum, ascending; of equal ones the first.

    Narrows the values down to where the sum is reached, so that only few are sorted, however flat they are.
    """
    goal = top_p * float(weight.sum(dtype=torch.float64))
    rest, ahead, mass = weight, 0, 0.0  # undecided; number and sum of those that are higher
    while rest.numel() > _SORTABLE:
        above = rest > rest.mean()
        higher = rest[above]
        if higher.numel() in (0, rest.numel()):
            break  # all equal, but for rounding
        higher_mass = float(higher.sum(dtype=torch.float64))
        if mass + higher_mass >= goal:
            rest = higher
        else:
            ahead, mass, rest = ahead + higher.numel(), mass + higher_mass, rest[~above]
    ranked = rest.sort(descending=True).values
    index = int(torch.searchsorted(ranked.cumsum(0, dtype=torch.float64), goal - mass))
    index = min(index, ranked.numel() - 1)  # rounding may leave the sum short of the goal
    return _at_least(weight, ranked[index], ahead + index + 1)


def _at_least(x: Tensor, last: Tensor, count: int) -> Tensor:
    """Places of values >= `last`, ascending, but only the first of those equal to it, so that there are `count`."""
    kept = (x >= last).nonzero().squeeze(-1)
    excess = kept.numel() - count
    if excess > 0:
        tied = (x[kept] == last).nonzero().squeeze(-1)
        mask = torch.ones_like(kept, dtype=torch.bool)
        mask[tied[-excess:]] = False
        kept = kept[mask]
    return kept


def top_logprobs(logits: Tensor, token: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-softmax of logits `[N, V]` where asked: of `token` int64 `[N]` and of the `count` best.

    Returns logprob float32 `[N]`, rank int64 `[N]` (1: no token is likelier), best ids int64 `[N, count]`, their
    logprobs float32 `[N, count]`, best first; N is at least 1. Values stop at LOGPROB_FLOOR; so does NaN.
    """
    parts = []
    for start in range(0, len(token), _LOGPROB_ROWS):  # bounds the memory of a long prompt
        rows = slice(start, start + _LOGPROB_ROWS)
        logprobs = logits[rows].log_softmax(dim=-1)
        own = logprobs.gather(-1, token[rows].unsqueeze(-1))
        top = logprobs.topk(count, dim=-1)
        parts.append((own.squeeze(-1), (logprobs > own).sum(dim=-1) + 1, top.indices, top.values))
    own, rank, ids, values = (torch.cat(column) for column in zip(*parts, strict=True))
    return _clamp(own), rank, ids, _clamp(values)


def _clamp(logprobs: Tensor) -> Tensor:
    return logprobs.nan_to_num(nan=LOGPROB_FLOOR).clamp_(min=LOGPROB_FLOOR)
