import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdfm.noise import Noise, Purpose, philox


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # the known answers published with the generator
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_known_answers(counter, key, expected):
    assert [int(word) for word in philox([torch.tensor(word) for word in counter], key)] == expected


@given(
    samples=st.lists(st.integers(0, 2**56 - 1), min_size=1, max_size=8),
    length=st.integers(1, 17),
    seed=st.integers(0, 2**64 - 1),
)
def test_a_row_does_not_depend_on_its_batch(samples, length, seed):
    together = Noise(seed, samples).uniform(Purpose.COIN, length, 3)
    alone = torch.cat([Noise(seed, [sample]).uniform(Purpose.COIN, length, 3) for sample in samples])
    assert torch.equal(together, alone)
    longer = Noise(seed, samples).uniform(Purpose.COIN, length + 5, 3)
    assert torch.equal(longer[:, :length], together)


def test_every_part_of_the_address_matters():
    base = Noise(1, [5]).uniform(Purpose.COIN, 64, 2)
    others = [
        Noise(2, [5]).uniform(Purpose.COIN, 64, 2),
        Noise(1 + 2**32, [5]).uniform(Purpose.COIN, 64, 2),
        Noise(1, [6]).uniform(Purpose.COIN, 64, 2),
        Noise(1, [5 + 2**32]).uniform(Purpose.COIN, 64, 2),
        Noise(1, [5]).uniform(Purpose.COIN, 64, 3),
        Noise(1, [5]).uniform(Purpose.PATH, 64, 2),
    ]
    assert len(torch.unique(torch.cat([base, *others]))) == 64 * 7


def test_uniforms_are_open_have_52_bits_and_are_uniform():
    u = Noise(0, range(64)).uniform(Purpose.PATH, 16384)
    assert 0 < float(u.min()) < 1e-5
    assert 1 - 1e-5 < float(u.max()) < 1
    assert u.dtype == torch.float64
    bits = (u * 2.0**52 - 0.5).to(torch.int64)
    for bit in (0, 1, 20, 24, 30, 47, 51):  # torch.rand in float32 would leave everything below bit 28 empty
        share = float(((bits >> bit) & 1).double().mean())
        assert abs(share - 0.5) < 4 * 0.5 / u.numel() ** 0.5
    counts = torch.histc(u.float(), 100, 0, 1).double()
    chi_square = float(((counts - u.numel() / 100) ** 2 / (u.numel() / 100)).sum())
    assert 50 < chi_square < 160  # 99 degrees of freedom


def test_integers_cover_their_range():
    draws = Noise(3, range(4)).integers(Purpose.SOURCE, 4096, 7)
    assert sorted(draws.unique().tolist()) == list(range(7))
    assert bool((Noise(3).integers(Purpose.SOURCE, 64, 1) == 0).all())


def test_rows_can_be_picked():
    noise = Noise(0, range(10))
    picked = noise[torch.tensor([7, 2])]
    assert torch.equal(picked.uniform(Purpose.COIN, 5), noise.uniform(Purpose.COIN, 5)[[7, 2]])


@pytest.mark.parametrize(
    "bad",
    [
        lambda: Noise(-1),
        lambda: Noise(2**64),
        lambda: Noise(1.5),
        lambda: Noise(0, [0.9, 1.7]),
        lambda: Noise(0, [-1]),
        lambda: Noise(0, [2**56]),
        lambda: Noise(0, torch.zeros(2, 2)),
        lambda: Noise(0).uniform(Purpose.COIN, 4, step=-1),
        lambda: Noise(0).uniform(Purpose.COIN, -1),
        lambda: Noise(0).integers(Purpose.COIN, 4, 0),
    ],
)
def test_bad_addresses_are_errors(bad):
    with pytest.raises(ValueError, match="allowed|outside|one index"):
        bad()
