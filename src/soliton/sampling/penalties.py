"""Logit processors: repetition, frequency and presence penalties, logit bias, the minimum length, a grammar's masks.

Order, as in SGLang and vLLM: repetition, frequency, presence, bias, then what may not come is masked. All of it works
on raw logits, before temperature. Neutral values (repetition 1, others 0) return the same bits that came in.

Row i of a verify step is fed the committed anchor (i = 0) or draft token i - 1, and predicts the token after it. The
anchor is already counted; rows behind it add the draft tokens before them, so a row sees what plain decoding would see.
"""

from __future__ import annotations

import torch
from torch import Tensor


def draft_counts(draft_tokens: Tensor, rows: int, vocab: int) -> Tensor:
    """How often each token occurs among the first i draft tokens, for each row i: [rows, vocab] int32.

    draft_tokens: int64 [rows - 1] or longer. Ids outside the vocabulary (padding) count nothing.
    """
    draft = draft_tokens[: rows - 1]
    valid = (draft >= 0) & (draft < vocab)
    index = draft.clamp(0, vocab - 1).unsqueeze(-1)
    first = torch.zeros(1, vocab, dtype=torch.int32, device=draft.device)
    if rows == 1:
        return first
    ones = torch.zeros(rows - 1, vocab, dtype=torch.int32, device=draft.device)
    ones = ones.scatter(1, index, valid.to(torch.int32).unsqueeze(-1))
    return torch.cat((first, ones)).cumsum(0, dtype=torch.int32)


def process(
    logits: Tensor,
    *,
    counts: Tensor,
    prompt_seen: Tensor,
    bias: Tensor,
    presence: Tensor,
    frequency: Tensor,
    repetition: Tensor,
    generated: Tensor,
    min_tokens: Tensor,
    stop_mask: Tensor,
    draft_tokens: Tensor,
) -> Tensor:
    """Apply every processor to the rows of one step; returns a new [R, V] float32.

    logits: [R, V] float32. counts: [V] int32, tokens generated so far, the anchor included. prompt_seen: [V] bool.
    bias: [V] float32. presence, frequency, repetition: [1] float32. generated: [1] int64, how many tokens have been
    generated, the anchor included. min_tokens: [1] int64. stop_mask: [V] bool, the ids that would end the answer.
    draft_tokens: int64 [R - 1] or longer; what lies behind the rows in use may be anything.

    Repetition (CTRL, as in transformers): a token seen in the prompt or the answer has its positive logit divided, its
    negative one multiplied. Frequency and presence (OpenAI): minus frequency x count, minus presence if count > 0, over
    the answer alone. Row i predicts answer token number generated + i (from 0): while that is below min_tokens, the
    stop ids get -inf.
    """
    rows, vocab = logits.shape
    count = counts.unsqueeze(0) + draft_counts(draft_tokens, rows, vocab)
    generated_here = count > 0
    scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
    out = torch.where(generated_here | prompt_seen, scaled, logits)
    lowered = out - frequency * count.to(torch.float32) - presence
    out = torch.where(generated_here, lowered, out)
    out = torch.where(bias != 0, out + bias, out)
    number = generated + torch.arange(rows, device=logits.device)
    return out.masked_fill((number < min_tokens).unsqueeze(-1) & stop_mask, float("-inf"))


def restrict(logits: Tensor, masks: Tensor) -> Tensor:
    """logits [R, V] float32 with -inf where masks, int32 [R, ceil(V / 32)], has no bit: a new tensor. Bit t % 32 of
    word t // 32 is token t."""
    bit = 1 << torch.arange(8, dtype=torch.uint8, device=masks.device)  # of bytes: four times less to write than words
    taken = (masks.view(torch.uint8).unsqueeze(-1) & bit) == 0
    return logits.masked_fill(taken.flatten(1)[:, : logits.shape[1]], float("-inf"))


def commit_counts(counts: Tensor, tokens: Tensor, n_accepted: Tensor) -> None:
    """Add the tokens a step committed to ``counts`` ([V] int32), in place.

    tokens: [R] int64, the verdict's row of tokens. n_accepted: [1] int64; tokens[0 .. n_accepted] are added, that is
    the accepted drafts and the final token, which is the next anchor. n_accepted = -1 (a frozen step) adds nothing.
    """
    vocab = counts.shape[0]
    place = torch.arange(tokens.shape[0], device=tokens.device)
    keep = (place <= n_accepted) & (tokens >= 0) & (tokens < vocab)
    counts.index_add_(0, tokens.clamp(0, vocab - 1), keep.to(counts.dtype))
