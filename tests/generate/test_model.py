import itertools
from dataclasses import replace

import pytest
import torch

import fsdfm
import fsdfm.peers  # noqa: F401  (gives their rules their names)
from fsdfm.checkpoint import save_model
from fsdfm.flow import RULES, Grid, Independent, Jump, MixturePath, PolynomialSchedule, sample
from fsdfm.generate import LanguageModel, SamplerConfig
from fsdfm.generate.invariant import BatchInvariant
from fsdfm.generate.run import GenerationRun, cut_blocks
from fsdfm.noise import Noise
from fsdfm.runtime import Runtime, RuntimeConfig
from tiny_models import BYTES, SOURCES, known_bundle, random_bundle, wants

PROMPTS = ["a", "two words", "a longer prompt than that", "é"]


@pytest.fixture(scope="module")
def lm():
    return LanguageModel(random_bundle())


@pytest.mark.parametrize("jump", [name for name, rule in RULES.items() if isinstance(rule, Jump)])
def test_the_batch_changes_no_token(lm, jump):
    together = lm.generate(PROMPTS, num=3, steps=4, jump=jump)
    alone = [one for prompt in PROMPTS for one in lm.generate(prompt, num=3, steps=4, jump=jump)]
    last = lm.run([lm.encoder.continuation("é", None).copies(3)[2]], steps=4, jump=jump)[0]
    assert [one.tokens for one in together] == [one.tokens for one in alone]
    assert last.tokens == together[-1].tokens
    assert len({one.tokens for one in together}) == 12


@pytest.mark.parametrize("jump", ["llada", "llada-random", "dream", "dream-entropy"])
def test_the_batch_changes_no_token_where_masks_are_revealed(jump):
    masked = LanguageModel(random_bundle(source="mask"))
    together = masked.generate(PROMPTS, num=2, steps=4, jump=jump)
    alone = [one for prompt in PROMPTS for one in masked.generate(prompt, num=2, steps=4, jump=jump)]
    assert [one.tokens for one in together] == [one.tokens for one in alone]
    assert all(masked.checkpoint.path.source.mask_token not in one.tokens for one in together)


@pytest.mark.parametrize("jump", ["exact", "spaced", "single"])
def test_the_batch_changes_no_token_of_a_crf(jump):
    linked = LanguageModel(random_bundle(transition_rank=4, bos_id=0))
    together = linked.generate(PROMPTS, num=2, steps=4, jump=jump, temperature=0.9)
    alone = [one for prompt in PROMPTS for one in linked.generate(prompt, num=2, steps=4, jump=jump, temperature=0.9)]
    assert [one.tokens for one in together] == [one.tokens for one in alone]
    assert len({one.tokens for one in together}) == 8
    for prompt, one in zip(PROMPTS, together[::2], strict=True):
        assert one.text.startswith(prompt)
    repaired = linked.repair("some daamged text", steps=2)
    assert len(repaired.tokens) == len("some daamged text")


def test_transitions_survive_the_disk(tmp_path):
    bundle = random_bundle(transition_rank=4)
    save_model(tmp_path / "linked", bundle)
    again = fsdfm.load(tmp_path / "linked")
    assert torch.equal(again.checkpoint.model.joint.right, bundle.model.joint.right)
    assert again.generate("a", steps=3).tokens == LanguageModel(bundle).generate("a", steps=3).tokens
    for precision in ("bfloat16", "int8"):
        narrow = fsdfm.load(tmp_path / "linked", precision=precision)
        assert narrow.generate("a", steps=3).text.startswith("a")


def test_a_model_advises_how_to_sample_it():
    bundle = random_bundle()
    advised = LanguageModel(
        replace(bundle, facts={"sampling": {"jump": "spaced", "temperature": {"1": 0.9, "8": 0.5}}})
    )
    plain = LanguageModel(bundle)
    for steps, temperature in ((1, 0.9), (2, 0.9), (4, 0.5), (64, 0.5)):
        used = advised.sampler_config(steps=steps)
        assert (used.temperature, used.jump) == (temperature, "spaced")
    told = {"steps": 8, "temperature": 0.5, "jump": "spaced"}
    assert advised.generate("a", steps=8).tokens == plain.generate("a", **told).tokens
    assert advised.generate("a", steps=8).tokens != plain.generate("a", steps=8).tokens
    assert advised.generate("a", steps=8, temperature=1.0, jump="exact").tokens == plain.generate("a", steps=8).tokens
    assert advised.sampler_config(final_temperature=0.3).temperature is None
    one = SamplerConfig().advised({"steps": 1, "temperature": {"1": 0.7, "8": 0.9}})
    assert (one.steps, one.temperature) == (1, 0.7)
    assert SamplerConfig(steps=8).advised({"steps": 1, "temperature": {"1": 0.7, "8": 0.9}}).temperature == 0.9
    for bad in ({"temperature": 3}, {"temperature": {"8": "hot"}}, {"jump": "high"}, {"temperature": {"0": 1.0}}):
        broken = LanguageModel(replace(bundle, facts={"sampling": bad}))
        with pytest.raises(ValueError, match="the model's advice on sampling cannot be used"):
            broken.generate("a", steps=2)


def test_ragged_requests_come_back_in_their_order(lm):
    asked = [lm.encoder.gaps("a[[3]]b"), lm.encoder.continuation("ab", None), lm.encoder.gaps("xyz[[9]]")]
    together = lm.run(asked, steps=3)
    assert [one.tokens for one in together] == [lm.run([each], steps=3)[0].tokens for each in asked]


@pytest.mark.parametrize("budgets", [None, (1, 2, 4)])
def test_the_arithmetic_of_a_row_does_not_know_the_batch(budgets):
    network = BatchInvariant(random_bundle(budgets=budgets).model, Runtime(RuntimeConfig(device="cpu")))
    x_t = torch.randint(0, 257, (5, 21), generator=torch.Generator().manual_seed(0))
    t, h = torch.linspace(0, 0.9, 5, dtype=torch.float64), torch.full((5,), 0.25, dtype=torch.float64)
    features = network.trunk(x_t, t, h)
    for row in range(5):
        assert torch.equal(network.trunk(x_t[row : row + 1], t[row : row + 1], h[row : row + 1])[0], features[row])
    rows = torch.arange(0, 105, 2)  # some of every sample
    together = torch.cat([tile for _, tile, _ in Independent.of_features(features, network).marginals(rows)])
    for row in range(5):
        own = rows[rows // 21 == row] - 21 * row
        alone = [tile for _, tile, _ in Independent.of_features(features[row : row + 1], network).marginals(own)]
        assert torch.equal(torch.cat(alone), together[rows // 21 == row])


def test_the_features_of_a_sample_do_not_know_the_batch():
    model = random_bundle().model
    network = BatchInvariant(model, Runtime(RuntimeConfig(device="cpu")))
    x_t = torch.randint(0, 257, (3, 21), generator=torch.Generator().manual_seed(0))
    t, h = torch.linspace(0, 0.9, 3, dtype=torch.float64), torch.full((3,), 0.25, dtype=torch.float64)
    rows = torch.tensor([0, 5, 20, 45, 62])  # none of the second sample
    together = network.features_at(x_t, t, h, rows=rows)
    torch.testing.assert_close(together, network.trunk(x_t, t, h).flatten(0, 1)[rows])
    alone = network.features_at(x_t[2:], t[2:], h[2:], rows=rows[3:] - 42)
    assert torch.equal(together[3:], alone)


def test_a_sample_with_nothing_to_draw_is_not_computed(monkeypatch):
    bundle = random_bundle()
    network, path = BatchInvariant(bundle.model, Runtime(RuntimeConfig(device="cpu"))), bundle.path
    noise, calls = Noise(0, range(3)), []
    x_0 = path.source.sample(noise, 5)
    plain = sample(bundle.model, path, x_0, grid=Grid.uniform(20), noise=noise)
    real = bundle.model.features_at
    monkeypatch.setattr(bundle.model, "features_at", lambda *a, rows: (calls.append(len(rows)), real(*a, rows=rows))[1])
    assert torch.equal(sample(network, path, x_0, grid=Grid.uniform(20), noise=noise), plain)
    assert min(calls) > 0
    assert len(calls) < 45  # of 60


@pytest.mark.parametrize("precision", ["int8", "bfloat16"])
def test_rounded_models_write_text_that_does_not_depend_on_the_batch(tmp_path, precision):
    folder = save_model(tmp_path / "model", random_bundle())
    lm = fsdfm.load(folder, precision=precision)
    assert lm.checkpoint.model.precision == precision
    assert not lm.runtime.bfloat16  # nobody else rounds
    together = lm.generate(PROMPTS, num=2, steps=4)
    alone = [one for prompt in PROMPTS for one in lm.generate(prompt, num=2, steps=4)]
    assert [one.tokens for one in together] == [one.tokens for one in alone]
    with pytest.raises(ValueError, match="on a GPU use bfloat16"):
        fsdfm.load(folder, precision="int8", device="cuda")


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("bos_id", [None, 256, 3])
def test_what_is_given_stands_and_no_mask_is_left(source, bos_id):
    lm = LanguageModel(random_bundle(source=source, bos_id=bos_id))
    result = lm.generate("Once", suffix="end.", steps=3, keep_states=True)
    assert result.text.startswith("Once")
    assert result.text.endswith("end.")
    assert len(result.tokens) == 31
    assert max(result.tokens) < 256  # no mask, no end of a document, no beginning of one
    assert "".join(result.pieces) == result.text
    filled = lm.infill("ab[[4]]cd[[1]]e", steps=3)
    assert [filled.tokens[i] for i in (0, 1, 6, 7, 9)] == [*b"abcde"]
    assert all((change == 0) == fixed for change, fixed in zip(filled.last_changed, filled.given, strict=True))


def test_states_tell_how_the_text_came_about(lm):
    result = lm.generate("ab", steps=5, keep_states=True)
    assert [state.step for state in result.states] == [0, 1, 2, 3, 4, 5]
    last = [0] * len(result.states[0].tokens)
    for before, after in zip(result.states, result.states[1:], strict=False):
        assert after.changed == tuple(a != b for a, b in zip(before.tokens, after.tokens, strict=True))
        assert result.changes[after.step - 1] == sum(after.changed)
        last = [after.step if moved else old for moved, old in zip(after.changed, last, strict=True)]
    size = len(result.tokens)
    assert tuple(last[:size]) == result.last_changed
    assert result.states[-1].tokens[:size] == result.tokens
    assert result.states[-1].t == 1
    record = result.to_json()
    assert record["states"][5]["text"] == result.states[5].text
    assert "states" not in lm.generate("ab", steps=2).to_json()
    assert all(type(number) is int for number in result.changes)  # a count in JSON is 3, not 3.0


def test_a_stream_is_the_same_text(lm):
    stream = lm.stream("ab", steps=3)
    texts = [state.text for state in stream]
    whole = lm.generate("ab", steps=3, keep_states=True)
    assert texts == [state.text for state in whole.states]
    assert stream.result.tokens == whole.tokens
    filled = lm.stream(lm.encoder.gaps("x[[5]]"), steps=2).result
    assert filled.tokens == lm.infill("x[[5]]", steps=2).tokens


@pytest.mark.parametrize(
    ("exponent", "start", "expected"), [(1, None, 0.25), (2, None, 0.5), (1, 0.0, 0), (1, 0.6, 0.6)]
)
def test_the_model_is_told_the_start_and_h(exponent, start, expected):
    bundle = known_bundle(wants(65), path=MixturePath(SOURCES["uniform"], PolynomialSchedule(exponent)))
    result = LanguageModel(bundle).infill("abc[[9]]", steps=4, start=start)  # 3 of 12 tokens are known
    h = (1 - expected) / 4
    assert [t for t, _ in bundle.model.told] == pytest.approx([expected + k * h for k in range(4)])
    assert [size for _, size in bundle.model.told] == pytest.approx([h] * 4)
    assert result.start == pytest.approx(expected)
    assert result.calls == 4


@pytest.mark.parametrize("given", ["a", "abc", "abcdefgh"])
@pytest.mark.parametrize("steps", [1, 4, 8])
def test_a_trained_budget_is_no_cause_for_a_warning_however_much_is_given(steps, given):
    bundle = replace(known_bundle(wants(65)), budgets=(1, 2, 4, 8))
    free = 12 - len(given)
    result = LanguageModel(bundle).infill(f"{given}[[{free}]]", steps=steps)
    assert result.warnings == ()
    assert [size for _, size in bundle.model.told] == pytest.approx([free / 12 / steps] * steps)


@pytest.mark.parametrize("name", ["fewstep", "parent"])
def test_ordinary_use_of_what_ships_never_warns(name):
    lm = fsdfm.load(name, threads=1)
    made = [lm.generate("Once upon a time there was a", length=24), lm.infill("The dog [[6]] because it was [[2]].")]
    made += [lm.repair("The cat zat on teh mat.", [(8, 11)], steps=8), lm.generate(length=16, suffix="The end.")]
    assert [each.warnings for each in made] == [()] * 4


def test_nothing_given_starts_at_zero_and_damage_where_it_is_known():
    bundle = known_bundle(wants(65))
    assert LanguageModel(bundle).generate(steps=2).start == 0
    assert LanguageModel(bundle).repair("0123456789", [1, 2, 3], steps=2).start == pytest.approx(0.7)


def test_repair_says_what_it_replaced():
    lm = LanguageModel(known_bundle(wants(*([65] * 64))))
    result = lm.repair("xAxA", [0, 1, 2, 3], steps=2)
    assert (result.text, result.replaced, result.marked) == ("AAAA", (True, False, True, False), (True,) * 4)
    assert lm.repair("xAxA", [0], steps=2).text == "AAxA"


def test_bos_stands_in_no_text_where_another_token_ends_it():
    lm = LanguageModel(known_bundle(wants(65), length=16, bos_id=65))  # the model wants its BOS everywhere
    found = lm.generate(num=2, steps=2)
    assert all(65 not in text.tokens for text in found)
    assert lm.checkpoint.tokenizer.eos_id != 65


def test_a_text_ends_at_its_end():
    lm = LanguageModel(known_bundle(wants(256, *b"abc", 256), length=16))
    result = lm.generate(steps=2)
    assert (result.text, result.finished, result.calls) == ("abc", True, 2)
    assert len(result.given) == len(result.pieces) == len(result.last_changed) == 3
    long = lm.generate(steps=2, length=32)
    assert long.calls == 2  # no further block for a text that has ended
    assert "3 overlapping blocks" in long.warnings[0]
    assert not lm.infill("a[[4]]", steps=2).finished
    assert 256 not in lm.infill("a[[4]]", steps=2).tokens


@pytest.mark.parametrize("bos_id", [None, 3])
def test_long_texts_are_written_in_blocks(bos_id):
    lm = LanguageModel(random_bundle(length=12, bos_id=bos_id))
    result = lm.generate("abc", suffix="z", length=40, steps=2, keep_states=True)
    assert "more than the 12 this model was trained on" in result.warnings[0]
    assert result.blocks == len(cut_blocks(40, 12, extra=int(bos_id is not None)))
    assert result.calls == 2 * result.blocks
    assert len(result.tokens) == 39
    assert result.text.startswith("abc")
    for before, after in zip(result.states, result.states[1:], strict=False):
        if after.block > before.block:  # what is decided stays
            assert after.tokens[: len(before.tokens)] == before.tokens


@pytest.mark.parametrize("extra", [0, 1])
@pytest.mark.parametrize("size", [2, 3, 12, 13])
@pytest.mark.parametrize("length", [1, 2, 11, 12, 13, 25, 100])
def test_blocks_cover_every_position_and_overlap_by_half(length, size, extra):
    blocks = cut_blocks(length, size, extra=extra)
    assert sorted({place for block in blocks for place in block}) == list(range(length))
    assert all(len(block) <= size - extra for block in blocks[1:])
    for before, after in itertools.pairwise(blocks):
        assert before.stop - after.start >= (size - extra) // 2


def test_step_sizes_out_of_training_warn_and_work():
    lm = LanguageModel(random_bundle(budgets=(1, 2, 4, 8)))
    assert not lm.generate(steps=8).warnings
    assert not lm.infill("abcd[[4]]", steps=4).warnings  # half is known: h = 1/8
    for steps, start in ((6, None), (20, None), (8, 0.3)):
        result = lm.generate(steps=steps, start=start)
        assert result.calls == steps
        assert "this model was trained for 1/1, 1/2, 1/4, 1/8" in result.warnings[0]


def test_grids(lm):
    starts = torch.tensor([0.0, 0.5])
    square = PolynomialSchedule(2)
    assert SamplerConfig(steps=2).make_grid(starts, square).times.tolist() == [[0, 0.5, 1], [0.5, 0.75, 1]]
    assert SamplerConfig(steps=2, grid="kappa").make_grid(starts[:1], square).times[0, 1] == pytest.approx(0.5**0.5)
    assert SamplerConfig(grid="0,0.8,1").make_grid(starts, square).times.tolist() == [[0, 0.8, 1], [0.5, 0.9, 1]]
    assert lm.generate(grid=Grid([0.25, 0.5, 1.0])).start == 0.25
    assert lm.generate(grid="0,0.8,1").calls == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps is 0; allowed are whole numbers 1 <= steps <= 8192"),
        ({"steps": 10**6}, "steps is 1000000; allowed"),
        ({"start": 1.0}, "start is 1.0"),
        ({"jump": "exakt"}, "allowed are exact, single"),
        ({"grid": "cosine"}, "grid is 'cosine'; allowed are uniform, kappa, tail, geometric, fitted, or times"),
        ({"grid": "0,2"}, "end at exactly 1.0"),
        ({"grid": "0,1", "steps": 3}, "leave steps out"),
        ({"grid": "0.5,1", "start": 0.1}, "leave one of them out"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_bad_settings(lm, options, message):
    with pytest.raises(ValueError, match=message):
        lm.generate(**options)


def test_too_long_a_text_is_refused():
    lm = LanguageModel(random_bundle(length=4))
    with pytest.raises(ValueError, match="at most 514 are possible"):
        lm.generate(length=10_000)


def test_corruption_chooses_places_and_tokens_independently(lm):
    """The tokens know nothing of why their places were chosen: half are of the vocabulary's upper half."""
    text = "abcdefghij" * 30
    corruption = lm.corrupt(text, 0.1, seed=1)
    put = [token for token, damaged in zip(corruption.tokens, corruption.damaged, strict=True) if damaged]
    assert len(put) == 30
    assert 8 <= sum(token > 128 for token in put) <= 22


def test_there_may_be_room_for_a_single_token(lm):
    request = lm.encoder.continuation("abc", "de", length=7)  # with the one that begins the document
    assert request.frozen.count(False) == 1
    with pytest.raises(ValueError, match="leaves no room in a length of 6"):
        lm.encoder.continuation("abc", "de", length=6)


def test_who_looks_on_is_told_the_places_in_the_text():
    """Of later blocks, too, which begin with a token that is no part of the text."""
    lm = LanguageModel(random_bundle(length=16, bos_id=256))
    request = lm.encoder.continuation("ab", None, length=40)
    seen: list[tuple[int, int]] = []
    run = GenerationRun(
        lm.checkpoint,
        lm.network,
        [request],
        config=lm.sampler_config(steps=1),
        observe=lambda logits, where: seen.extend((len(logits), place) for place in where.position.tolist()),
    )
    for _ in run.run():
        pass
    assert len(run.blocks) > 2
    places = [place for _, place in seen]
    assert places == [place for place, fixed in enumerate(request.frozen) if not fixed][: len(places)]
    assert max(places) > 16


def test_a_draft_is_read_at_the_finest_step_or_at_the_models_own():
    """h of the calls that find a draft's time: that of a plain posterior, and never beyond t = 1."""
    for budgets, finest in ((None, 2.0**-10), ((1, 4), 0.25)):
        bundle = known_bundle(lambda x_t, t: torch.zeros(*x_t.shape, 257), budgets=budgets)
        lm = LanguageModel(bundle)
        draft = replace(lm.encoder.damaged("some words that may be wrong"), blind=False, draft=True)
        lm.run([draft], steps=1)
        told = bundle.model.told[:-1]
        assert len(told) > 3
        assert all(h == min(finest, 1 - t) for t, h in told)


def test_corruption_and_recovery(lm):
    text = "a text of some length"
    corruption = lm.corrupt(text, 0.5, seed=4)
    assert sum(corruption.damaged) == round(len(text) / 2)
    assert sum(lm.corrupt("ten tokens", 0.28).damaged) == 3  # of 2.8: rounded, not cut
    wrong = [a != b for a, b in zip(corruption.tokens, BYTES.encode(text), strict=True)]
    assert tuple(wrong) == corruption.damaged
    assert corruption.recovered(BYTES.encode(text)) == 1
    assert corruption.recovered(corruption.tokens) == 0
    with pytest.raises(ValueError, match="share is 0"):
        lm.corrupt(text, 0.0)


def test_load(tmp_path):
    bundle = random_bundle()
    save_model(tmp_path / "model", bundle)
    loaded = fsdfm.load(tmp_path / "model", device="cpu")
    assert loaded.generate("ab", steps=2).tokens == LanguageModel(bundle).generate("ab", steps=2).tokens
    assert loaded.pieces("ab") == ("a", "b")
    with pytest.raises(ValueError, match="is not a folder"):
        fsdfm.load(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no checkpoint"):
        fsdfm.load(tmp_path / "empty")
    (tmp_path / "model" / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="tokenizer.json is missing"):
        fsdfm.load(tmp_path / "model")


def test_spoilt_weights_are_refused():
    bundle = random_bundle()
    with torch.no_grad():
        bundle.model.blocks[1].mlp.out.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match="blocks.1.mlp.out.weight hold NaN"):
        LanguageModel(bundle)


def test_a_notebook_shows_the_timeline_with_the_text_escaped():
    hostile = b"<script>alert(1)</script>"
    assert fsdfm.load  # says how a notebook shows texts
    text = LanguageModel(known_bundle(wants(0, *hostile), length=1 + len(hostile))).generate(steps=2)
    assert text.text == hostile.decode()
    html = text._repr_html_()
    assert html.count("<figure") == html.count("<style>") == 1
    assert "<script" not in html
    assert "&lt;" in html


def test_every_damaged_token_is_another(lm):
    """The replacement is uniform over the other tokens: over thousands none is the one that stood there."""
    text = "abcdefghij" * 10
    for seed in range(40):
        corruption = lm.corrupt(text, 1.0, seed=seed)
        assert all(a != b for a, b in zip(corruption.tokens, BYTES.encode(text), strict=True))


def test_every_block_has_noise_of_its_own(lm):
    request = lm.encoder.continuation("ab", None, length=8)
    numbers = {copy.sample_index(block) for copy in request.copies(3) for block in range(4)}
    assert len(numbers) == 12


def test_changes_are_counted_over_all_blocks():
    lm = LanguageModel(random_bundle(length=12))
    result = lm.generate("abc", length=40, steps=2, keep_states=True)
    assert result.blocks > 2
    assert sum(result.changes) == sum(sum(state.changed) for state in result.states)


def test_states_of_a_mask_model_show_their_masks():
    result = LanguageModel(random_bundle(source="mask", length=12)).generate("ab", steps=2, keep_states=True)
    first, last = result.states[0], result.states[-1]
    assert first.text == "ab" + "░" * (len(first.tokens) - 2)
    assert "░" not in last.text
    assert last.text == result.text
    assert [state["text"] for state in result.to_json()["states"]] == [state.text for state in result.states]
