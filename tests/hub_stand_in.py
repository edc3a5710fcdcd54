"""A stand-in of the Hugging Face hub's HTTP interface, in memory: what downloads, uploads and revisions need of it."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

TOKEN = "hf_of_the_stand_in"


@dataclass
class Repository:
    """Branches by name, each the commit it points to; commits by their hash, each its files."""

    private: bool = False
    branches: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)

    def commit(self, branch: str, files: dict[str, bytes]) -> str:
        whole = {**self.commits.get(self.branches.get(branch, ""), {}), **files}
        names = json.dumps([branch, sorted((name, _oid(data)) for name, data in whole.items()), len(self.commits)])
        sha = hashlib.sha1(names.encode()).hexdigest()
        self.commits[sha], self.branches[branch] = whole, sha
        return sha

    def find(self, revision: str) -> str | None:
        return self.branches.get(revision) or (revision if revision in self.commits else None)


@dataclass
class Hub:
    """What it holds, where it listens, and what was asked of it."""

    address: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    def add(self, name: str, folder: Path, *, private: bool = False, branch: str = "main") -> str:
        repository = self.repositories.setdefault(name, Repository(private))
        return repository.commit(branch, {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()})

    def files(self, name: str, branch: str = "main") -> dict[str, bytes]:
        repository = self.repositories[name]
        return repository.commits[repository.branches[branch]]


def _oid(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _json(self, value: Any, status: int = 200, **headers: str) -> None:
        self._answer(status, json.dumps(value).encode(), Content_Type="application/json", **headers)

    def _missing(self, code: str = "RepoNotFound") -> None:
        self._json({"error": code}, 401 if code == "RepoNotFound" and not self._known() else 404, X_Error_Code=code)

    def _known(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _repository(self, name: str) -> Repository | None:
        found = self.hub.repositories.get(name)
        return None if found is None or (found.private and not self._known()) else found

    def _read(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        self.hub.asked.append(f"{self.command} {urlsplit(self.path).path}")
        if path[:2] == ["api", "models"] and len(path) >= 4:
            self._about("/".join(path[2:4]), path[4:])
        elif len(path) >= 5 and path[2] == "resolve":
            self._file("/".join(path[:2]), path[3], "/".join(path[4:]))
        else:
            self._json({"error": "unknown"}, 404)

    def _about(self, name: str, rest: list[str]) -> None:
        repository = self._repository(name)
        if repository is None:
            return self._missing()
        sha = repository.find(rest[1] if len(rest) > 1 else "main")
        if sha is None:
            return self._missing("RevisionNotFound")
        files = repository.commits[sha]
        if rest[:1] == ["tree"]:
            return self._json(
                [{"type": "file", "path": n, "size": len(data), "oid": _oid(data)} for n, data in files.items()]
            )
        siblings = [{"rfilename": file} for file in files]
        return self._json(
            {"id": name, "modelId": name, "sha": sha, "private": repository.private, "siblings": siblings}
        )

    def _file(self, name: str, revision: str, file: str) -> None:
        repository = self._repository(name)
        if repository is None:
            return self._missing()
        sha = repository.find(revision)
        data = None if sha is None else repository.commits[sha].get(file)
        if sha is None or data is None:
            return self._missing("RevisionNotFound" if sha is None else "EntryNotFound")
        return self._answer(200, data, ETag=f'"{_oid(data)}"', X_Repo_Commit=sha, Accept_Ranges="none")

    def do_POST(self) -> None:
        body = self._read()
        path = urlsplit(self.path).path
        self.hub.asked.append(f"POST {path}")
        if not self._known():
            return self._json({"error": "log in"}, 401)
        if path == "/api/validate-yaml":
            return self._json({"errors": [], "warnings": []})
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        parts = [unquote(part) for part in path.strip("/").split("/")]
        name, verb = "/".join(parts[2:4]), parts[4]
        repository = self.hub.repositories[name]
        if verb == "branch":
            repository.branches.setdefault(parts[5], repository.branches.get("main") or repository.commit("main", {}))
            return self._json({})
        if verb == "preupload":
            files = json.loads(body)["files"]
            modes = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in files]
            return self._json({"files": modes})
        lines = [json.loads(line) for line in body.splitlines()]
        added = {line["value"]["path"]: line["value"]["content"] for line in lines if line["key"] == "file"}
        sha = repository.commit(parts[5], {file: base64.b64decode(text) for file, text in added.items()})
        return self._json({"commitUrl": f"{self.hub.address}/{name}/commit/{sha}", "commitOid": sha})

    def _create(self, asked: dict[str, Any]) -> None:
        name = f"{asked['organization']}/{asked['name']}"
        if name in self.hub.repositories:
            return self._json({"error": "exists", "url": f"{self.hub.address}/{name}"}, 409)
        self.hub.repositories[name] = Repository(asked.get("visibility") == "private")
        self.hub.repositories[name].commit("main", {})
        return self._json({"url": f"{self.hub.address}/{name}"})


@contextmanager
def run_hub() -> Iterator[Hub]:
    """A hub that listens on a free port of this machine."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def use_hub(monkeypatch: pytest.MonkeyPatch, address: str, cache: Path, *, token: str | None = TOKEN) -> None:
    """Let the hub's client talk to an address, with a cache of its own: what its environment variables do."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(cache / "token"))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
