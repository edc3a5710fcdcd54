"""What is measured of fixed samples, number by number; see tests/pinned.py."""

import json
import math
import struct
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from networks import MixerNet
from rich.console import Console
from worlds import world

from fsdfm.checkpoint import save_model
from fsdfm.flow import CosineSchedule, ExactDenoiser, Independent, MaskSource, MixturePath, MixtureSource, UniformSource
from fsdfm.generate import LanguageModel, SamplerConfig
from fsdfm.measure import mauve as mauve_module
from fsdfm.measure.alternative import Alternative, make_alternative
from fsdfm.measure.archive import Archive, first_difference
from fsdfm.measure.brier import brier_lm, brier_n, brier_terms
from fsdfm.measure.collapse import Tolerance, leave_band
from fsdfm.measure.consistency import find_names, name_recurrence, rarity, topic_likeness
from fsdfm.measure.controls import CONTROLS, Blindness, Material, find_blindness, sample_controls, sentence_ends
from fsdfm.measure.copying import find_copies
from fsdfm.measure.defects import DEFECTS, Sight, find_sights, inject
from fsdfm.measure.distances import (
    Scale,
    energy_distance,
    hidden_features,
    median_distance,
    mmd,
    ngram_features,
    split_scale,
    standardise_features,
    style_features,
    trunk_features,
)
from fsdfm.measure.evaluation import (
    EvaluationRequest,
    _largest_common,
    _metrics,
    _numbers,
    _stored_options,
    _stored_plan,
    _target,
    count,
    parse_steps,
    run_evaluation,
)
from fsdfm.measure.evaluator import Data, MatchTarget, Options, evaluate, evaluate_samples
from fsdfm.measure.evidence import Evidence, measure_checks
from fsdfm.measure.frontier import AtEntropy, common_entropies, compare_frontiers, frontier_of, mean_frontier
from fsdfm.measure.judges import causal_judge, huggingface
from fsdfm.measure.judges.calibration import calibrate, make_judge, shuffle_words
from fsdfm.measure.judges.gemma import GemmaConfig, GemmaModel, SentencePieceEncoder, gemma_judge, is_gemma3
from fsdfm.measure.judges.gguf import GgufFile, llama_judge, read_gguf
from fsdfm.measure.judges.scoring import Scores, TokenJudge
from fsdfm.measure.kept import ScoreStore
from fsdfm.measure.matching import find_temperature
from fsdfm.measure.mauve import Mauve, compute_mauve
from fsdfm.measure.metrics import (
    EntropyMeter,
    count_jumps,
    distinct_n,
    distribution_entropy_bits,
    duplicates,
    repetition,
    replace_tokens,
    self_bleu,
    to_row,
    token_accuracy,
    unigram_entropy_bits,
    unigram_entropy_nats,
)
from fsdfm.measure.ngrams import NgramModel, cross_entropy_bits, perplexity_bits
from fsdfm.measure.nll_bound import nll_bound
from fsdfm.measure.results import Evaluation, Measured, Row, load_evaluation, save_evaluation
from fsdfm.measure.reward import MmdReward, MmdRewardConfig
from fsdfm.measure.rows import Piece, Reader, cut_rows, score_pieces, shuffle_pieces
from fsdfm.measure.sampling import Continuations, Drawn, Repairs, SamplingPlan, TaskSampler, Texts
from fsdfm.measure.statistics import (
    Interval,
    bootstrap_mean,
    bootstrap_ratio,
    gap_closed,
    jackknife,
    sequence_perplexity,
    student_mean,
    token_perplexity,
)
from fsdfm.measure.suite import METRICS, MetricSuite
from fsdfm.measure.wellformed import check_texts
from fsdfm.model import CausalConfig, CausalModel
from fsdfm.noise import Noise, Purpose
from pinned import Cases, chosen, odd, said
from tiny_models import BYTES, random_bundle, save_judges

cases = Cases("measure")
STORY = [
    f'The {k} cats sat on {k * k} mats. Tom and Ann saw {7 * k % 31} hats! "Is it so?" he said.\nAll was well.'
    for k in range(30)
]


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch):
    monkeypatch.setattr("fsdfm.measure.statistics.RESAMPLES", 100)


def tokens(*shape: int, high: int = 9, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, high, shape)


def judge(seed: int = 0, name: str = "tiny", bos_id: int | None = 256, max_length: int = 24) -> TokenJudge:
    config = CausalConfig(vocab_size=257, width=16, num_blocks=1, num_heads=2, max_length=max_length, dropout=0.0)
    model, generator = CausalModel(config, seed=seed), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)
    return causal_judge(model.eval().requires_grad_(False), BYTES, name=name, bos_id=bos_id)


def packed() -> tuple[np.ndarray, np.ndarray]:
    documents = [[*BYTES.encode(text), BYTES.eos_id] for text in STORY]
    return np.concatenate(documents), np.cumsum([0, *map(len, documents[:-1])])


@cases
def metrics() -> object:
    samples = [tokens(n, seed=n) for n in (12, 12, 20, 5)]
    samples.append(samples[0].copy())
    found: list[object] = [
        [unigram_entropy_bits(s), unigram_entropy_nats(s), repetition(s, 2), repetition(s)] for s in samples
    ]
    found += [
        [distinct_n(samples, n) for n in (1, 2, 4)],
        self_bleu(samples),
        self_bleu(samples[1:4]),
        duplicates(samples),
        self_bleu([[1], [1, 2], [3, 3, 3]]),
    ]
    x_1 = torch.from_numpy(tokens(3, 11))
    for source in (UniformSource(9), MaskSource(10), MixtureSource(10)):
        for share in (0.0, 0.25, 0.5, 1.0):
            damaged, where = replace_tokens(x_1, source, Noise(2, range(3)), share=share)
            found += [damaged, where, token_accuracy(damaged, x_1, where)]
    logits = torch.randn(300, 7, generator=torch.Generator().manual_seed(0))
    logits[3, 2:] = -torch.inf
    meter = EntropyMeter(3)
    from fsdfm.flow import Rows

    meter(logits[:4], Rows(torch.tensor([0, 2, 2, 1]), torch.arange(4), x_1, torch.zeros(3), torch.ones(3)))
    found += [
        distribution_entropy_bits(logits),
        distribution_entropy_bits(logits[0]),
        meter.total_bits,
        meter.num_logits,
    ]
    found += [count_jumps([x_1 > 3, x_1 > 6])]
    for wrong in (
        lambda: unigram_entropy_bits([]),
        lambda: distinct_n([[1, 2]], 3),
        lambda: distinct_n([[1, 2]], 0),
        lambda: self_bleu([[1, 2]]),
        lambda: self_bleu([[1, 2], []]),
        lambda: duplicates([]),
        lambda: replace_tokens(x_1, UniformSource(9), Noise(0, range(3)), share=1.1),
        lambda: replace_tokens(x_1, UniformSource(9), Noise(0, range(3)), share=-0.1),
        lambda: count_jumps([]),
        lambda: to_row([[1]]),
        lambda: to_row([0.5]),
        lambda: to_row([]),
        lambda: token_accuracy(x_1, x_1[:1], x_1 > 0),
    ):
        found.append(said(wrong))
    return found


@cases
def statistics() -> object:
    values = torch.from_numpy(np.random.default_rng(0).normal(2, 1, 30))
    weights = torch.from_numpy(np.random.default_rng(1).integers(1, 9, 30))
    found: list[object] = [
        bootstrap_mean(values),
        bootstrap_mean([1.0, 2.0, 4.0], seed=3),
        bootstrap_ratio(values, weights, stream=2),
        bootstrap_ratio(values, weights, seed=1),
    ]
    found += [student_mean(v) for v in ([], [3.0], [3.0, 5.0], list(range(31)), list(range(32)), list(range(40)))]
    scores = [Scores(values[k : k + 10].abs() * 20, weights[k : k + 10]) for k in (0, 10, 20)]
    found += [
        token_perplexity(scores[0]),
        sequence_perplexity(scores[0], seed=2),
        gap_closed(*scores),
        said(lambda: gap_closed(scores[0], scores[1], scores[0])),
    ]
    for size, groups in ((1, 20), (2, 20), (7, 3), (30, 20), (60, 40)):
        found.append(
            jackknife(
                lambda part: float(np.var(part)), list(np.random.default_rng(size).normal(0, 1, size)), groups=groups
            )
        )
    some = Interval(1.0, 0.5, 2.0)
    found += [
        f"{some:.2f}",
        f"{Interval(1.0, math.nan, math.nan):.1f}",
        some.map(math.exp),
        said(lambda: bootstrap_ratio(values, weights[:3])),
        said(lambda: bootstrap_mean([])),
    ]
    found += [scores[0].token_perplexity, scores[0].sequence_perplexity, scores[0].perplexities(), len(scores[0])]
    return [
        *found,
        said(lambda: Scores(values, weights[:2])),
        said(lambda: Scores(values[:1], weights[:1] * 0).token_perplexity),
        said(lambda: Scores(values[:1], weights[:1] * 0).perplexities()),
    ]


@cases
def ngrams() -> object:
    rows = [tokens(n, high=5, seed=n) for n in (30, 3, 1, 0, 25)]
    other = [tokens(n, high=6, seed=50 + n) for n in (10, 2, 0)]
    found: list[object] = []
    for order in (1, 2, 3, 5):
        model = NgramModel.fit(rows, order=order, vocab_size=6)
        found += [cross_entropy_bits(model, other), perplexity_bits(model, other), model.log2_probs(rows[0])]
    for wrong in ({"order": 0}, {"vocab_size": 0}, {"vocab_size": 4}, {"vocab_size": 5}):
        found.append(said(lambda w=wrong: len(NgramModel.fit(rows, **{"vocab_size": 6, **w}).orders)))
    return [
        *found,
        said(lambda: NgramModel.fit([[]], vocab_size=3)),
        said(lambda: NgramModel.fit([[-1]], vocab_size=3)),
    ]


@cases
def distances() -> object:
    rng = np.random.default_rng(0)
    a, b = rng.normal(0, 1, (20, 3)), rng.normal(0.5, 2, (13, 3))
    found: list[object] = [
        energy_distance(a, b),
        energy_distance(a, a),
        mmd(a, b),
        mmd(a, b, bandwidth=0.7),
        mmd(a[:1].repeat(4, 0), a[:1].repeat(4, 0)),
        median_distance(torch.from_numpy(a)),
    ]
    found += [
        median_distance(torch.from_numpy(rng.normal(0, 1, (2500, 2)))),
        standardise_features(np.c_[a, np.ones(20)], np.c_[b, np.ones(13)]),
    ]
    scale = split_scale(energy_distance, a, size=6, noise=Noise(1, range(9)))
    found += [scale, scale.z(1.5), said(lambda: Scale(1.0, 0.0, 2, 2).z(1))]
    found += [
        said(lambda s=s: split_scale(energy_distance, a, size=s, noise=Noise(1, range(2))).size) for s in (1, 2, 10, 11)
    ]
    found += [
        said(lambda: split_scale(energy_distance, a, size=2, noise=Noise(1, range(1)))),
        said(lambda: energy_distance(a[:1], b)),
        said(lambda: mmd(a, b[:, :2])),
        said(lambda: mmd(a, b, bandwidth=0.0)),
    ]
    texts = [*STORY[:3], "", "no stop", "A? B! c...\n(d; 'e': f-g)"]
    found += [
        style_features(texts),
        style_features([]),
        ngram_features([tokens(n) for n in (9, 1, 0)], n=2, buckets=16),
        ngram_features([tokens(9)], n=3, buckets=7),
    ]
    found += [
        said(lambda n=n, k=k: ngram_features([tokens(5)], n=n, buckets=k).shape) for n, k in ((0, 8), (1, 1), (1, 2))
    ]
    found += [hidden_features(judge())(texts), hidden_features(judge(bos_id=None))(texts), hidden_features(judge())([])]
    found += [
        trunk_features(random_bundle(length=16, bos_id=b))(["abc", "", "a longer text than that"]) for b in (None, 256)
    ]
    reward = MmdReward(style_features, STORY[:8])
    found += [
        reward(texts),
        reward(STORY[3:4]),
        reward.bandwidth,
        said(lambda: MmdRewardConfig()),
        said(lambda: MmdRewardConfig(real="x", num=1)),
        MmdRewardConfig(real="x", num=2),
    ]
    return found


def sweep(shift: float, n: int = 5, wide: float = 0.1) -> list[Row]:
    return [
        Row(
            steps=1,
            temperature=0.5 + k / 10,
            metrics={
                "token_perplexity": Measured(9 + shift + k * k, 8 + k * k, 11 + k * k),
                "entropy_bits": Measured(5 + k * 0.3, 5 + k * 0.3 - wide, 5 + k * 0.3 + wide),
            },
        )
        for k in range(n)
    ]


@cases
def frontiers() -> object:
    ours, theirs = frontier_of(sweep(0.0)), frontier_of(sweep(2.0, 4)[::-1])
    bare = [Row(steps=1), Row(steps=2, metrics={"token_perplexity": Measured(math.inf), "entropy_bits": Measured(1.0)})]
    found: list[object] = [
        ours,
        theirs.ends,
        [ours.at(h) for h in (4.9, 5.0, 5.31, 6.2, 6.3)],
        [ours.extended(h) for h in (4.0, 7.0)],
        ours.excess(5.5, 2.0),
    ]
    found += [
        compare_frontiers(theirs, ours),
        compare_frontiers(ours, theirs, entropies=[5.2, 9.0], seed=3),
        common_entropies(ours, theirs, num=3),
    ]
    far = mean_frontier([[(9.0, 1.0), (10.0, 2.0)], [(9.2, 1.5), (10.4, 2.5), (11.0, 9.0)]])
    found += [
        far,
        common_entropies(ours, far),
        frontier_of([*sweep(0.0), *sweep(1.0)[:2], *bare]),
        said(lambda: frontier_of(bare)),
    ]
    found += [
        AtEntropy(5.0, Interval(0.9, low, high)).decided
        for low, high in ((0.8, 0.99), (0.8, 1.0), (1.0, 1.2), (1.01, 1.2))
    ]
    wild = frontier_of(sweep(0.0, wide=2.0))
    return [
        *found,
        wild.draws(5.4, Noise(0, range(6)), stream=1),
        AtEntropy(5.0, Interval(0.9, 0.8, 1.0)).to_json(),
        frontier_of(sweep(0.0), "token_perplexity").ends,
    ]


@cases
def bounds() -> object:
    found: list[object] = []
    for source in ("uniform", "mask", "mixture"):
        path, data = world(source, CosineSchedule())
        x_1 = torch.from_numpy(tokens(5, 2, high=3))
        exact = ExactDenoiser(path, p_1=data)
        given = torch.zeros(5, 2, dtype=torch.bool)
        given[:, 0] = True
        for options in (
            {},
            {"draws": 3, "t_end": 0.9, "seed": 2, "batch_size": 2},
            {"given": given, "first": 4},
            {"t_end": 1.0, "draws": 2},
        ):
            bound = nll_bound(exact, path, x_1, **options)
            found += [
                bound.rows,
                bound.nats_per_token,
                bound.standard_error,
                bound.bits_per_token,
                bound.perplexity,
                bound.draws_per_row,
            ]
    net = MixerNet(4).double()
    found += [nll_bound(net, MixturePath(MaskSource(4)), x_1, h=h).rows for h in (2**-10, 0.5)]
    path, x_1 = MixturePath(UniformSource(4)), x_1[:1]
    found += [nll_bound(net, path, x_1, draws=1).standard_error]
    for wrong in ({"draws": 0}, {"t_end": 0.0}, {"t_end": 1.1}, {"given": given[:1].bool() | True}, {"given": given}):
        found.append(said(lambda w=wrong: nll_bound(net, path, x_1, **w)))
    return [*found, said(lambda: nll_bound(net, path, x_1[0]))]


@cases
def copies_and_brier() -> object:
    text = tokens(400, high=4, seed=3)
    samples = [
        text[10:60],
        np.r_[text[5:20], tokens(9, high=4), text[100:130]],
        tokens(12, high=4),
        tokens(3, high=4),
        text[-20:],
    ]
    found: list[object] = [find_copies(samples, text, n=n) for n in (1, 4, 8)]
    found += [
        find_copies(samples, text).share,
        find_copies([], text),
        find_copies(samples, text[:3]),
        said(lambda: find_copies(samples, text, n=0)),
    ]
    drawn, truth = tokens(6, 4, 5, high=2), tokens(6, 5, high=2, seed=1)
    drawn[:, :3] = np.where(tokens(6, 3, 5, high=6) > 0, truth[:, None], drawn[:, :3])
    found += [brier_terms(drawn, truth, n) for n in (1, 2, 5)] + [
        brier_n(drawn, truth, 2),
        brier_lm(drawn, truth),
        brier_lm(drawn, truth, orders=(1, 2), seed=4),
    ]
    for wrong in (
        (drawn[:, :1], truth, 1),
        (drawn, truth[:, :4], 1),
        (drawn, truth, 0),
        (drawn, truth, 6),
        (drawn[0], truth, 1),
    ):
        found.append(said(lambda w=wrong: brier_terms(*w)))
    return found


@cases
def controls() -> object:
    ends = sentence_ends(BYTES.decode, 257)
    stream, starts = packed()
    rows = cut_rows(stream, starts, 60)
    material = Material(rows, ends=ends)
    found: list[object] = [
        ends.nonzero()[0],
        material.entropy_bits,
        len(material.sentences),
        material.phrases(4)[:5],
        material.counts,
    ]
    for length in (1, 17, 60):
        found += [sample_controls(material, num=3, length=length, seed=2)]
    found += [
        sorted(sample_controls(Material(rows), num=1, length=9)),
        said(lambda: CONTROLS["sentences"].sample(Material(rows), Noise(0, [1]), 9)),
    ]
    found += [
        said(lambda: CONTROLS["cycle"].sample(material, Noise(0, [1]), 0)),
        said(lambda: Material(rows[0])),
        CONTROLS["unigram"].sample(material, Noise(0, []), 4).shape,
        said(lambda: Material(rows[:0])),
    ]
    real = {
        "token_perplexity": Measured(10, 9, 11),
        "mauve": Measured(0.9, 0.8, 1.0),
        "entropy_bits": Measured(6, 5.9, 6.1),
        "self_bleu": Measured(0.3),
    }
    models = {
        "few": {
            "token_perplexity": Measured(20, 18, 22),
            "mauve": Measured(0.5, 0.4, 0.6),
            "entropy_bits": Measured(5.0, 4.9, 5.1),
            "self_bleu": Measured(0.4),
        },
        "bare": {},
    }
    nonsense = {
        "cycle": {
            "token_perplexity": Measured(8, 7, 8.9),
            "mauve": Measured(0.1, 0.0, 0.2),
            "entropy_bits": Measured(6.0, 5.95, 6.05),
            "self_bleu": Measured(0.35),
        },
        "echo": {
            "token_perplexity": Measured(15, 12, 17.9),
            "mauve": Measured(0.7, 0.61, 0.79),
            "entropy_bits": Measured(6.9, 6.5, 6.99),
        },
        "touch": {
            "token_perplexity": Measured(10, 8, 18),
            "mauve": Measured(0.6, 0.6, 0.7),
            "entropy_bits": Measured(5.2, 5.05, 5.3),
        },
    }
    marks = find_blindness(real, models, nonsense)
    found += [marks, [str(m) for m in marks], [Blindness.from_json(m.to_json()) == m for m in marks]]
    return [
        *found,
        find_blindness(
            {"token_perplexity": real["token_perplexity"]}, models, nonsense, directions={"token_perplexity": "higher"}
        ),
    ]


@cases
def defects() -> object:
    texts, noise = STORY[:8], Noise(3, range(8))
    found: dict[str, object] = {
        name: [inject(name, texts, strength=s, noise=noise, training=STORY[10:20]) for s in (0.0, 0.3, 1.0)]
        for name in DEFECTS
    }
    found["sights"] = {
        " ".join(k): v.z
        for k, v in find_sights(
            {
                "length": lambda t: float(np.mean([len(x) for x in t])),
                "marks": lambda t: float(sum(x.count("was") for x in t)),
                "flat": lambda t: 1.0,
            },
            STORY[:12],
            STORY[12:],
            noise=Noise(0, range(5)),
            strengths=(0.3, 1.0),
        ).items()
    }
    found["seen"] = [
        Sight(z).seen_from
        for z in ({0.1: 4.0, 0.3: 2.0, 1.0: 5.0}, {0.1: 3.0, 0.3: 3.1, 1.0: -9.0}, {1.0: 3.0}, {0.1: -4.0, 1.0: 4.0})
    ]
    found["refused"] = [
        said(lambda: inject("none", texts, strength=0.1, noise=noise)),
        said(lambda: inject("copying", texts, strength=0.1, noise=noise)),
        said(lambda: inject("repetition", texts, strength=1.1, noise=noise)),
        said(lambda: inject("repetition", texts, strength=-0.1, noise=noise)),
        said(lambda: inject("repetition", texts[:2], strength=0.1, noise=noise)),
        said(lambda: find_sights({}, texts[:3], [], noise=noise)),
        said(lambda: find_sights({}, texts[:4], [], noise=noise[:1])),
        said(lambda: find_sights({}, texts[:4], [], noise=noise)),
    ]
    found["checks"] = check_texts(
        [
            *STORY[:2],
            "",
            'One.\n"Two\nThree',
            "A “b” c.\nd ”e“ f.\ng",
            "x. Tom saw Ann and then he saw Bob go.",
            "Tom ran. I saw that Mom and Tom ran on and then Zed came",
        ]
    )
    return {**found, "measured": measure_checks([*STORY[:4], "One\ntwo", "a"], seed=1)}


@cases
def guards() -> object:
    real = {"entropy_bits": Interval(6.0, 5.8, 6.1), "distinct_2": Interval(0.4, 0.35, 0.45)}
    found: list[object] = []
    for bits in (5.64, 5.65, 5.66, 6.25, 6.26, math.nan):
        for share in (0.3, 0.31, 0.49, 0.5):
            flags = leave_band({"entropy_bits": bits, "distinct_2": share, "other": 3}, real)
            found.append([[str(f), f.side] for f in flags])
    found += [
        Tolerance(0.1, 0.2).band(Interval(-2.0, math.nan, math.nan)),
        Tolerance(0.1, 0.2).band(Interval(5.0, 6.0, 4.0)),
        said(lambda: leave_band({"distinct_1": 1.0}, real)),
    ]
    for target in (1.0, 3.0, 5.0, 9.0, -1.0):
        for curve in (lambda t: 3 + 2 * math.log(t), lambda t: 5 - t, lambda t: 3.0, lambda t: 4 + math.sin(6 * t)):
            asked: list[float] = []
            found += [
                find_temperature(lambda t, c=curve, a=asked: (a.append(t), c(t))[1], target, start=0.9, tolerance=0.01),
                asked,
            ]
    return [*found, find_temperature(lambda t: 2 * t, 0.5, ends=(0.5, 2.0))]


@cases
def judges(folder) -> object:
    texts, found = [*STORY[:3], "a", "", "über"], []
    for each in (judge(), judge(bos_id=None), judge(max_length=7)):
        scores = each.score(texts)
        found += [
            scores.nll,
            scores.num_tokens,
            each.score(texts[:2], prefixes=["The 0", "x"]),
            each.score([]),
            dict(each.facts),
        ]
    small = replace(judge(), nll=judge().nll)
    found += [
        said(lambda: small.score(["a"], prefixes=["b", "c"])),
        calibrate(judge(), STORY[:4], seed=3).contrast,
        str(calibrate(judge(), STORY[:2])),
        said(lambda: calibrate(judge(), ["", " "])),
    ]
    found += [shuffle_words(STORY[0], seed=s, index=i) for s, i in ((0, 0), (0, 1), (1, 0))]
    pieces = [Piece(4, "abc"), Piece(5, "de", "xy"), Piece(4, "f")]
    found += [
        score_pieces(judge(), pieces, 3, first=4),
        score_pieces(judge(), [], 2),
        shuffle_pieces([Piece(3, STORY[0], "p")], seed=1),
    ]
    store = ScoreStore(folder)
    key = store.key(judge(), pieces, 3)
    store.put(key, score_pieces(judge(), pieces, 3, first=4))
    found += [
        key,
        store.key(judge(), pieces, 4) != key,
        store.key(judge(), pieces[:2], 3) != key,
        store.get(key),
        store.get("no"),
        len(list(folder.iterdir())),
    ]
    return [*found, said(lambda: make_judge("stories15m")), said(lambda: make_judge("nowhere.bin"))]


@cases
def rows() -> object:
    stream, starts = packed()
    found: list[object] = []
    for begin in ("document", "anywhere"):
        for bos_id in (None, 3):
            for length in (2, 24, 150):
                found.append(cut_rows(stream, starts, length, bos_id=bos_id, begin=begin))
    found += [
        said(lambda: cut_rows(stream, starts, 1, bos_id=3)),
        said(lambda: cut_rows(stream, starts, 0)),
        cut_rows(stream, starts, 1).shape,
    ]
    eos = BYTES.eos_id
    lines = np.array(
        [[3, 65, 66, eos, 67, 68, 3, 69], [eos, eos, 70, 71, 0xC3, 0xBC, 72, eos], [65, 66, 67, 68, 69, 70, 71, 72]],
        dtype=np.int32,
    )
    for bos_id in (None, 3):
        reader = Reader(BYTES, bos_id)
        found += [reader.pieces(lines, border=b, first=2) for b in (0, 3, 5, 8)] + [
            [reader.text(row) for row in lines],
            reader.num_bos,
        ]
    return found


@cases
def samples(folder) -> object:
    found: list[object] = []
    real = cut_rows(*packed(), 20)[:4]
    for bos_id in (None, 256):
        lm = LanguageModel(random_bundle(length=20, bos_id=bos_id))
        for task in (
            Texts(lm.encoder.continuation(None, None, length=20)),
            Continuations(real, int(bos_id is not None), copy=1),
            Repairs(real, int(bos_id is not None)),
        ):
            found += [task.requests([0, 3], 5), task.truth([0, 2]), getattr(task, "border", None)]
            for drawn in TaskSampler(lm, batch_size=2).draw(task, range(3), config=SamplerConfig(steps=2, seed=1)):
                found += [drawn.tokens, {k: v for k, v in drawn.columns.items() if k != "seconds"}]
    plan = SamplingPlan(
        length=20, config=SamplerConfig(seed=4), advice={"steps": 2, "temperature": {"1": 0.9, "8": 0.7}}
    )
    found += [
        plan.at(1).to_json(),
        plan.at(8, 1.3).to_json(),
        plan.temperature(4),
        plan.to_json(),
        SamplingPlan(length=8).to_json(),
        said(lambda: SamplingPlan(length=7)),
        SamplingPlan(length=9).temperature(3),
    ]
    archive = Archive.create(folder / "s.jsonl", {"seed": 1, "model": {"name": "a"}}, ("seed", "model.name"))
    archive.add("text", 2, drawn, temperature=0.5, first=0, text=lambda row: str(len(row)))
    archive.add("text", 2, drawn, temperature=0.5, first=len(drawn) + 1, text=lambda row: "x")
    archive.add_real(real[:2], lambda row: "r")
    archive.add_real(real, lambda row: "r")
    for _ in range(2):
        archive.add_record("bound", rows=[1.0], draws=3)
    with archive.file.open("a") as file:
        file.write('{"kind": "real", "half')
    again = Archive.create(archive.file, {"seed": 1, "model": {"name": "a"}}, ("seed", "model.name"))
    for num in (0, 1, 9):
        part = again.drawn("text", 2, temperature=0.5, num=num)
        found += [None if part is None else [part.tokens, sorted(part.columns)]]
    found += [
        again.drawn("text", 3, temperature=0.5, num=2),
        again.real(),
        again.has("bound"),
        again.has("row"),
        again.records("bound"),
        again.header,
    ]
    found += [
        said(lambda: Archive.create(archive.file, {"seed": 2}, ("seed",))).split(":", 2)[-1],
        len(archive.file.read_text().splitlines()),
    ]
    (folder / "bad").write_text("no\n")
    (folder / "old").write_text(json.dumps({"format": "fsdfm-samples", "format_version": 2}) + "\n")
    found += [said(lambda n=n: Archive.open(folder / n)).rpartition("/")[2] for n in ("bad", "old", "none")]
    found += [
        first_difference({"a": {"b": 1}}, {"a": {"b": 2}}, ("a.b",)),
        first_difference({"a": 1}, {"a": 1.0}, ("a", "c")),
    ]
    joined = Drawn.join([Drawn(real[:1], {"x": np.array([1.0])}), Drawn(real[1:3], {"x": np.array([2.0, 3.0])})])
    return [*found, joined.tokens, joined.columns, len(joined)]


@cases
def results(folder) -> object:
    row = Row(
        steps=4,
        calls=3,
        num_samples=5,
        seconds=1.5,
        flags=("odd",),
        metrics={"entropy_bits": Measured(6.0, 5.5, 6.5, {"n": 3}), "perplexity": Measured(math.inf)},
        facts={"note": 1},
    )
    matched = Row(steps=4, temperature=0.7, matched={"to": "data", "entropy_bits": 6.1})
    whole = Evaluation(
        model={"name": "a"},
        rows=(row, matched, Row(steps=1)),
        real={"entropy_bits": Measured(6.2, 6.0, 6.4, {"band": (5.9, 6.5)})},
        bound=Measured(2.0),
        frontier=(Row(steps=4, temperature=0.5),),
        controls={"cycle": {"entropy_bits": Measured(6.0)}},
        alternatives=(Row(steps=20, facts={"name": "ar"}),),
        facts={"seed": 3},
    )
    save_evaluation(whole, folder / "r.json")
    again = load_evaluation(folder / "r.json")
    found: list[object] = [
        whole.to_json(),
        again.to_json() == whole.to_json(),
        [r.key for r in whole.rows],
        [r.steps for r in whole.plain],
        [r.steps for r in whole.matched],
        whole.row(4).calls,
        whole.row(2),
        whole.name,
    ]
    found += [
        [r.key for r in whole.with_row(replace(row, calls=9)).rows],
        whole.with_row(replace(row, calls=9)).row(4).calls,
        [r.key for r in whole.with_row(Row(steps=2)).with_frontier(Row(steps=4, temperature=0.5, calls=2)).frontier],
    ]
    found += [
        Measured(1.0, 0.5, 1.5).has_interval,
        Measured(1.0).has_interval,
        Measured(1.0, 0.0, math.inf).has_interval,
        whole.real["entropy_bits"].band,
        Measured(1.0, 0.5, 1.5).band,
        row.num_calls,
        Row(steps=2).num_calls,
    ]
    base = whole.to_json()
    for change in (
        {"format": "x"},
        {"format_version": 2},
        {"model": {}},
        {"model": {"name": " "}},
        {"rows": 3},
        {"rows": [3]},
        {"rows": [{"steps": 0}]},
        {"rows": [{"steps": 2**30}]},
        {"rows": [{"steps": 2**30 + 1}]},
        {"rows": [{"steps": 2.5}]},
        {"rows": [{"steps": 1, "temperature": -1}]},
        {"rows": [{"steps": 1}, {"steps": 1}]},
        {"rows": [{"steps": 1, "e": {"value": 1, "low": 3, "high": 2}}]},
        {"rows": [{"steps": 1, "e": {"value": "x"}}]},
        {"rows": [{"steps": 1, "e": {"value": "inf", "low": None}}]},
        {"rows": [{"steps": 1, "flags": "x"}]},
        {"rows": [{"steps": 1, "flags": [3]}]},
        {"rows": [{"steps": 1, "calls": 0}]},
        {"rows": [{"steps": 1, "matched": 4}]},
        {"bound": {"low": 1}},
        {"bound": 3},
        {"real": {"entropy_bits": {"value": 1, "band": [1]}}},
        {"real": {"entropy_bits": {"value": 1, "band": [1, "inf"]}}},
        {"controls": {"a": 3}},
        {"judge": 3},
        {"unknown": [1, 2]},
    ):
        found.append(said(lambda c=change: Evaluation.from_json({**base, **c}).to_json()["rows"][:1]))
    found += [
        said(lambda: Measured(1.0, 2.0, 1.0)),
        said(lambda: Row(steps=1, temperature=math.inf)),
        said(lambda: Row(steps=1, temperature=0.0).steps),
    ]
    found += [
        said(lambda: load_evaluation(folder / "none")).partition(str(folder))[2],
        Evaluation.from_json({**base, "unknown": 3}).facts,
    ]
    return found


@cases
def words() -> object:
    found: list[object] = []
    for text in ("1,2,4", "8", "1-8", "1..8", "2,2", "0", "x", "", "1,1024", "1 , 3"):
        found.append(said(lambda t=text: parse_steps(t)))
    for text in ("0.5,1", "x", "", "1"):
        found.append(said(lambda t=text: _numbers(t, "--frontier")))
    for text in (None, "diversity", "all", "perplexity,diversity", " perplexity , ,diversity ", "nothing", ""):
        found.append(said(lambda t=text: _metrics(t)))
    for text in ("data", "7.5", "x", "-1", "nowhere.json"):
        found.append(said(lambda t=text: _target(t, 16)))
    found += [count(n, "text") for n in (0, 1, 2, 1000)]
    rows_of = [
        {"kind": "text", "steps": s, "temperature": 1.0, "num": n, "place": "rows", "matched": None}
        for s, n in ((1, 5), (2, 3), (2, 7))
    ]
    return [
        *found,
        said(lambda: _largest_common(rows_of)),
        said(lambda: Options(sampling=SamplingPlan(length=8), num=1)),
        said(lambda: Options(sampling=SamplingPlan(length=8), steps=(0,))),
        said(lambda: Options(sampling=SamplingPlan(length=8), steps=(1, 1))),
        said(lambda: Options(sampling=SamplingPlan(length=8), metrics=("x",))),
    ]


def plain(evaluation) -> object:
    """An evaluation without times and what was made of them."""

    def strip(value):
        if isinstance(value, dict):
            return {
                k: strip(v) for k, v in value.items() if not k.startswith(("seconds", "started", "versions", "commit"))
            }
        return [strip(v) for v in value] if isinstance(value, list) else value

    return strip(evaluation.to_json())


def whole_options(**changes) -> Options:
    plan = SamplingPlan(length=24, config=SamplerConfig(seed=2))
    return Options(
        **{
            "sampling": plan,
            "steps": (1, 2),
            "num": 6,
            "frontier": (0.7, 1.2),
            "frontier_num": 4,
            "pilot": 3,
            "batch_size": 4,
            "matched": (MatchTarget("data"),),
            **changes,
        }
    )


@cases
def evaluations(folder) -> object:
    stream, starts = packed()
    rows = cut_rows(stream, starts, 24)
    config = CausalConfig(vocab_size=257, width=16, num_blocks=1, num_heads=2, max_length=40, dropout=0.0)
    data = Data(
        rows,
        training=stream[:600],
        distances={"style": style_features},
        second=judge(3, "other"),
        alternatives=(Alternative("ar", CausalModel(config, seed=1).eval()),),
        facts={"held_out": "x"},
    )
    archive = Archive.create(
        folder / "s.jsonl",
        {
            "seed": 2,
            "tokenizer": BYTES.definition,
            "bos_id": None,
            "sampler": {"length": 24},
            "model": {"name": "tiny"},
            "data": {},
        },
        ("seed",),
    )
    told: list[tuple[str, int, int]] = []
    found = evaluate(
        random_bundle(length=24),
        data,
        judge(max_length=64),
        options=whole_options(),
        archive=archive,
        on_progress=lambda *what: told.append(what),
    )
    bos = rows.copy()
    bos[:, 0] = 3
    small = evaluate(
        random_bundle(source="mask", length=24, bos_id=3, budgets=(1, 2)),
        Data(bos),
        None,
        options=whole_options(steps=(2,), matched=(), frontier=(), controls=False),
    )
    saved = evaluate_samples(
        archive, Data(rows, training=stream[:600]), judge(5, "new", max_length=64), options=whole_options(matched=())
    )
    # by which temperatures a search goes hangs on the last digit of an entropy; where it ends is among the rows
    names = {name.partition(" at ")[0] if ": pilot" in name else name for name, _, _ in told}
    rows = [*found.rows, *found.frontier, *found.alternatives]
    return {
        **{"whole": plain(found), "small": plain(small), "saved": plain(saved), "told": names},
        "samples by seconds": [row.seconds / row.seconds_per_sample for row in rows],
        "rows take no more than the whole": sum(row.seconds for row in rows) <= found.facts["seconds"],
    }


def near_means(p, q, *, num_buckets, seed, verbose) -> SimpleNamespace:
    """Stands for mauve-text: all that it is told has a say."""
    apart = float(np.linalg.norm(p.mean(0) - q[:-1].mean(0)))
    return SimpleNamespace(mauve=math.exp(-apart) * (1 - 0.01 * num_buckets) - 0.001 * seed * (2 - verbose))


@cases
def suites(folder) -> object:
    """More rows than are read at once, with a first token that is given."""
    rows = cut_rows(*packed(), 16, bos_id=256, begin="anywhere")
    assert len(rows) > 144
    told: list[tuple[str, int, int]] = []
    suite = MetricSuite(
        Reader(BYTES, 256),
        METRICS,
        judge=judge(),
        real=rows[:34],
        training=rows[74:80].flatten(),
        features=style_features,
        seed=3,
        on_progress=lambda *what: told.append(what),
        evidence=Evidence(Reader(BYTES, 256), rows[80:96], seed=3),
        store=ScoreStore(folder),
        second=judge(4, "other"),
        spare=rows[40:74],
    )
    columns = {name: np.arange(len(rows[:34])) % 7 + k for k, name in enumerate(("bits", "logits", "jumps", "free"))}
    drawn, other = Drawn(rows[110:144], columns), rows[110:130]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mauve_module, "_library", lambda: near_means)
        patch.setattr(mauve_module, "_threads", nullcontext)
        found: list[object] = [
            suite.texts(drawn, "all"),
            suite.texts(drawn, "light", light=True, kept=True),
            suite.real_texts(rows[:34], "real"),
            suite.control_texts(rows[100:134], "control"),
            suite.mauve(drawn.tokens, "all"),
            suite.mauve(other, "fewer"),
            suite.mauve(other[:1], "one"),
            compute_mauve(np.eye(40)[:33], np.eye(40)[7:], num_buckets=3, seeds=(4, 1)),
            [compute_mauve(np.eye(n), np.eye(n)[::-1]).num_buckets for n in (2, 14, 15, 25, 35)],
        ]
    shuffled = suite.score_shuffled(rows[:34], "shuffled")
    found += [shuffled, suite.score(rows[:34], "behind", border=9), suite.entropy(rows, border=9)]
    found += [suite.entropy_bits(rows), suite.ratio(drawn, "jumps", "free")]
    zeros = Drawn(rows[:2], {"a": np.ones(2), "b": np.zeros(2)})
    band = {name: Measured(1.0, 0.9, 1.1) for name in ("entropy_bits", "distinct_1", "distinct_2", "distinct_4")}
    found += [suite.ratio(zeros, "a", "b"), suite.flags(rows[100:], band), said(lambda: suite.flags(rows[100:], {}))]
    nothing = Scores(torch.zeros(3), torch.zeros(3, dtype=torch.int64))
    bare = MetricSuite(Reader(BYTES), ("perplexity", "diversity"), judge=judge())
    found += [suite.perplexities(nothing, "x_"), bare.flags(rows, {}), bare.mauve(rows, "x")]
    few = bare.texts(Drawn(rows[:2], {}), "two")
    before = len(told)
    suite.real_texts(rows[:34], "real")  # kept: the judges read nothing
    return [*found, few, told, len(told) - before]


@cases
def embedded() -> object:
    """Sentence features of a network of a few numbers, more texts than are read at once."""

    def tokenizer(texts, *, truncation, max_length):
        return {"input_ids": [[ord(c) for c in text][: max_length if truncation else None] for text in texts]}

    def network(input_ids, attention_mask):
        place = torch.arange(input_ids.shape[1])[:, None] + 1
        hidden = torch.sin(input_ids[..., None] * torch.tensor([0.1, 0.7, 1.3]) + 0.01 * place)
        return SimpleNamespace(last_hidden_state=hidden + attention_mask.sum(1)[:, None, None] / 50)

    hidden, real = torch.randn(3, 4, 2, generator=torch.Generator().manual_seed(0)), torch.ones(3, 4).long()
    real[1, 2:], real[2] = 0, 0
    found: list[object] = [mauve_module._mean_pool(hidden, real), mauve_module._last_token(hidden, real)]
    for pool in (mauve_module._mean_pool, mauve_module._last_token):
        made = object.__new__(mauve_module._Embedder)
        made.tokenizer, made.network, made.pool, made.max_tokens, made.device = tokenizer, network, pool, 60, "cpu"
        found += [made([*STORY[:20], "", *"abc"]), said(lambda m=made: m([]))]
    return found


class Transformers:
    """Stands for the library: notes what it is asked for, and gives a network of a few numbers."""

    def __init__(self, bos: int | None, lengths: tuple[object, object]):
        self.bos, self.lengths, self.asked = bos, lengths, list[object]()
        self.AutoTokenizer = SimpleNamespace(from_pretrained=self.tokenizer)
        self.AutoModelForCausalLM = self.AutoModel = SimpleNamespace(from_pretrained=self.network)

    def tokenizer(self, source, **options):
        self.asked.append(["tokenizer", source, options])

        def encode(texts, **how):
            self.asked.append(how)
            return {"input_ids": [[ord(c) % 50 for c in text] for text in texts]}

        encode.bos_token_id, encode.eos_token_id, encode.model_max_length = self.bos, 49, self.lengths[1]
        return encode

    def network(self, source, **options):
        self.asked.append(["network", source, {name: str(value) for name, value in options.items()}])
        model = torch.nn.Embedding(50, 50, _weight=torch.sin(torch.arange(2500.0)).view(50, 50) * 2)
        model.config = SimpleNamespace(vocab_size=50, max_position_embeddings=self.lengths[0])
        forward = model.forward
        model.forward = lambda input_ids, **options: SimpleNamespace(logits=forward(input_ids))
        return model


@cases
def judges_of_transformers() -> object:
    texts = ["a word", "x", "", STORY[0]]
    found: list[object] = []
    for bos, lengths in ((None, (9, 10**30)), (7, (None, 30)), (0, (2048, 12)), (3, (None, None)), (3, (10**6, 10**6))):
        library = Transformers(bos, lengths)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(huggingface, "_require", lambda _, library=library: library)
            made = huggingface.huggingface_judge("some/model")
            again = huggingface._load("folder", name="n", device="cpu", options={"gguf_file": "f"}, bos_id=5)
        found += [made.score(texts), made.max_length, made.bos_id, made.name, dict(made.facts), made.score([])]
        found += [again.bos_id, dict(again.facts), library.asked]
    logits = huggingface._Nll(Transformers(1, (9, 9)).network("x"))(torch.arange(600).view(2, 300) % 50)
    return [*found, logits]


@cases
def evaluations_with_features() -> object:
    """What needs vectors of texts, and what is taken over from an evaluation of other weights."""
    stream, starts = packed()
    rows = cut_rows(stream, starts, 16, bos_id=256)
    config = CausalConfig(vocab_size=257, width=16, num_blocks=1, num_heads=2, max_length=40, dropout=0.0)
    alternatives = (Alternative("ar", CausalModel(config, seed=1).eval()),)
    plan = SamplingPlan(length=16, config=SamplerConfig(seed=2))
    asked = Options(sampling=plan, steps=(1,), num=4, batch_size=3, metrics=("mauve", "brier", "continuation"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mauve_module, "_library", lambda: near_means)
        patch.setattr(mauve_module, "_threads", nullcontext)
        data = Data(rows[:8], features=style_features, alternatives=alternatives)
        swept = replace(asked, alternative_frontier=(0.6, 1.0), frontier=(0.7,), frontier_num=3, controls=False)
        kept: list[object] = []
        bundle = random_bundle(length=16, bos_id=256)
        found = [evaluate(bundle, data, judge(), options=swept, on_row=kept.append)]
        found.append(evaluate(bundle, data, judge(), options=swept, earlier=kept[1]))
        alone = replace(asked, steps=(), metrics=("brier",))
        found.append(evaluate(bundle, data, judge(), options=alone))
        beside = Data(rows[:8], features=style_features, beside=found[-1])
        found.append(evaluate(bundle, beside, judge(), options=replace(alone, steps=(1,))))
    return [[plain(each) for each in found], len(kept)]


@cases
def names_and_topics() -> object:
    blocks = ["Then Tom met Mrs. Hill and Mr. Brown", "so Anna, Tom; Otto and the Lady", "Tom", "we saw Anna and Tom"]
    weight = rarity(blocks)
    found: list[object] = [[find_names(block) for block in blocks], weight]
    found += [name_recurrence(blocks, range(a, b)) for a, b in ((1, 2), (1, 3), (2, 4))]
    return [*found, *(topic_likeness(blocks, k, weight) for k in (1, 2)), topic_likeness(["x", "Tom"], 1, weight)]


@cases
def evidence() -> object:
    rows = cut_rows(*packed(), 24)
    made = Evidence(Reader(BYTES), rows[:20], {"style": style_features}, seed=1)
    return [made.size, made.measure(rows[4:9]), made.measure_real()]


@cases
def alternatives() -> object:
    config = CausalConfig(vocab_size=257, width=16, num_blocks=1, num_heads=2, max_length=20, dropout=0.0)
    model = Alternative("ar", CausalModel(config, seed=2).eval(), temperature=0.8, batch_size=2)
    found: list[object] = [model.num_parameters]
    for bos_id in (None, 256):
        found += [
            model.draw(3, length=6, bos_id=bos_id, seed=4).tokens,
            model.continue_rows(tokens(2, 4, high=250).astype(np.int32), 5, bos_id=bos_id, copy=1, seed=3),
        ]
    found += [said(lambda s=s: make_alternative(s, BYTES, length=9)) for s in ("nowhere", "stories15m:no.bin", "x.bin")]
    scores = Mauve((0.4, 0.9, 0.5), (0, 1, 2), (10, 9), 2)
    logits = torch.zeros(1, 2, 3)
    return [
        *found,
        scores.mean,
        scores.low,
        scores.high,
        Independent.of_logits(logits).log_prob(torch.zeros(1, 2).long()),
        Noise(0).uniform(Purpose.DATA, 1),
    ]


def gguf_file(facts: dict[str, object], tensors: dict[str, torch.Tensor]) -> GgufFile:
    """A file of plain float32 tensors, as if read."""
    places, parts, at = {}, [], 0
    for name, value in tensors.items():
        places[name] = (tuple(value.shape), 0, at)
        parts.append(value.detach().numpy().astype(np.float32).tobytes())
        at += len(parts[-1])
    return GgufFile("tiny.gguf", np.frombuffer(b"".join(parts), dtype=np.uint8), facts, places)


def stirred(model: torch.nn.Module) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3 + (weight.ndim == 1))
    return model


PIECES = [
    "<pad>",
    "<eos>",
    "<bos>",
    "<unk>",
    "\n\n",
    *(f"<0x{i:02X}>" for i in range(256)),
    "the",
    "th",
    "\u2581t",
    "\u2581",
    *"thexo",
]
KINDS = [3] * 4 + [4] + [6] * 256 + [1] * 9


@cases
def judges_of_files(folder) -> object:
    pytest.importorskip("gguf", reason="the extra `judge`")
    texts, found = ["the x\n\nox é", "th e", ""], []
    encoder = SentencePieceEncoder(PIECES, [-float(i) for i in range(len(PIECES))], KINDS)
    config = GemmaConfig(
        vocab_size=len(PIECES),
        width=16,
        num_blocks=7,
        num_heads=2,
        num_kv_heads=1,
        head_width=8,
        mlp_width=24,
        window=3,
        rope_base=5e5,
    )
    model = stirred(GemmaModel(config))
    x = torch.from_numpy(tokens(2, 9, high=len(PIECES)))
    with torch.no_grad():
        found += [
            encoder(texts),
            config,
            [config.sees_all(k) for k in range(13)],
            model.trunk(x),
            model.trunk(x[:, :3]),
            model.nll(x),
        ]
    facts = {
        "general.architecture": "gemma3",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.tokens": PIECES,
        "tokenizer.ggml.scores": [-float(i) for i in range(len(PIECES))],
        "tokenizer.ggml.token_type": KINDS,
        "tokenizer.ggml.bos_token_id": 2,
    }
    sizes = {
        "embedding_length": 16,
        "block_count": 7,
        "attention.head_count": 2,
        "attention.head_count_kv": 1,
        "attention.key_length": 8,
        "feed_forward_length": 24,
        "attention.sliding_window": 3,
        "rope.freq_base": 5e5,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "context_length": 12,
    }
    file = gguf_file({**facts, **{f"gemma3.{k}": v for k, v in sizes.items()}}, dict(model.named_parameters()))
    made = gemma_judge(file, name="g")
    found += [
        is_gemma3(file),
        made.score(texts),
        dict(made.facts),
        made.max_length,
        made.bos_id,
        gemma_judge(file, name="g", bos_id=1).score(texts[:1]),
    ]
    for change in (
        {"general.architecture": "llama"},
        {"tokenizer.ggml.model": "gpt2"},
        {"tokenizer.ggml.add_space_prefix": True},
        {"gemma3.rope.scaling.type": "x"},
    ):
        found.append(is_gemma3(replace(file, metadata={**file.metadata, **change})))
    for change in ({"gemma3.block_count": 10**6}, {"gemma3.block_count": 6}, {"gemma3.embedding_length": "x"}):
        found.append(
            said(
                lambda c=change: gemma_judge(replace(file, metadata={**file.metadata, **c}), name="g").max_length
            ).partition(":")[0]
        )
    found += [said(lambda: replace(file, data=file.data[:100]).tensor("token_embd.weight"))]
    words = ["<eos>", *"abcdefgh", "ab", "cd", "\u0120"]
    llama = stirred(
        CausalModel(
            CausalConfig(
                vocab_size=len(words),
                width=16,
                num_blocks=2,
                num_heads=2,
                num_kv_heads=1,
                mlp_width=20,
                style="llama",
                dropout=0.0,
            )
        )
    )
    state = dict(llama.named_parameters())
    named = {"token_embd.weight": state["embedding.weight"], "output_norm.weight": state["norm.weight"]}
    for i in range(2):
        q, k, v = state[f"blocks.{i}.attention.qkv.weight"].split([16, 8, 8])
        gate, up = state[f"blocks.{i}.mlp.into.weight"].chunk(2)
        named |= {
            f"blk.{i}.{part}.weight": value
            for part, value in {
                "attn_q": q,
                "attn_k": k,
                "attn_v": v,
                "ffn_gate": gate,
                "ffn_up": up,
                "attn_output": state[f"blocks.{i}.attention.out.weight"],
                "ffn_down": state[f"blocks.{i}.mlp.out.weight"],
                "attn_norm": state[f"blocks.{i}.norm_attention.weight"],
                "ffn_norm": state[f"blocks.{i}.norm_mlp.weight"],
            }.items()
        }
    own = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": words,
        "tokenizer.ggml.merges": ["a b", "c d"],
        "tokenizer.ggml.eos_token_id": 0,
    }
    own |= {
        f"llama.{k}": v
        for k, v in {
            "embedding_length": 16,
            "block_count": 2,
            "attention.head_count": 2,
            "attention.head_count_kv": 1,
            "feed_forward_length": 20,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "context_length": 9,
            "rope.freq_base": 3e4,
        }.items()
    }
    plain = gguf_file(own, named)
    reader = llama_judge(plain, name="l")
    found += [
        plain.is_plain_llama,
        reader.score(["abcd efgh", "a"]),
        reader.max_length,
        reader.bos_id,
        reader.encode(["abcd e"]),
        dict(reader.facts),
        llama_judge(plain, name="l", bos_id=3).bos_id,
    ]
    with torch.no_grad():
        found += [reader.hidden(torch.tensor([[0, 9, 3, 4]]))]
    headed = gguf_file(
        {**own, "tokenizer.ggml.bos_token_id": 2}, {**named, "output.weight": named["token_embd.weight"].flip(0)}
    )
    found += [llama_judge(headed, name="l").score(["abcd"]), llama_judge(headed, name="l").bos_id]
    for change in (
        {"general.architecture": "x"},
        {"tokenizer.ggml.model": "llama"},
        {"tokenizer.ggml.pre": "x"},
        {"llama.rope.scaling.type": 1},
        {"llama.expert_count": 2},
    ):
        found.append(replace(plain, metadata={**own, **change}).is_plain_llama)
    found += [
        replace(plain, tensors={**plain.tensors, "a.bias": ((1,), 0, 0)}).is_plain_llama,
        replace(plain, tensors={**plain.tensors, "rope_freqs.weight": ((1,), 0, 0)}).is_plain_llama,
    ]
    header = (
        struct.pack("<Q", 1)
        + b"a"
        + struct.pack("<IIQ3i", 9, 5, 3, 1, -2, 3)
        + struct.pack("<Q", 1)
        + b"s"
        + struct.pack("<IQ", 8, 2)
        + b"hi"
        + struct.pack("<Q", 17)
        + b"general.alignment"
        + struct.pack("<II", 4, 8)
    )
    entry = struct.pack("<Q", 1) + b"t" + struct.pack("<IQQIQ", 2, 2, 3, 0, 0)
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 3) + header + entry
    body = head + bytes(-len(head) % 8) + np.arange(6, dtype=np.float32).tobytes()
    (folder / "f.gguf").write_bytes(body)
    (folder / "p0").write_bytes(body[:50])
    (folder / "p1").write_bytes(body[50:])
    for parts in ([folder / "f.gguf"], [folder / "p0", folder / "p1"]):
        read = read_gguf(*parts)
        found += [read.metadata, read.tensors, read.tensor("t")]
    for cut in (0, 3, 8, 30, 60, len(head) - 1):
        (folder / "c.gguf").write_bytes(body[:cut])
        found.append(said(lambda: read_gguf(folder / "c.gguf").tensors).partition("(")[0])
    return found


@cases
def requests_of_evaluations(folder) -> object:
    advice = {"sampling": {"temperature": {"1": 0.9, "4": 0.7}, "jump": "spaced"}}
    save_model(folder / "tiny", random_bundle(length=24))
    save_model(folder / "advised", replace(random_bundle(length=24, bos_id=3), facts=advice))
    save_judges(folder)
    (folder / "held.txt").write_text("<|endoftext|>".join(STORY))
    (folder / "more.txt").write_text("<|endoftext|>".join(STORY[:4]))
    asked = EvaluationRequest(
        model=str(folder / "tiny"),
        judge=str(folder / "judge"),
        held_out=str(folder / "held.txt"),
        num=3,
        steps="1,2",
        frontier="0.7,0.9",
        device="cpu",
        threads=1,
        seed=5,
    )
    found: dict[str, object] = {}
    for name, changes in {
        "whole": {
            "temperature": 0.9,
            "top_k": 50,
            "training": (str(folder / "more.txt"),),
            "second_judge": str(folder / "other"),
            "features": "judge",
        },
        "advised": {
            "model": str(folder / "advised"),
            "metrics": "diversity,accuracy",
            "matched": ("5.0",),
            "frontier": "none",
            "controls": False,
            "begin": "anywhere",
            "length": 20,
            "name": "other",
        },
    }.items():
        request = replace(asked, **changes, json=folder / f"{name}.json", samples=folder / f"{name}.jsonl")
        outcome = run_evaluation(request, console=Console(quiet=True))
        found[name] = [plain(outcome.evaluation), outcome.finished, outcome.speaks]
        again = EvaluationRequest(
            from_samples=folder / f"{name}.jsonl", judge=str(folder / "other"), held_out=None, device="cpu", threads=1
        )
        found[name + " again"] = said(lambda r=again: plain(run_evaluation(r, console=Console(quiet=True)).evaluation))
        header = Archive.open(folder / f"{name}.jsonl").header
        found[name + " plan"] = [
            _stored_plan(header).to_json(),
            _stored_options(again, Archive.open(folder / f"{name}.jsonl")),
        ]
    for wrong in (
        {"judge": None, "second_judge": "x"},
        {"second_judge": asked.judge},
        {"features": "x"},
        {"features": "judge", "judge": None},
        {"metrics": "x"},
        {"num": 1},
        {"length": 7},
        {"held_out": None},
        {"held_out": str(folder / "more.txt"), "length": 4000},
        {"model": None, "from_samples": folder / "none"},
        {"matched": ("x",)},
        {"alternative": "nowhere"},
        {"steps": "0"},
    ):
        found[str(sorted(wrong))] = said(
            lambda w=wrong: run_evaluation(replace(asked, **w), console=Console(quiet=True)).finished
        )
    return found


@cases
def what_is_allowed() -> object:
    return odd(
        "fsdfm.measure",
        Options(sampling=SamplingPlan(length=24)),
        SamplingPlan(length=24),
        Measured(1.0, 0.5, 2.0),
        Row(steps=2),
    )


@cases
def numbers_that_were_chosen() -> object:
    return chosen("fsdfm.measure")


test_what_is_computed = cases.test()
