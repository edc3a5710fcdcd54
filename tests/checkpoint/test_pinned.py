"""What is written and read of weights; see tests/pinned.py."""

import json
from dataclasses import replace

import torch
from llama2c_files import STORIES, VOCAB_SIZE, Llama, write_vocabulary
from safetensors.torch import save_file

from fsdfm.checkpoint import load_model, save_model
from fsdfm.checkpoint.folder import _write_checksums, damage, describe_model, make_schedule, make_source, newest
from fsdfm.checkpoint.huggingface import FAMILIES, is_folder, open_folder, read_bos_id, read_tokenizer
from fsdfm.checkpoint.llama2c import (
    build_tokenizer,
    causal_over,
    convert_llama2c,
    is_llama2c,
    prune_vocabulary,
    read_vocabulary,
)
from fsdfm.checkpoint.released import open_released, preset_settings
from fsdfm.flow import CosineSchedule, MaskSource, MixturePath, MixtureSource
from fsdfm.model import CausalHeadConfig, DiT, Transformer, TransformerConfig
from huggingface_folders import SHARED, save_tokenizer
from pinned import Cases, chosen, odd, said, taken_by_name
from released_files import Released, inputs
from tiny_models import random_bundle

cases = Cases("checkpoint")


OF_THE_DAY = ("fsdfm_version", "commit", "versions")


@cases
def folders(folder) -> object:
    found: dict[str, object] = {}
    for name, bundle in {
        "plain": random_bundle(length=16),
        "mask": random_bundle(source="mask", bos_id=256, budgets=(1, 4), length=8),
        "chain": random_bundle(transition_rank=2, length=8),
        "causal": random_bundle(posterior=CausalHeadConfig(cond_width=8), length=8, style="llama"),
        "mixed": replace(
            random_bundle(source="mixture", length=8),
            path=MixturePath(MixtureSource(258, mask_share=0.25), CosineSchedule()),
        ),
    }.items():
        for dtype in (torch.float32, torch.bfloat16):
            place = save_model(folder / f"{name}-{dtype}", bundle, dtype=dtype)
            again = load_model(place)
            config = json.loads((place / "config.json").read_text())
            same = max(
                float((a - b).abs().max())
                for a, b in zip(bundle.model.state_dict().values(), again.model.state_dict().values(), strict=True)
            )
            config = {key: value for key, value in config.items() if key not in OF_THE_DAY}
            found[f"{name} {dtype}"] = [
                sorted(p.name for p in place.iterdir()),
                config,
                same == 0,
                again.length,
                again.bos_id,
                again.budgets,
                repr(again.path.source),
                repr(again.path.schedule),
                damage(place),
                (place / "model.safetensors").read_bytes(),
            ]
    base = folder / "plain-torch.float32"
    config = json.loads((base / "config.json").read_text())
    for change in (
        {"length": 0},
        {"length": 1},
        {"length": 2.5},
        {"bos_id": 257},
        {"bos_id": -1},
        {"bos_id": 3},
        {"budgets": []},
        {"budgets": [0]},
        {"budgets": [2]},
        {"source": {"name": "x"}},
        {"schedule": {"name": "polynomial", "exponent": 0.5}},
        {"format_version": 99},
    ):
        (base / "config.json").write_text(json.dumps({**config, **change}))
        _write_checksums(base)
        found[str(change)] = said(lambda: load_model(base).length)
    found["none"] = [said(lambda: load_model(folder / "no")), said(lambda: newest(folder / "no"))]
    found["specs"] = [
        [
            said(lambda m=m, s=s: repr(m(s)))
            for m, s in (
                (make_source, {"name": "mask", "vocab_size": 5}),
                (make_source, {"name": "y"}),
                (make_schedule, {"name": "cosine"}),
                (make_schedule, {"name": "x"}),
            )
        ]
    ]
    return {
        **found,
        "described": {k: v for k, v in describe_model(random_bundle(length=9)).items() if k not in OF_THE_DAY},
    }


@cases
def llamas(folder) -> object:
    found: list[object] = []
    for shared in (True, False):
        file = Llama(shared=shared).write(folder / f"{shared}.bin")
        vocabulary = write_vocabulary(folder / "tokenizer.bin")
        parts = convert_llama2c(file, vocabulary)
        found += [parts.causal.config, dict(parts.causal.named_parameters()), parts.bos_id, is_llama2c(file)]
        kept = (
            convert_llama2c(file, vocabulary, texts=STORIES[:2])
            if "texts" in convert_llama2c.__code__.co_varnames
            else None
        )
        found += [None if kept is None else [kept.causal.config.vocab_size, dict(kept.causal.named_parameters())]]
    words = read_vocabulary(vocabulary, VOCAB_SIZE)
    tokenizer = build_tokenizer(words)
    found += [
        tokenizer.encode(STORIES[1], add_special_tokens=False).ids,
        prune_vocabulary(words, STORIES[:1]),
        prune_vocabulary(words, STORIES, min_count=3),
    ]
    data = file.read_bytes()
    for cut in (0, 10, 27, 28, 400, len(data) - 1):
        (folder / "cut.bin").write_bytes(data[:cut])
        found.append(said(lambda: convert_llama2c(folder / "cut.bin", vocabulary).causal.config.width))
    return [
        *found,
        said(lambda: read_vocabulary(vocabulary, VOCAB_SIZE + 1)),
        is_llama2c(vocabulary),
        said(lambda: causal_over(file, ["a"], vocabulary)),
    ]


@cases
def released(folder) -> object:
    found: list[object] = []
    for made in (Released(), Released(step_aware=False)):
        file = made.save(folder / "r.pth")
        for kind in (None, "ema", "raw", "averaged", "trained"):

            def read(file=file, kind=kind, made=made):
                with open_released(file, weights=kind) if kind else open_released(file) as weights:
                    model = DiT(weights.config)
                    model.load_state_dict(dict(weights))
                    x_t, t, h = inputs(made.vocab_size)
                    with torch.no_grad():
                        return [weights.config, model.eval()(x_t, t, h)]

            found.append(said(read))
    return [*found, [said(lambda n=n: preset_settings(n)) for n in ("170m", "1300m", "x")]]


@cases
def families() -> object:
    found: dict[str, object] = {}
    for name, family in FAMILIES.items():
        for change in (
            {},
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            {"hidden_act": "relu"},
            {"tie_word_embeddings": True},
            {"rms_norm_eps": 1e-3, "layer_norm_epsilon": 1e-3},
            {"head_dim": 20},
            {"rope_theta": 5e5},
        ):
            config = {
                **SHARED,
                "n_embd": 48,
                "n_layer": 3,
                "n_head": 4,
                "n_positions": 64,
                "d_model": 48,
                "n_layers": 3,
                "n_heads": 4,
                "n_kv_heads": 2,
                "mlp_hidden_size": 80,
                "max_sequence_length": 64,
                **change,
            }
            read = next((value for value in vars(family).values() if callable(value)), None)
            found[f"{name} {change}"] = said(lambda r=read, c=config: r(c)) if read else None
            if not change and read:
                found[f"{name} allows"] = taken_by_name(read, config)
    return {**found, "source": repr(MaskSource(4))}


def save_as(name: str, folder, about: dict[str, object], *, shards: int = 1) -> None:
    """A random network of a family in its own layout."""
    family = FAMILIES[name]
    config = TransformerConfig.from_dict(family.settings(about))
    state = Transformer(config, seed=1).state_dict()
    stored: dict[str, torch.Tensor] = {}
    heads, groups = config.num_heads * config.head_width, config.kv_heads * config.head_width
    for ours, theirs in family.names.items():
        for i in range(config.num_blocks) if "{i}" in ours else (0,):
            if (value := state.get(ours.format(i=i))) is None:
                continue
            value = value + torch.linspace(-0.2, 0.2, value.numel()).view(value.shape)
            sizes = [heads, groups, groups] if len(theirs) == 3 else [len(value) // len(theirs)] * len(theirs)
            for part, place in zip(value.split(sizes), theirs, strict=True):
                turned = family.transposed and ours.startswith("blocks.") and value.ndim == 2
                stored[family.prefix + place.format(i=i)] = (part.t() if turned else part).contiguous()
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": name, **about}))
    if shards == 1:
        save_file(stored, folder / "model.safetensors")
        return
    places = {each: f"model-{number % shards}.safetensors" for number, each in enumerate(sorted(stored))}
    for file in set(places.values()):
        save_file({each: stored[each] for each, where in places.items() if where == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


SIZES = {
    **{"vocab_size": 300, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "max_position_embeddings": 32, "n_embd": 16, "n_layer": 2, "n_head": 4, "head_dim": 4},
    **{"n_positions": 32, "d_model": 16, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "mlp_hidden_size": 20},
    **{"max_sequence_length": 32, "bos_token_id": 7, "eos_token_id": [0, 3]},
}


@cases
def foreign_folders(folder) -> object:
    """Networks in the layout of others, whole, in part, and spoilt."""
    found: dict[str, object] = {}
    x = torch.arange(10).view(2, 5) * 13
    for number, name in enumerate(FAMILIES):
        place = folder / name
        save_as(name, place, {**SIZES, "tie_word_embeddings": bool(number % 2)}, shards=1 + number % 3)
        save_tokenizer(place, normaliser=bool(number % 2))
        weights = open_folder(place, conditioning="step" if number == 2 else "none")
        with weights, torch.no_grad():
            whole = weights.build(seed=4)
            own: list[object] = [is_folder(place), weights.config, len(weights), sorted(weights)[:3]]
            one = torch.full((2,), 0.5).double()
            own += [whole(x, one, one), sorted(weights.new_tensors(4)), weights.new_tensors(4)]
            weights.keep_tokens(280, mask=True)
            own += [weights["embedding.weight"], weights.build(precision="bfloat16").embedding.weight]
            own += [said(lambda w=weights, n=n: w.keep_tokens(n)) for n in (0, 1, 300)]
            own += [str(said(lambda w=weights: w.keep_tokens(301))).replace(str(folder), "")]
        tokenizer = read_tokenizer(place)
        own += [tokenizer.eos_id, tokenizer.vocab_size, tokenizer.encode("a little dog"), read_bos_id(place, tokenizer)]
        found[name] = own
    place, words = folder / "llama", lambda ask: str(said(ask)).replace(str(folder), "")
    for notes in (
        {"bos_token": "<|pad|>", "eos_token": {"content": "<|pad|>"}},
        {"bos_token": {"content": "dog"}, "eos_token": None},
        {"bos_token": 3},
    ):
        (place / "tokenizer_config.json").write_text(json.dumps(notes))
        found[str(notes)] = words(lambda: [read_tokenizer(place).eos_id, read_bos_id(place, read_tokenizer(place))])
    config = json.loads((place / "config.json").read_text())
    for change in (
        {"bos_token_id": 10**6, "eos_token_id": 1},
        {"bos_token_id": -1, "eos_token_id": 0},
        {"bos_token_id": "x"},
        {"model_type": "bert"},
        {"model_type": 3},
        {"hidden_size": 20},
        {"num_hidden_layers": 1},
        {"num_hidden_layers": 3},
        {"attention_bias": True},
    ):
        (place / "config.json").write_text(json.dumps({**config, **change}))
        (place / "tokenizer_config.json").unlink(missing_ok=True)
        found[str(change)] = [
            is_folder(place),
            words(lambda: [len(open_folder(place)), open_folder(place)["blocks.0.attention.out.weight"].shape]),
            words(lambda: [read_tokenizer(place).eos_id, read_bos_id(place, read_tokenizer(place))]),
        ]
    for text in ("[]", "{no", json.dumps({k: v for k, v in config.items() if k != "hidden_size"})):
        (place / "config.json").write_text(text)
        found[text[:9]] = [is_folder(place), words(lambda: open_folder(place))]
    place, index = folder / "qwen2", folder / "qwen2" / "model.safetensors.index.json"
    assert index.is_file()
    for places in ({}, [], {"a": 3}, {"model.norm.weight": "../x"}, {"model.norm.weight": "gone.safetensors"}):
        index.write_text(json.dumps({"weight_map": places}))
        found[f"index {places}"] = words(lambda: open_folder(place)["norm.weight"])
    return found


@cases
def what_is_allowed() -> object:
    return odd("fsdfm.checkpoint")


@cases
def numbers_that_were_chosen() -> object:
    return chosen("fsdfm.checkpoint")


test_what_is_computed = cases.test()
