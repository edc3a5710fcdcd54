"""The evaluator's own truth: oracles, collapsed samplers, and that nothing but the samples moves a number."""

import copy
import json
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from fsdfm.checkpoint import Checkpoint
from fsdfm.generate import LanguageModel, SamplerConfig
from fsdfm.measure.alternative import Alternative
from fsdfm.measure.archive import Archive
from fsdfm.measure.evaluation import _largest_common
from fsdfm.measure.evaluator import Data, MatchTarget, Options, evaluate, evaluate_samples
from fsdfm.measure.judges import causal_judge
from fsdfm.measure.mauve import Mauve
from fsdfm.measure.results import Evaluation, load_evaluation, save_evaluation
from fsdfm.measure.rows import cut_rows
from fsdfm.measure.sampling import Drawn, Repairs, SamplingPlan, TaskSampler, Texts
from fsdfm.model import CausalConfig, CausalHeadConfig, CausalModel
from fsdfm.noise import Noise, Purpose
from tiny_models import BYTES, known_bundle, random_bundle, unigram_world, wants

LENGTH = 24
STORY = "".join(f"The {k} cats sat on {k * k} mats and {7 * k % 31} hats.\x00" for k in range(60))


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch):
    monkeypatch.setattr("fsdfm.measure.statistics.RESAMPLES", 100)


def judge_model(seed):
    config = CausalConfig(vocab_size=257, width=16, num_blocks=1, num_heads=2, max_length=64, dropout=0.0)
    model = CausalModel(config, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)
    return model.eval().requires_grad_(False)


def judge(seed=0, name="tiny"):
    return causal_judge(judge_model(seed), BYTES, name=name, bos_id=256)


def real_rows(length=LENGTH):
    documents = [BYTES.encode(text) for text in STORY.split("\x00") if text]
    tokens = np.array([token for document in documents for token in [*document, BYTES.eos_id]])
    starts = np.cumsum([0, *(len(document) + 1 for document in documents[:-1])])
    return cut_rows(tokens, starts, length)


def options(**changes):
    config = SamplerConfig(seed=changes.pop("seed", 0), **changes.pop("sampling", {}))
    sampling = SamplingPlan(length=changes.pop("length", LENGTH), config=config)
    return Options(**{"steps": (1, 2), "num": 6, "sampling": sampling, **changes})


def oracle(rows):
    """Logits that are sure of the row that agrees best with x_t."""
    known = torch.from_numpy(rows.astype(np.int64))

    def answer(x_t, t):
        best = (x_t[:, None] == known[None]).sum(-1).argmax(-1)
        return torch.full((*x_t.shape, 257), -30.0).scatter(-1, known[best][..., None], 30.0)

    return answer


def without_times(evaluation):
    def strip(value):
        if isinstance(value, dict):
            return {k: strip(v) for k, v in value.items() if not k.startswith(("seconds", "started"))}
        return [strip(v) for v in value] if isinstance(value, list) else value

    return strip(evaluation.to_json())


# --- known answers ----------------------------------------------------------------------------------------------------


def test_an_oracle_repairs_everything_and_continues_as_the_text_does():
    rows = real_rows()[:6]
    bundle = known_bundle(oracle(rows), length=LENGTH)
    found = evaluate(bundle, Data(rows), judge(), options=options(metrics=("accuracy", "continuation", "bound")))
    for row in found.rows:
        assert row.metrics["accuracy"].value == 1
        assert row.metrics["accuracy_argmax"].value == 1
        given = row.metrics["continuation_token_perplexity"]
        assert given.value == pytest.approx(found.real["continuation_token_perplexity"].value, rel=1e-6)
        assert given.value != pytest.approx(found.real["token_perplexity"].value, rel=1e-3)


def test_brier_is_that_of_two_continuations_of_every_row():
    """An oracle has 100, and one that knows nothing about 0: it is never right, and never says the same twice."""
    rows = real_rows()[:6]
    sure = evaluate(known_bundle(oracle(rows)), Data(real=rows), None, options=options(metrics=["brier"], steps=(1,)))
    assert sure.row(1).metrics["brier_lm"].value == 100.0
    assert sure.row(1).metrics["brier_lm"].facts == {"contexts": 6, "samples": 2}
    blank = known_bundle(lambda x_t, _: torch.zeros(*x_t.shape, 257))
    chance = evaluate(blank, Data(real=rows), None, options=options(metrics=["brier"], steps=(1,)))
    assert chance.row(1).metrics["brier_lm"].value < 5


def test_the_alternative_continues_the_same_rows_for_its_brier():
    rows = real_rows()[:6]
    alternative = Alternative("ar", judge_model(0))
    bundle = known_bundle(oracle(rows))
    found = evaluate(
        bundle, Data(real=rows, alternatives=(alternative,)), None, options=options(metrics=["brier"], steps=(1,))
    )
    assert found.alternatives[0].metrics["brier_lm"].facts["contexts"] == 6


def test_the_alternative_is_swept_over_temperature_and_resumes():
    rows, kept = real_rows()[:6], []
    alternative = Alternative("ar", judge_model(0))
    data = Data(real=rows, alternatives=(alternative,))
    asked = options(metrics=["diversity"], steps=(1,), alternative_frontier=(0.5, 1.0, 1.5), frontier_num=4)
    found = evaluate(known_bundle(oracle(rows)), data, None, options=asked, on_row=kept.append)
    assert [row.temperature for row in found.alternatives] == [1.0]
    assert [row.temperature for row in found.alternative_frontier] == [0.5, 1.5]  # the base has one of them
    assert {row.num_samples for row in found.alternative_frontier} == {4}
    cold, hot = (row.metrics["entropy_bits"].value for row in found.alternative_frontier)
    assert cold < hot
    model = found.swept_alternatives["ar"]
    assert sorted(row.temperature for row in (*model.rows, *model.frontier)) == [0.5, 1.0, 1.5]
    half = next(each for each in kept if len(each.alternative_frontier) == 1)
    again = evaluate(known_bundle(oracle(rows)), data, None, options=asked, earlier=half)
    assert again.alternative_frontier[0] == half.alternative_frontier[0]
    assert [row.metrics for row in again.alternative_frontier] == [row.metrics for row in found.alternative_frontier]
    assert Evaluation.from_json(found.to_json()).swept_alternatives.keys() == {"ar"}


def test_what_stands_beside_a_model_is_measured_alone_and_taken_over():
    """Real text, controls and the autoregressive models are those of one evaluation, to the digit."""
    rows = real_rows()[:12]
    alone = Data(real=rows, alternatives=(Alternative("ar", judge_model(1)),))
    asked = options(metrics=["perplexity", "diversity", "brier"], steps=(), alternative_frontier=(0.5,))
    first, other = known_bundle(oracle(rows)), known_bundle(lambda x_t, _: torch.zeros(*x_t.shape, 257))
    about = {"model": {"name": "beside"}}
    beside = evaluate(first, alone, judge(), options=asked, about=about)
    assert (beside.rows, beside.frontier, beside.sampler) == ((), (), {"length": LENGTH})
    assert evaluate(other, alone, judge(), options=asked, about=about, earlier=beside).alternatives == (
        beside.alternatives
    )  # no weights have a say

    asked = options(metrics=["perplexity", "diversity", "trajectory"], steps=(1,))
    whole = evaluate(first, Data(real=rows), judge(), options=asked)
    taken = evaluate(first, Data(real=rows, beside=beside), judge(), options=asked)
    assert (taken.real, taken.controls, taken.judge) == (whole.real, whole.controls, whole.judge)
    assert [row.metrics for row in taken.rows] == [row.metrics for row in whole.rows]
    assert taken.alternatives == beside.alternatives
    assert taken.alternative_frontier == beside.alternative_frontier
    bare = options(metrics=["perplexity", "diversity"], steps=(1,), controls=False)
    assert evaluate(first, Data(real=rows, beside=beside), judge(), options=bare).controls == {}

    changed = rows.copy()
    changed[0, 3:9] = changed[0, 2]
    for data, name, changes, message in (
        (Data(real=changed, beside=beside), "tiny", {}, "its real is"),
        (
            Data(real=rows, beside=beside, facts={"held_out": "b"}),
            "tiny",
            {},
            "its data held_out is None, now it is 'b'",
        ),
        (Data(real=rows, beside=beside), "strange", {}, "its judge name is 'tiny'"),
        (Data(real=rows, beside=beside), "tiny", {"seed": 1}, "its seed is 0"),
        (Data(real=rows, beside=beside), "tiny", {"metrics": ["perplexity"]}, "its metrics is"),
    ):
        with pytest.raises(ValueError, match=f"measured otherwise: {message}"):
            evaluate(first, data, judge(name=name), options=replace(asked, **options_of(changes)))


@pytest.mark.parametrize(("posterior", "first"), [(CausalHeadConfig(num_blocks=1, cond_width=8), [[0]]), (None, [])])
def test_a_joint_model_speaks_once_before_it_is_timed(monkeypatch, posterior, first):
    """Its loop is compiled or loaded with its first text, which would otherwise have those seconds."""
    asked, batch = [], TaskSampler._batch
    monkeypatch.setattr(
        TaskSampler,
        "_batch",
        lambda self, task, samples, **more: asked.append([*samples]) or batch(self, task, samples, **more),
    )
    bundle = random_bundle(length=16, posterior=posterior)
    wanted = options(length=16, steps=(2,), num=2, metrics=["trajectory"])
    assert len(evaluate(bundle, Data(), None, options=wanted).rows) == 1
    assert asked == [*first, [0, 1]]


def test_the_alternatives_first_tokens_are_not_timed_with_its_compiling(monkeypatch):
    alternative, lengths = Alternative("ar", judge_model(0)), []
    generate = CausalModel.generate
    monkeypatch.setattr(
        CausalModel,
        "generate",
        lambda self, prompt, length, *a, **more: lengths.append(length) or generate(self, prompt, length, *a, **more),
    )
    alternative.draw(2, length=12, bos_id=256, seed=0)
    assert lengths == [4, 12]


def options_of(changes):
    """Changes of options, a seed among them."""
    seed = changes.pop("seed", None)
    return changes if seed is None else {**changes, "sampling": options(seed=seed).sampling}


def test_a_model_that_knows_nothing_repairs_by_chance():
    bundle = known_bundle(lambda x_t, t: torch.zeros(*x_t.shape, 257), length=LENGTH)
    rows = real_rows()
    found = evaluate(bundle, Data(rows), None, options=options(num=40, steps=(1,), metrics=("accuracy", "trajectory")))
    metrics = found.rows[0].metrics
    assert metrics["accuracy"].value < 0.03
    assert metrics["accuracy_argmax"].value == 0  # token 0, which no text holds
    assert metrics["model_entropy_bits"].value == pytest.approx(np.log2(257))
    assert metrics["jumps_per_token"].value == pytest.approx(256 / 257, abs=0.02)


def test_the_start_of_a_repair_is_an_argument():
    for start, told in ((None, 0.5), (0.0, 0.0)):
        bundle = known_bundle(wants(97), length=LENGTH)
        evaluate(
            bundle,
            Data(real_rows()),
            None,
            options=options(metrics=("accuracy",), steps=(2,), sampling={"start": start}),
        )
        times = [t for t, _ in bundle.model.told]
        assert times.count(told) >= 6
        assert (0.75 in times) == (start is None)


@pytest.mark.slow
def test_a_collapsed_sampler_is_flagged_and_an_honest_one_is_not():
    collapsed = evaluate(
        known_bundle(wants(97), length=LENGTH), Data(real_rows()), judge(), options=options(steps=(2,))
    )
    flags = collapsed.rows[0].flags
    assert any(flag.startswith("collapse: entropy_bits below real text's") for flag in flags)
    assert any("distinct_2" in flag for flag in flags)
    assert collapsed.rows[0].metrics["entropy_bits"].value == 0
    assert collapsed.rows[0].metrics["duplicates"].value == pytest.approx(5 / 6)
    world, p_1 = unigram_world(length=100)
    uniform = Noise(7, range(20)).uniform(Purpose.DATA, 100)
    rows = torch.searchsorted(p_1.cumsum(0), uniform).clamp(max=256).numpy().astype(np.int32)
    honest = evaluate(world, Data(rows), None, options=options(num=20, length=100, steps=(32,), metrics=("diversity",)))
    assert honest.rows[0].flags == ()
    band = honest.real["entropy_bits"].facts["band"]
    assert band[0] < honest.real["entropy_bits"].low < honest.real["entropy_bits"].high < band[1]


def test_a_judge_first_says_what_it_thinks_of_real_and_shuffled_text():
    rows = real_rows()[:6]
    found = evaluate(
        random_bundle(length=LENGTH), Data(rows), judge(), options=options(steps=(1,), metrics=("perplexity",))
    )
    documents = [BYTES.decode(part) for row in rows for part in _split(row.tolist())]
    assert found.real["token_perplexity"].value == pytest.approx(judge().score(documents).token_perplexity, rel=1e-6)
    assert found.judge["real"]["token_perplexity"]["value"] == found.real["token_perplexity"].value
    assert found.judge["shuffled"]["token_perplexity"]["value"] != found.real["token_perplexity"].value
    assert (found.judge["name"], found.judge["real"]["n"]) == ("tiny", 6)


def _split(row):
    parts = [[]]
    for token in row:
        if token == BYTES.eos_id:
            parts.append([])
        else:
            parts[-1].append(token)
    return [part for part in parts if part]


def test_copying_is_measured_beside_that_of_real_text():
    rows = real_rows()
    training = np.concatenate([rows[0], rows[1]])
    bundle = known_bundle(oracle(rows[:1]), length=LENGTH)  # writes the first row, whatever the noise
    found = evaluate(bundle, Data(rows, training=training), None, options=options(steps=(1,), metrics=("copying",)))
    assert found.rows[0].metrics["copied_8grams"].value == 1
    assert found.rows[0].metrics["longest_copy"].facts["max"] == LENGTH
    assert 0 < found.real["copied_8grams"].value < 1


# --- nothing else moves a number --------------------------------------------------------------------------------------


def test_evaluation_changes_nothing():
    bundle = random_bundle(length=LENGTH, budgets=(1, 2))
    bundle.model.train()
    bundle.model.blocks[0].eval()
    weights = copy.deepcopy(bundle.model.state_dict())
    modes = [module.training for module in bundle.model.modules()]
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    found = evaluate(
        bundle, Data(real_rows()), judge(), options=options(steps=(1,), matched=(MatchTarget("data"),), pilot=2)
    )
    assert found.bound.value > 0
    assert [module.training for module in bundle.model.modules()] == modes
    assert all(torch.equal(value, weights[name]) for name, value in bundle.model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (np.random.get_state()[1] == states[1]).all()
    assert random.getstate() == states[2]


def test_the_batch_size_changes_no_number():
    bundle = random_bundle(length=LENGTH, bos_id=3)
    rows = real_rows()
    rows[:, 0] = 3
    runs = [evaluate(bundle, Data(rows), judge(), options=options(steps=(2,), batch_size=size)) for size in (1, 4)]
    assert without_times(runs[0]) == without_times(runs[1])
    assert runs[0].rows[0].metrics["model_entropy_bits"].value > 0


@pytest.mark.parametrize("source", ["mask", "mixture"])
def test_other_sources_are_measured_alike(source):
    bundle = random_bundle(source=source, length=LENGTH, budgets=(1, 2))
    asked = options(steps=(2,), metrics=("accuracy", "trajectory", "bound"))
    found = evaluate(bundle, Data(real_rows()), None, options=asked)
    metrics = found.rows[0].metrics
    assert 0 <= metrics["accuracy"].value < 0.2
    assert metrics["model_entropy_bits"].value <= np.log2(257)  # the mask is never emitted
    if source == "mask":
        assert metrics["jumps_per_token"].value == 1
    assert found.bound.value > 0


class Interrupt:
    """Stops an evaluation after some rows, as Ctrl-C would, when they are on the disk."""

    def __init__(self, file, rows):
        self.file, self.rows = file, rows

    def __call__(self, evaluation):
        save_evaluation(evaluation, self.file)
        if len(evaluation.rows) + len(evaluation.frontier) >= self.rows:
            raise KeyboardInterrupt


@pytest.mark.slow
def test_interrupted_and_resumed_it_is_the_same_file(tmp_path):
    bundle, data = random_bundle(length=LENGTH), Data(real_rows())
    asked = options(matched=(MatchTarget(4.0, 4.0),), frontier=(0.7,), steps=(1,), pilot=3)
    whole = evaluate(bundle, data, judge(), options=asked)
    assert [row.matched is None for row in whole.rows] == [True, False]
    file = tmp_path / "a.json"
    earlier = None
    for rows in (1, 2, 99):
        archive = Archive.create(tmp_path / "a.jsonl", {"model": {}}, ["model"])
        keep = Interrupt(file, rows)
        try:
            done = evaluate(bundle, data, judge(), options=asked, archive=archive, earlier=earlier, on_row=keep)
        except KeyboardInterrupt:
            earlier = load_evaluation(file)
    assert without_times(load_evaluation(file)) == without_times(whole) == without_times(done)
    assert done.rows[0] == earlier.rows[0]  # kept, times and all


def test_half_a_row_is_gone_on_with(tmp_path):
    bundle, data = random_bundle(length=LENGTH), Data(real_rows())
    asked = options(steps=(2,), metrics=("perplexity",), batch_size=2)
    whole = evaluate(bundle, data, judge(), options=asked)

    def stop(what, done, total):
        if "text at" in what and done == 4:
            raise KeyboardInterrupt

    archive = Archive.create(tmp_path / "a.jsonl", {}, [])
    with pytest.raises(KeyboardInterrupt):
        evaluate(bundle, data, judge(), options=asked, archive=archive, on_progress=stop)
    with archive.file.open("a") as lines:
        lines.write('{"kind": "text", "steps": 2, "temp')  # the line that the power cut short
    assert len(archive.drawn("text", 2, temperature=1.0, num=6)) == 4
    drawn = []
    archive = Archive.create(tmp_path / "a.jsonl", {}, [])
    done = evaluate(
        bundle,
        data,
        judge(),
        options=asked,
        archive=archive,
        on_progress=lambda what, done, _: drawn.append((what, done)),
    )
    assert ("steps 2: text at temperature 1", 4) in drawn
    assert ("steps 2: text at temperature 1", 2) not in drawn
    assert without_times(done) == without_times(whole)


@pytest.mark.parametrize(
    ("changes", "other", "message"),
    [
        ({"seed": 1}, "tiny", "its seed is 0, now it is 1"),
        ({"num": 5}, "tiny", "num_samples is 6, now it is 5"),
        ({"sampling": {"temperature": 0.5}}, "tiny", "its sampler is"),
        ({"metrics": ("diversity",)}, "tiny", "its metrics is"),
        ({}, "another", "its judge name is 'tiny', now it is 'another'"),
    ],
)
def test_another_evaluations_rows_are_not_mixed_in(changes, other, message):
    bundle, data = random_bundle(length=LENGTH), Data(real_rows())
    asked = {"steps": (1,), "metrics": ("perplexity",)}
    first = evaluate(bundle, data, judge(), options=options(**asked))
    with pytest.raises(ValueError, match=message):
        evaluate(bundle, data, judge(name=other), options=options(**{**asked, **changes}), earlier=first)


# --- matching, frontier, samples kept ---------------------------------------------------------------------------------


def test_matched_entropy_hits_its_target():
    bundle, data = random_bundle(length=64), Data(real_rows(64))
    asked = options(
        steps=(2,),
        num=12,
        pilot=4,
        length=64,
        metrics=("diversity",),
        matched=(MatchTarget("data"), MatchTarget(5.0, 5.0)),
    )
    found = evaluate(bundle, data, None, options=asked)
    plain = found.rows[0].metrics["entropy_bits"].value
    for row, target in zip(found.matched, (found.real["entropy_bits"].value, 5.0), strict=True):
        assert abs(plain - target) > 0.2
        assert row.metrics["entropy_bits"].value == pytest.approx(target, abs=asked.tolerance)
        assert row.matched["entropy_bits"] == pytest.approx(row.metrics["entropy_bits"].value)
        assert row.matched["reached"]
        assert row.temperature < 1


def test_an_entropy_out_of_reach_is_said_to_be():
    bundle = known_bundle(wants(97), length=LENGTH)
    found = evaluate(
        bundle, Data(), None, options=options(steps=(1,), metrics=("diversity",), matched=(MatchTarget(3.0, 3.0),))
    )
    assert found.matched[0].flags == ("the entropy of 3.0 is out of reach: not matched",)
    assert not found.matched[0].matched["reached"]


def test_the_frontier_rises_with_the_temperature():
    asked = options(steps=(2,), metrics=("perplexity",), frontier=(0.3, 1.5))
    found = evaluate(random_bundle(length=LENGTH), Data(real_rows()), judge(), options=asked)
    cold, hot = found.frontier
    assert (cold.temperature, hot.temperature) == (0.3, 1.5)
    assert cold.metrics["entropy_bits"].value < hot.metrics["entropy_bits"].value
    assert "token_perplexity" in hot.metrics


@pytest.mark.slow
def test_another_judge_scores_the_same_samples(tmp_path):
    bundle = random_bundle(length=LENGTH)
    header = {
        "model": {"name": "tiny"},
        "data": {},
        "sampler": SamplingPlan(length=LENGTH).to_json(),
        "tokenizer": BYTES.definition,
        "bos_id": None,
    }
    archive = Archive.create(tmp_path / "a.jsonl", header, ["model"])
    asked = options(steps=(1,), matched=(MatchTarget(4.0, 4.0),), pilot=3)
    direct = evaluate(bundle, Data(real_rows()), judge(), options=asked, archive=archive)
    archive = Archive.open(tmp_path / "a.jsonl")
    same = evaluate_samples(archive, Data(), judge(), options=options(steps=(1,)))
    assert [row.metrics for row in same.rows] == [row.metrics for row in direct.rows]
    assert [row.matched for row in same.rows] == [row.matched for row in direct.rows]
    assert (same.real, same.bound) == (direct.real, direct.bound)
    other = evaluate_samples(archive, Data(), judge(seed=1), options=options(steps=(1,)))
    assert other.rows[0].metrics["token_perplexity"] != direct.rows[0].metrics["token_perplexity"]
    assert other.rows[0].metrics["accuracy"] == direct.rows[0].metrics["accuracy"]
    lines = [json.loads(line) for line in archive.file.read_text().splitlines()]
    assert {line.get("kind") for line in lines[1:]} == {
        "real",
        "bound",
        "text",
        "continuation",
        "another continuation",
        "repair",
        "row",
    }
    with pytest.raises(ValueError, match="holds no complete row"):
        evaluate_samples(archive, Data(), judge(), options=options(steps=(4,)))


def test_what_is_missing_is_said():
    bundle = random_bundle(length=LENGTH)
    with pytest.raises(ValueError, match="the judge tiny needs real text"):
        evaluate(bundle, Data(), judge(), options=options())
    for metric, missing in (("perplexity", "a judge"), ("copying", "--training"), ("mauve", "--mauve")):
        with pytest.raises(ValueError, match=f"the metric '{metric}' needs .*{missing}"):
            evaluate(bundle, Data(real_rows()), None, options=options(metrics=(metric,)))
    with pytest.raises(ValueError, match="metrics holds 'speed'"):
        options(metrics=("speed",))
    with pytest.raises(ValueError, match="num is 1"):
        options(num=1)


def test_mauve_compares_with_real_text_and_real_text_with_itself(monkeypatch):
    compared = []

    def compare(real, generated, **_):
        compared.append((real.tolist(), generated.tolist()))
        return Mauve((0.5, 0.7), (0, 1), (len(real), len(generated)), 2)

    monkeypatch.setattr("fsdfm.measure.suite.compute_mauve", compare)

    def features(texts):
        return np.array([[len(text), text.count("a")] for text in texts], dtype=np.float32)

    rows = real_rows()
    data = Data(rows[:8], features=features)
    bundle = known_bundle(oracle(rows[9:10]), length=LENGTH)
    found = evaluate(bundle, data, None, options=options(steps=(1,), num=4, metrics=("mauve",)))
    assert found.real["mauve"].value == found.rows[0].metrics["mauve"].value == pytest.approx(0.6)
    assert found.rows[0].metrics["mauve"].facts["n"] == [4, 4]
    embedded = features([BYTES.decode(row) for row in rows[:10].tolist()]).tolist()
    splits, others = compared[1:33], compared[33:]
    assert compared[0] == (embedded[:4], embedded[4:8])
    assert all(row in embedded[:8] for pair in splits for half in pair for row in half)  # the scale of mauve_z
    assert (embedded[:4], embedded[9:] * 4) in others
    assert all(real == embedded[:4] for real, _ in others)  # controls, too


def test_a_model_that_writes_nothing_has_no_perplexity():
    bundle = known_bundle(wants(BYTES.eos_id), length=LENGTH)
    assert isinstance(bundle, Checkpoint)
    found = evaluate(bundle, Data(real_rows()), judge(), options=options(steps=(1,), metrics=("perplexity",)))
    assert np.isnan(found.rows[0].metrics["token_perplexity"].value)
    assert found.rows[0].flags


def test_what_is_measured_is_what_is_generated():
    """Sample k of an evaluation is copy k of the empty prompt, sampled as the model advises."""
    advice = {"jump": "spaced", "temperature": {"1": 0.7, "4": 0.9}}
    bundle = replace(random_bundle(bos_id=1), facts={"sampling": advice})
    lm = LanguageModel(bundle)
    plan = SamplingPlan(length=LENGTH, config=SamplerConfig(seed=5), advice=advice)
    for steps in (1, 4):
        task = Texts(lm.encoder.continuation(None, None, length=LENGTH))
        (drawn,) = TaskSampler(lm).draw(task, range(3), config=plan.at(steps))
        for row, text in zip(drawn.tokens, lm.generate(length=LENGTH, num=3, steps=steps, seed=5), strict=True):
            assert tuple(row[1 : 1 + len(text.tokens)].tolist()) == text.tokens
    found = evaluate(bundle, Data(), None, options=Options(sampling=plan, steps=(1, 4), num=2, metrics=()))
    assert [row.temperature for row in found.rows] == [0.7, 0.9]
    assert found.sampler["jump"] == "spaced"
    assert found.sampler["temperature"] == {"1": 0.7, "4": 0.9}


def test_texts_of_many_calls_are_kept_one_by_one():
    """On a CPU a text of 64 calls or more is there before the next one is begun; the tokens are those of a batch."""
    lm = LanguageModel(random_bundle())
    task, config = Texts(lm.encoder.continuation(None, None, length=8)), SamplerConfig(seed=3)
    parts = list(TaskSampler(lm).draw(task, range(3), config=replace(config, steps=64)))
    assert [len(part.tokens) for part in parts] == [1, 1, 1]
    together = lm.run(lm.encoder.continuation(None, None, length=8).copies(3), seed=3, steps=64)
    for part, text in zip(parts, together, strict=True):
        assert tuple(part.tokens[0][1 : 1 + len(text.tokens)].tolist()) == text.tokens
    assert [len(part.tokens) for part in TaskSampler(lm).draw(task, range(3), config=replace(config, steps=2))] == [3]


def test_samples_behind_a_hole_are_not_taken_for_earlier_ones(tmp_path):
    """Sample 1 is missing: what is there is sample 0 alone, not 0 and 2 under the names 0 and 1."""
    archive = Archive.create(tmp_path / "a.jsonl", {}, [])
    for first in (0, 2, 3):
        drawn = Drawn(np.full((1, 4), first, dtype=np.int32), {})
        archive.add("text", 2, drawn, temperature=1.0, first=first, text=str)
    found = archive.drawn("text", 2, temperature=1.0, num=6)
    assert found.tokens.tolist() == [[0, 0, 0, 0]]
    last = archive.file.read_bytes()
    archive.file.write_bytes(last + b'{"kind": "text", "st')
    Archive.create(tmp_path / "a.jsonl", {}, [])
    assert archive.file.read_bytes() == last  # half a line is cut off, and nothing else


def test_stored_samples_are_compared_by_as_many_as_every_row_has():
    """A row may have been completed later with more; those of the frontier have fewer on purpose and no say."""
    row = {"place": "rows", "steps": 1, "temperature": 1.0, "matched": None, "num": 8}
    rows = [row, {**row, "num": 16}, {**row, "steps": 2, "num": 12}, {**row, "place": "frontier", "num": 2}]
    assert _largest_common(rows) == 12
    assert _largest_common(rows[3:]) == 2


@pytest.mark.parametrize(("length", "damaged"), [(1, 1), (3, 2), (7, 4), (8, 4)])
def test_half_of_the_tokens_are_damaged_rounded_not_cut(length, damaged):
    requests = Repairs(np.zeros((2, 1 + length), dtype=np.uint16), num_bos=1).requests([0, 1], 5)
    assert [sum(request.damaged) for request in requests] == [damaged, damaged]
    assert not any(request.damaged[0] for request in requests)


@pytest.mark.parametrize("half", ['{"kind', '{"x": "' + "y" * 70_000])
def test_half_a_line_at_the_end_of_a_samples_file_is_cut_off(tmp_path, half):
    file = tmp_path / "a.jsonl"
    Archive.create(file, {"model": {}}, ["model"])
    whole = file.read_text()
    with file.open("a") as end:
        end.write(half)  # the process died here
    Archive.create(file, {"model": {}}, ["model"])
    assert file.read_text() == whole
    assert whole.endswith("\n")
