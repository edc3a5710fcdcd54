"""What Tab completes: names of recipes, models and jump rules, without importing torch.

`fsdfm --install-completion` sets a shell up for it. What is named here again, so that torch need not be imported, a
test compares with what it names.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["EMBEDDED", "RULE_NAMES", "complete_models", "complete_recipes", "complete_rules"]

EMBEDDED = ("fewstep", "parent")  # fsdfm.checkpoint.embedded.NAMES
RULE_NAMES = (  # fsdfm.flow.RULES, those of the peers included
    "exact",
    "single",
    "instant",
    "systematic",
    "spaced",
    "sweep",
    "certain",
    "bounded",
    "stop",
    "dream",
    "dream-entropy",
    "llada",
    "llada-random",
    "mdlm",
    "remdm-cap",
    "remdm-rescale",
    "remdm-conf",
    "remdm-loop",
    "forward-backward",
    "dfm-corrector",
    "sedd",
    "sedd-uniform",
    "hdlm-acs",
    "hdlm-gamma",
    "duo",
    "duo-greedy",
    "duo-psi",
)


def complete_recipes(incomplete: str) -> list[str]:
    """Recipes that ship, and TOML files here."""
    here = Path(__file__).resolve().parents[1]
    folders = (here / "recipes", here.parents[1] / "recipes")
    names = {file.stem for folder in folders for file in folder.glob("*.toml")}
    return _beginning(incomplete, [*sorted(names), *sorted(map(str, Path().glob("*.toml")))])


def complete_models(incomplete: str) -> list[str]:
    """Models that ship, and the runs and models here."""
    places = [place for folder in ("runs", "models") for place in sorted(Path(folder).glob("*")) if place.is_dir()]
    return _beginning(incomplete, [*EMBEDDED, *map(str, places)])


def complete_rules(incomplete: str) -> list[str]:
    """Rules of a step."""
    return _beginning(incomplete, RULE_NAMES)


def _beginning(incomplete: str, names: list[str] | tuple[str, ...]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
