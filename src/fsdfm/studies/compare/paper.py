"""The paper's own figures (arXiv 2509.20624): other data, sizes and judge than ours, shown beside ours and marked.

Its expanded-baselines table: 8 steps, GPT-2-large perplexity, entropy in bits per text (but Duo's, a row that stands
commented out in its source: 5.28 can only be nats, 7.6 bits). Its continuation table: 512 tokens given, 512 scored.
Steps are what it counts: SEDD's last call and the like are not in them.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CONTINUED", "CONTINUED_STEPS", "EXPANDED", "EXPANDED_STEPS", "REAL", "PaperFigure", "paper_figure"]

EXPANDED_STEPS = 8
CONTINUED_STEPS = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class PaperFigure:
    """A row of the expanded-baselines table: sizes in billions of parameters and tokens, None where it says none."""

    label: str
    size: float
    tokens: str | None
    perplexity: float
    entropy: float
    variant: str | None = None


REAL = (14.7, 7.70)  # "training data": perplexity, entropy

EXPANDED: tuple[PaperFigure, ...] = (
    PaperFigure("SDTT (1 round)", 0.86, None, 612.38, 8.38),
    PaperFigure("SDTT (3 rounds)", 0.86, None, 376.19, 8.19),
    PaperFigure("SDTT (5 rounds)", 0.86, None, 220.81, 8.09),
    PaperFigure("SDTT (7 rounds)", 0.86, None, 131.71, 7.78, "sdtt"),
    PaperFigure("HDLM (epsilon 0.01)", 0.16, "524", 279.60, 7.54, "hdlm"),
    PaperFigure("HDLM (gamma 0.05)", 0.16, "524", 192.74, 8.13),
    PaperFigure("MDLM-OWT", 0.17, "262", 837.58, 8.47, "mdlm"),
    PaperFigure("Duo (commented out, entropy in nats)", 0.17, "2621.4", 68.49, 5.28, "duo-greedy"),
    PaperFigure("SEDD", 0.32, None, 602.09, 8.42, "sedd-tail"),
    PaperFigure("ReMDM-cap", 0.17, "262", 559.74, 8.34, "remdm-cap"),
    PaperFigure("ReMDM-rescale", 0.17, "262", 560.06, 8.35, "remdm-rescale"),
    PaperFigure("ReMDM-conf", 0.17, "262", 549.86, 8.35, "remdm-conf"),
    PaperFigure("ReMDM-loop", 0.17, "262", 1358.84, 8.41, "remdm-loop"),
    PaperFigure("DFM", 0.17, "65.5", 335.64, 8.06, "dfm"),
    PaperFigure("DFM", 1.30, "65.5", 331.36, 8.11),
    PaperFigure("DFM", 1.70, "65.5", 444.71, 8.18),
    PaperFigure("FS-DFM", 0.17, "65.5 + 24.6", 90.49, 7.29, "fs-dfm"),
    PaperFigure("FS-DFM", 1.30, "65.5 + 8.2", 77.21, 7.40),
    PaperFigure("FS-DFM", 1.70, "65.5 + 4.1", 73.65, 7.61),
)

CONTINUED: dict[str, tuple[float, tuple[tuple[float, float, float], ...]]] = {
    "Dream, base": (
        7.0,
        (
            (1163.08, 1.55, 0.005),
            (785.87, 1.43, 0.005),
            (752.11, 1.53, 0.005),
            (739.40, 1.74, 0.006),
            (630.30, 2.31, 0.005),
        ),
    ),
    "Dream, instruct": (
        7.0,
        ((46371, 0.58, 0.005), (64281, 0.35, 0.006), (66348, 0.20, 0.007), (62740, 0.13, 0.006), (57694, 0.10, 0.006)),
    ),
    "LLaDA, base": (
        8.0,
        (
            (256.07, 0.84, 0.005),
            (290.35, 0.59, 0.005),
            (495.17, 0.47, 0.005),
            (441.26, 0.42, 0.005),
            (432.65, 0.50, 0.005),
        ),
    ),
    "LLaDA, instruct": (
        8.0,
        ((8677, 0.53, 0.012), (8869, 0.41, 0.014), (9049, 0.40, 0.029), (9259, 0.40, 0.027), (9289, 0.43, 0.048)),
    ),
    "FS-DFM 0.17": (
        0.17,
        (
            (173.39, 7.67, 0.006),
            (143.77, 7.85, 0.008),
            (97.07, 7.89, 0.053),
            (75.78, 7.95, 0.270),
            (67.42, 7.97, 0.390),
        ),
    ),
    "FS-DFM 1.3": (
        1.3,
        (
            (231.89, 7.88, 0.006),
            (169.99, 7.97, 0.013),
            (99.79, 7.98, 0.120),
            (70.97, 8.01, 0.480),
            (59.84, 7.99, 0.583),
        ),
    ),
    "FS-DFM 1.7": (
        1.7,
        (
            (191.20, 7.67, 0.007),
            (155.01, 7.93, 0.014),
            (101.20, 8.03, 0.083),
            (72.84, 8.07, 0.311),
            (61.67, 8.06, 0.550),
        ),
    ),
}
"""Perplexity, entropy and MAUVE at `CONTINUED_STEPS`, by model and its billions of parameters."""


def paper_figure(variant: str) -> PaperFigure | None:
    """What the paper has where this row stands; weights of a name have none of their own."""
    return next((figure for figure in EXPANDED if figure.variant == variant.partition("/")[0]), None)
