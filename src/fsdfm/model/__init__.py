"""Networks: the denoiser (`dit`), a plain transformer for others' weights (`stack`), a causal model (`causal`).

`architecture` lists what a checkpoint can hold, `int8` and `bfloat16` make it smaller, `layers` are the parts.
"""

from fsdfm.model.architecture import (
    ARCHITECTURES,
    Architecture,
    Network,
    NetworkConfig,
    architecture_of,
    build_network,
    find_architecture,
)
from fsdfm.model.bfloat16 import multiplies_bfloat16, to_bfloat16
from fsdfm.model.causal import CausalConfig, CausalModel
from fsdfm.model.dit import PRESETS, Conditioning, DiT, FusedConditioning, ModelConfig, SharedConditioning
from fsdfm.model.int8 import to_int8
from fsdfm.model.stack import Transformer, TransformerConfig

__all__ = [
    "ARCHITECTURES",
    "PRESETS",
    "Architecture",
    "CausalConfig",
    "CausalModel",
    "Conditioning",
    "DiT",
    "FusedConditioning",
    "ModelConfig",
    "Network",
    "NetworkConfig",
    "SharedConditioning",
    "Transformer",
    "TransformerConfig",
    "architecture_of",
    "build_network",
    "find_architecture",
    "multiplies_bfloat16",
    "to_bfloat16",
    "to_int8",
]
