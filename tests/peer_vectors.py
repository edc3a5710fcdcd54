"""Where the vectors of the originals are, and the networks that belong to them."""

import os
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, safe_open

from fsdfm.peers.layouts import open_layout

FOLDER = Path(os.environ.get("FSDFM_GOLDEN", Path(__file__).resolve().parents[2] / "shared" / "golden")) / "peers"
MDLM, SEDD = FOLDER / "mdlm-remdm-duo", FOLDER / "sedd-sdtt-hdlm"

needs_golden = pytest.mark.skipif(
    not FOLDER.is_dir(), reason="no golden files: FSDFM_GOLDEN names no folder with peers"
)


@cache
def vectors(name):
    """The tensors of a file of vectors."""
    folder = MDLM if (MDLM / f"{name}.safetensors").is_file() else SEDD
    return load_file(folder / f"{name}.safetensors")


def metadata(name):
    """Its scalars."""
    with safe_open(SEDD / f"{name}.safetensors", "pt") as file:
        return file.metadata()


@cache
def network(file, **options):
    """Our network with the weights of a file."""
    folder = MDLM if (MDLM / file).is_file() else SEDD
    with open_layout(folder / file, **options) as weights:
        return weights.load()


@cache
def peer(file, system, weights=None):
    """The same, where the system or the kind of weights must be said."""
    folder = MDLM if (MDLM / file).is_file() else SEDD
    with open_layout(folder / file, system=system, weights=weights) as opened:
        return opened.load()


def same(ours, theirs, tolerance, *, relative=False):
    """Assert equality to a tolerance; infinities and stand-ins for them (-1e6) count as equal."""
    ours, theirs = ours.detach().double(), theirs.double()
    assert ours.shape == theirs.shape
    finite = (theirs > -1e5) & torch.isfinite(theirs)
    assert bool((ours[~finite] < -1e5).all()) or bool(torch.isinf(ours[~finite]).all())
    gap = (ours - theirs)[finite].abs()
    if relative:
        gap = gap / theirs[finite].abs().clamp(min=1e-8)
    worst = float(gap.max()) if gap.numel() else 0.0
    assert worst <= tolerance, f"worst difference {worst:.3g}, allowed {tolerance}"
