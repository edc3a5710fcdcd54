"""The denoiser: sizes, conditioning, the exact warm start, the split form and the next-token shift."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fsdfm.model import PRESETS, Conditioning, CRFConfig, DiT, ModelConfig

SMALL = ModelConfig(vocab_size=37, width=32, num_blocks=3, num_heads=4, cond_width=16)
LLAMA = replace(SMALL, style="llama", num_kv_heads=2, mlp_width=40)


def build(config: ModelConfig = SMALL, seed: int = 0) -> DiT:
    """A model as training might leave it: nothing is zero."""
    model, generator = DiT(config).eval(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return model


def batch(rows: int = 3, length: int = 10) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    x_t = torch.randint(SMALL.vocab_size, (rows, length), generator=generator)
    return x_t, torch.rand(rows, generator=generator), 2.0 ** -torch.arange(rows)


@pytest.mark.parametrize(
    ("name", "count", "step_count"),
    [
        ("tiny", 9_585_024, 9_605_568),
        ("170m", 169_625_681, 169_674_961),  # the paper's 169.6 M
        ("1300m", 1_330_673_233, 1_330_804_561),  # 1.331 B
        ("1700m", 1_705_201_233, 1_705_332_561),  # 1.705 B
    ],
)
def test_presets_have_the_papers_parameter_counts(name: str, count: int, step_count: int) -> None:
    for conditioning, expected in (("time", count), ("step", step_count)):
        with torch.device("meta"):
            model = DiT(ModelConfig.preset(name, conditioning=conditioning))
        assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
        assert sum(parameter.numel() for parameter in model.parameters()) == expected


def test_presets_are_named_and_can_be_changed() -> None:
    assert ModelConfig.preset("170m", vocab_size=99) == replace(PRESETS["170m"], vocab_size=99)
    with pytest.raises(ValueError, match="170m"):
        ModelConfig.preset("huge")
    with pytest.raises(ValueError, match="did you mean 'vocab_size'"):
        ModelConfig.preset("tiny", vocabsize=3)


@pytest.mark.parametrize("changes", [{"cond_width": 0}, {"conditioning": "none"}, {"next_token": 1}])
def test_a_bad_model_config_names_the_field(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        ModelConfig.from_dict({**SMALL.to_dict(), **changes})


def test_a_fresh_model_says_nothing_yet() -> None:
    x_t, t, _ = batch()
    assert not DiT(SMALL)(x_t, t).any()


def test_features_are_normed_and_modulated_by_shift_then_scale() -> None:
    model = DiT(SMALL).eval()  # its blocks are the identity
    x_t, t, _ = batch()
    shift, scale = torch.linspace(-1, 1, 64).view(2, 32)
    with torch.no_grad():
        model.modulation.linear.bias.copy_(torch.cat((shift, scale)))
    expected = model.norm(model.embedding(x_t)) * (1 + scale) + shift
    torch.testing.assert_close(model.trunk(x_t, t), expected)


def test_weights_come_from_the_seed_alone() -> None:
    state = torch.get_rng_state()
    first, second, other = DiT(SMALL, seed=3), DiT(SMALL, seed=3), DiT(SMALL, seed=4)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(first.embedding.weight, other.embedding.weight)
    assert all(bool(parameter.isfinite().all()) for parameter in first.parameters())


@pytest.mark.parametrize("config", [SMALL, LLAMA])
def test_a_step_aware_child_starts_as_its_parent_bit_for_bit(config: ModelConfig) -> None:
    parent = build(config)
    child = parent.step_aware()
    x_t, t, _ = batch()
    expected = parent(x_t, t)
    for k in range(11):
        assert torch.equal(child(x_t, t, torch.full((3,), 2.0**-k)), expected)
    assert not child.training
    assert child.config == replace(config, conditioning="step")
    with pytest.raises(ValueError, match="already"):
        child.step_aware()


def test_a_trained_child_tells_step_sizes_apart_by_their_logarithm() -> None:
    model = build(replace(SMALL, conditioning="step"))
    x_t, t, _ = batch(rows=1)

    def features(h: float) -> Tensor:
        return model.trunk(x_t, t, torch.tensor([h]))

    small, large = (features(2**-10) - features(2**-9)).norm(), (features(0.5) - features(1.0)).norm()
    assert small > 0.2 * large  # fed raw, 2^-10 and 2^-9 would differ 500 times less than 1/2 and 1
    with pytest.raises(ValueError, match="step-aware"):
        model(x_t, t)


def test_a_step_size_enters_by_its_binary_logarithm() -> None:
    model = build(replace(SMALL, conditioning="step"))
    t, halvings = torch.full((3,), 0.5), torch.tensor([0.0, -1.0, -10.0])
    found = model.conditioning(t, 2.0**halvings)[0]
    expected = torch.nn.functional.silu(model.conditioning.time(t) + model.conditioning.step(halvings))
    torch.testing.assert_close(found, expected)


def test_the_child_learns_from_its_first_step() -> None:
    child = build().step_aware()
    x_t, t, h = batch()
    child(x_t, t, h).square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in child.named_parameters()}
    still = {name for name, gradient in gradients.items() if gradient is None or not gradient.any()}
    assert still == {"conditioning.step.into.weight", "conditioning.step.into.bias"}  # behind W_h = 0


def test_a_time_model_takes_any_h() -> None:
    model = build()
    x_t, t, h = batch()
    assert torch.equal(model(x_t, t), model(x_t, t, h))


@pytest.mark.parametrize("config", [SMALL, LLAMA, replace(LLAMA, next_token=True)])
def test_the_split_form_is_the_whole(config: ModelConfig) -> None:
    model = build(config)
    x_t, t, h = batch()
    features = model.trunk(x_t, t, h)
    assert features.shape == (3, 10, 32)
    logits = model(x_t, t, h)
    assert torch.equal(model.logits_at(features.flatten(0, 1)).view(3, 10, 37), logits)
    rows = torch.tensor([1, 13, 29])
    torch.testing.assert_close(model.logits_at(features.flatten(0, 1)[rows]), logits.flatten(0, 1)[rows])


def test_a_next_token_model_answers_one_position_later() -> None:
    plain, shifted = build(), DiT(replace(SMALL, next_token=True)).eval()
    shifted.load_state_dict(plain.state_dict())
    x_t, t, _ = batch()
    assert torch.equal(shifted(x_t, t)[:, 1:], plain(x_t, t)[:, :-1])


@pytest.mark.parametrize("config", [SMALL, LLAMA])
def test_every_position_sees_every_other_and_no_other_row(config: ModelConfig) -> None:
    model = build(config)
    x_t, t, _ = batch()
    changed = x_t.clone()
    changed[1, -1] = (changed[1, -1] + 1) % 37
    moved = (model(changed, t) != model(x_t, t)).any(-1)
    assert bool(moved[1].all())
    assert not moved[[0, 2]].any()


def test_each_row_has_its_own_time() -> None:
    model = build()
    x_t, t, _ = batch()
    logits = model(x_t, t)
    for row in range(3):
        torch.testing.assert_close(model(x_t[row : row + 1], t[row : row + 1])[0], logits[row])
    assert not torch.allclose(model(x_t, t.flip(0))[0], logits[0], atol=1e-3)


def test_time_may_be_float64() -> None:
    model = build(replace(SMALL, conditioning="step"))
    x_t, t, h = batch()
    assert torch.equal(model(x_t, t.double(), h.double()), model(x_t, t, h))


def test_dropout_acts_in_training_only() -> None:
    model = build()
    x_t, t, _ = batch()
    assert torch.equal(model(x_t, t), model(x_t, t))
    model.train()
    assert not torch.equal(model(x_t, t), model(x_t, t))


def test_conditioning_is_an_object_with_a_word_for_every_block() -> None:
    class PerBlock(Conditioning):
        def forward(self, t: Tensor, h: Tensor | None) -> list[Tensor]:
            return [torch.full((len(t), 16), float(i)) for i in range(SMALL.num_blocks + 1)]

    model, heard = build(), []
    for module in (*(block.modulation for block in model.blocks), model.modulation):
        module.register_forward_pre_hook(lambda _, inputs: heard.append(float(inputs[0][0, 0])))
    model.conditioning = PerBlock()
    model(*batch())
    assert heard == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("config", [SMALL, LLAMA])
def test_bfloat16_autocast_runs_and_agrees(config: ModelConfig) -> None:
    model = build(config)
    x_t, t, _ = batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = model(x_t, t)
    exact = model(x_t, t)
    assert bool((rough.float() - exact).norm() < 0.05 * exact.norm())


@pytest.mark.parametrize("config", [SMALL, LLAMA])
def test_no_rows_give_no_logits(config: ModelConfig) -> None:
    assert build(config)(torch.zeros(0, 10, dtype=torch.int64), torch.zeros(0)).shape == (0, 10, 37)


def test_fused_conditioning_tells_every_block_its_own_of_t_and_h() -> None:
    model = build(replace(SMALL, conditioning="fused"))
    x_t, t, h = batch()
    conditions = model.conditioning(t, h)
    assert [c.shape for c in conditions] == [(3, 16)] * (SMALL.num_blocks + 1)
    assert not torch.allclose(conditions[0], conditions[1])
    assert not torch.allclose(model(x_t, t, h), model(x_t, t, h / 2), atol=1e-4)
    assert not torch.allclose(model(x_t, t, h), model(x_t, t / 2, h), atol=1e-4)
    assert model.config.is_step_aware
    with pytest.raises(ValueError, match="h is None"):
        model(x_t, t)


CONFIGS = [
    SMALL,
    LLAMA,
    replace(SMALL, next_token=True),
    replace(SMALL, conditioning="step"),
    replace(SMALL, conditioning="fused", num_blocks=1),
]


@pytest.mark.parametrize("config", CONFIGS, ids=["paper", "llama", "next-token", "step", "fused-1-block"])
@pytest.mark.parametrize("rows", [[], [0], [1, 10, 11], [0, 3, 9, 20, 29], list(range(30))])
def test_features_at_some_rows_are_those_of_the_whole_trunk(config: ModelConfig, rows: list[int]) -> None:
    model, (x_t, t, h) = build(config), batch()
    chosen = torch.tensor(rows, dtype=torch.int64)
    with torch.no_grad():
        found = model.features_at(x_t, t, h, rows=chosen)
        torch.testing.assert_close(found, model.trunk(x_t, t, h).flatten(0, 1)[chosen])
        torch.testing.assert_close(model.logits_at(found), model(x_t, t, h).flatten(0, 1)[chosen])


def test_the_last_block_works_only_where_it_is_asked() -> None:
    model, (x_t, t, h) = build(), batch()
    seen: list[int] = []
    for block in model.blocks:
        block.mlp.into.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0][..., 0].numel()))
    model.features_at(x_t, t, h, rows=torch.tensor([2, 17]))
    assert seen == [30, 30, 2]


def test_what_sampling_remembers_does_not_hurt_training() -> None:
    model, (x_t, t, h) = build(), batch()
    with torch.inference_mode():
        expected = model(x_t, t, h)
    logits = model(x_t, t, h)
    logits.sum().backward()
    torch.testing.assert_close(logits.detach(), expected.clone())
    torch.testing.assert_close(model(x_t[:, :4], t, h), build()(x_t[:, :4], t, h))  # another length, another rotation


def test_a_linked_child_has_its_parents_logits_and_the_tables() -> None:
    parent = DiT(ModelConfig(vocab_size=11, width=16, num_blocks=1, num_heads=2, cond_width=8))
    assert parent.joint is None
    left, right = torch.randn(2, 11, 3)
    child = parent.with_transitions(left, right)
    assert child.joint is not None
    assert torch.equal(child.joint.left, left)
    assert torch.equal(child.joint.right, right)
    inputs = torch.zeros(2, 4, dtype=torch.int64), torch.tensor([0.1, 0.7])
    assert torch.equal(child(*inputs), parent(*inputs))
    with pytest.raises(ValueError, match="has transitions of rank 3 already"):
        child.with_transitions(left, right)
    fresh = DiT(ModelConfig.from_dict({**child.config.to_dict()}))
    assert fresh.joint is not None
    assert not bool((fresh.joint.left @ fresh.joint.right.T).any())  # no transitions yet
    with pytest.raises(ValueError, match="rank is -1"):
        CRFConfig(rank=-1)


def test_threads_that_ask_for_other_lengths_do_not_disturb_each_other():
    """Between two lines of one thread, another may keep phases of its own length."""

    class Shared(DiT):
        other = None

        @property
        def _phases(self):
            return self.kept

        @_phases.setter
        def _phases(self, value):
            self.kept = value if self.other is None else self.other

    model = Shared(SMALL).eval()
    x_t, t = torch.arange(5)[None] % SMALL.vocab_size, torch.tensor([0.5])
    expected = model(x_t, t)
    model(x_t[:, :3], t)
    model.other = model.kept
    torch.testing.assert_close(model(x_t, t), expected, rtol=0, atol=0)
