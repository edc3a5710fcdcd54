import pytest
import torch
from peer_files import small_network
from safetensors.torch import load_file, save_file

from canvases import GOLDEN, golden
from fsdfm.model.layers import rotary_phases
from fsdfm.peers import network
from fsdfm.peers.layouts import open_layout
from fsdfm.peers.network import Clock, blended_embedding, embed_soft, embed_sparse, run

X = torch.arange(24).view(2, 12) * 9 % 257
S = torch.tensor([0.3, 2.0])


def same(a, b):
    assert float((a - b).abs().max()) < 1e-5


@torch.no_grad()
def test_every_way_in_agrees_with_the_plain_one_where_they_mean_the_same():
    model = small_network()
    plain = model(X, S)
    same(run(model, X, S), plain)
    same(run(model, X, S[:, None].expand(2, 12)), plain)  # ragged times that are not
    same(run(model, X, S, hidden=torch.zeros(12, 12, dtype=torch.bool)), plain)
    one_hot = torch.nn.functional.one_hot(X, 257).float()
    same(run(model, X, S, embedded=embed_soft(model, one_hot)), plain)
    same(embed_sparse(model, X[..., None], torch.ones(2, 12, 1)), model.embedding(X))
    same(run(model, X, S, embedded=blended_embedding(model, X, S, gamma=0.0)), plain)
    same(model.head(model.trunk(X, S, embedded=model.embedding(X))), plain)


@torch.no_grad()
def test_hidden_positions_do_not_matter_and_blind_ones_see_everybody_alike():
    model = small_network()
    hidden = torch.zeros(12, 12, dtype=torch.bool)
    hidden[:6, 6:] = True
    other = X.clone()
    other[:, 6:] = 3
    same(run(model, X, S, hidden=hidden)[:, :6], run(model, other, S, hidden=hidden)[:, :6])
    hidden[6:] = True
    assert torch.isfinite(run(model, X, S, hidden=hidden)).all()


@golden
@torch.no_grad()
@pytest.mark.parametrize(("kind", "system"), [("adaln", "mdlm"), ("plain", "hdlm-epsilon")])
def test_block_diffusion_is_the_same_network_under_another_mask(kind, system, tmp_path, monkeypatch):
    """BD3-LM, which is not built: its logits, block-causal as it samples and [x_t ; x_0] as it trains."""
    weights = load_file(GOLDEN / f"bd3lm_tiny_{kind}.safetensors")
    save_file({name: value for name, value in weights.items() if "eps" not in name}, tmp_path / "model.safetensors")
    with open_layout(tmp_path / "model.safetensors", system=system) as opened:
        model = opened.load().eval()
    said, block = load_file(GOLDEN / "bd3lm_logits.safetensors"), torch.arange(16) // 4
    x_t, told = said[f"{kind}_input_sampling"], torch.zeros(2)
    causal = run(model, x_t, told, hidden=block[None] > block[:, None])
    assert float((causal - said[f"{kind}_logits_sampling"]).abs().max()) < 2e-5
    assert float((causal[:, -4:] - said[f"{kind}_logits_last_block_cached"]).abs().max()) < 2e-5
    cos, sin = rotary_phases(16, model.config.head_width)
    monkeypatch.setattr(network, "rotary_phases", lambda *_, **__: (torch.cat((cos, cos)), torch.cat((sin, sin))))
    both = torch.cat((said[f"{kind}_x_t"], said[f"{kind}_x_0"]), 1)
    for length, width in ((16, 4), (8, 2)):  # the noisy half, then the clean one
        number, clean = torch.arange(length).repeat(2) // width, torch.arange(2 * length) >= length
        alike = (number == number[:, None]) & (clean == clean[:, None])
        before = clean & ((number < number[:, None]) | (clean[:, None] & (number == number[:, None])))
        assert torch.equal(alike | before, said[f"attends_n{length}_block{width}"])
    trained = run(model, both, told, hidden=~said["attends_n16_block4"])[:, :16]
    assert float((trained - said[f"{kind}_logits_training"]).abs().max()) < 2e-5


def test_clocks():
    t = torch.tensor([0.0, 0.5])
    assert Clock("none")(t).tolist() == [0, 0]
    assert Clock("time")(t).tolist() == [0, 0.5]
    assert Clock("sigma")(0.5) == pytest.approx(-torch.log(torch.tensor(0.5005)))
    with pytest.raises(ValueError, match="clock is 'x'"):
        Clock("x")


@pytest.mark.parametrize("clock", ["time", "none", "sigma"])
@torch.no_grad()
def test_a_network_with_a_clock_is_told_by_it(clock):
    raw, told = small_network(), small_network(clock=clock)
    t = torch.tensor([0.2, 0.9])
    same(told(X, t), raw(X, Clock(clock)(t).float()))
