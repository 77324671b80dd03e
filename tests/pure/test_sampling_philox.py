"""Philox4x32-10 against its published vectors, and the uniforms made of it."""

import pytest
import torch

from soliton.sampling import philox


def _words(text):
    return torch.tensor([int(w, 16) for w in text.split()], dtype=torch.int64)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("0 0 0 0", "0 0", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff " * 4, "ffffffff " * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_known_answers(counter, key, expected):
    assert torch.equal(philox.philox4x32(_words(counter), _words(key)), _words(expected))
    batch = philox.philox4x32(_words(counter).expand(5, 3, 4), _words(key))
    assert torch.equal(batch, _words(expected).expand(5, 3, 4))


def _scalar(counter, key):
    c, k = list(counter), list(key)
    for _ in range(10):
        a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(b >> 32) ^ c[1] ^ k[0], b & 0xFFFFFFFF, (a >> 32) ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def test_layout_of_counter_and_key():
    seed, position = 0x123456789ABCDEF, (1 << 33) + 77
    got = philox.words(torch.tensor([seed]), torch.tensor([position]), philox.STREAM_FINAL, 6)[0].tolist()
    want = []
    for block in range(2):
        counter = (position & 0xFFFFFFFF, position >> 32, philox.STREAM_FINAL, block)
        want += _scalar(counter, (seed & 0xFFFFFFFF, seed >> 32))
    assert got == want[:6]


def test_depends_on_seed_position_stream_lane_alone():
    seed, position = torch.tensor([11]), torch.arange(1000)
    base = philox.uniform(seed, position, 0)
    assert base.dtype == torch.float32 and base.shape == (1000,)
    assert torch.equal(philox.uniform(seed, position.flip(0), 0).flip(0), base)
    assert torch.equal(philox.uniform(seed.reshape(()), position[5:6], 0), base[5:6])
    assert torch.equal(philox.uniform(seed, position, 0, lanes=7)[:, 0], base)
    streams = torch.tensor([[0], [1], [2]])
    both = philox.uniform(seed, position, streams)
    assert torch.equal(both, torch.stack([philox.uniform(seed, position, s) for s in range(3)]))
    assert (both[0] != both[1]).float().mean() > 0.99
    assert (philox.uniform(seed + 1, position, 0) != base).float().mean() > 0.99


def test_ranges_and_evenness():
    seed, position = torch.tensor([3]), torch.arange(64_000)
    u = philox.uniform(seed, position, 1)
    assert u.min() >= 0 and u.max() < 1
    counts = torch.bincount((u * 64).long(), minlength=64).double()
    chi2 = float(((counts - 1000) ** 2 / 1000).sum())
    assert chi2 < 63 + 6 * (2 * 63) ** 0.5
    pairs = u.double()
    assert abs(float(((pairs[1:] - 0.5) * (pairs[:-1] - 0.5)).mean()) * 12) < 0.02
    assert philox.uniform(seed, position[:4], 1, lanes=3).shape == (4, 3)


def test_largest_values_stay_below_one(monkeypatch):
    monkeypatch.setattr(philox, "philox4x32", lambda counter, key: torch.full_like(counter, 0xFFFFFFFF))
    seed, position = torch.tensor([0]), torch.arange(3)
    assert torch.all(philox.uniform(seed, position, 0) == 1 - 2.0**-24)
