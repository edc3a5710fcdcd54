"""The lm-evaluation-harness over our models: likelihoods against enumeration, tasks from files, no network."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

lm_eval = pytest.importorskip("lm_eval", reason="pip install 'fsdfm[tasks]'")

from fsdfm.adapters.lm_eval import FlowLM, LikelihoodConfig, evaluate_tasks  # noqa: E402
from fsdfm.checkpoint import Checkpoint  # noqa: E402
from fsdfm.cli import app  # noqa: E402
from fsdfm.generate import LanguageModel  # noqa: E402
from fsdfm.model import CausalHeadConfig  # noqa: E402
from tiny_models import known_bundle, random_bundle, save_tiny, unigram_world, wants  # noqa: E402


def ask(*args: Any, doc_id: int = 0) -> Any:
    return SimpleNamespace(args=args, task_name="t", doc_id=doc_id)


def flow(bundle: Checkpoint, **config: Any) -> FlowLM:
    return FlowLM(LanguageModel(bundle), LikelihoodConfig(**{"repeats": 4, "draws": 8, **config}))


def test_the_bound_of_independent_letters_is_their_law() -> None:
    bundle, p_1 = unigram_world(length=64)  # the posterior is exact: the bound is nearly tight
    model = flow(bundle, repeats=16, draws=32)
    assert model.kind == "bound"
    text = "tea in the sun"
    truth = float(p_1.log()[torch.tensor(list(text.encode()))].sum())
    scored = model.score([], list(text.encode()))
    assert scored.log_prob < truth + 3 * scored.error  # a bound lies below
    assert scored.log_prob > truth - 3 * scored.error - 0.25 * len(text)  # and not far below
    assert model.errors == [scored.error]


def test_context_is_given_and_not_scored() -> None:
    bundle, _ = unigram_world(length=64)
    model = flow(bundle, repeats=8, draws=16)
    (alone, _), (after, _) = model.loglikelihood([ask("", " tea"), ask("it is", " tea")])
    assert math.isclose(alone, after, abs_tol=4 * max(model.errors) + 0.2)  # letters are independent


def test_a_joint_posterior_says_its_own_law() -> None:
    bundle = random_bundle(length=16, bos_id=256, posterior=CausalHeadConfig(num_blocks=1, cond_width=8))
    model = flow(bundle, repeats=2)
    assert model.kind == "one-call"
    total = sum(math.exp(model.score([104, 105], [token]).log_prob) for token in range(257))
    assert total == pytest.approx(1.0, abs=1e-5)  # normalised over the next token: the same noise for all
    both = flow(bundle, repeats=16).score([104], [105, 106])
    assert 0 < both.error < 0.5
    mask = random_bundle(source="mask", length=16, bos_id=256, posterior=CausalHeadConfig(num_blocks=1, cond_width=8))
    assert flow(mask).score([104], [105]).error == pytest.approx(0, abs=1e-6)  # x_0 is one state: exact


def test_greedy_is_what_the_model_is_sure_of() -> None:
    model = flow(known_bundle(wants(0, *b"the cat"), length=16))
    asked = [ask("the", " cat"), ask("the", " dog"), ask("", "the")]
    assert [greedy for _, greedy in model.loglikelihood(asked)] == [True, False, True]


def test_long_texts_are_scored_in_the_blocks_of_generation() -> None:
    bundle, p_1 = unigram_world(length=16)
    model = flow(bundle, repeats=4, draws=16)
    text = "tea and sun " * 4
    (found,) = model.loglikelihood_rolling([ask(text)])
    truth = float(p_1.log()[torch.tensor(list(text.encode()))].sum())
    assert truth - 0.4 * len(text) < found < truth + 4 * model.errors[0]
    short = model.score(list(b"x" * 50), list(b"tea"))  # a context that does not fit loses its beginning
    assert short.log_prob == pytest.approx(model.score(list(b"x" * 12), list(b"tea")).log_prob, abs=2.0)


def test_text_is_cut_at_the_first_stop() -> None:
    model = flow(known_bundle(wants(0, *b"one. two\nthree"), length=24))
    (text,) = model.generate_until([ask("one", {"until": ["\n", " two"], "max_gen_toks": 12})])
    assert text == "."
    (longer,) = model.generate_until([ask("one", {"until": "\n", "do_sample": True, "temperature": 0.5})])
    assert longer == ". two"


@pytest.mark.parametrize("wrong", [{"kind": "exact"}, {"repeats": 1}, {"draws": 0}])
def test_settings_that_are_none(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="allowed are"):
        LikelihoodConfig(**wrong)


TASK = """
task: tiny_choice
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    folder = tmp_path / "tasks"
    folder.mkdir()
    rows = [{"question": "the", "choices": [" cat", " dog"], "answer": 0}] * 2
    rows += [{"question": "the", "choices": [" dog", " cat"], "answer": 1}]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "tiny.yaml").write_text(TASK.format(data=folder / "data.jsonl"))
    return folder


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_task_of_files_runs_without_a_network(tasks: Path) -> None:
    lm = LanguageModel(known_bundle(wants(0, *b"the cat"), length=16))
    found, table = evaluate_tasks(lm, ["tiny_choice"], folder=str(tasks), likelihood=LikelihoodConfig(repeats=2))
    assert found["results"]["tiny_choice"]["acc,none"] == 1.0
    assert found["likelihood"]["kind"] == "bound"
    assert found["likelihood"]["questions"] == 3
    assert found["likelihood"]["within_two_errors"] == 0.0
    assert "tiny_choice" in table


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_command(tasks: Path, tmp_path: Path) -> None:
    model, out = str(save_tiny(tmp_path / "model")), tmp_path / "found.json"
    words = ["evaluate", model, "--tasks", "tiny_choice", "--task-folder", str(tasks), "--limit", "2"]
    done = CliRunner().invoke(app, [*words, "--json", str(out)])
    assert done.exit_code == 0, done.output
    assert "standard error" in done.output
    assert json.loads(out.read_text())["n-samples"]["tiny_choice"]["effective"] == 2
    wrong = CliRunner().invoke(app, ["evaluate", model, "--tasks", "no_such_task"])
    assert "which the harness does not know" in str(wrong.exception)
    mixed = CliRunner().invoke(app, [*words, "--judge", "smollm2"])
    assert "--judge is not used with --tasks" in str(mixed.exception)
    lonely = CliRunner().invoke(app, ["evaluate", model, "--limit", "2"])
    assert "--limit goes with --tasks" in str(lonely.exception)
