"""The MTP (NEXTN) layer: entry t reads token t+1 and the target's hidden state at t, and predicts token t+2."""

from __future__ import annotations

from torch import Tensor

from ..ops.tape import Tape
from .decoder import Memory, Rows, layer_forward
from .spec import ModelSpec
from .weights import ModelWeights


def mtp(tape: Tape, w: ModelWeights, spec: ModelSpec, ids: Tensor, hidden: Tensor, cache: Tensor, rows: Rows) -> Tensor:
    """The layer's normed output [R, hidden]: feeds the target's head, and the next entry of a draft chain.

    ids: int64 [R], the token after each entry; hidden: [R, hidden], the target's state after its final norm (inside
    a chain: this function's own output); cache: the MTP layer's [max_len, D]; rows.positions: the entries' own.
    u = eh [enorm(embed(id)); hnorm(h)], embedding first; then one MLA + MoE block without clamps; then its own norm.
    """
    assert w.mtp is not None and spec.mtp is not None
    count, size = ids.shape[0], spec.hidden
    embedded = tape.new(count, size)
    tape.call("embed", embedded, ids, w.embed)
    pair = tape.new(count, 2 * size)
    tape.call("norm", pair[:, :size], embedded, w.mtp.enorm, spec.eps)
    tape.call("norm", pair[:, size:], hidden, w.mtp.hnorm, spec.eps)
    joined = tape.new(count, w.mtp.eh.padded)
    tape.call("linear", joined, pair, w.mtp.eh)
    x = tape.new(count, size)
    tape.call("copy", x, joined[:, :size])
    layer_forward(
        tape, w.mtp.layer, spec.mtp, x, Memory(windows={}, states={}, caches={spec.mtp.index: cache}), rows, spec.eps
    )
    out = tape.new(count, size)
    tape.call("norm", out, x, w.mtp.out_norm, spec.eps)
    return out
