"""Networks: the denoiser (`dit`), in `int8` and `bfloat16` too, a causal model (`causal`), their parts (`layers`)."""

from fsdfm.model.bfloat16 import multiplies_bfloat16, to_bfloat16
from fsdfm.model.causal import CausalConfig, CausalModel
from fsdfm.model.dit import PRESETS, Conditioning, DiT, FusedConditioning, ModelConfig, SharedConditioning
from fsdfm.model.int8 import to_int8

__all__ = [
    "PRESETS",
    "CausalConfig",
    "CausalModel",
    "Conditioning",
    "DiT",
    "FusedConditioning",
    "ModelConfig",
    "SharedConditioning",
    "multiplies_bfloat16",
    "to_bfloat16",
    "to_int8",
]
