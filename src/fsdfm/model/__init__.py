"""Networks: the denoiser (`dit`), also in 8 bits (`int8`), a causal model (`causal`), and their parts (`layers`)."""

from fsdfm.model.causal import CausalConfig, CausalModel
from fsdfm.model.dit import PRESETS, Conditioning, DiT, FusedConditioning, ModelConfig, SharedConditioning
from fsdfm.model.int8 import quantise

__all__ = [
    "PRESETS",
    "CausalConfig",
    "CausalModel",
    "Conditioning",
    "DiT",
    "FusedConditioning",
    "ModelConfig",
    "SharedConditioning",
    "quantise",
]
