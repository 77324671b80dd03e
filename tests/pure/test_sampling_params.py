"""Sampling parameters: ranges, aliases, defaults, and what an error says."""

import dataclasses
import math

import numpy as np
import pytest

from soliton.errors import CheckpointError, RequestError
from soliton.sampling.params import SamplingParams

VOCAB = 100


def resolve(defaults=None, *, room=None, eos_ids=(7, 9), **kw):
    return SamplingParams(**kw).resolve(defaults, vocab=VOCAB, eos_ids=eos_ids, room=room)


def test_neutral():
    r = resolve()
    assert (r.temperature, r.top_p, r.top_k, r.min_p, r.repetition_penalty) == (1.0, 1.0, 0, 0.0, 1.0)
    assert not r.greedy and not r.processors
    assert r.stop_ids == (7, 9) and r.stop_strings == () and r.max_tokens is None and r.min_tokens == 0
    assert r.logprobs is None and r.prompt_logprobs is None and r.skip_special_tokens
    assert 0 <= r.seed < 2**63
    with pytest.raises(dataclasses.FrozenInstanceError):
        r.seed = 1


BAD = [
    ("temperature", -0.1), ("temperature", math.nan), ("temperature", math.inf), ("temperature", "1"),
    ("temperature", True), ("top_p", 0), ("top_p", 1.01), ("top_p", math.nan), ("min_p", -0.01), ("min_p", 1.1),
    ("presence_penalty", 2.1), ("presence_penalty", -2.1), ("frequency_penalty", -math.inf),
    ("frequency_penalty", 3), ("repetition_penalty", 0), ("repetition_penalty", 2.5),
    ("repetition_penalty", 1e-40), ("top_k", -2), ("top_k", 1.5),
    ("n", 2), ("n", 0), ("seed", 1.0), ("seed", True), ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 1.5),
    ("min_tokens", -1), ("ignore_eos", 1), ("skip_special_tokens", "no"), ("logprobs", 21), ("logprobs", -1),
    ("logprobs", 1.0), ("top_logprobs", 21), ("top_logprobs", 3), ("prompt_logprobs", 21), ("stop", ""),
    ("stop", ["a", ""]), ("stop", [1]), ("stop", 5), ("stop", ["x"] * 17), ("stop_token_ids", [100]),
    ("stop_token_ids", [-1]), ("stop_token_ids", ["3"]), ("stop_token_ids", 3), ("stop_token_ids", "3"),
    ("logit_bias", {100: 1}), ("logit_bias", {3: 101}), ("logit_bias", {3: math.nan}), ("logit_bias", {"x": 1}),
    ("logit_bias", [1]), ("logit_bias", []), ("logit_bias", 0), ("stop_token_ids", 0), ("logit_bias", {3: 1, "3": 2}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), BAD, ids=lambda v: repr(v)[:24])
def test_refused_by_name(name, value):
    with pytest.raises(RequestError) as caught:
        resolve(**{name: value})
    assert caught.value.param == name
    assert name in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", 0), ("temperature", 17.5), ("top_p", 1), ("min_p", 1), ("top_k", -1), ("top_k", 0),
     ("top_k", 10**9), ("repetition_penalty", 2), ("presence_penalty", -2), ("n", 1), ("seed", -5),
     ("stop", ["a"] * 16)],
)  # fmt: skip
def test_edges_accepted(name, value):
    resolve(**{name: value})


def test_message_holds_the_number():
    with pytest.raises(RequestError, match=r"top_p is 1\.5; it must be above 0 and at most 1"):
        resolve(top_p=1.5)
    with pytest.raises(RequestError, match="vocabulary of 100"):
        resolve(logit_bias={250: 1.0})


def test_precedence():
    defaults = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": None, "eos_token_id": [1], "do_sample": True}
    r = resolve(defaults, top_p=0.5)
    assert (r.temperature, r.top_p, r.top_k, r.min_p) == (0.6, 0.5, 20, 0.0)
    assert resolve(defaults, temperature=0).greedy
    with pytest.raises(CheckpointError, match="generation_config: top_p is 2"):
        resolve({"top_p": 2})


def test_greedy_and_processors():
    assert resolve(temperature=9e-6).greedy and not resolve(temperature=2e-5).greedy
    assert resolve(top_k=1).greedy and resolve(temperature=0).temperature == 1.0
    for kw in ({"presence_penalty": 0.1}, {"frequency_penalty": -0.1}, {"repetition_penalty": 1.1},
               {"logit_bias": {3: 1}}, {"min_tokens": 1}):  # fmt: skip
        assert resolve(**kw).processors
    assert not resolve(presence_penalty=-0.0, logit_bias={3: 0}).processors
    assert math.copysign(1, resolve(presence_penalty=-0.0).presence_penalty) == 1


def test_numbers_of_numpy_are_numbers():
    values = {"max_tokens": np.int64(9), "min_tokens": np.int32(2), "seed": np.int64(5), "top_k": np.int16(4)}
    values |= {"temperature": np.float32(0.5), "top_p": np.float64(0.25), "logprobs": np.int8(2)}
    r = resolve(**values, stop_token_ids=[np.int64(3)], logit_bias={np.int64(4): np.float32(1)})
    assert (r.max_tokens, r.min_tokens, r.seed, r.top_k, r.temperature, r.top_p) == (9, 2, 5, 4, 0.5, 0.25)
    assert r.stop_ids[-1] == 3 and r.logit_bias == ((4, 1.0),) and r.logprobs == 2
    listed = [r.max_tokens, r.min_tokens, r.seed, r.top_k, r.logprobs, *r.stop_ids, r.logit_bias[0][0]]
    assert all(type(v) is int for v in listed)
    for name, value in (("max_tokens", np.float32(3)), ("temperature", np.float32("nan")), ("seed", np.bool_(True))):
        with pytest.raises(RequestError, match=name):
            resolve(**{name: value})


def test_do_sample():
    """The checkpoint's false means greedy, until a request brings a temperature."""
    assert resolve({"do_sample": False}).greedy and resolve({"do_sample": False, "temperature": 0.7}).greedy
    assert resolve({"do_sample": False}, temperature=0.7).temperature == 0.7
    assert not resolve({"do_sample": True}).greedy
    with pytest.raises(CheckpointError, match="do_sample must be true or false, not 'no'"):
        resolve({"do_sample": "no"})


def test_min_tokens_needs_a_token_that_does_not_end():
    everything = list(range(VOCAB))
    assert len(resolve(stop_token_ids=everything).stop_ids) == VOCAB
    resolve(min_tokens=1, stop_token_ids=everything[1:], eos_ids=())
    with pytest.raises(RequestError, match="min_tokens is 1, but all 100 token ids end the answer"):
        resolve(min_tokens=1, stop_token_ids=everything[:-1], eos_ids=(99,))


def test_stop_ids():
    assert resolve(stop_token_ids=[9, 3, 3]).stop_ids == (7, 9, 3)
    assert resolve(stop_token_ids=[3], ignore_eos=True).stop_ids == (3,)
    assert resolve(stop="x").stop_strings == ("x",) and resolve(stop=["a", "b", "a"]).stop_strings == ("a", "b")


def test_lengths():
    assert resolve(room=50).max_tokens == 50 and resolve(room=50, max_tokens=8).max_tokens == 8
    with pytest.raises(RequestError, match="room for 50"):
        resolve(room=50, max_tokens=51)
    with pytest.raises(RequestError) as caught:
        resolve(max_tokens=5, min_tokens=6)
    assert caught.value.param == "min_tokens"
    with pytest.raises(RequestError):
        resolve(room=5, min_tokens=6)
    assert resolve(max_tokens=0, prompt_logprobs=0).max_tokens == 0


def test_seed_folds():
    assert resolve(seed=42).seed == 42 and resolve(seed=-1).seed == 2**63 - 1
    assert resolve(seed=2**63 + 5).seed == 5 and 0 <= resolve(seed=-(10**40)).seed < 2**63
    assert resolve().seed != resolve().seed


def test_logprobs():
    assert resolve(logprobs=True).logprobs == 0 and resolve(logprobs=True, top_logprobs=4).logprobs == 4
    assert resolve(logprobs=3).logprobs == 3 and resolve(logprobs=False).logprobs is None
    assert resolve(prompt_logprobs=True).prompt_logprobs == 0 and resolve(prompt_logprobs=2).prompt_logprobs == 2
    with pytest.raises(RequestError, match="logprobs is 3 but top_logprobs is 4"):
        resolve(logprobs=3, top_logprobs=4)


def test_aliases():
    assert SamplingParams(max_new_tokens=5, min_new_tokens=2) == SamplingParams(max_tokens=5, min_tokens=2)
    assert SamplingParams.from_dict({"max_completion_tokens": 5}).max_tokens == 5
    assert SamplingParams.from_dict({"max_tokens": 5, "max_new_tokens": 5}).max_tokens == 5
    with pytest.raises(RequestError, match="give one of them"):
        SamplingParams.from_dict({"max_tokens": 5, "max_new_tokens": 6})
    with pytest.raises(RequestError, match="give one of them"):
        SamplingParams(max_tokens=5, max_new_tokens=6)


def test_from_dict():
    p = SamplingParams.from_dict({"temperature": None, "logit_bias": {"5": -100}, "stop": ["x"]})
    assert p.temperature is None and p.resolve(vocab=VOCAB).logit_bias == ((5, -100.0),)
    with pytest.raises(
        RequestError, match=r"unknown sampling parameter 'temprature' \(did you mean 'temperature'\?\)"
    ) as e:
        SamplingParams.from_dict({"temprature": 1})
    assert e.value.param == "temprature"
    with pytest.raises(TypeError):
        SamplingParams(5)  # keyword only
