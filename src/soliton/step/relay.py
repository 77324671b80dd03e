"""The relay: everything that passes from phase to phase and from step to step, as device tensors at fixed addresses.

Phases read and write only the relay, the stream's buffers and the weights. Counts that depend on what was accepted
are device indices; no shape and no launch depends on them.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from ..sampling.grammar import words

TOP_LOGPROBS = 20
# finish codes as the device writes them
RUNNING, STOPPED, LENGTH = 0, 1, 2


@dataclass(frozen=True, kw_only=True)
class Relay:
    """R: most rows of a step; S: drafts a step (R - 1); V: vocabulary; D: slots of the output ring.

    Step state: ``anchor`` the committed token not yet run; ``length`` tokens run; ``rows`` live rows of this step;
    ``drafted`` 1 when tokens[1:] hold drafts for the coming step (0 right after the prompt); ``seed`` the MTP's
    output that the chain continues from, one row twice; ``taken`` rows committed by this step (0 when frozen).
    """

    anchor: Tensor  # int64 [1]
    length: Tensor  # int64 [1]
    rows: Tensor  # int64 [1]
    drafted: Tensor  # int64 [1]
    tokens: Tensor  # int64 [R], anchor then drafts
    positions: Tensor  # int64 [R]
    turn: Tensor | None  # float32 [R, rope/2, 2]
    hidden: Tensor  # [R, hidden], the target's after its final norm
    logits: Tensor  # float32 [R, V padded], raw
    seed: Tensor  # [2, hidden]
    taps: Tensor | None  # [R, taps * hidden], the target's residuals that a block drafter reads
    confidence: Tensor  # float32 [max(S, 1)], logits of each draft's acceptance, of a block drafter
    draft_law: Tensor  # float32 [max(S, 1), V], laws the drafts were drawn from (sampled steps)
    draft_counts: Tensor  # int32 [V], counts plus the drafts so far (processors)
    new_tokens: Tensor  # int64 [R], accepted drafts, the target's token, then -1
    taken: Tensor  # int64 [1]
    reason: Tensor  # int64 [1], RUNNING / STOPPED / LENGTH
    stopped: Tensor  # int64 [1], raised by an event, freezes what follows
    step: Tensor  # int64 [1]
    generated: Tensor  # int64 [1], tokens of the answer so far
    # the request's values
    limit: Tensor  # int64 [1], most tokens of the answer
    min_tokens: Tensor  # int64 [1]
    stop_mask: Tensor  # bool [V]
    temperature: Tensor  # float32 [1]
    top_k: Tensor  # int64 [1]
    top_p: Tensor  # float32 [1]
    min_p: Tensor  # float32 [1]
    presence: Tensor  # float32 [1]
    frequency: Tensor  # float32 [1]
    repetition: Tensor  # float32 [1]
    generator_seed: Tensor  # int64 [1]
    counts: Tensor  # int32 [V], the answer's tokens
    prompt_seen: Tensor  # bool [V]
    bias: Tensor  # float32 [V]
    want_logprobs: Tensor  # int64 [1]
    allowed: Tensor  # int32 [R, ceil(V / 32)], the masks of a grammar; see sampling.grammar
    # the output ring
    ring_tokens: Tensor  # int64 [D, R]
    ring_meta: Tensor  # int64 [D, 4]: taken, reason, length, rows
    ring_logprob: Tensor  # float32 [D, R]
    ring_top_ids: Tensor  # int64 [D, R, 20]
    ring_top_logprobs: Tensor  # float32 [D, R, 20]

    @classmethod
    def allocate(
        cls,
        *,
        rows: int,
        vocab: int,
        padded_vocab: int,
        hidden: int,
        rope_pairs: int,
        slots: int,
        device: torch.device,
        dtype: torch.dtype,
        taps: int = 0,
    ) -> Relay:
        """All buffers, zeroed. ``rows`` >= 2 (a single row has other bits on a CPU); rope_pairs 0: no rotation."""
        assert rows >= 2
        drafts, top = max(rows - 1, 1), min(TOP_LOGPROBS, vocab)

        def whole(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.int64, device=device)

        def real(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.float32, device=device)

        return cls(
            anchor=whole(1),
            length=whole(1),
            rows=whole(1),
            drafted=whole(1),
            tokens=whole(rows),
            positions=whole(rows),
            turn=real(rows, rope_pairs, 2) if rope_pairs else None,
            hidden=torch.zeros(rows, hidden, dtype=dtype, device=device),
            logits=real(rows, padded_vocab),
            seed=torch.zeros(2, hidden, dtype=dtype, device=device),
            taps=torch.zeros(rows, taps * hidden, dtype=dtype, device=device) if taps else None,
            confidence=real(drafts),
            draft_law=real(drafts, vocab),
            draft_counts=torch.zeros(vocab, dtype=torch.int32, device=device),
            new_tokens=whole(rows),
            taken=whole(1),
            reason=whole(1),
            stopped=whole(1),
            step=whole(1),
            generated=whole(1),
            limit=whole(1),
            min_tokens=whole(1),
            stop_mask=torch.zeros(vocab, dtype=torch.bool, device=device),
            temperature=real(1) + 1,
            top_k=whole(1),
            top_p=real(1) + 1,
            min_p=real(1),
            presence=real(1),
            frequency=real(1),
            repetition=real(1) + 1,
            generator_seed=whole(1),
            counts=torch.zeros(vocab, dtype=torch.int32, device=device),
            prompt_seen=torch.zeros(vocab, dtype=torch.bool, device=device),
            bias=real(vocab),
            want_logprobs=whole(1),
            allowed=torch.full((rows, words(vocab)), -1, dtype=torch.int32, device=device),
            ring_tokens=whole(slots, rows),
            ring_meta=whole(slots, 4),
            ring_logprob=real(slots, rows),
            ring_top_ids=whole(slots, rows, top),
            ring_top_logprobs=real(slots, rows, top),
        )

    def tensors(self) -> dict[str, Tensor]:
        """All buffers by name."""
        named = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {name: t for name, t in named.items() if t is not None}

    def addresses(self) -> dict[str, int]:
        """Data pointers by name: equal before every replay."""
        return {name: t.data_ptr() for name, t in self.tensors().items()}
