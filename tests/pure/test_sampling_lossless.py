"""Whatever the draft, the tokens that come out have the target's law: chi-square tests on a small vocabulary.

A toy model gives logits by the token before; penalties make the law depend on the whole prefix. Each trial drafts three
tokens, takes the verdict on a random number of rows, and every position is compared with the target's law given the
tokens before it. The random numbers are Philox draws with a fixed seed, so the outcome never varies. The last tests
break the rule on purpose and see it rejected.
"""

import functools

import pytest
import torch

from soliton.sampling import accept, law, penalties, philox

VOCAB, SIZE, TRIALS, ANCHOR = 12, 4, 30_000, 3
PASS, REJECT = 1e-4, 1e-12


def f32(value):
    return torch.tensor([value], dtype=torch.float32)


def i64(value):
    return torch.tensor([value], dtype=torch.int64)


@functools.cache
def tables():
    g = torch.Generator().manual_seed(7)
    target = torch.randn(VOCAB, VOCAB, generator=g) * 1.2
    good = target + torch.randn(VOCAB, VOCAB, generator=g) * 0.3
    bad = torch.randn(VOCAB, VOCAB, generator=g) * 1.5
    return {"target": target, "good": good, "bad": bad}


# temperature, top_k, top_p, min_p, and penalties by name
CASES = {
    "plain": (1.0, 0, 1.0, 0.0, {}),
    "temperature": (0.6, 0, 1.0, 0.0, {}),
    "top_k": (1.0, 4, 1.0, 0.0, {}),
    "top_p": (1.0, 0, 0.8, 0.0, {}),
    "min_p": (1.0, 0, 1.0, 0.15, {}),
    "repetition": (1.0, 0, 1.0, 0.0, {"repetition": 1.6}),
    "presence": (1.0, 0, 1.0, 0.0, {"presence": 1.2}),
    "frequency": (1.0, 0, 1.0, 0.0, {"frequency": 0.9}),
    "bias": (1.0, 0, 1.0, 0.0, {"bias": 2.0}),
    "min_tokens": (1.0, 0, 1.0, 0.0, {"min_tokens": 6}),
    "mixture": (
        0.8,
        8,
        0.9,
        0.02,
        {"repetition": 1.2, "presence": 0.4, "frequency": 0.3, "bias": 1.0, "min_tokens": 6},
    ),
    "hot mixture": (1.7, 9, 0.95, 0.05, {"presence": -0.7, "frequency": 0.5}),
}


@functools.cache
def target_laws(case, forget=False):
    """[V, V, V, SIZE, V]: the laws of every row for every chain of three drafts, through the real functions.

    forget=True leaves the drafts out of the penalties' counts, which is wrong.
    """
    t, k, p, m, extra = CASES[case]
    every = torch.cartesian_prod(*[torch.arange(VOCAB)] * 3)
    fed = torch.cat((torch.full((len(every), 1), ANCHOR), every), dim=1)
    counts = torch.zeros(VOCAB, dtype=torch.int32)
    counts[[ANCHOR, 5]] = torch.tensor([2, 1], dtype=torch.int32)
    bias = torch.zeros(VOCAB)
    bias[[1, 8]] = torch.tensor([extra.get("bias", 0.0), -extra.get("bias", 0.0)])
    marks = torch.arange(VOCAB)

    def one(logits, drafts):
        return penalties.process(
            logits, counts=counts, prompt_seen=(marks == 0) | (marks == 6), bias=bias,
            presence=f32(extra.get("presence", 0.0)), frequency=f32(extra.get("frequency", 0.0)),
            repetition=f32(extra.get("repetition", 1.0)), generated=i64(4),
            min_tokens=i64(extra.get("min_tokens", 0)), stop_mask=(marks == 2) | (marks == 9), draft_tokens=drafts,
        )  # fmt: skip

    seen = torch.full_like(every, -1) if forget else every
    logits = torch.vmap(one)(tables()["target"][fed], seen).view(VOCAB, VOCAB, VOCAB, SIZE, VOCAB)
    out = []
    for row in range(SIZE):  # row i knows the first i drafts alone: compute each such prefix once
        known = logits[..., row, :][(slice(None),) * row + (0,) * (SIZE - 1 - row)]
        probs = law.distribution(known.reshape(-1, VOCAB), f32(t), i64(k), f32(p), f32(m), method="threshold")
        shape = (VOCAB,) * row + (1,) * (SIZE - 1 - row) + (VOCAB,)
        out.append(probs.view(shape).expand(VOCAB, VOCAB, VOCAB, VOCAB))
    return torch.stack(out, dim=3)


@functools.cache
def draws(stream, seed, lanes):
    position = torch.arange(TRIALS * lanes).view(TRIALS, lanes)
    return philox.uniform(i64(seed), position, stream)


def simulate(case, draft, *, seed, slack=0.0, residual=True, claim=None, forget=False):
    """Run every trial: (tokens [TRIALS, SIZE], n_accepted [TRIALS]).

    draft: "good", "bad" or "greedy". The other arguments break the rule: slack accepts too much, residual=False draws
    from p after a refusal, claim tells the verdict another draft law than the one drawn from, forget leaves the drafts
    out of the penalties.
    """
    laws, t = target_laws(case, forget), CASES[case][0]
    table = tables()["good" if draft == "greedy" else draft]
    q_of = law.distribution(table, f32(t), i64(0), f32(1.0), f32(0.0))
    u = draws(philox.STREAM_DRAFT, seed, SIZE - 1)
    chain, q, last = [], [], torch.full((TRIALS,), ANCHOR)
    for i in range(SIZE - 1):
        q.append(q_of[last] if claim is None else claim.expand(TRIALS, VOCAB))
        last = table.argmax(-1)[last] if draft == "greedy" else law.pick(q_of[last], u[:, i])
        chain.append(last)
    drafts = torch.stack(chain, 1)
    p = laws[tuple(drafts.unbind(1))]
    rows = 1 + (draws(9, seed, 1) * SIZE).long()
    final_u = draws(philox.STREAM_FINAL, seed, SIZE)
    laws_of_draft = None if draft == "greedy" else torch.stack(q, 1)
    verdict = torch.vmap(accept.sampled_chain, in_dims=(0, None if laws_of_draft is None else 0, 0, 0, 0, 0))(
        p, laws_of_draft, drafts, rows, draws(philox.STREAM_ACCEPT, seed, SIZE - 1) - slack, final_u
    )
    n, tokens = verdict.n_accepted.squeeze(1), verdict.tokens
    if not residual:
        at = torch.arange(TRIALS)
        tokens = tokens.clone()
        tokens[at, n] = law.pick(p[at, n], final_u[at, n])
    return tokens, n


def p_value(groups):
    """Chi-square of observed against expected counts over groups of cells; thin cells are joined within a group."""
    statistic, freedom = 0.0, 0
    for observed, expected in groups:
        thick = expected >= 5
        cells = [*zip(observed[thick].tolist(), expected[thick].tolist())]
        rest = (float(observed[~thick].sum()), float(expected[~thick].sum()))
        if rest[1] >= 5 or not cells:
            cells.append(rest)
        else:
            cells[0] = (cells[0][0] + rest[0], cells[0][1] + rest[1])
        if len(cells) > 1:
            statistic += sum((o - e) ** 2 / e for o, e in cells)
            freedom += len(cells) - 1
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def positions(case, tokens, n):
    """For each position: p-value of its token given the tokens before, over the trials that reached it."""
    laws = target_laws(case)
    out = []
    for place in range(SIZE):
        here = tokens[n >= place]
        prefix = here[:, :place]
        code = sum((prefix[:, j] * VOCAB ** (2 - j) for j in range(place)), torch.zeros(len(here), dtype=torch.int64))
        table = torch.bincount(code * VOCAB + here[:, place], minlength=VOCAB**4).view(-1, VOCAB).double()
        groups = []
        for group in table.sum(1).nonzero().squeeze(1).tolist():
            p = laws.view(-1, SIZE, VOCAB)[group, place].double()
            assert float(table[group][p == 0].sum()) == 0, "a token the target never gives"
            groups.append((table[group], p * table[group].sum()))
        out.append(p_value(groups))
    return out


@pytest.mark.parametrize("draft", ["good", "bad", "greedy"])
@pytest.mark.parametrize("case", CASES)
def test_output_has_the_target_law(case, draft):
    tokens, n = simulate(case, draft, seed=100)
    assert bool(((tokens >= 0).sum(1) == n + 1).all())
    assert min(positions(case, tokens, n)) > PASS


def test_a_good_draft_is_accepted_more_often():
    rate = {draft: float(simulate("plain", draft, seed=100)[1].double().mean()) for draft in ("good", "bad")}
    assert rate["good"] > rate["bad"] + 0.3


def test_accept_rate_is_the_overlap():
    """The first draft stays with probability sum(min(p, q)) whenever it is verified."""
    _, n = simulate("plain", "good", seed=100)
    p = target_laws("plain")[0, 0, 0, 0].double()
    q = torch.softmax(tables()["good"][ANCHOR].double(), -1)
    verified = 1 + (draws(9, 100, 1) * SIZE).long().squeeze(1) > 1
    want, got = float(torch.minimum(p, q).sum()), float((n[verified] > 0).double().mean())
    assert abs(want - got) < 5 * (want * (1 - want) / float(verified.sum())) ** 0.5


BROKEN = {
    "accepts a tenth too often": {"slack": 0.1},
    "draws from p after a refusal": {"residual": False},
    "claims a flat draft law": {"claim": torch.full((VOCAB,), 1.0 / VOCAB)},
}


@pytest.mark.parametrize("draft", ["good", "bad"])
@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_rule_is_rejected(how, draft):
    tokens, n = simulate("plain", draft, seed=100, **BROKEN[how])
    assert positions("plain", tokens, n)[0] < REJECT


def test_forgotten_draft_counts_are_rejected():
    """Penalties that leave out the drafts before a row are right at the first position and wrong behind it."""
    tokens, n = simulate("frequency", "good", seed=100, forget=True)
    values = positions("frequency", tokens, n)
    assert values[0] > PASS and max(values[1:3]) < REJECT
