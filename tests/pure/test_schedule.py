"""How many drafts a step verifies: the conformance file's numbers, exact laws, what may not be looked at, files."""

import dataclasses
import functools
import itertools
import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import DATA, chi_square
from soliton.errors import ConfigError
from soliton.sampling import accept, law
from soliton.speculation import schedule
from soliton.speculation.schedule import Calibration, Costs, Schedule, Scheduler

CASES = json.loads((DATA / "scheduler.json").read_text(encoding="utf-8"))
ROUNDS, PASS, REJECT = 200_000, 1e-4, 1e-12


def f64(values):
    return torch.tensor(values, dtype=torch.float64)


def f32(values):
    return torch.tensor(values, dtype=torch.float32)


def i64(*values):
    return torch.tensor(values, dtype=torch.int64)


def logit(confidence):
    return f64(confidence).logit().to(torch.float32)


def named(cases):
    return [pytest.param(case, id=case["name"]) for case in cases]


def some_costs(draft=10.0, verify=(20.0, 21.0, 23.0), **other):
    values = {"model": "m", "draft": "d", "device": "cpu", "commit": None, "versions": {"torch": "2"}, **other}
    return Costs(draft_us=draft, verify_us=tuple(verify), **values)


def scheduled(scheduler, logits, sampled):
    out = i64(-1)
    assert scheduler.live_rows(logits, out, sampled=sampled) is out
    return int(out)


# -- the rules against their numbers ----------------------------------------------------------------------------------


def rates(survival, t_draft, t_verify):
    """The rule of one request in plain floats: (rate of every length, best length, length of the early stop)."""
    tokens = itertools.accumulate(survival, initial=1.0)
    rate = [n / (t_draft + t) for n, t in zip(tokens, t_verify, strict=True)]
    early = 0
    while early < len(survival) and rate[early + 1] > rate[early]:
        early += 1
    return rate, max(range(len(rate)), key=rate.__getitem__), early


@pytest.mark.parametrize("case", CASES["survival"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_survival(case, dtype):
    logits, temperatures = (torch.tensor(case[key], dtype=dtype) for key in ("logits", "temperatures"))
    conditional, survival = schedule.confidences(logits, temperatures)
    assert conditional.dtype == survival.dtype == dtype
    near = functools.partial(torch.testing.assert_close, rtol=0, atol=1e-6 if dtype == torch.float32 else 1e-14)
    near(conditional.double(), f64(case["confidence"]))
    near(survival.double(), f64(case["survival"]))
    near(1 + survival.sum().double(), f64(case["expected_tokens_verify_all"]), atol=1e-5)


@pytest.mark.parametrize("case", named(CASES["batch1"]))
def test_cost(case):
    survival, t_draft, t_verify = case["survival"], case["t_draft"], case["t_verify"]
    rate, best, early = rates(survival, t_draft, t_verify)
    assert rate == pytest.approx(case["rate"], rel=1e-14)
    assert (best, early) == (case["best_length"], case["early_stop_length"])
    for given_survival in (f64(survival), f32(survival), schedule.confidences(logit(case["confidence"]), 1.0)[1]):
        for t in (t_draft, f64(t_draft)):
            found = schedule.rows_cost(given_survival, t, f64(t_verify), True)
            assert found.dtype == torch.int64 and found.tolist() == [1 + early]
            assert schedule.rows_cost(given_survival, t, f64(t_verify), False).tolist() == [1 + best]
    drafts = len(survival)
    scheduler = Scheduler(Schedule("cost", costs=some_costs(t_draft, t_verify)), drafts, "cpu")
    assert scheduled(scheduler, logit(case["confidence"]), True) == 1 + early
    assert scheduled(scheduler, logit(case["confidence"]), False) == 1 + best


@pytest.mark.parametrize("case", named(CASES["batch"]))
def test_batch(case):
    found = schedule.admit(case["confidence"], case["sps"])
    assert [list(slot) for slot in found.order] == case["admission_order"]
    assert found.path == pytest.approx(case["theta_path"], rel=1e-14)
    assert list(found.early) == case["early_stop_lengths"] and list(found.best) == case["global_lengths"]
    assert found.early_theta == pytest.approx(case["early_stop_theta"], rel=1e-14)
    assert found.best_theta == pytest.approx(case["global_theta"], rel=1e-14)


@pytest.mark.parametrize("case", named(CASES["batch1"]))
def test_a_batch_of_one_is_the_form_for_one(case):
    found = schedule.admit([case["confidence"]], [1 / (case["t_draft"] + t) for t in case["t_verify"]])
    assert (found.early, found.best) == ((case["early_stop_length"],), (case["best_length"],))


def test_equal_survivals_are_admitted_in_the_request_s_order():
    found = schedule.admit([[1.0, 1.0], [1.0, 0.5]], [1.0] * 6)
    assert found.order == ((0, 1), (0, 2), (1, 1), (1, 2))
    assert (found.early, found.best) == ((2, 2), (2, 2))
    level = schedule.admit([[0.5, 0.5]], [1.0, 1 / 1.5, 1.0])  # 1, 1, 1.75: standing still is no improvement
    assert (level.early, level.best) == ((0,), (2,))
    with pytest.raises(ConfigError, match="sps has 3 entries, but up to 6"):
        schedule.admit([[1.0, 1.0], [1.0, 0.5]], [1.0] * 3)


@pytest.mark.parametrize("case", CASES["threshold"]["cases"])
def test_threshold(case):
    confidence, cut, want = CASES["threshold"]["confidence"], case["threshold"], 1 + case["verified"]
    for conditional in (f64(confidence), f32(confidence)):
        found = schedule.rows_threshold(conditional, cut)
        assert found.dtype == torch.int64 and found.tolist() == [want]
    assert schedule.rows_threshold(f64(confidence), f64(cut)).tolist() == [want]


def test_threshold_through_the_scheduler():
    confidence = CASES["threshold"]["confidence"]
    for cut, verified in ((0.0, 5), (0.3, 5), (0.5, 3), (0.76, 1), (0.91, 0)):
        for sampled in (True, False):
            assert scheduled(Scheduler(Schedule("threshold", threshold=cut), 5, "cpu"), logit(confidence), sampled) == (
                1 + verified
            )
    cooler = Calibration(temperatures=(1.0, 1.0, 1.0, 3.0, 1.0))  # 0.4 becomes 0.466
    scheduler = Scheduler(Schedule("threshold", threshold=0.45), 5, "cpu", cooler)
    assert scheduled(scheduler, logit(confidence), True) == 6


def test_schedules_that_read_no_confidence():
    for of, want in ((Schedule(), 6), (Schedule("fixed", rows=3), 3), (Schedule("threshold"), 6)):
        assert not of.confident
        assert scheduled(Scheduler(of, 5, "cpu"), None, True) == want
    assert schedule.rows_all(5).tolist() == [6] and schedule.rows_fixed(3).tolist() == [3]
    assert Schedule("threshold", threshold=0.1).confident and Schedule("cost", costs=some_costs()).confident


ALL = [
    Schedule(),
    Schedule("fixed", rows=2),
    Schedule("threshold", threshold=0.5),
    Schedule("cost", costs=some_costs()),
]


@pytest.mark.parametrize("of", ALL, ids=lambda of: of.mode)
@pytest.mark.parametrize("sampled", [True, False])
def test_reads_no_device_value(of, sampled):
    """Tensors of the device "meta" have a shape and no values: reading one raises."""
    out = torch.empty(1, dtype=torch.int64, device="meta")
    Scheduler(of, 2, "meta").live_rows(torch.empty(2, device="meta"), out, sampled=sampled)


@pytest.mark.parametrize("of", ALL, ids=lambda of: of.mode)
@pytest.mark.parametrize("sampled", [True, False])
def test_any_logits_give_rows_in_range(of, sampled):
    for logits in itertools.product((-math.inf, -1.0, math.inf, math.nan), repeat=2):
        assert 1 <= scheduled(Scheduler(of, 2, "cpu"), f32(logits), sampled) <= 3


# -- what a slot's inclusion may rest on ------------------------------------------------------------------------------

BLOCK = 6
numbers = st.floats(-9, 9, width=32)
blocks = st.lists(numbers, min_size=BLOCK, max_size=BLOCK)
steps = st.lists(st.sampled_from([0.0, 0.01, 0.1, 0.3, 1.0]), min_size=BLOCK, max_size=BLOCK)


@settings(max_examples=300)
@given(blocks, blocks, st.integers(0, BLOCK), steps, st.floats(0.0, 1.0))
def test_a_slot_is_included_by_what_lies_up_to_it(logits, other, kept, costs, threshold):
    """Whether slot j is verified in a sampled step stays the same bit whatever the logits behind it are."""
    verify = tuple(itertools.accumulate(costs, initial=1.0))
    mixed = [*logits[:kept], *other[kept:]]
    for of in (Schedule("cost", costs=some_costs(0.3, verify)), Schedule("threshold", threshold=threshold)):
        scheduler = Scheduler(of, BLOCK, "cpu")
        rows, changed = (scheduled(scheduler, f32(x), True) for x in (logits, mixed))
        for slot in range(1, kept + 1):
            assert (rows > slot) == (changed > slot)


def test_the_best_of_all_lengths_looks_further():
    """The same property is false of the greedy rule: this is why a sampled step must not take it."""
    case = CASES["counterexample"]
    scheduler = Scheduler(counterexample_schedule(), 2, "cpu")
    rows = [scheduled(scheduler, logit([case["a1"], case["c2"][token]]), False) for token in case["vocab"]]
    assert rows == [3, 1]


@settings(max_examples=200)
@given(blocks, steps, st.sampled_from([0.0, 0.3, 2.0]))
def test_cost_against_plain_floats(logits, costs, t_draft):
    verify = list(itertools.accumulate(costs, initial=1.0))
    survival = schedule.confidences(f64(logits), f64([1.0] * BLOCK))[1]
    rate, best, early = rates(survival.tolist(), t_draft, verify)
    got_early, got_best = (int(schedule.rows_cost(survival, t_draft, f64(verify), stop)) - 1 for stop in (True, False))
    for got, want in ((got_best, best), (got_early, early)):  # sums may round otherwise where rates are all but equal
        assert got == want or rate[got] == pytest.approx(rate[want], rel=1e-14)


@settings(max_examples=200)
@given(blocks, st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_a_higher_threshold_never_verifies_more(logits, one, another):
    conditional = schedule.confidences(f32(logits), f32([1.0] * BLOCK))[0]
    low, high = (int(schedule.rows_threshold(conditional, t)) for t in sorted((one, another)))
    assert 1 <= high <= low <= 1 + BLOCK


# -- laws -------------------------------------------------------------------------------------------------------------


class Toy:
    """Blocks of two drafts over a small vocabulary: laws p1, p2[x1] of the target and q1, q2[x1] of the draft."""

    def __init__(self, p1, p2, q1, q2):
        self.p1, self.p2, self.q1, self.q2 = f32(p1), f32(p2), f32(q1), f32(q2)
        self.vocab = len(p1)

    def rounds(self, drafts, rows, accept_u, final_u):
        """The serving verdict on many rounds: (tokens [N, 3], accepted [N]). drafts: [N, 2], rows: [N]."""
        first = drafts[:, 0]
        count = len(drafts)
        # the law behind the second draft is not looked at: any will do
        target = torch.stack((self.p1.expand(count, -1), self.p2[first], self.p1.expand(count, -1)), 1)
        draft = torch.stack((self.q1.expand(count, -1), self.q2[first]), 1)
        run = torch.vmap(accept.sampled_chain)
        verdict = run(target, draft, drafts, rows.unsqueeze(1), accept_u, final_u.unsqueeze(1))
        return verdict.tokens, verdict.n_accepted.squeeze(1)

    def exact(self, rows_of, forget):
        """[V, V]: the joint law of the first two tokens, by weighing every way a round can go.

        rows_of: [V, V] live rows by the drafts. forget: accepted counts whose second token is drawn from the target
        afresh. The uniforms are cut where the verdict can change, and one point of each piece stands for it.
        """
        ratios = [*(self.p1 / self.q1).tolist(), *(self.p2 / self.q2).flatten().tolist()]
        laws = [self.p1, *self.p2, (self.p1 - self.q1).clamp(min=0), *(self.p2 - self.q2).clamp(min=0)]
        edges = [(each.double().cumsum(0) / each.double().sum()).tolist() for each in laws if float(each.sum()) > 1e-6]
        accepts, finals = pieces(ratios), pieces(itertools.chain(*edges))
        every = itertools.product(range(self.vocab), range(self.vocab), accepts, accepts, finals)
        ways = [((a, b), (u[0], v[0]), w[0], u[1] * v[1] * w[1]) for a, b, u, v, w in every]
        drafts, accept_u, final_u, weight = (torch.tensor(column) for column in zip(*ways, strict=True))
        q = self.q1.double()[drafts[:, 0]] * self.q2.double()[drafts[:, 0], drafts[:, 1]]
        weight = weight.double() * q
        tokens, n = self.rounds(drafts, rows_of[drafts[:, 0], drafts[:, 1]], accept_u, final_u)
        again = (tokens[:, 1] < 0) | forget[n]
        joint = torch.zeros(self.vocab, self.vocab, dtype=torch.float64)
        joint.index_put_((tokens[~again, 0], tokens[~again, 1]), weight[~again], accumulate=True)
        joint.index_add_(0, tokens[again, 0], weight[again].unsqueeze(1) * self.p2.double()[tokens[again, 0]])
        return joint

    def draw(self, rows_of, forget):
        """[V, V]: counts of the first two tokens in ROUNDS rounds."""
        g = torch.Generator().manual_seed(5)
        u = torch.rand(6, ROUNDS, generator=g, dtype=torch.float64)
        first = law.pick(self.q1.expand(ROUNDS, -1), u[0])
        drafts = torch.stack((first, law.pick(self.q2[first], u[1])), 1)
        tokens, n = self.rounds(drafts, rows_of[drafts[:, 0], drafts[:, 1]], u[2:4].T, u[4])
        fresh = law.pick(self.p2[tokens[:, 0]], u[5])
        second = torch.where((tokens[:, 1] < 0) | forget[n], fresh, tokens[:, 1])
        return torch.bincount(tokens[:, 0] * self.vocab + second, minlength=self.vocab**2).view(self.vocab, -1)


def pieces(edges):
    """[(middle, width)] of the pieces into which the edges cut the unit interval; edges closer than 1e-5 are one."""
    cuts = [0.0]
    for edge in sorted(edge for edge in edges if 1e-5 < edge < 1 - 1e-5):
        if edge - cuts[-1] > 1e-5:
            cuts.append(edge)
    return [((low + high) / 2, high - low) for low, high in itertools.pairwise([*cuts, 1.0])]


KEEP = torch.zeros(3, dtype=torch.bool)


def by_first(rows):
    """Live rows, one tensor for each first draft, as a table over both drafts."""
    return torch.cat(rows).unsqueeze(1).expand(-1, len(rows))


def exact_toy():
    case = CASES["exact_laws"]
    return Toy(case["p1"], case["p2_given_x1"], case["q1"], case["q2_given_x1"])


def exact_rule(name):
    """(rows by drafts, accepted counts that forget the second token) of a rule of the file."""
    c2, vocab = CASES["exact_laws"]["c2_given_x1"], CASES["exact_laws"]["vocab"]
    everything = by_first([schedule.rows_all(2)] * vocab)
    sees_its_own = torch.full((vocab, vocab), 2)
    sees_its_own[:, 0] = 3
    return {
        "verify all": (everything, KEEP),
        "l = 1 always": (by_first([schedule.rows_fixed(2)] * vocab), KEEP),
        "l = 0 always": (by_first([schedule.rows_fixed(1)] * vocab), KEEP),
        "causal": (by_first([schedule.rows_threshold(f32([1.0, c]), 0.5) for c in c2]), KEEP),
        "retrospective": (by_first([i64(3 if c >= 0.5 else 1) for c in c2]), KEEP),
        "slot 2 iff x2": (sees_its_own, KEEP),
        "cap 1, an accepted x2 handed out": (everything, KEEP),
        "cap 1, bonus always fresh": (everything, torch.tensor([False, True, True])),
        "cap 1, fresh draw if x2 was accepted": (everything, torch.tensor([False, False, True])),
    }[next(start for start in RULES if name.startswith(start))]


RULES = [
    "verify all", "l = 1 always", "l = 0 always", "causal", "retrospective", "slot 2 iff x2",
    "cap 1, an accepted x2 handed out", "cap 1, bonus always fresh", "cap 1, fresh draw if x2 was accepted",
]  # fmt: skip


@pytest.mark.parametrize("rule", [pytest.param(rule, id=rule["rule"]) for rule in CASES["exact_laws"]["rules"]])
def test_exact_laws(rule):
    """Each rule has the law that the file says; the lossless ones pass the test against the target, no others do."""
    target = f64(CASES["exact_laws"]["target_joint"])
    found = exact_toy().exact(*exact_rule(rule["rule"]))
    torch.testing.assert_close(found, f64(rule["joint"]), rtol=0, atol=1e-6)
    distance = float((found - target).abs().sum()) / 2
    assert distance == pytest.approx(rule["total_variation_from_target"], abs=1e-6)
    assert (distance < 1e-6) == rule["lossless"]
    observed = exact_toy().draw(*exact_rule(rule["rule"])).flatten().tolist()
    p, cells = chi_square(observed, (target * ROUNDS).flatten().tolist())
    assert cells == 9
    assert p > PASS if rule["lossless"] else p < REJECT
    assert chi_square(observed, (f64(rule["joint"]) * ROUNDS).flatten().tolist())[0] > PASS


def counterexample_schedule():
    return Schedule("cost", costs=some_costs(0.0, [1 / s for s in CASES["counterexample"]["sps"]]))


def counterexample_rules():
    case = CASES["counterexample"]
    verify = f64([1 / s for s in case["sps"]])
    blocks = [f64([case["a1"], case["c2"][token]]) for token in case["vocab"]]
    scheduler = Scheduler(counterexample_schedule(), 2, "cpu")
    served = [i64(scheduled(scheduler, logit(c.tolist()), True)) for c in blocks]
    return {
        "retrospective": [schedule.rows_cost(c.cumprod(0), 0.0, verify, False) for c in blocks],
        "early stop": [schedule.rows_cost(c.cumprod(0), 0.0, verify, True) for c in blocks],
        "early stop, served": served,
        "verify all": [schedule.rows_all(2) for _ in blocks],
        "fixed": [schedule.rows_fixed(2) for _ in blocks],
        "threshold": [schedule.rows_threshold(c, 0.5) for c in blocks],
    }


@pytest.mark.parametrize(
    "rule", ["retrospective", "early stop", "early stop, served", "verify all", "fixed", "threshold"]
)
def test_counterexample(rule):
    case = CASES["counterexample"]
    toy = Toy(case["target"], [case["target"]] * 2, case["draft"], [case["draft"]] * 2)
    rows = counterexample_rules()[rule]
    lossless = rule != "retrospective"
    key = {"retrospective": "retrospective", "verify all": "verify_all", "fixed": "fixed_length_1"}.get(
        rule, "early_stop"
    )
    if f"{key}_length" in case and rule != "threshold":
        assert [int(r) - 1 for r in rows] == [case[f"{key}_length"][token] for token in case["vocab"]]
    found = toy.exact(by_first(rows), KEEP).sum(1)
    torch.testing.assert_close(found, f64(case[f"{key}_law"]), rtol=0, atol=1e-6)
    observed = toy.draw(by_first(rows), KEEP).sum(1).tolist()
    p, _ = chi_square(observed, [ROUNDS * p for p in case["target"]])
    assert p > PASS if lossless else p < REJECT
    if not lossless:
        assert chi_square(observed, [ROUNDS * p for p in (0.85, 0.15)])[0] > PASS


@pytest.mark.parametrize("case", CASES["rejection"])
def test_rejection(case):
    """p, q, who is kept with what probability and what is drawn after a refusal, through the serving code."""
    if "target_logits" in case:
        off = (i64(0), f32([1.0]), f32([0.0]))
        p, q = (
            law.distribution(f32([case[f"{of}_logits"]]), f32([case["temperature"]]), *off)
            for of in ("target", "draft")
        )
        torch.testing.assert_close(p[0].double(), f64(case["p"]), rtol=0, atol=1e-6)
        torch.testing.assert_close(q[0].double(), f64(case["q"]), rtol=0, atol=1e-6)
    else:
        p, q = f32([case["p"]]), f32([case["q"]])
    vocab, kept = p.shape[1], case["accept_probability"]
    target = p.expand(2, -1)

    def accepted(token, u):
        return int(accept.sampled_chain(target, q, i64(token), i64(2), f64([u]), f64([0.5])).n_accepted)

    for token, share in enumerate(kept):
        assert accepted(token, share * (1 - 1e-5)) == 1
        assert share == 1 or accepted(token, share * (1 + 1e-5)) == 0
    assert sum(q[0].double() * f64(kept)) == pytest.approx(case["expected_accept"], abs=1e-6)
    assert case["one_minus_half_l1"] == pytest.approx(float(1 - (p - q).abs().sum() / 2), abs=1e-6)

    # the refused draft: the one that is refused most often, or any where rounding alone can refuse (u = 1)
    token, points = min(range(vocab), key=lambda t: kept[t]), 20_000
    finals = (torch.arange(points, dtype=torch.float64) + 0.5) / points
    run = torch.vmap(accept.sampled_chain, in_dims=(None, None, None, None, None, 0))
    drawn = run(target, q, i64(token), i64(2), f64([1.0]), finals.unsqueeze(1))
    assert int(drawn.n_accepted.max()) == 0
    shares = torch.bincount(drawn.final.squeeze(1), minlength=vocab).double() / points
    torch.testing.assert_close(shares, f64(case["residual"]), rtol=0, atol=1.01 / points)


# -- schedules and files ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"mode": "some"}, "'some' is unknown; it is one of all, fixed, threshold, cost"),
        ({"rows": 3}, "'all' has no use for what 'fixed' takes"),
        ({"mode": "cost", "threshold": 0.5}, "'cost' has no use for what 'threshold' takes"),
        ({"mode": "fixed"}, "rows is None"),
        ({"mode": "fixed", "rows": 0}, "rows is 0"),
        ({"mode": "fixed", "rows": True}, "rows is True"),
        ({"mode": "threshold", "threshold": 1.5}, "threshold is 1.5"),
        ({"mode": "threshold", "threshold": -0.5}, "'threshold' is -0.5"),
        ({"mode": "threshold", "threshold": math.nan}, "'threshold' is nan"),
        ({"mode": "cost"}, "needs a file of costs"),
    ],
)
def test_a_schedule_that_cannot_be(given, told):
    with pytest.raises(ConfigError, match=told):
        Schedule(**given)


def test_a_schedule_that_this_draft_cannot_have():
    for of, drafts, told in (
        (Schedule("fixed", rows=7), 5, "rows is 7, but a block of 5 drafts has 6 rows"),
        (Schedule("cost", costs=some_costs()), 5, "the costs cover 3 rows, but a block of 5 drafts needs 6"),
    ):
        for refused in (lambda of=of, g=drafts: of.check(g, True), lambda of=of, g=drafts: Scheduler(of, g, "cpu")):
            with pytest.raises(ConfigError, match=told):
                refused()
    with pytest.raises(ConfigError, match="'threshold' reads confidences, and this draft has no confidence head"):
        Schedule("threshold", threshold=0.5).check(5, False)
    Schedule("threshold").check(5, False)
    with pytest.raises(ConfigError, match="has 3 temperatures, but a block of this draft has 5"):
        Scheduler(Schedule(), 5, "cpu", Calibration(temperatures=(1.0, 2.0, 3.0)))
    hash(Schedule("cost", costs=some_costs()))


def test_costs_go_to_a_file_and_back(tmp_path):
    path = tmp_path / "costs.json"
    costs = some_costs(commit="abc", versions={"torch": "2.11", "triton": None})
    costs.save(path)
    assert Costs.load(path) == costs and costs.note is None
    assert costs.rows(2) == (20.0, 21.0) and costs.rows(3) == costs.verify_us


def test_costs_never_fall(tmp_path):
    costs = some_costs(verify=(20, 22, 21, 25, 24.5))
    assert costs.verify_us == (20.0, 22.0, 22.0, 25.0, 25.0)
    assert costs.note is not None and "3 rows from 21 to 22, 5 rows from 24.5 to 25" in costs.note
    costs.save(tmp_path / "costs.json")
    assert Costs.load(tmp_path / "costs.json") == costs
    assert some_costs(verify=(2, 1), note="by hand").note == "by hand; " + some_costs(verify=(2, 1)).note


def document():
    return dataclasses.asdict(some_costs())


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"verify": [1.0]}, "the key 'verify' is unknown (did you mean 'verify_us'?)"),
        ({"draft_us": None}, "'draft_us' is None"),
        ({"draft_us": -1.0}, "'draft_us' is -1.0"),
        ({"draft_us": True}, "'draft_us' is True"),
        ({"draft_us": math.inf}, "'draft_us' is inf"),
        ({"draft_us": 10**400}, "finite number"),
        ({"verify_us": []}, "'verify_us' is empty"),
        ({"verify_us": 3.0}, "'verify_us' is 3.0, but a list"),
        ({"verify_us": [1.0, 0.0]}, "'verify_us[1]' is 0.0, but a finite number above 0"),
        ({"verify_us": [1.0, "2"]}, "'verify_us[1]' is '2'"),
        ({"verify_us": [math.nan]}, "'verify_us[0]' is nan"),
        ({"model": 3}, "'model' is 3, but a text"),
        ({"commit": 3}, "'commit' is 3, but a text or null"),
        ({"versions": ["torch"]}, "'versions' is ('torch',)"),
        ({"versions": {"torch": 2}}, "'versions' is {'torch': 2}"),
    ],
)
def test_costs_that_will_not_do(tmp_path, change, told):
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({**document(), **change}), encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        Costs.load(path)
    assert told in str(error.value) and str(error.value).startswith(f"{path}: ")


@pytest.mark.parametrize("text", ["", "{", "[1]", "3", "\ud800", "[" * 100_000])
@pytest.mark.parametrize("kind", [Costs, Calibration])
def test_files_that_are_none(tmp_path, text, kind):
    path = tmp_path / "it.json"
    path.write_bytes(text.encode("utf-8", errors="surrogatepass"))
    with pytest.raises(ConfigError, match="it.json: "):
        kind.load(path)


@pytest.mark.parametrize("kind", [Costs, Calibration])
def test_files_that_are_not_there(tmp_path, kind):
    with pytest.raises(ConfigError, match="cannot be read"):
        kind.load(tmp_path / "none.json")
    (tmp_path / "empty.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match="the key '(draft_us|temperatures)' is missing"):
        kind.load(tmp_path / "empty.json")
    whole = some_costs() if kind is Costs else Calibration(temperatures=(1.0,))
    with pytest.raises(ConfigError, match="cannot be written"):
        whole.save(tmp_path / "none" / "it.json")
