"""Every device function runs on tensors without data: no host read, no shape that depends on values.

The tensors are on the meta device, which has no values and is not the host, and a dispatch mode refuses tensors of the
host beside them; so the functions can be captured in a graph.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from soliton.sampling import accept, law, logprobs, penalties, philox
from soliton.sampling.grammar import words


class NoHostCopies(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sized = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.dim() > 0]
        assert all(t.device.type == "meta" for t in sized), f"{func} reads a host tensor"
        made = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t.dim() > 0]
        assert all(t.device.type == "meta" for t in made), f"{func} makes a host tensor"
        return out


def buffers(rows, vocab):
    def new(*shape, dtype=torch.float32):
        return torch.empty(shape, dtype=dtype, device="meta")

    i = {"dtype": torch.int64}
    return {
        "logits": new(rows, vocab), "scalar": new(1), "count": new(1, **i), "draft": new(rows - 1, **i),
        "probs": new(rows, vocab), "q": new(rows - 1, vocab), "u": new(rows - 1), "chosen": new(rows, **i),
        "counts": new(vocab, dtype=torch.int32), "mask": new(vocab, dtype=torch.bool), "bias": new(vocab),
        "words": new(rows, words(vocab), dtype=torch.int32),
    }  # fmt: skip


CALLS = {
    "uniform": lambda b: philox.uniform(b["count"], b["chosen"], philox.STREAM_FINAL),
    "lanes": lambda b: philox.uniform(b["count"], b["chosen"], philox.STREAM_DRAFT, lanes=2),
    "sort": lambda b: law.distribution(b["logits"], b["scalar"], b["count"], b["scalar"], b["scalar"], method="sort"),
    "threshold": lambda b: law.distribution(b["logits"], b["scalar"], b["count"], b["scalar"], b["scalar"]),
    "pick": lambda b: law.pick(b["probs"], b["logits"][:, 0]),
    "process": lambda b: penalties.process(
        b["logits"], counts=b["counts"], prompt_seen=b["mask"], bias=b["bias"], presence=b["scalar"],
        frequency=b["scalar"], repetition=b["scalar"], generated=b["count"], min_tokens=b["count"],
        stop_mask=b["mask"], draft_tokens=b["draft"],
    ),
    "commit_counts": lambda b: penalties.commit_counts(b["counts"], b["chosen"], b["count"]),
    "argmax": lambda b: accept.argmax_lowest(b["logits"]),
    "greedy_chain": lambda b: accept.greedy_chain(b["chosen"], b["draft"], b["count"]),
    "sampled_chain": lambda b: accept.sampled_chain(b["probs"], b["q"], b["draft"], b["count"], b["u"], b["scalar"]),
    "greedy_draft": lambda b: accept.sampled_chain(b["probs"], None, b["draft"], b["count"], b["u"], b["scalar"]),
    "restrict": lambda b: penalties.restrict(b["logits"], b["words"]),
    "gather": lambda b: logprobs.gather(b["logits"], b["chosen"]),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("rows", [1, 5])
def test_runs_without_values(name, rows):
    b = buffers(rows, 321)
    with NoHostCopies():
        CALLS[name](b)


def test_the_check_can_fail():
    b = buffers(3, 5)
    with pytest.raises(AssertionError, match="host tensor"), NoHostCopies():
        torch.zeros(3)
    for read in (lambda: b["scalar"].item(), lambda: bool(b["mask"].any()), lambda: b["mask"].nonzero()):
        with pytest.raises((RuntimeError, NotImplementedError)):
            read()
