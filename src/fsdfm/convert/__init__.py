"""Other people's weights: llama2.c's autoregressive checkpoints (`llama2c`), the paper's released ones (`released`)."""

from fsdfm.convert.llama2c import (
    BOS_ID,
    Conversion,
    Vocabulary,
    build_tokenizer,
    causal_over,
    convert_llama2c,
    prune_vocabulary,
    read_llama2c,
    read_vocabulary,
    select_tokens,
    to_denoiser,
)
from fsdfm.convert.released import (
    ReleasedWeights,
    Settings,
    WeightsName,
    open_released,
    preset_settings,
    read_settings,
)

__all__ = [
    "BOS_ID",
    "Conversion",
    "ReleasedWeights",
    "Settings",
    "Vocabulary",
    "WeightsName",
    "build_tokenizer",
    "causal_over",
    "convert_llama2c",
    "open_released",
    "preset_settings",
    "prune_vocabulary",
    "read_llama2c",
    "read_settings",
    "read_vocabulary",
    "select_tokens",
    "to_denoiser",
]
