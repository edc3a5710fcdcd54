import math

import pytest
import torch

from fsdfm.peers.noising import Geometric, LogLinear, column

every = pytest.mark.parametrize("noising", [LogLinear(), LogLinear(5e-3), Geometric()], ids=str)
TIMES = torch.linspace(0, 0.99, 12, dtype=torch.float64)


@every
def test_sigma_kappa_and_their_complement_agree(noising):
    assert torch.allclose(noising.kappa(TIMES), torch.exp(-noising.sigma(TIMES)), rtol=1e-12)
    assert torch.allclose(noising.lost(TIMES), 1 - noising.kappa(TIMES), atol=1e-12)


@every
def test_the_rate_is_the_derivative_of_sigma(noising):
    step = 1e-6
    slope = (noising.sigma(TIMES - step / 2) - noising.sigma(TIMES + step / 2)) / step
    assert torch.allclose(noising.rate(TIMES), slope, rtol=1e-5)


def test_the_ends():
    assert float(LogLinear().sigma(0.0)) == pytest.approx(math.log(1000))
    assert float(LogLinear().sigma(1.0)) == 0
    assert float(Geometric().sigma(0.0)) == pytest.approx(20)
    assert float(Geometric().sigma(1.0)) == pytest.approx(1e-4)


def test_a_column_stands_beside_texts():
    assert column(0.5).shape == ()
    assert column(torch.zeros(3)).shape == (3, 1)
    assert column(torch.zeros(3, 4)).shape == (3, 4)


def test_bad_numbers_are_refused():
    with pytest.raises(ValueError, match="epsilon is 1"):
        LogLinear(1.0)
    with pytest.raises(ValueError, match="0 < smallest < largest"):
        Geometric(2.0, 1.0)
