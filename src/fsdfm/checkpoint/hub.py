"""Models on the Hugging Face hub: `owner/name`, `owner/name@revision`; `hf:owner/name` where a folder could be meant.

Everything goes through the hub's own client, with its cache (`HF_HOME`), its offline mode (`HF_HUB_OFFLINE=1`), its
endpoint (`HF_ENDPOINT`) and its tokens (`hf auth login`, `HF_TOKEN`); nothing here takes or stores a token. What comes
from there is a stranger's folder and is read like one: named files only, nothing is run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fsdfm.files import read_text

__all__ = [
    "MODEL_FILES",
    "HubName",
    "download_model",
    "download_weights",
    "find_hub_name",
    "read_hub_name",
    "snapshot_name",
    "upload",
]

MODEL_FILES = ("config.json", "model.safetensors", "tokenizer.json", "checksums.json", "README.md")
"""What a shared checkpoint consists of."""

_NAME = re.compile(r"(?P<owner>[A-Za-z0-9][\w.-]*)/(?P<name>[A-Za-z0-9][\w.-]*)(@(?P<revision>\w[\w./-]*))?")
_SNAPSHOT = re.compile(r"models--(?P<owner>[\w.-]+?)--(?P<name>[\w.-]+)")
_PAGE = "https://huggingface.co/{}/tree/{}"
_LOCAL = ("runs", "imported", "corpora")  # where recipes and imports write: a mistyped one is not asked of the hub
_DESCRIBED = (
    "config.json",
    "config.yaml",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
)
_SAFE = ("*.safetensors", "*.safetensors.index.json")
_PICKLED = ("pytorch_model*.bin", "*.ckpt", "*.pth")  # read by a machine of our own, and only where nothing else is


@dataclass(frozen=True)
class HubName:
    """A model on the hub, and the branch, tag or commit of it that is meant; None: its main branch."""

    repo: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.repo if self.revision is None else f"{self.repo}@{self.revision}"


def read_hub_name(word: str) -> HubName:
    """`owner/name`, `owner/name@revision`, with or without `hf:` before it."""
    found = _NAME.fullmatch(word.removeprefix("hf:"))
    if found is None or ".." in word:
        raise ValueError(f"{word!r:.120} is no name of a model on the hub; write owner/name or owner/name@revision")
    return HubName(f"{found['owner']}/{found['name']}", found["revision"])


def find_hub_name(word: str) -> HubName | None:
    """The model on the hub that a word means, or None where it means a path.

    What is here wins: a path that exists is that path, and so is one whose first part is a folder here, or a folder
    that recipes write to. `hf:` always means the hub, `./` and `/` never do.
    """
    if word.startswith("hf:"):
        return read_hub_name(word)
    found = _NAME.fullmatch(word)
    if found is None or found["owner"] in _LOCAL or Path(word).exists() or Path(found["owner"]).exists():
        return None
    return read_hub_name(word)


def download_model(name: HubName) -> Path:
    """The folder of a checkpoint on the hub, downloaded unless it is in the cache; other repositories are errors."""
    with _one_sentence(name):
        folder = _download(name, ["config.json"])
        if not _is_checkpoint(folder):
            raise ValueError(
                f"{name} on the hub is no checkpoint of fsdfm; make one of it: fsdfm import {name} --out FOLDER"
            )
        return _download(name, MODEL_FILES)


def download_weights(name: HubName) -> Path:
    """The folder of other people's weights on the hub, or their one file; safetensors where there are any."""
    with _one_sentence(name):
        folder = _download(name, (*_DESCRIBED, *_SAFE))
        if _is_checkpoint(folder):
            raise ValueError(f"{name} is a checkpoint of fsdfm already; use it by its name: fsdfm.load({str(name)!r})")
        if not any(folder.glob("*.safetensors")):
            folder = _download(name, (*_DESCRIBED, *_PICKLED))
        single = [*folder.glob("*.pth")]
        return single[0] if len(single) == 1 else folder


def snapshot_name(folder: Path) -> str | None:
    """`owner/name@commit` of a folder in the hub's cache; None: it is another folder."""
    found = _SNAPSHOT.fullmatch(folder.parent.parent.name)
    if found is None or folder.parent.name != "snapshots":
        return None
    return f"{found['owner']}/{found['name']}@{folder.name[:12]}"


def upload(folder: Path, name: HubName, *, private: bool = False, message: str = "Upload with fsdfm") -> str:
    """Put the files of a checkpoint on the hub, as one commit; the address of it.

    The repository is made if it is missing, and so is the branch that the name says.
    """
    with _one_sentence(name):
        from huggingface_hub import HfApi

        api = HfApi()
        api.create_repo(name.repo, private=private, exist_ok=True)
        if private and not api.repo_info(name.repo).private:
            raise ValueError(f"{name.repo} is public already; nothing was uploaded: make it private on its page first")
        if name.revision is not None:
            api.create_branch(name.repo, branch=name.revision, exist_ok=True)
        done = api.upload_folder(
            repo_id=name.repo,
            folder_path=folder,
            revision=name.revision,
            commit_message=message,
            allow_patterns=[*MODEL_FILES],
        )
        return str(done.commit_url)


def _download(name: HubName, patterns: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download

    files = [*patterns]
    return Path(snapshot_download(name.repo, revision=name.revision, allow_patterns=files, ignore_patterns=["*/*"]))


def _is_checkpoint(folder: Path) -> bool:
    try:
        return bool(json.loads(read_text(folder / "config.json")).get("format") == "fsdfm")
    except (OSError, ValueError, AttributeError, RecursionError):
        return False


@contextmanager
def _one_sentence(name: HubName) -> Iterator[None]:
    """Whatever the hub's client raises, as a `ValueError` that says what to do."""
    try:
        import huggingface_hub.errors as known
    except ImportError as error:
        raise ValueError(f"{name} is on the hub; to reach it: pip install 'fsdfm[hub]'") from error
    reasons: dict[type[Exception], str] = {
        known.GatedRepoError: "is gated; accept its terms on its page, then log in: hf auth login",
        known.RepositoryNotFoundError: "is not on the hub, or is private; check the name, or log in: hf auth login",
        known.RevisionNotFoundError: f"has no revision {name.revision!r} on the hub; name a branch, tag or commit",
        known.LocalTokenNotFoundError: "needs a login; log in: hf auth login",
        known.LocalEntryNotFoundError: "is no folder here, is not whole in the hub's cache, and the hub cannot be "
        f"reached; connect, or download {_PAGE.format(name.repo, name.revision or 'main')} into a folder and name that",
        known.OfflineModeIsEnabled: "needs the hub, and HF_HUB_OFFLINE is set; unset it",
    }
    try:
        yield
    except ValueError:
        raise
    except Exception as error:  # of the client and of all that it stands on
        told = next((words for kind, words in reasons.items() if isinstance(error, kind)), None)
        raise ValueError(f"{name} {told or _other_reason(error)}") from error


def _other_reason(error: Exception) -> str:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        return "may not be written to or read with this login; log in: hf auth login"
    if status is not None:
        return f"cannot be had: the hub answered with status {status}; try again later"
    return f"needs the hub, which cannot be reached ({type(error).__name__}); connect, and try again"
