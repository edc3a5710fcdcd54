"""Who is compared: how each system is trained, and every way in which it is sampled.

All trainings of one study have the same number of tokens, from the same base: a distillation spends half of them on its
teacher and the rest on its rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from fsdfm.files import did_you_mean

__all__ = [
    "BASE",
    "GROUPS",
    "NAMED",
    "OURS",
    "PAPERS",
    "SHIPPED",
    "TRAININGS",
    "VARIANTS",
    "PeerTraining",
    "SystemRow",
    "chosen_variants",
]

BASE = "base"  # the model that everything starts from, as it is
SHIPPED = "shipped"  # the few-step model of the package: more tokens than the others have
NAMED = "weights:"  # stands before the name of weights that a user names
OURS = "ours"  # our recipe, for the same tokens as everybody
PAPERS = "fs-dfm"  # the paper's recipe, or weights of it

Group = Literal["flow", "masked", "distilled", "hybrid", "uniform", "decoder"]
GROUPS: dict[Group, str] = {
    "flow": "Discrete flow matching",
    "masked": "Masked diffusion",
    "uniform": "Uniform-state diffusion",
    "distilled": "Distilled in rounds",
    "hybrid": "Hybrid noise",
    "decoder": "Decoders of LLaDA and Dream, on MDLM's network",
}


@dataclass(frozen=True)
class PeerTraining:
    """A run: its recipe, the share of the study's training steps that it takes, and what it starts from.

    start      another training by its name; BASE: the base
    overrides  of the recipe, beside those that all trainings have
    curriculum   the share of its steps that Duo's soft inputs take
    repeats    how often a pair is used, where it learns from pairs that what it starts from makes of noised text
    """

    recipe: str
    share: float = 1.0
    start: str = BASE
    overrides: tuple[str, ...] = ()
    curriculum: float | None = None
    repeats: int | None = None


_PLAIN = ("model.llama2c=none", "model.llama2c_tokenizer=none", "model.min_count=none")
_WHOLE_ROWS = ("data.document_starts=1.0", "data.short_share=0.0", "data.given_share=0.0", "sample.every=0")

TRAININGS: dict[str, PeerTraining] = {
    "dfm": PeerTraining("stories-dfm", overrides=(*_PLAIN, *_WHOLE_ROWS, "optim.lr=4e-4")),
    PAPERS: PeerTraining("stories-paper"),
    OURS: PeerTraining("stories-causal", overrides=("held_out.inputs=[]",)),
    "mdlm": PeerTraining("peer-mdlm"),
    "mdlm-half": PeerTraining("peer-mdlm", share=0.5),
    "sdtt-1": PeerTraining("peer-sdtt", share=0.25, start="mdlm-half"),
    "sdtt": PeerTraining("peer-sdtt", share=0.25, start="sdtt-1", overrides=("objective.step=0.0625",)),
    "sedd": PeerTraining("peer-sedd"),
    "sedd-uniform": PeerTraining("peer-sedd-uniform"),
    "hdlm": PeerTraining("peer-hdlm"),
    "hdlm-gamma": PeerTraining("peer-hdlm-gamma"),
    "duo": PeerTraining("peer-duo", curriculum=0.5),
    "duo-half": PeerTraining("peer-duo", share=0.5, curriculum=0.5),
    "duo-dcd-1": PeerTraining("peer-duo-dcd", share=0.25, start="duo-half"),
    "duo-dcd": PeerTraining("peer-duo-dcd", share=0.25, start="duo-dcd-1", overrides=("objective.step=0.015625",)),
    "redi": PeerTraining("peer-redi", repeats=8),
}
"""By name; one stands behind what it starts from."""


@dataclass(frozen=True)
class SystemRow:
    """One row of the tables: a model and how it is sampled.

    name, label   in files and in tables
    model         a training, BASE, SHIPPED, or NAMED and the name of published weights
    jump, grid    of the sampler; None: as the model advises
    frontier      whether temperatures are swept; greedy decoders have none
    continued     whether continuations of given halves are measured, too
    """

    name: str
    label: str
    group: Group
    model: str
    jump: str | None = None
    grid: str = "uniform"
    frontier: bool = True
    continued: bool = False


VARIANTS: tuple[SystemRow, ...] = (
    SystemRow(BASE, "DFM, the base as it is", "flow", BASE, "exact"),
    SystemRow("dfm", "DFM", "flow", "dfm", "exact", continued=True),
    SystemRow(PAPERS, "FS-DFM, the paper's recipe", "flow", PAPERS, "single", continued=True),
    SystemRow(OURS, "ours, the shipped recipe", "flow", OURS, "sweep", continued=True),
    SystemRow(SHIPPED, "ours, the shipped model (more tokens)", "flow", SHIPPED, continued=True),
    SystemRow("mdlm", "MDLM", "masked", "mdlm", "mdlm", continued=True),
    SystemRow("remdm-cap", "ReMDM-cap", "masked", "mdlm", "remdm-cap"),
    SystemRow("remdm-rescale", "ReMDM-rescale", "masked", "mdlm", "remdm-rescale"),
    SystemRow("remdm-conf", "ReMDM-conf", "masked", "mdlm", "remdm-conf"),
    SystemRow("remdm-loop", "ReMDM-loop", "masked", "mdlm", "remdm-loop"),
    SystemRow("sedd", "SEDD absorb", "masked", "sedd", "sedd"),
    SystemRow("sedd-tail", "SEDD absorb, last call as released", "masked", "sedd", "sedd", grid="tail"),
    SystemRow("sedd-uniform", "SEDD uniform, its posterior by our exact rule", "uniform", "sedd-uniform", "exact"),
    SystemRow(
        *("sedd-uniform-own", "SEDD uniform, its own steps as released", "uniform", "sedd-uniform", "sedd-uniform"),
        grid="geometric",
    ),
    SystemRow("duo", "Duo", "uniform", "duo", "duo"),
    SystemRow("duo-greedy", "Duo, greedy tail as released", "uniform", "duo", "duo-greedy", grid="tail"),
    SystemRow("sdtt", "SDTT, 2 rounds", "distilled", "sdtt", "mdlm"),
    SystemRow("duo-dcd", "Duo + DCD, 2 rounds", "distilled", "duo-dcd", "duo"),
    SystemRow("redi", "ReDi, one round", "distilled", "redi", "exact"),
    SystemRow("hdlm", "HDLM, epsilon 0.01", "hybrid", "hdlm", "hdlm-acs"),
    SystemRow("hdlm-gamma", "HDLM, gamma 0.01, own score mended", "hybrid", "hdlm-gamma", "hdlm-gamma"),
    SystemRow(
        *("llada-paper", "LLaDA, a greedy call per block (the paper's setting)", "decoder", "mdlm"),
        *("llada:block_calls=1", "uniform"),
        frontier=False,
        continued=True,
    ),
    SystemRow("llada-greedy", "LLaDA, greedy, one block", "decoder", "mdlm", "llada", frontier=False, continued=True),
    SystemRow("llada", "LLaDA, T = 1, one block", "decoder", "mdlm", "llada:temperature=1", continued=True),
    SystemRow("llada-random", "LLaDA, T = 1, random order", "decoder", "mdlm", "llada-random"),
    SystemRow("dream", "Dream, entropy, T = 0.2", "decoder", "mdlm", "dream-entropy", frontier=False, continued=True),
)


def chosen_variants(names: Sequence[str], weights: Sequence[str] = ()) -> list[SystemRow]:
    """The rows of some systems (of all, where none is named); of published weights those of their system.

    weights   SYSTEM or SYSTEM/LABEL, a model each: the rows of the system are measured of it in the place of our own
    """
    known = [variant.name for variant in VARIANTS]
    for name in names:
        if name not in known:
            raise ValueError(f"--only is {name!r:.80}; {did_you_mean(name, known)}")
    found = [replaced for each in weights for replaced in _of_weights(each)] if weights else list(VARIANTS)
    return [variant for variant in found if not names or variant.name.partition("/")[0] in names]


def _of_weights(name: str) -> list[SystemRow]:
    """The rows of a model that somebody names."""
    system, slash, label = name.partition("/")
    models = sorted({variant.model for variant in VARIANTS} | {"llada", "dream"})
    if system not in models or (slash and not label):
        raise ValueError(f"--weights names the system {system!r:.80}; {did_you_mean(system, models)}")
    own = {"llada": "llada", "dream": "dream"}.get(system)
    rows = [v for v in VARIANTS if (v.model == system if own is None else v.name.startswith(own))]
    tail = slash + label
    return [
        replace(v, name=v.name + tail, label=f"{v.label}{' ' + label if label else ''}", model=f"{NAMED}{name}")
        for v in rows
    ]
