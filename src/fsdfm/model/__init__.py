"""Networks: the denoiser (`dit`), in `int8` and `bfloat16` too, a causal model (`causal`), their parts (`layers`)."""

from fsdfm.model.bfloat16 import multiplies_bfloat16, to_bfloat16
from fsdfm.model.causal import CausalConfig, CausalModel
from fsdfm.model.causal_head import CausalHead, CausalHeadConfig, CausalPosterior
from fsdfm.model.crf_head import CRFConfig, TransitionTables
from fsdfm.model.dit import PRESETS, Conditioning, DiT, FusedConditioning, ModelConfig, SharedConditioning
from fsdfm.model.int8 import to_int8
from fsdfm.model.joint import JointConfig, JointHead, register_joint_head

__all__ = [
    "PRESETS",
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
    "SharedConditioning",
    "TransitionTables",
    "multiplies_bfloat16",
    "register_joint_head",
    "to_bfloat16",
    "to_int8",
]
