"""What is written and read of weights; see tests/pinned.py."""

import json
from dataclasses import replace

import torch
from llama2c_files import STORIES, VOCAB_SIZE, Llama, write_vocabulary

from fsdfm.checkpoint import load_model, save_model
from fsdfm.checkpoint.folder import _write_checksums, damage, describe_model, make_schedule, make_source, newest
from fsdfm.checkpoint.huggingface import FAMILIES
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
from fsdfm.model import CausalHeadConfig, DiT
from huggingface_folders import SHARED
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


@cases
def what_is_allowed() -> object:
    return odd("fsdfm.checkpoint")


@cases
def numbers_that_were_chosen() -> object:
    return chosen("fsdfm.checkpoint")


test_what_is_computed = cases.test()
