"""The tree of exceptions: one module, one root, and the built-in bases that programs catch."""

from __future__ import annotations

import inspect
import pickle
import re

import pytest

from vllm import exceptions

CLASSES = [
    value for value in vars(exceptions).values() if inspect.isclass(value) and value.__module__ == exceptions.__name__
]


def test_public_names() -> None:
    assert {cls.__name__ for cls in CLASSES} == {
        "VLLMError",
        "BadRequestError",
        "PromptTooLongError",
        "DuplicateRequestError",
        "ConfigError",
        "QueueFullError",
        "EngineError",
        "EngineStartError",
        "EngineDeadError",
        "EngineGenerateError",
        "IntegrityError",
        "ModelLoadError",
        "ModelNotFoundError",
        "CheckpointError",
        "WeightError",
        "UnknownArchitectureError",
        "TokenizerError",
        "UnsupportedError",
        "UnsupportedSpecError",
        "BackendUnavailableError",
    }


@pytest.mark.parametrize("cls", CLASSES)
def test_each_is_in_the_tree_and_in_its_picture(cls: type[Exception]) -> None:
    assert issubclass(cls, exceptions.VLLMError)
    assert re.search(rf"\b{cls.__name__}\b", exceptions.__doc__ or "")
    assert cls.__doc__


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("BadRequestError", ValueError),
        ("PromptTooLongError", ValueError),
        ("ConfigError", ValueError),
        ("QueueFullError", RuntimeError),
        ("EngineDeadError", RuntimeError),
        ("ModelNotFoundError", FileNotFoundError),
        ("WeightError", RuntimeError),
        ("UnsupportedSpecError", NotImplementedError),
    ],
)
def test_built_in_bases(name: str, base: type[Exception]) -> None:
    assert issubclass(getattr(exceptions, name), base)


def test_the_parameter_survives_pickling() -> None:
    for cls in (exceptions.BadRequestError, exceptions.PromptTooLongError, exceptions.ConfigError):
        error = pickle.loads(pickle.dumps(cls("n must be 1", "n")))
        assert type(error) is cls
        assert (str(error), error.parameter) == ("n must be 1", "n")
    assert exceptions.BadRequestError("x").parameter is None


def test_engine_dead_says_so_by_itself() -> None:
    assert "dead" in str(exceptions.EngineDeadError())
