"""Networks: the denoiser (`dit`), a causal model (`causal`), and the parts both are made of (`layers`)."""

from fsdfm.model.causal import CausalConfig, CausalModel
from fsdfm.model.dit import PRESETS, Conditioning, DiT, FusedConditioning, ModelConfig, SharedConditioning

__all__ = [
    "PRESETS",
    "CausalConfig",
    "CausalModel",
    "Conditioning",
    "DiT",
    "FusedConditioning",
    "ModelConfig",
    "SharedConditioning",
]
