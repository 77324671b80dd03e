"""The trainer's arithmetic against the conformance batch: logits, terms, metrics and gradients, in both dtypes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from soliton.train import losses
from soliton.train.data import candidates, sample_anchors
from soliton.train.losses import Objective
from soliton.train.model import places
from train_cases import Batch

DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
# The names of the terms in the case's gradient norms, and the weights that give each.
NONE = {"ce": 0.0, "l1": 0.0, "confidence": 0.0, "accept_length": 0.0}
WEIGHTS = {
    "total": {**NONE, "ce": 0.1, "l1": 0.9, "confidence": 1.0},
    "ce": {**NONE, "ce": 1.0},
    "l1": {**NONE, "l1": 1.0},
    "conf": {**NONE, "confidence": 1.0},
    "accept_length": {**NONE, "accept_length": 1.0},
}


def worst(found: Tensor, golden: Tensor) -> float:
    return float(((found.detach() - golden).abs() / (1 + golden.abs())).max())


def close(found: float, golden: float, rtol: float) -> bool:
    return abs(found - golden) <= rtol * max(abs(golden), 1e-3)


@DTYPES
@pytest.mark.parametrize("chunk", [3, 64])
def test_logits_and_confidence(dtype: torch.dtype, chunk: int) -> None:
    b = Batch(dtype)
    out = b.model(b.taps, b.ids, b.anchors, b.keep, chunk=chunk)
    atol = 1e-6 if dtype == torch.float64 else b.suggested["fp32_logits_atol"]
    assert worst(out.logits[b.keep], b.arrays["logits"][b.keep]) <= atol
    assert worst(out.confidence[b.keep], b.arrays["confidence_logits"][b.keep]) <= atol
    assert not out.hidden[~b.keep].any()


def test_labels_masks_and_candidates() -> None:
    b = Batch(torch.float32)
    assert torch.equal(losses.supervised(b.loss_mask, b.anchors, b.keep, 5), b.mask)
    labels = b.ids.gather(1, (places(b.anchors, 5, 44) + 1).clamp(max=43).flatten(1)).view(2, 8, 5)
    assert torch.equal(labels[b.mask], b.arrays["labels"].long()[b.mask])
    for sample, golden in zip(b.samples, b.values["anchor_candidates"]):
        assert candidates(sample.mask()).tolist() == golden
    drawn = sample_anchors(b.samples[0].mask(), 8, seed=1)
    assert drawn.tolist() == sorted(set(drawn.tolist())) and len(drawn) == 8
    assert set(drawn.tolist()) <= set(b.values["anchor_candidates"][0])
    assert sample_anchors(b.samples[1].mask(), 8, seed=1).tolist() == b.values["anchor_candidates"][1]


@DTYPES
@pytest.mark.parametrize("decay", [4.0, 0.0])
def test_terms_and_metrics(dtype: torch.dtype, decay: float) -> None:
    b = Batch(dtype)
    trainer = b.trainer(decay=decay, chunk=3)
    whole = losses.totals([b.mask], decay or None)
    with torch.no_grad():
        found = losses.metrics(trainer._sums(b.batch(3), whole, None), whole)
    rtol = 1e-9 if dtype == torch.float64 else b.suggested["fp32_loss_rtol"]
    golden = b.values if decay else b.values["no_decay"]
    for term in ("ce", "l1", "confidence"):
        assert close(found[term], golden[term], rtol), term
    assert whole.blocks == b.values["valid_blocks"] and whole.rows == tuple(b.values["metrics"]["accept_rate_counts"])
    assert close(found["accept_length"], b.values["accept_length"], rtol)
    assert close(found["tau"], b.values["metrics"]["tau_probabilistic"], rtol)
    for mine, its in zip(found["accept_rate"], b.values["metrics"]["accept_rate"], strict=True):
        assert close(mine, its, rtol * 10)
    if decay:
        for name in ("abs_error", "bias", "cumprod_bias"):
            assert close(found[f"confidence_{name}"], b.values["metrics"][f"confidence_{name}"], rtol * 10), name


@DTYPES
@pytest.mark.parametrize("chunk", [3, 8])
@pytest.mark.parametrize("term", WEIGHTS)
def test_gradients(dtype: torch.dtype, chunk: int, term: str) -> None:
    b = Batch(dtype)
    trainer = b.trainer(chunk=chunk)
    whole = losses.totals([b.mask], 4.0)
    trainer._sums(b.batch(chunk), whole, WEIGHTS[term])
    rtol = 1e-7 if dtype == torch.float64 else b.suggested["fp32_grad_rtol"]
    norms = b.values["grad_norms"][term]
    grads = {name: p.grad for name, p in b.model.named_parameters()}
    assert set(grads) == set(norms) - {"(all)"}
    for name, grad in grads.items():
        found = float(grad.double().norm())
        assert found == 0 if norms[name] == 0 else close(found, norms[name], rtol), name
    whole_norm = float(torch.stack([g.double().norm() for g in grads.values()]).norm())
    assert close(whole_norm, norms["(all)"], rtol)
    for name, golden in b.arrays.items():
        if name.startswith(f"grad.{term}."):
            grad = grads[name.removeprefix(f"grad.{term}.")]
            assert float((grad - golden).abs().max()) <= max(rtol, 1e-6) * max(float(golden.abs().max()), 1e-30), name


def test_a_padded_batch_in_parts_gives_the_same_sums() -> None:
    """Two sequences together or one by one, whatever the chunk."""
    b = Batch(torch.float64)
    whole, found = losses.totals([b.mask], 4.0), []
    for micros, chunk in (([b.micro()], 8), ([b.micro()], 1), ("single", 5)):
        trainer = b.trainer(chunk=chunk)
        if micros == "single":
            both = b.micro()
            micros = [
                type(both)((s,), both.ids[i : i + 1], both.anchors[i : i + 1], both.mask[i : i + 1])
                for i, s in enumerate(both.samples)
            ]
        for p in b.model.parameters():
            p.grad.zero_()
        sums = trainer._sums([(m, list(m.parts(chunk))) for m in micros], whole, WEIGHTS["total"])
        found.append([*(v.flatten() for v in sums.values()), *(p.grad.flatten() for p in b.model.parameters())])
    for other in found[1:]:
        torch.testing.assert_close(torch.cat(other), torch.cat(found[0]), rtol=1e-9, atol=1e-12)


class TestTemperatures:
    def test_one_is_the_plain_law(self) -> None:
        draft, law = torch.randn(4, 3, 11), torch.randn(4, 3, 11)
        l1, rate = losses.distances(draft, law, 1.0)
        p, q = law.softmax(-1), draft.softmax(-1)
        torch.testing.assert_close(rate, torch.minimum(p, q).sum(-1))
        torch.testing.assert_close(l1, (p - q).abs().sum(-1))

    def test_zero_is_the_argmax(self) -> None:
        draft, law = torch.randn(4, 3, 11, requires_grad=True), torch.randn(4, 3, 11)
        l1, rate = losses.distances(draft, law, 0.0)
        hard = torch.nn.functional.one_hot(law.argmax(-1), 11)
        torch.testing.assert_close(l1, (hard - draft.softmax(-1)).abs().sum(-1))
        assert torch.equal(rate, (draft.argmax(-1) == law.argmax(-1)).float())
        l1.sum().backward()
        assert draft.grad is not None and draft.grad.abs().sum() > 0

    def test_several_are_averaged(self) -> None:
        draft, law = torch.randn(4, 3, 11), torch.randn(4, 3, 11)
        mask, labels = torch.ones(4, 3, dtype=torch.bool), torch.zeros(4, 3, dtype=torch.int64)
        each = [
            losses.sums(Objective(temperatures=t), draft, law, None, labels, mask) for t in ((1.0,), (0.5,), (1.0, 0.5))
        ]
        for name in ("l1", "accept_length", "rates"):
            torch.testing.assert_close(each[2][name], (each[0][name] + each[1][name]) / 2)

    def test_confidence_may_have_its_own(self) -> None:
        draft, law, sure = torch.randn(4, 3, 11), torch.randn(4, 3, 11), torch.randn(4, 3, requires_grad=True)
        mask, labels = torch.ones(4, 3, dtype=torch.bool), torch.zeros(4, 3, dtype=torch.int64)
        found = losses.sums(Objective(sure=(0.0,), decay=None), draft, law, sure, labels, mask)
        agree = (draft.argmax(-1) == law.argmax(-1)).float()
        bce = torch.nn.functional.binary_cross_entropy_with_logits(sure, agree, reduction="sum")
        torch.testing.assert_close(found["confidence"], bce)
        plain = losses.sums(Objective(decay=None), draft, law, sure, labels, mask)
        assert torch.equal(plain["l1"], found["l1"]) and not torch.equal(plain["confidence"], found["confidence"])

    def test_confidence_counts_as_far_as_a_block_is_accepted(self) -> None:
        draft, law, sure = torch.randn(40, 3, 5), torch.randn(40, 3, 5), torch.randn(40, 3)
        mask, labels = torch.ones(40, 3, dtype=torch.bool), torch.zeros(40, 3, dtype=torch.int64)
        found = losses.sums(Objective(sure=(0.0,), reached=True, decay=None), draft, law, sure, labels, mask)
        agree = draft.argmax(-1) == law.argmax(-1)
        assert agree.any() and not agree.all()
        expected = 0.0
        for block, good in zip(sure.tolist(), agree.tolist()):
            for logit, accepted in zip(block, good):
                p = 1 / (1 + math.exp(-logit))
                expected -= math.log(p if accepted else 1 - p)
                if not accepted:
                    break  # the rows behind are never asked
        assert float(found["confidence"]) == pytest.approx(expected, rel=1e-4)


def test_the_ramp_grows_to_its_weight() -> None:
    ramp = Objective(accept_length=2.0, ramp=4)
    assert [ramp.weights(step)["accept_length"] for step in range(6)] == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]
    assert Objective(accept_length=2.0).weights(0)["accept_length"] == 2.0
