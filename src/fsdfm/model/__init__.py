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
from fsdfm.model.causal_head import CausalHead, CausalHeadConfig, CausalPosterior
from fsdfm.model.crf_head import CRFConfig, TransitionTables
from fsdfm.model.dit import PRESETS, Conditioning, DiT, FusedConditioning, ModelConfig, SharedConditioning
from fsdfm.model.int8 import to_int8
from fsdfm.model.joint import JointConfig, JointHead, register_joint_head
from fsdfm.model.stack import Transformer, TransformerConfig

__all__ = [
    "ARCHITECTURES",
    "PRESETS",
    "Architecture",
    "CRFConfig",
    "CausalConfig",
    "CausalHead",
    "CausalHeadConfig",
    "CausalModel",
    "CausalPosterior",
    "Conditioning",
    "DiT",
    "FusedConditioning",
    "JointConfig",
    "JointHead",
    "ModelConfig",
    "Network",
    "NetworkConfig",
    "SharedConditioning",
    "Transformer",
    "TransformerConfig",
    "TransitionTables",
    "architecture_of",
    "build_network",
    "find_architecture",
    "multiplies_bfloat16",
    "register_joint_head",
    "to_bfloat16",
    "to_int8",
]
