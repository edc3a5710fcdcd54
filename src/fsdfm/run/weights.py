"""Where the weights of a run come from: fresh, a parent, an autoregressive model; and where they go to be shared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from fsdfm import data, flow
from fsdfm.checkpoint import Checkpoint, causal_over, convert_llama2c, load_model, save_model
from fsdfm.config import DataConfig, ModelSection, Recipe
from fsdfm.generate import LanguageModel, check_advice, fit_curve
from fsdfm.learn import AutoregressiveTeacher, GeneralisedKL, NextTokenConfig, Objective
from fsdfm.model import (
    CausalHead,
    CausalHeadConfig,
    CausalModel,
    CRFConfig,
    DiT,
    ModelConfig,
    Network,
    NetworkConfig,
    Transformer,
    build_network,
    find_architecture,
)
from fsdfm.model.layers import LARGEST_FACTOR, RotaryScaling
from fsdfm.run.build import make_objective, make_path
from fsdfm.run.corpora import corpus_folder, prepare_corpus

__all__ = [
    "autoregressive_teacher",
    "check",
    "export",
    "frozen_parent",
    "import_llama2c",
    "is_step_aware",
    "model_config",
    "require_files",
    "start",
]

_CURVE_TEXTS = 64  # documents that an entropy curve is fitted on
_SIZES = ("width", "num_blocks", "num_heads", "num_kv_heads", "mlp_width", "cond_width", "style")


def check(recipe: Recipe) -> None:
    """Raise for what can be told without text and weights, before hours are spent on making tokens."""
    section = recipe.model
    if isinstance(recipe.objective, NextTokenConfig):
        raise ValueError(
            f'model.architecture is "{section.architecture}" and objective.kind "{recipe.objective.kind}"; '
            '"causal" and "next-token" belong together, and this needs a denoiser'
        )
    if section.architecture != "dit":
        _check_own(recipe)
        return
    chosen = [name for name in ("preset", "parent", "llama2c") if getattr(section, name) is not None]
    if len(chosen) != 1:
        found = " and ".join(f"model.{name}" for name in chosen) or "none of them"
        raise ValueError(f"a model starts from model.preset, model.parent or model.llama2c; the recipe has {found}")
    sizes = [name for name in _SIZES if getattr(section, name) is not None]
    if section.preset is None and sizes:
        raise ValueError(f"model.{sizes[0]} is set, but model.{chosen[0]} decides it; leave it out")
    if section.preset is not None:
        model_config(recipe, vocab_size=2)
        if recipe.data.pairs is not None or recipe.data.step_pairs:
            raise ValueError("data.pairs are made by a parent; name it as model.parent in place of model.preset")
    _check_llama2c(section)
    if not 0 <= (section.open_steps or 0) <= recipe.train.steps:
        raise ValueError(
            f"model.open_steps is {section.open_steps}; allowed are 0 to train.steps = {recipe.train.steps}, or the "
            "attention would never be open"
        )
    objective = make_objective(recipe.objective, make_path(recipe.flow, num_tokens=2))
    if section.transition_rank is not None and section.transition_rank < 0:
        raise ValueError(
            f"model.transition_rank is {section.transition_rank}; allowed are whole numbers >= 0, 64 for example"
        )
    if section.transition_rank or section.causal_blocks:
        _check_joint(objective)


def _check_own(recipe: Recipe) -> None:
    """Raise for what fresh weights of a registered network have no use for, and for keys that it does not know."""
    section = recipe.model
    for f in fields(section):
        if f.name not in ("architecture", "network") and getattr(section, f.name) != f.default:
            raise ValueError(
                f'model.{f.name} is not used by model.architecture = "{section.architecture}"; remove it, or write '
                "what the network knows into [model.network]"
            )
    if recipe.data.pairs is not None or recipe.data.step_pairs:
        raise ValueError("data.pairs are made by a parent; name it as model.parent in place of model.architecture")
    config = _own_config(section, vocab_size=2)
    if is_step_aware(recipe) and not getattr(config, "is_step_aware", False):
        raise ValueError(
            f'objective.kind "{recipe.objective.kind}" trains several step sizes, and model.architecture = '
            f'"{section.architecture}" is told none; take an objective of one, or give its config `is_step_aware`'
        )


def _own_config(section: ModelSection, vocab_size: int) -> NetworkConfig:
    """The config of a registered network, of the keys in [model.network]."""
    try:
        return find_architecture(section.architecture).read({**(section.network or {}), "vocab_size": vocab_size})
    except (TypeError, KeyError) as error:
        raise ValueError(
            f'model.network is not what model.architecture = "{section.architecture}" takes: {error}'
        ) from (error)


def _check_llama2c(section: ModelSection) -> None:
    """Raise for keys of a llama2.c start where there is none; a causal head's start has a tokenizer, too."""
    unused = ["min_count"] if section.min_count is not None else []
    if section.llama2c_tokenizer is not None and section.causal_start is None:
        unused.insert(0, "llama2c_tokenizer")
    if section.llama2c is None and unused:
        chosen = "preset" if section.preset is not None else "parent"
        raise ValueError(f"model.{unused[0]} is not used by model.{chosen}; remove it, or start from model.llama2c")


def is_step_aware(recipe: Recipe) -> bool:
    """Must the network be told its step size?"""
    objective = make_objective(recipe.objective, make_path(recipe.flow, num_tokens=2))
    return len(objective.step_sizes) > 1


def _network_of(recipe: Recipe) -> dict[str, Any]:
    """Fields of the network's config that the objective decides: what it is told of the time, what its outputs mean.

    Objectives of p_{1|t} decide nothing: a network trained with one of them keeps what it has.
    """
    objective = make_objective(recipe.objective, make_path(recipe.flow, num_tokens=2))
    return dict(getattr(objective, "network", {}))


def frozen_parent(recipe: Recipe, path: flow.MixturePath) -> Network | None:
    """The network of model.parent, frozen, where the objective asks it as its teacher."""
    objective = make_objective(recipe.objective, path)
    if objective.teacher is None or objective.teacher.network != "parent":
        return None
    if recipe.model.parent is None:
        raise ValueError(
            f'objective.kind "{recipe.objective.kind}" learns from the parent; name it as model.parent, trained with '
            "the objective that it distils"
        )
    model = _child(recipe).model.eval()
    return model.requires_grad_(False)


def autoregressive_teacher(recipe: Recipe, checkpoint: Checkpoint) -> CausalModel | None:
    """The autoregressive model over the tokens of a checkpoint, frozen, where the objective asks one."""
    asked = make_objective(recipe.objective, checkpoint.path).teacher
    if not isinstance(asked, AutoregressiveTeacher):
        return None
    require_files(asked.checkpoint, asked.tokenizer)
    if checkpoint.bos_id is None:
        raise ValueError(
            "objective.teacher is autoregressive, which needs a token before the first; this model's texts begin with "
            'none: set objective.teacher to "none"'
        )
    model = causal_over(asked.checkpoint, checkpoint.tokenizer.pieces, asked.tokenizer)
    if model.config.max_length < recipe.data.length - 1:
        raise ValueError(
            f"data.length is {recipe.data.length}, but the teacher {asked.checkpoint} knows at most "
            f"{model.config.max_length} tokens; take shorter blocks"
        )
    return model.eval().requires_grad_(False)


def _check_joint(objective: Objective) -> None:
    """Raise unless a model with a joint posterior can be trained so."""
    if getattr(objective, "joint_allowed", False):
        return
    if isinstance(getattr(objective, "loss", None), GeneralisedKL):
        raise ValueError(
            'objective.loss is "generalised-kl", but a model with a joint posterior is trained on its likelihood; '
            'set it to "cross-entropy"'
        )
    if objective.teacher is not None and objective.teacher.network != "autoregressive":
        raise ValueError(
            'objective.teacher is set, but a teacher knows of no joint posterior; set it to "none", or start from a '
            "model without one"
        )


def start(recipe: Recipe, out: Path) -> Checkpoint:
    """The model of a new run."""
    if recipe.model.preset is not None or recipe.model.architecture != "dit":
        checkpoint = _fresh(recipe, corpus_folder(recipe, out))
    else:
        checkpoint = _child(recipe) if recipe.model.parent is not None else _converted(recipe)
    if recipe.model.open_steps and not isinstance(checkpoint.model, Transformer):
        raise ValueError("model.open_steps is for models imported from Hugging Face folders; this one sees everything")
    if recipe.model.transition_rank is not None:
        checkpoint = _with_transitions(recipe, checkpoint, out)
    if recipe.model.transition_gates is not None:
        checkpoint = _with_gates(recipe.model.transition_gates, checkpoint)
    if recipe.model.causal_blocks is not None:
        checkpoint = _with_causal_head(recipe.model, checkpoint)
    if getattr(checkpoint.model.config, "posterior", None) is not None:
        _check_joint(make_objective(recipe.objective, checkpoint.path))  # a parent may bring its own
    return checkpoint


def _with_causal_head(section: ModelSection, checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with a causal head, whose blocks may start as an autoregressive model's."""
    blocks = section.causal_blocks
    assert blocks is not None
    if not isinstance(checkpoint.model, DiT):
        raise ValueError("model.causal_blocks is for a DiT; leave it out")
    found = checkpoint.model.config.posterior
    if isinstance(found, CausalHeadConfig) and found.num_blocks == blocks:
        return checkpoint
    causal = None
    if section.causal_start is not None:
        require_files(section.causal_start, section.llama2c_tokenizer)
        causal = causal_over(section.causal_start, checkpoint.tokenizer.pieces, section.llama2c_tokenizer)
    if isinstance(found, CausalHeadConfig):
        larger = replace(found, num_blocks=blocks)
        return replace(checkpoint, model=checkpoint.model.with_larger_posterior(larger, causal=causal))
    model = checkpoint.model.with_posterior(CausalHeadConfig(num_blocks=blocks))
    if causal is not None:
        assert isinstance(model.joint, CausalHead)
        model.joint.start_from(causal)
    return replace(checkpoint, model=model)


def _with_transitions(recipe: Recipe, checkpoint: Checkpoint, out: Path) -> Checkpoint:
    """The checkpoint with transitions between neighbours, which begin with what the corpus counts."""
    rank, found = recipe.model.transition_rank, getattr(checkpoint.model.config, "transition_rank", 0)
    assert rank is not None
    if found not in (0, rank):
        raise ValueError(
            f"model.transition_rank is {rank}, but the parent has transitions of rank {found}; leave it out"
        )
    if found == rank:
        return checkpoint
    corpus = prepare_corpus(recipe.data, corpus_folder(recipe, out), checkpoint.tokenizer)
    counts = corpus.count_followers(checkpoint.path.source.vocab_size)
    return replace(checkpoint, model=checkpoint.model.with_transitions(*flow.pmi_transitions(counts, rank)))


def _with_gates(width: int, checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with dynamic transitions."""
    model = checkpoint.model
    if not isinstance(model, DiT) or not isinstance(model.config.posterior, CRFConfig):
        raise ValueError(
            "model.transition_gates is for a DiT with transitions; set model.transition_rank, to 64 perhaps"
        )
    if model.config.posterior.gate_width == width:
        return checkpoint
    return replace(checkpoint, model=model.with_gates(width))


def _fresh(recipe: Recipe, folder: Path) -> Checkpoint:
    corpus = prepare_corpus(recipe.data, folder)
    path = make_path(recipe.flow, corpus.header.vocab_size)
    model: Network
    if recipe.model.architecture == "dit":
        model = DiT(model_config(recipe, path.source.vocab_size), seed=recipe.train.seed)
    else:
        own = build_network(_own_config(recipe.model, path.source.vocab_size), seed=recipe.train.seed)
        model = _adapted(own, recipe)
    return _as_checkpoint(recipe, model, path, tokenizer=corpus.tokenizer)


def model_config(recipe: Recipe, vocab_size: int) -> ModelConfig:
    """The network of a recipe with a preset: the preset, what the recipe changes, and the objective's conditioning."""
    section = recipe.model
    assert section.preset is not None
    changes = {name: getattr(section, name) for name in (*_SIZES, "dropout") if getattr(section, name) is not None}
    conditioning = "step" if is_step_aware(recipe) else "time"
    changes |= _network_of(recipe)
    return ModelConfig.preset(section.preset, **changes, vocab_size=vocab_size, conditioning=conditioning)


def _child(recipe: Recipe) -> Checkpoint:
    assert recipe.model.parent is not None
    try:
        parent = load_model(recipe.model.parent)
    except ValueError as error:
        raise ValueError(f"model.parent: {error}") from error
    if recipe.data.tokenizer is not None and not recipe.data.tokenizer.startswith("bpe:"):
        named = data.make_tokenizer(recipe.data.tokenizer)
        if named.hash != parent.tokenizer.hash:
            raise ValueError(
                f"data.tokenizer {recipe.data.tokenizer!r} has {named.vocab_size} tokens and is not the parent's, "
                f"which has {parent.tokenizer.vocab_size}; leave it out to use the parent's"
            )
    path = make_path(recipe.flow, parent.tokenizer.vocab_size, parent.path.source.mask_token)
    if recipe.model.add_mask:
        parent = _with_mask(parent, path)
    if (path.source, path.schedule) != (parent.path.source, parent.path.schedule):
        raise ValueError(
            f"the recipe's flow is {path.source} with {path.schedule}, the parent's {parent.path.source} with "
            f"{parent.path.schedule}; make [flow] what the parent was trained with"
        )
    model = _adapted(parent.model, recipe)
    if recipe.model.reset_head:
        for value in model.head.parameters():
            torch.nn.init.zeros_(value)
    return _as_checkpoint(recipe, model, path, tokenizer=parent.tokenizer, bos_id=parent.bos_id, budgets=parent.budgets)


def _converted(recipe: Recipe) -> Checkpoint:
    start = _from_llama2c(recipe.model, recipe.data, recipe.train.seed)
    path = make_path(recipe.flow, start.tokenizer.vocab_size)
    if path.source.vocab_size != start.model.config.vocab_size:
        raise ValueError(f"flow.source is {recipe.flow.source!r}; a converted model has no mask token: use uniform")
    model = _adapted(start.model, recipe)
    return _as_checkpoint(recipe, model, path, tokenizer=start.tokenizer, bos_id=start.bos_id)


def _from_llama2c(section: ModelSection, config: DataConfig, seed: int) -> Checkpoint:
    """The denoiser of a llama2.c checkpoint over the tokens that the inputs use; without inputs over all of them."""
    assert section.llama2c is not None
    require_files(section.llama2c, section.llama2c_tokenizer)
    texts = None
    if config.inputs:
        texts = data.texts(
            data.open_documents(config.inputs, config.separator, config.field, max_documents=config.max_documents)
        )
    parts = convert_llama2c(
        section.llama2c, section.llama2c_tokenizer, texts, min_count=section.min_count or 1, seed=seed
    )
    tokenizer = data.Tokenizer(parts.tokenizer.to_str(), parts.tokenizer.id_to_token(parts.eos_id))
    path = flow.MixturePath(flow.UniformSource(len(parts.kept)))
    length = parts.causal.config.max_length
    facts = {"converted_from": Path(section.llama2c).name}
    return Checkpoint(parts.denoiser, path, tokenizer, length=length, bos_id=parts.bos_id, facts=facts)


def require_files(*names: str | None) -> None:
    """Raise for a file of an autoregressive model that is not there; None is none."""
    for file in filter(None, names):
        if not Path(file).is_file():
            raise ValueError(f"{file} is not a file; name a llama2.c checkpoint and its tokenizer.bin")


def _with_mask(parent: Checkpoint, path: flow.MixturePath) -> Checkpoint:
    """A parent of the uniform source as a start for one with a mask, which becomes its last token."""
    if parent.path.source.mask_token is not None or path.source.mask_token is None:
        raise ValueError(
            f"model.add_mask is set, but the parent's source is {parent.path.source} and the recipe's {path.source}; "
            "it makes a start for a mask source of a parent that has none: leave it out"
        )
    assert isinstance(parent.model, DiT)
    return replace(parent, model=parent.model.with_mask(), path=path)


def _adapted(model: Network, recipe: Recipe) -> Network:
    """The parent's network with the recipe's dropout, and all that the objective asks of it."""
    changes = _network_of(recipe)
    if recipe.model.dropout is not None:
        changes["dropout"] = recipe.model.dropout
    for name in changes:
        if not hasattr(model.config, name):
            asks = "model.dropout is set" if name == "dropout" else f'objective.kind is "{recipe.objective.kind}"'
            raise ValueError(f"{asks}, but the config of {type(model).__name__} has no {name}; leave it out")
    if any(getattr(model.config, name) != value for name, value in changes.items()):
        other = build_network(replace(model.config, **changes))
        other.load_state_dict(model.state_dict())
        model = other
    if is_step_aware(recipe) and not getattr(model.config, "is_step_aware", False):
        model = model.step_aware(seed=recipe.train.seed)
    return model


def _as_checkpoint(
    recipe: Recipe,
    model: Network,
    path: flow.MixturePath,
    *,
    tokenizer: data.Tokenizer,
    bos_id: int | None = None,
    budgets: tuple[int, ...] | None = None,
) -> Checkpoint:
    """`budgets` are those of the parent: an objective of one step size leaves them as they are."""
    if is_step_aware(recipe):
        step_sizes = make_objective(recipe.objective, path).step_sizes
        budgets = tuple(sorted(round(1 / h) for h in step_sizes.tolist()))
    section = recipe.data
    pairs = [] if section.pairs is None else [section.pairs]
    names = {"pairs": [*pairs, *section.step_pairs]}
    if section.pairs is None or section.text_share:
        names["inputs"] = [*section.inputs]
    text = {kind: [_public_name(name) for name in found] for kind, found in names.items() if found}
    facts = {"objective": _public_objective(asdict(recipe)["objective"]), "data": text}
    return Checkpoint(model, path, tokenizer, recipe.data.length, bos_id=bos_id, budgets=budgets, facts=facts)


def _public_objective(section: dict[str, Any]) -> dict[str, Any]:
    """An objective's keys, files without their folders."""
    files = ("checkpoint", "tokenizer")
    return {
        key: _public_objective(value)
        if isinstance(value, dict)
        else Path(value).name
        if key in files and value is not None
        else value
        for key, value in section.items()
    }


def _public_name(name: str) -> str:
    """An input as a model card names it: what the hub and we call it, of a file its name without the folders."""
    return name if name.startswith(("hf:", "builtin:")) else Path(name).name


def import_llama2c(section: ModelSection, config: DataConfig, out: str | Path, *, half: bool = False) -> Checkpoint:
    """Make a checkpoint folder of a llama2.c checkpoint, to be used or named as `model.parent`."""
    checkpoint = _from_llama2c(section, config, seed=0)
    save_model(out, checkpoint, dtype=torch.float16 if half else torch.float32)
    return checkpoint


def export(
    checkpoint: str | Path,
    out: str | Path,
    *,
    half: bool = False,
    sampling: Mapping[str, Any] | None = None,
    curve_text: str | None = None,
    rotary: str | None = None,
) -> Checkpoint:
    """Make a folder to share of a run or a checkpoint: the averaged weights and what describes them, nothing else.

    sampling   how the model is best sampled, {"jump": "spaced", "temperature": {"1": 0.95, "8": 0.85}}: what its users
               get unless they say otherwise; None: as the checkpoint advises, {}: no advice
    curve_text  text that it was not trained on: the entropy curve is fitted there and joins the advice
    rotary      "ntk:2" or "linear:2": rows twice as long, at angles scaled so (`RotaryScaling`); the weights stay
    """
    if sampling is not None:
        check_advice(sampling)
    held_out = None if curve_text is None else _first_documents(curve_text)
    found = load_model(checkpoint)
    if rotary is not None:
        found = _stretched(found, _read_scaling(rotary))
    if held_out is not None:
        curve = fit_curve(LanguageModel(found), held_out)
        advised = found.facts.get("sampling", {}) if sampling is None else sampling
        sampling = {**advised, "curve": [round(nats, 4) for nats in curve.nats]}
    if sampling is not None:
        others = {name: value for name, value in found.facts.items() if name != "sampling"}
        found = replace(found, facts={**others, **({"sampling": dict(sampling)} if sampling else {})})
    save_model(out, found, dtype=torch.float16 if half else torch.float32)
    return found


def _read_scaling(text: str) -> RotaryScaling:
    """ "ntk:2" -> by which factor, and how."""
    kind, _, factor = text.partition(":")
    try:
        return RotaryScaling(kind=kind, factor=float(factor))  # type: ignore[arg-type]
    except ValueError as error:
        raise ValueError(
            f"rotary is {text!r}; allowed are ntk:FACTOR and linear:FACTOR with a factor from 1 to {LARGEST_FACTOR}, "
            "ntk:2 for rows twice as long"
        ) from error


def _stretched(found: Checkpoint, scaling: RotaryScaling) -> Checkpoint:
    """The same weights for rows longer than those of training, at scaled rotary angles."""
    if not isinstance(found.model, DiT) or isinstance(found.model.config.posterior, CausalHeadConfig):
        raise ValueError("rotary scaling is for a DiT without a causal head, whose blocks have angles of their own")
    config = found.model.config
    model = DiT(replace(config, rotary_factor=scaling.factor, rotary_scaling=scaling.kind)).eval()
    model.load_state_dict(found.model.state_dict())
    return replace(found, model=model, length=round(found.length / config.rotary_factor * scaling.factor))


def _first_documents(name: str) -> list[str]:
    """The first documents of a text, which an entropy curve is fitted on."""
    found = [text for text in islice(data.texts(data.open_documents([name])), _CURVE_TEXTS) if text.strip()]
    if not found:
        raise ValueError(f"{name} holds no text to fit the curve on; name a file with some documents")
    return found
