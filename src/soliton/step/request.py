"""A request's values as the relay holds them, and how they get there."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..sampling.params import Resolved
from .relay import Relay


def begin(relay: Relay, params: Resolved, *, prompt: Sequence[int], limit: int) -> None:
    """Write one request into the relay, all before its first step.

    prompt: token ids, the last of which is the first anchor (the others have been read by prefill); limit: most
    tokens of the answer, >= 1, counting what the context has room for.
    """
    relay.anchor.fill_(prompt[-1])
    relay.length.fill_(len(prompt) - 1)
    for counter in (relay.drafted, relay.stopped, relay.reason, relay.taken, relay.generated, relay.step):
        counter.zero_()
    relay.limit.fill_(limit)
    # masks hold the stop ids back themselves, but for where a grammar leaves nothing else
    relay.min_tokens.fill_(params.min_tokens if params.grammar is None else 0)
    relay.temperature.fill_(params.temperature)
    relay.top_k.fill_(params.top_k)
    relay.top_p.fill_(params.top_p)
    relay.min_p.fill_(params.min_p)
    relay.presence.fill_(params.presence_penalty)
    relay.frequency.fill_(params.frequency_penalty)
    relay.repetition.fill_(params.repetition_penalty)
    relay.generator_seed.fill_(params.seed)
    relay.want_logprobs.fill_(params.logprobs is not None)
    relay.stop_mask.zero_()
    if params.stop_ids:
        relay.stop_mask[torch.tensor(params.stop_ids, device=relay.stop_mask.device)] = True
    relay.counts.zero_()
    relay.prompt_seen.zero_()
    relay.prompt_seen[torch.tensor(list(set(prompt)), device=relay.prompt_seen.device)] = True
    relay.bias.zero_()
    if params.logit_bias:
        ids, values = zip(*params.logit_bias, strict=True)
        relay.bias[torch.tensor(ids, device=relay.bias.device)] = torch.tensor(
            values, dtype=relay.bias.dtype, device=relay.bias.device
        )
