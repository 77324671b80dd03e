"""The trainable draft: what a block may see, the Markov heads row by row, names, and what is refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from soliton.errors import UnsupportedError
from soliton.model.draft_spec import DraftSpec, shapes
from soliton.train.model import Drafter

SPEC = DraftSpec(
    name="x", hidden=16, vocab=50, layers=2, heads=4, kv_heads=2, head_dim=8, width=24, eps=1e-6, theta=1e4, block=4,
    mask_id=49, taps=(0, 2), target_layers=4, markov="vanilla", rank=6, confidence=True, confidence_markov=True,
)  # fmt: skip
KEEP = torch.ones(2, 3, dtype=torch.bool)


def drafter(**changes: object) -> Drafter:
    spec = dataclasses.replace(SPEC, **changes)
    g = torch.Generator().manual_seed(1)
    model = Drafter(spec, torch.randn(50, 16, generator=g), torch.randn(50, 16, generator=g)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=g, dtype=torch.float64) * 0.3)
    return model


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(2)
    taps = torch.randn(2, 20, 32, generator=g, dtype=torch.float64)
    return taps, torch.randint(0, 49, (2, 20), generator=g), torch.tensor([[3, 7, 15], [0, 9, 18]])


@pytest.mark.parametrize("markov", ["none", "vanilla", "gated", "rnn"])
@pytest.mark.parametrize("with_markov", [True, False])
def test_names_are_the_layouts(markov: str, with_markov: bool) -> None:
    changes = {"markov": markov, "rank": 0 if markov == "none" else 6}
    model = drafter(**changes, confidence_markov=with_markov and markov != "none")
    assert {name: tuple(p.shape) for name, p in model.state_dict().items()} == shapes(model.spec)
    taps, ids, anchors = inputs()
    out = model(taps, ids, anchors, KEEP)
    assert out.logits.shape == (2, 3, 4, 50) and out.confidence.shape == (2, 3, 4)
    (out.logits.square().mean() + out.confidence.square().mean()).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


class TestSight:
    def test_a_block_sees_nothing_from_its_anchor_on(self) -> None:
        model, (taps, ids, anchors) = drafter(), inputs()
        before = model(taps, ids, anchors, KEEP).hidden
        changed = taps.clone()
        changed[0, 7:] += 1
        after = model(changed, ids, anchors, KEEP).hidden
        torch.testing.assert_close(after[0, :2], before[0, :2])
        assert (after[0, 2] - before[0, 2]).abs().min() > 0
        changed = taps.clone()
        changed[0, 6] += 1  # the last row before the second anchor
        after = model(changed, ids, anchors, KEEP).hidden
        torch.testing.assert_close(after[0, 0], before[0, 0])
        assert (after[0, 1] - before[0, 1]).abs().min() > 0

    def test_blocks_do_not_see_one_another(self) -> None:
        model, (taps, ids, anchors) = drafter(), inputs()
        together = model(taps, ids, anchors, KEEP).hidden
        for i in range(3):
            alone = model(taps, ids, anchors[:, i : i + 1], KEEP[:, :1]).hidden
            torch.testing.assert_close(alone[:, 0], together[:, i])

    def test_rows_of_a_block_see_one_another(self) -> None:
        """Every row's hidden state depends on the anchor's token."""
        model, (taps, ids, anchors) = drafter(), inputs()
        other = ids.clone()
        other[0, 3] = (other[0, 3] + 1) % 49
        moved = model(taps, other, anchors, KEEP).hidden - model(taps, ids, anchors, KEEP).hidden
        assert moved[0, 0].abs().amax(-1).min() > 0
        assert not moved[0, 1:].any()

    def test_shared_heads_are_repeated_heads(self) -> None:
        shared, (taps, ids, anchors) = drafter(), inputs()
        full = drafter(kv_heads=4)
        state = {
            k: v.view(2, 1, 8, -1).expand(-1, 2, -1, -1).reshape(32, -1) if "k_proj" in k or "v_proj" in k else v
            for k, v in shared.state_dict().items()
        }
        full.load_state_dict(state)
        torch.testing.assert_close(full(taps, ids, anchors, KEEP).logits, shared(taps, ids, anchors, KEEP).logits)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_markov_heads_row_by_row(kind: str) -> None:
    model, (taps, ids, anchors) = drafter(markov=kind), inputs()
    out = model(taps, ids, anchors, KEEP)
    w, a = model.state_dict(), int(anchors[0, 1])
    state = torch.zeros(6, dtype=torch.float64)
    for k in range(4):
        h, e = out.hidden[0, 1, k], w["markov_head.markov_w1.weight"][ids[0, a + k]]
        x = e
        if kind == "gated":
            at = "markov_head.gate_proj."
            x = torch.sigmoid(w[at + "weight"] @ torch.cat([h, e]) + w[at + "bias"]) * e
        if kind == "rnn":
            at = "markov_head.joint_proj."
            joint = w[at + "weight"] @ torch.cat([state, e, h]) + w[at + "bias"]
            g, c, o = joint[:6], joint[6:12], joint[12:]
            state, x = torch.sigmoid(g) * state + (1 - torch.sigmoid(g)) * torch.tanh(c), torch.tanh(o)
        logits = model.head @ h + w["markov_head.markov_w2.weight"] @ x
        torch.testing.assert_close(out.logits[0, 1, k], logits)
        proj = w["confidence_head.proj.weight"][0] @ torch.cat([h, e]) + w["confidence_head.proj.bias"][0]
        torch.testing.assert_close(out.confidence[0, 1, k], proj)


def test_training_starts_at_the_base_logits() -> None:
    g = torch.Generator().manual_seed(1)
    embed, head = torch.randn(50, 16, generator=g), torch.randn(50, 16, generator=g)
    model, (taps, ids, anchors) = Drafter(SPEC, embed, head, seed=4), inputs()
    out = model(taps.float(), ids, anchors, KEEP)
    torch.testing.assert_close(out.logits, F.linear(out.hidden, head))
    again = Drafter(SPEC, embed, head, seed=4)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters()))
    assert not any(p is embed or p is head for p in model.parameters())


@pytest.mark.parametrize(
    ("changes", "word"), [({"anchor_first": False}, "DFlash"), ({"draft_vocab": 20}, "vocabulary of 20")]
)
def test_refusals(changes: dict[str, object], word: str) -> None:
    with pytest.raises(UnsupportedError, match=word):
        drafter(**changes)
