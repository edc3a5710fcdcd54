"""The causal baseline: `fsdfm train` with model.architecture = "causal"."""

import io
import json

import pytest
import torch
from llama2c_files import STORIES, Llama, write_vocabulary
from rich.console import Console
from safetensors.torch import load_file

from fsdfm.checkpoint import convert_llama2c, read_llama2c
from fsdfm.config import load_recipe
from fsdfm.data import Tokenizer, TrainingBatch
from fsdfm.learn import NextTokenObjective
from fsdfm.measure.judges import load_causal
from fsdfm.model import CausalConfig, CausalModel
from fsdfm.noise import Noise
from fsdfm.run import make_workload, train
from small_runs import write_recipe

CAUSAL = ["model.architecture=causal", "objective.kind=next-token", "model.cond_width=none"]


def train_silently(recipe, *overrides):
    return train(recipe, [*CAUSAL, *overrides], console=Console(file=io.StringIO(), width=200))


def test_the_objective_is_the_mean_log_loss_of_the_next_token():
    model = CausalModel(CausalConfig(vocab_size=7, width=8, num_blocks=1, num_heads=2, max_length=6), seed=3).eval()
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(0))
    x_1 = torch.randint(7, (3, 6), generator=torch.Generator().manual_seed(1))
    real = torch.ones(3, 6, dtype=torch.bool)
    real[1, 4:] = False
    outcome = NextTokenObjective()(model, TrainingBatch(x_1, real=real), Noise(0, range(3)), training_step=0, ema=model)
    log_p = torch.log_softmax(model(x_1), -1)
    expected = [
        -sum(log_p[b, i - 1, x_1[b, i]] for i in range(1, length)) / (length - 1) for b, length in enumerate((6, 4, 6))
    ]
    assert torch.allclose(outcome.sample_loss, torch.stack(expected), rtol=1e-5)
    assert torch.allclose(outcome.loss, torch.stack(expected).mean(), rtol=1e-5)


def test_a_causal_run_learns_resumes_and_judges(tmp_path):
    recipe = write_recipe(tmp_path)
    out = tmp_path / "run"
    unseen = [f"held_out.inputs={tmp_path / 'text.txt'}", "held_out.every=6"]
    whole = train_silently(recipe, f"out={out}", *unseen)
    assert whole.finished
    losses = [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0]
    assert "held_out_loss" in (out / "held-out.jsonl").read_text()
    judge = load_causal(out / "model")
    assert judge.vocab_size == 257
    again = tmp_path / "again"
    assert train_silently(recipe, f"out={again}", "train.save_every=5").finished
    (again / "model").rename(again / "old")  # a run that has finished finishes again from its state
    assert train_silently(recipe, f"out={again}").finished
    for name in ("training.safetensors", "model/model.safetensors"):
        one, two = load_file(out / name), load_file(again / name)
        assert all(torch.equal(value, two[key]) for key, value in one.items())


def test_an_interrupted_causal_run_is_the_same_run(tmp_path, monkeypatch):
    recipe = write_recipe(tmp_path)
    train_silently(recipe, f"out={tmp_path / 'whole'}")
    real = NextTokenObjective.__call__

    def fails(self, *arguments, training_step, **options):
        if training_step == 7:
            raise KeyboardInterrupt
        return real(self, *arguments, training_step=training_step, **options)

    with monkeypatch.context() as patch:
        patch.setattr(NextTokenObjective, "__call__", fails)
        with pytest.raises(KeyboardInterrupt):
            train_silently(recipe, f"out={tmp_path / 'parts'}")
    assert train_silently(recipe, f"out={tmp_path / 'parts'}").finished
    one, two = (load_file(tmp_path / name / "training.safetensors") for name in ("whole", "parts"))
    assert all(torch.equal(value, two[key]) for key, value in one.items())


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("objective.kind=path", 'is trained on "next-token"'),
        ("model.cond_width=8", 'model.cond_width is not used by model.architecture = "causal"; remove it'),
        ("flow.source=mask", "flow is not used by"),
        ("model.preset=none", "model.preset is missing"),
        ("model.llama2c=nothing.bin", "or model.llama2c is set beside it"),
        ("model.min_count=2", 'model.min_count is not used by model.architecture = "causal" with model.preset'),
        ("model.preset=huge", "allowed are tiny, stories, 170m"),
        ("runtime.strategy=fsdp", "allowed are single and ddp"),
        ("model.architecture=dit", '"causal" and "next-token" belong together'),
    ],
)
def test_what_a_causal_model_has_no_use_for_is_an_error(tmp_path, override, sentence):
    with pytest.raises(ValueError, match=sentence):
        train_silently(write_recipe(tmp_path), f"out={tmp_path / 'run'}", override)
    assert not (tmp_path / "run").exists()


def test_a_causal_run_begins_as_an_autoregressive_model_over_the_tokens_of_another(tmp_path):
    Llama().write(tmp_path / "model.bin")
    write_vocabulary(tmp_path / "tokenizer.bin")
    whole = read_llama2c(tmp_path / "model.bin")
    parts = convert_llama2c(tmp_path / "model.bin", tmp_path / "tokenizer.bin", STORIES[:2])
    tokenizer = Tokenizer(parts.tokenizer.to_str(), parts.tokenizer.id_to_token(parts.eos_id))
    (tmp_path / "tokens.json").write_text(tokenizer.definition)
    assert len(parts.kept) < whole.config.vocab_size
    (tmp_path / "stories.txt").write_text("\n".join(STORIES * 5))
    start = [f"model.{name}=none" for name in ("preset", "width", "num_blocks", "num_heads", "dropout")]
    start += [f"model.llama2c={tmp_path / 'model.bin'}", f"model.llama2c_tokenizer={tmp_path / 'tokenizer.bin'}"]
    start += [f"data.inputs={tmp_path / 'stories.txt'}", f"data.corpus={tmp_path / 'corpus'}"]
    start += [f"data.tokenizer={tmp_path / 'tokens.json'}"]
    recipe = write_recipe(tmp_path)
    train_silently(recipe, *start, "optim.lr=1e-30", "train.steps=1", f"out={tmp_path / 'still'}")
    still = load_file(tmp_path / "still" / "model" / "model.safetensors")
    assert torch.equal(still["embedding.weight"], whole.embedding.weight[list(parts.kept)])
    assert all(torch.equal(value, parts.causal.state_dict()[name]) for name, value in still.items())
    train_silently(recipe, *start, f"out={tmp_path / 'run'}")
    moved = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert not torch.equal(moved["head.weight"], still["head.weight"])
    wrong = (
        ("model.width=16", "model.width is not used by model.architecture = .causal. with model.llama2c"),
        ("model.min_count=3", "model.min_count is not used"),
        ("model.llama2c=nothing.bin", "nothing.bin is not a file"),
        ("data.length=4096", "knows at most"),
        ("data.tokenizer=bytes", "does not know the token"),
    )
    for number, (override, sentence) in enumerate(wrong):
        with pytest.raises(ValueError, match=sentence):
            train_silently(recipe, *start, f"out={tmp_path / 'x'}", f"data.corpus={tmp_path / str(number)}", override)


def test_a_plan_is_for_denoisers():
    with pytest.raises(ValueError, match="this needs a denoiser"):
        make_workload(load_recipe("tiny-causal"))
