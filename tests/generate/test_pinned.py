"""Whole texts of small networks and how they came about; see tests/pinned.py."""

from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import torch

from fsdfm.checkpoint import save_model
from fsdfm.data import Tokenizer
from fsdfm.flow import (
    RULES,
    CosineSchedule,
    Grid,
    LogitsHook,
    MixturePath,
    MixtureSource,
    PolynomialSchedule,
    Rows,
    UniformSource,
)
from fsdfm.flow.sampler import Question
from fsdfm.generate import LanguageModel, load
from fsdfm.generate.blind import consistent_time, expected_agreement, find_damage, find_recurring, leave_one_out
from fsdfm.generate.budget import BudgetTarget, EntropyCurve, fit_curve, seconds_per_call
from fsdfm.generate.cache import PromptCache
from fsdfm.generate.config import SamplerConfig, check_advice, check_options, read_advice
from fsdfm.generate.invariant import BatchInvariant
from fsdfm.generate.model import Corruption
from fsdfm.generate.request import PromptEncoder, Request, longest_text
from fsdfm.generate.result import pieces_of
from fsdfm.generate.run import GenerationRun, cut_blocks
from fsdfm.model import CausalHeadConfig
from fsdfm.noise import Noise
from fsdfm.runtime import Runtime, RuntimeConfig
from pinned import Cases, chosen, odd, refused, said
from tiny_models import BYTES, known_bundle, random_bundle, unigram_world, wants

cases = Cases("generate")


def told(generation) -> object:
    """All of a generation but the time that it took."""
    record = generation.to_json()
    del record["seconds"]
    return [record, list(generation.warnings), repr(generation.text)]


def texts(found) -> object:
    return [told(each) for each in (found if isinstance(found, list) else [found])]


@cases
def texts_from_every_source() -> object:
    found: dict[str, object] = {}
    for source in ("uniform", "mask", "mixture"):
        for bos_id in (None, 256, 3):
            lm = LanguageModel(random_bundle(source=source, bos_id=bos_id, length=16))
            name = f"{source} {bos_id}"
            found[name] = texts(lm.generate("ab", steps=3, seed=2))
            found[name + " two"] = texts(
                lm.generate(["x", "abc"], suffix="yz", length=10, num=2, steps=2, temperature=0.7, top_k=40)
            )
            found[name + " gaps"] = texts(lm.infill("one [[3]] \\[[ two[[4]]", steps=2, jump="spaced"))
            found[name + " mend"] = texts(lm.repair("a tale of old", [2, 3, 7], steps=2, keep_states=True))
            found[name + " spans"] = texts(lm.repair("a tale of old", [(0, 1), (5, 8)], steps=2, start=0.25))
            found[name + " blind"] = said(lambda lm=lm: texts(lm.repair("the cat sat on the mat", steps=2)))
    return found


@cases
def texts_of_every_rule() -> object:
    lm, found = LanguageModel(random_bundle(length=12, budgets=(1, 2, 4))), {}
    for jump in ("exact", "single", "instant", "systematic", "spaced", "sweep", "certain", "bounded", "stop"):
        found[jump] = texts(lm.generate("a", steps=3, jump=jump, temperature=0.9, final_temperature=0.5))
    for grid in ("kappa", "tail", "0,0.5,0.9,1", "0.25,0.5,1", Grid([0.0, 0.3, 1.0])):
        found[f"grid {grid if isinstance(grid, str) else 'own'}"] = texts(lm.generate(grid=grid, top_p=0.8))
    curve = EntropyCurve((5.0, 4.0, 2.5, 1.0, 0.2))
    found["fitted"] = texts(lm.generate("a", steps=4, grid="fitted", curve=curve))
    found["auto"] = texts(lm.generate("a", steps="auto", target="calls=3"))
    found["auto by quality"] = texts(lm.generate(steps="auto", target="quality=1.5", curve=curve))
    return found


@cases
def long_texts() -> object:
    found: dict[str, object] = {}
    for name, bundle in {
        "plain": random_bundle(length=12),
        "bos": random_bundle(length=12, bos_id=256),
        "chain": random_bundle(length=12, transition_rank=3),
        "causal": random_bundle(length=12, bos_id=256, posterior=CausalHeadConfig(cond_width=8), style="llama"),
        "canvas": random_bundle(length=12, canvas=8, window=8),
    }.items():
        lm = LanguageModel(bundle)
        stream = lm.stream("abc", length=30, steps=2)
        found[name] = [texts(lm.generate("abc", length=30, steps=2)), list(stream.blocks()), told(stream.result)]
        found[name + " infill"] = texts(lm.infill("a[[9]]bcd[[9]]e", steps=2, keep_states=True))
        states = lm.stream("abc", length=20, steps=2)
        found[name + " states"] = [state.to_json() for state in states]
        found[name + " blind"] = said(lambda lm=lm: texts(lm.repair("abcabcabxabcabcabcabc", steps=1)))
    return found


@cases
def known_answers() -> object:
    """Networks whose answer is known: endings, bans, damage and its time."""
    found: dict[str, object] = {}
    ending = LanguageModel(known_bundle(wants(65, 66, 67, 256, 68), length=8))
    found["ends"] = [
        texts(ending.generate(steps=2)),
        texts(ending.generate("xy", length=20, steps=1)),
        texts(ending.generate("xy", suffix="z", steps=1)),
    ]
    found["bos"] = texts(LanguageModel(known_bundle(wants(66), length=8, bos_id=66)).generate(steps=2))
    bundle, p_1 = unigram_world(length=40)
    lm = LanguageModel(bundle)
    text = "".join(
        chr(c)
        for c in torch.multinomial(p_1, 40, replacement=True, generator=torch.Generator().manual_seed(1)).tolist()
        if c < 256
    )
    spoilt = text[:5] + "#" + text[6:20] + "@%" + text[22:]
    found["blind"] = texts(lm.repair([text, spoilt], steps=2))
    found["twice"] = texts(lm.repair("the@# sea the@# sea e", steps=2, num=2))
    draft = replace(lm.encoder.damaged(spoilt, [1]), draft=True, frozen=(True, *[False] * len(spoilt)))
    for options in ({"steps": 2}, {"steps": 2, "start": 0.3}, {"steps": 3, "start": 0.95}):
        found[f"draft {options}"] = texts(lm.run([draft], **options))
    seen = []
    walk = GenerationRun(
        lm.checkpoint,
        lm.network,
        [lm.encoder.continuation("ab", None, length=9)],
        config=lm.sampler_config(steps=2),
        observe=lambda logits, where: seen.append((logits.shape[0], where.sample, where.position)),
    )
    moments = [(m.block, m.step, m.rows, m.t, m.changed, m.done) for m in walk.run()]
    found["seen"] = [seen, moments, walk.asked, walk.calls, walk.tokens(0, 0, 5), walk.tokens(0, 4, 9), walk.starts]
    return found


@cases
def progress_and_groups() -> object:
    lm, steps = LanguageModel(random_bundle(length=8)), []
    requests = [lm.encoder.continuation(p, None, length=n) for p, n in (("a", 8), ("bc", 14), ("d", 8), (None, 8))]
    answers = lm.run(requests, progress=lambda block, of: steps.append((block, of)), steps=2)
    alone = [lm.run([request], steps=2)[0].tokens for request in requests]
    return [steps, texts(answers), [a.tokens for a in answers] == alone, repr(lm)]


@cases
def corrupted() -> object:
    lm = LanguageModel(random_bundle(length=8))
    made = [lm.corrupt("a tale of old", share, seed=seed) for share, seed in ((0.5, 0), (0.01, 1), (1.0, 2))]
    found = [asdict(each) for each in made] + [each.recovered(each.original) for each in made]
    found += [
        made[0].recovered(made[0].tokens),
        Corruption("", (1, 2, 3), (1, 5, 6), (False, True, True)).recovered((0, 5, 0)),
    ]
    found += [said(lambda s=s: lm.corrupt("ab", s).damaged) for s in (0, -0.1, 1.1, 1)]
    return [*found, lm.pieces("tale")]


@cases
def requests() -> object:
    found: list[object] = []
    encoder = PromptEncoder(BYTES, None, needs_bos=False, length=10)
    other = PromptEncoder(BYTES, 7, needs_bos=True, length=10)
    word = PromptEncoder(
        Tokenizer.train(["the cat and the dog was in the house " * 20], 275), None, needs_bos=False, length=10
    )
    for make in (encoder, other, word):
        for ask in (
            lambda e: e.continuation(None, None),
            lambda e: e.continuation("ab", "c", length=7),
            lambda e: e.continuation("ab", None, begin="anywhere"),
            lambda e: e.continuation("abcdefgh", "i"),
            lambda e: e.continuation("abcdefgh", "ij"),
            lambda e: e.continuation("abcdefgh", "i", length=9),
            lambda e: e.continuation("", None),
            lambda e: e.continuation(3, None),
            lambda e: e.continuation("a<|endoftext|>", None),
            lambda e: e.continuation("a", None, length=0),
            lambda e: e.continuation(None, None, length=1),
            lambda e: e.continuation("a", None, length=e.most).frozen.count(False),
            lambda e: e.continuation("a", None, length=e.most + 1),
            lambda e: e.continuation("a", None, begin="here"),
            lambda e: e.continuation("x" * (e.most * max(map(len, e.tokenizer.pieces)) + 1), None),
            lambda e: e.gaps("the cat [[2]] and[[1]]"),
            lambda e: e.gaps("[[3]]"),
            lambda e: e.gaps("the \\[[2]] [[999999]]"),
            lambda e: e.gaps("a[[0]]"),
            lambda e: e.gaps("a[[1234567]]"),
            lambda e: e.gaps("a[[b"),
            lambda e: e.gaps("nothing"),
            lambda e: e.gaps("[[2]] dog", begin="anywhere"),
            lambda e: e.damaged("the cat"),
            lambda e: e.damaged("the cat", [0, 1]),
            lambda e: e.damaged("the cat", [0, 99]),
            lambda e: e.damaged("the cat", [-1]),
            lambda e: e.damaged("the cat", [(0, 3), (4, 5)]),
            lambda e: e.damaged("the cat", [(0, 7)]),
            lambda e: e.damaged("the cat", [(0, 8)]),
            lambda e: e.damaged("the cat", [(3, 3)]),
            lambda e: e.damaged("the cat", [(-1, 3)]),
            lambda e: e.damaged("the cat", []),
            lambda e: e.damaged("the cat", [False] * len(e.tokenizer.encode("the cat"))),
            lambda e: e.damaged("the cat", [True] * len(e.tokenizer.encode("the cat"))),
            lambda e: e.damaged("the cat", [True, False]),
            lambda e: e.damaged("the cat", "cat"),
            lambda e: e.damaged("the cat", [1.5]),
            lambda e: e.damaged("the cat", [(1, 2, 3)]),
            lambda e: e.damaged([1, 2, 3], [1]),
            lambda e: e.damaged([]),
            lambda e: e.damaged([1, "a"]),
            lambda e: e.damaged([10**6]),
            lambda e: e.damaged("the cat", [0], begin="anywhere"),
        ):
            found.append(said(lambda ask=ask, make=make: ask(make)))
        request = (
            make.continuation("ab", "c", length=7) if make is not word else make.continuation("the", None, length=7)
        )
        found += [
            request.sample_index(0),
            request.sample_index(3),
            [copy.sample_index(1) for copy in request.copies(3)],
        ]
        found += [replace(request, draft=True).sample_index(0), replace(request, blind=True).sample_index(0)]
        found += [said(lambda n=n, r=request: len(r.copies(n))) for n in (0, 1, 2.0, (1 << 20) + 1)]
    empty = Request(tokens=(0, 0), frozen=(False, False))
    found += [empty.sample_index(2), replace(empty, copy=5).sample_index(2)]
    found += [said(lambda s=s, x=x: longest_text(s, extra=x)) for s, x in ((1, 0), (1, 1), (2, 1), (10, 1), (11, 0))]
    found += [
        said(lambda a=a: cut_blocks(*a[:2], extra=a[2]))
        for a in ((1, 5, 0), (5, 5, 0), (6, 5, 0), (30, 5, 1), (30, 4, 0), (2, 1, 1), (300, 1, 0), (256, 1, 0))
    ]
    return found


@cases
def pieces() -> object:
    tokens = list("Grüße, 世界 🙂 ende".encode())
    cut = [*tokens, 0xE4, 0xB8, 0xFF, 65]
    return [pieces_of(BYTES, t) for t in (tokens, cut, tokens * 9, [], [0xF0], cut[::-1] * 8)]


@cases
def settings() -> object:
    found: list[object] = []
    for options in (
        *({"steps": s} for s in (0, 1, 8192, 8193, 2.0, "auto", "many", True)),
        *({"seed": s} for s in (-1, 0, 2**64 - 1, 2**64, 1.0)),
        *({"start": s} for s in (-0.1, 0, 0.5, 1, "0")),
        *({"grid": g} for g in ("uniform", "kapa", "0,1", "0,2", "0.5,1", 3, "0,0.5,nan,1")),
        *({"cache": c} for c in ("off", "prompt", "prompt:4", "prompt:x", "all")),
        *(
            {"target": t, "steps": "auto"}
            for t in ("quality=0.3", "calls=8", "calls=1.5", "ms=0", "speed=3", "quality")
        ),
        {"target": "calls=8"},
        {"keep_states": 1},
        {"temperature": 0},
        {"top_k": 0},
        {"top_p": 1.5},
        {"final_temperature": 0.5},
        {"jump": "sprint"},
        {"jump": "certain:bound=0.5"},
        {"jump": RULES["spaced"]},
        {"grid": "0,0.5,1", "steps": 2},
        {"grid": "0,0.5,1", "steps": 3},
        {"grid": "0.5,1", "start": 0.5},
        {"grid": Grid.uniform(2, torch.tensor([0.1, 0.2]))},
        {"grid": Grid([0.0, 0.25, 1.0])},
        {"grid": "fitted", "steps": 3},
    ):

        def of(options=options):
            config = SamplerConfig(**options)
            known = config.filter()
            return [config.to_json(), config.refresh(), config.fixed_start(), said(config.num_steps), known]

        found.append(refused(of))
    starts, curve = torch.tensor([0.0, 0.4, 0.9]).double(), EntropyCurve((5.0, 4.0, 2.5, 1.0, 0.2))
    for grid in ("uniform", "kappa", "tail", "fitted", "0,0.2,1", "0.5,0.6,1"):
        for schedule in (PolynomialSchedule(2), CosineSchedule()):
            for steps in (1, 5):
                own = {} if "," in grid else {"steps": steps}
                found.append(
                    said(
                        lambda g=grid, s=schedule, own=own: (
                            SamplerConfig(grid=g, curve=curve, **own).make_grid(starts, s).times
                        )
                    )
                )
    found += [said(lambda: SamplerConfig(grid="fitted").make_grid(starts, CosineSchedule()))]
    advice = {"steps": 2, "jump": "spaced", "temperature": {"1": 0.95, "4": 0.8, "16": 0.7}, "curve": list(curve.nats)}
    for options in (
        {},
        {"steps": 1},
        {"steps": 2},
        {"steps": 3},
        {"steps": 8},
        {"steps": 9},
        {"steps": 4000},
        {"temperature": 1.0},
        {"jump": "exact"},
        {"steps": "auto"},
        {"final_temperature": 0.5},
        {"grid": "0,0.5,1"},
    ):
        own = SamplerConfig(**options).advised(advice)
        found += [own.to_json(), own.curve, said(lambda own=own: own.budgeted(lambda: 0.01).to_json())]
    for wrong in (
        {"steps": 0},
        {"temperature": {"x": 1}},
        {"temperature": {"1": 0}},
        {"curve": [1]},
        {"jump": "no"},
        {"temperature": 3},
    ):
        found += [refused(lambda w=wrong: SamplerConfig().advised(w)), refused(lambda w=wrong: check_advice(w))]
    found += [
        said(lambda: check_advice({"step": 1})),
        said(lambda: check_advice({"temperature": {}})),
        check_advice(advice),
        SamplerConfig(steps=3).advised(None).to_json(),
    ]
    for words in (
        [],
        ["none"],
        ["steps=1", "jump=spaced", "temperature=1:0.9,8:0.85"],
        ["temperature=0.9"],
        ["curve=5,3,1"],
        ["curve=a"],
        ["steps=x"],
        ["steps"],
        ["steps=1", "steps=2"],
        ["temperature=1:x"],
        ["jump=no"],
        ["stpes=1"],
    ):
        found.append(refused(lambda w=words: read_advice(w)))
    found += [said(lambda n=n: check_options({n: 1})) for n in ("steps", "temprature", "zzz")]
    lm = LanguageModel(replace(random_bundle(length=8), facts={"sampling": advice}))
    return [*found, lm.sampler_config().to_json(), lm.sampler_config(steps="auto").to_json(), told(lm.generate("a"))]


@cases
def budgets() -> object:
    curve = EntropyCurve((5.0, 4.0, 4.5, 1.0, 0.2))
    found: list[object] = [curve.at(np.linspace(0, 1, 9)), curve.excess([0.0, 1.0]), curve.excess([0.0, 0.3, 0.6, 1.0])]
    for steps in (1, 2, 3, 8, 40, 256, 257):
        for start in (0.0, 0.3):
            plan = curve.plan(steps, start)
            found += [len(plan), np.array(plan), curve.excess(plan)]
    found += [curve.steps_for(e) for e in (10.0, 1.0, 0.3, 0.05, 0.0)] + [curve.steps_for(0.3, 0.5)]
    found += [
        said(lambda c=c: EntropyCurve(c).nats)
        for c in ((1.0, 0.0), (1.0, 0.5, 0.0), (1.0, -0.1, 0.0), (1.0, float("nan"), 0.0))
    ]
    for text in (
        "quality=0.3",
        "calls=3",
        "calls=2.5",
        "ms=20",
        "ms=1e9",
        "ms=0.001",
        "ms=-1",
        "quality=inf",
        "quality=0",
        "x=1",
    ):
        found.append(said(lambda t=text: [BudgetTarget.read(t), BudgetTarget.read(t).steps(curve, 0.004)]))
    found += [said(lambda: BudgetTarget().steps(None)), BudgetTarget().steps(curve)]
    for source in ("uniform", "mask"):
        lm = LanguageModel(random_bundle(source=source, length=12))
        found += [
            fit_curve(lm, ["a tale of old", "x", "the sea was calm"], points=points, seed=1).nats for points in (3, 5)
        ]
    return found


@cases
def blind() -> object:
    scores = torch.tensor(
        [
            [-9.0, 2.0, -12.0, 3.0, -1.0, 0.5],
            [-30.0, -40.0, -20.0, -25.0, -22.0, -21.0],
            [-11.0, -10.8, 0.1, 0.2, 0.3, 0.4],
        ]
    ).double()
    free = torch.ones(3, 6, dtype=torch.bool)
    free[0, 2] = False
    found: list[object] = [
        find_damage(scores, free, 257),
        find_damage(scores - 5, free, 50),
        find_damage(scores, free, 5),
    ]
    tokens = torch.tensor([[1, 2, 9, 1, 2, 7, 3, 3, 3, 3, 8, 1], [5, 6, 5, 7, 5, 8, 5, 6, 5, 9, 5, 5]])
    found += [find_recurring(tokens, vocab) for vocab in (10, 50, 150, 200, 400)]
    t = torch.tensor([0.0, 0.3, 0.8, 1.0]).double()
    for path in (MixturePath(UniformSource(9)), MixturePath(MixtureSource(9, mask_share=0.3), CosineSchedule())):
        found += [expected_agreement(path, t), leave_one_out(path, scores, tokens[:1, :6] % 8, kappa=0.85)]
        search = consistent_time(path, torch.tensor([10, 40, 7]))
        asked = [next(search)]
        try:
            while True:
                asked.append(
                    search.send(
                        torch.tensor([0.9, 0.4, 1.1]).double() - asked[-1] * torch.tensor([0.5, 0.0, 0.0]).double()
                    )
                )
        except StopIteration as ended:
            asked.append(ended.value)
        found += [asked]
    return [*found, said(lambda: leave_one_out(random_bundle(source="mask").path, scores, tokens[:1, :6], kappa=0.5))]


@cases
def networks() -> object:
    """One sample or several at a time, padded or not, with what was kept or read."""
    found: list[object] = []
    bundle = random_bundle(length=40, bos_id=256, posterior=None)
    runtime = Runtime(RuntimeConfig(device="cpu"))
    generator = torch.Generator().manual_seed(3)
    asked = [
        Question(
            torch.randint(257, (1, n), generator=generator),
            torch.tensor([0.1 * n / 4]).double() % 1,
            torch.tensor([0.25]).double(),
            rows,
        )
        for n, rows in (
            (9, None),
            (30, torch.tensor([0, 3, 29])),
            (32, torch.tensor([5])),
            (32, None),
            (40, torch.tensor([2, 39])),
        )
    ]
    for rows in (None, 3, 8):
        network = BatchInvariant(bundle.model, runtime, rows=rows)
        found += [[str(network.group(q)) for q in asked], network.rows, network.pads, network.samples_apart]
        for group in dict.fromkeys(network.group(q) for q in asked):
            own = [q for q in asked if network.group(q) == group]
            for q, p in zip(own, network.posteriors(own), strict=True):
                wanted = torch.arange(3) if q.rows is None else q.rows
                found.append([tile if kept is None else tile[kept] for _, tile, kept in p.marginals(wanted)])
        x_t = torch.randint(257, (4, 10), generator=torch.Generator().manual_seed(1))
        t, h = torch.linspace(0, 0.9, 4).double(), torch.full((4,), 0.5).double()
        found += [
            network.trunk(x_t, t, h),
            network.features_at(x_t, t, h, rows=torch.tensor([1, 5, 33])),
            network.features_at(x_t, t, h, rows=torch.tensor([], dtype=torch.int64)).shape,
        ]
        found += [network.logits_at(network.trunk(x_t, t, h).flatten(0, 1).repeat(4, 1))]
    found += [said(lambda: network.posteriors([replace(asked[0], x_t=asked[0].x_t.repeat(2, 1))]))]
    network = BatchInvariant(bundle.model, runtime)
    frozen = torch.zeros(4, 10, dtype=torch.bool)
    frozen[:, :4], frozen[2, 6] = True, True
    for refresh in (0, 2):
        kept = PromptCache(network, frozen.clone(), refresh=refresh)
        for call in range(4):
            changed = torch.where(frozen, x_t, (x_t + call) % 257)
            found.append(
                [
                    tile if own is None else tile[own]
                    for _, tile, own in kept.posterior(changed, t, h, rows=None).marginals(torch.tensor([4, 7, 25]))
                ]
            )
    lm = LanguageModel(bundle)
    found += [texts(lm.generate("abcdef", steps=3, cache=c)) for c in ("off", "prompt", "prompt:2")]
    return [
        *found,
        said(lambda: LanguageModel(known_bundle(wants(65), length=8)).generate("ab", steps=2, cache="prompt")),
    ]


@cases
def hooks_see_rows() -> object:
    def hook_of(lm) -> LogitsHook | None:
        walk = GenerationRun(
            lm.checkpoint,
            lm.network,
            [lm.encoder.continuation("a", None, length=6), lm.encoder.continuation("a", "b", length=6)],
            config=lm.sampler_config(steps=1),
        )
        return walk._ban(torch.arange(2))

    found: list[object] = []
    x_t = torch.zeros(2, 6).long()
    for bos_id in (None, 256, 3):
        hook = hook_of(LanguageModel(random_bundle(length=8, bos_id=bos_id)))
        where = Rows(torch.tensor([0, 1]), torch.tensor([2, 2]), x_t, torch.zeros(2), torch.ones(2))
        found.append(None if hook is None else hook(torch.zeros(2, 257), where).isinf().nonzero())
    return [*found, Noise(0).samples]


@cases
def mistakes() -> object:
    lm = LanguageModel(random_bundle(length=8))
    asks = (
        lambda: lm.generate(3),
        lambda: lm.generate([]),
        lambda: lm.generate(["a", 3]),
        lambda: lm.infill(None),
        lambda: lm.repair(["a b", "c d"], [0]),
        lambda: lm.repair(3),
        lambda: lm.generate("a", num=0),
        lambda: lm.generate("a", temprature=1),
        lambda: lm.stream(lm.encoder.continuation("a", None), length=3),
        lambda: len(lm.generate("a", num=1, steps=1)),
        lambda: len(lm.generate(["a"], steps=1)),
        lambda: len(lm.repair(["ab", "cd"], steps=1, num=2)),
        lambda: lm.generate("a", grid="fitted"),
        lambda: lm.generate("a", steps="auto"),
    )
    return [said(ask) for ask in asks]


@cases
def loaded(folder) -> object:
    save_model(folder / "tiny", random_bundle(length=16))
    found: list[object] = []
    try:
        for precision in ("float32", "bfloat16", "int8"):
            for threads in (0, 1, 2):
                lm = load(folder / "tiny", device="cpu", precision=precision, threads=threads)
                told_of = lm.runtime.config
                known = threads and [told_of.threads, torch.get_num_threads()]
                found += [
                    known,
                    told_of.device,
                    told_of.precision,
                    lm.checkpoint.model.precision,
                    len(lm.warnings) <= 1,
                ]
                if precision != "bfloat16":
                    found += [lm.generate("ab", steps=1).text]
    finally:
        torch.set_num_threads(1)
    return [*found, said(lambda: load(folder / "tiny", device="cuda", precision="int8"))]


@cases
def questions() -> object:
    """What the network hears, in which numbers: a draft, a repair whose damage it finds, a beginning."""
    lm, heard = LanguageModel(random_bundle(length=12)), list[object]()
    trunk = lm.checkpoint.model.trunk

    def listening(x_t, t, h, **options):
        heard.append([x_t, t, h, sorted(options)])
        return trunk(x_t, t, h, **options)

    lm.checkpoint.model.trunk = listening
    whole = lm.encoder.damaged("abcdefgh", [1])
    lm.run([replace(whole, draft=True, frozen=(True, *[False] * (len(whole.frozen) - 1)))], steps=2, seed=3)
    lm.repair("abcdefgh", steps=2, seed=3)
    lm.repair("abcdefgh", [(1, 4)], steps=2, seed=3)
    lm.generate("ab", length=8, steps=2, seed=3, start=0.3)
    return heard


@cases
def timed_calls() -> object:
    """What is asked of a network to learn how long a call takes."""
    asked: list[object] = []

    def posterior(x_t, t, h, *, rows):
        asked.append([x_t, t, h, rows])
        return SimpleNamespace(marginals=lambda rows: iter([asked.append(rows)]))

    for canvas, lengths in ((None, (3, 9)), (4, (3, 9))):
        checkpoint = SimpleNamespace(model=SimpleNamespace(config=SimpleNamespace(canvas=canvas)), length=6)
        lm = SimpleNamespace(
            checkpoint=checkpoint,
            runtime=SimpleNamespace(device=torch.device("cpu")),
            network=SimpleNamespace(posterior=posterior),
        )
        asked += [0 < seconds_per_call(lm, length) < 60 for length in lengths]
    return asked


@cases
def what_is_allowed() -> object:
    return odd("fsdfm.generate")


@cases
def numbers_that_were_chosen() -> object:
    return chosen("fsdfm.generate")


test_what_is_computed = cases.test()
