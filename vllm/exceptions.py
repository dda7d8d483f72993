"""Every exception of the project, as one tree.

VLLMError
├── BadRequestError (ValueError)            what the caller can mend: a parameter, a prompt, an id
│   ├── PromptTooLongError                  prompt (+ output) exceeds the context or the KV cache
│   └── DuplicateRequestError               a live request has this id already
├── ConfigError (ValueError)                an engine argument out of range, or arguments that contradict each other
├── QueueFullError (RuntimeError)           the bound on waiting children is reached; come back later
├── EngineError (RuntimeError)
│   ├── EngineStartError                    the engine did not come up; the message says why
│   ├── EngineDeadError                     the engine's process ended, or the engine was shut down
│   ├── EngineGenerateError                 one request failed inside the engine; the engine goes on
│   └── IntegrityError                      a debug check found tables that contradict each other
├── ModelLoadError (RuntimeError)
│   ├── ModelNotFoundError (FileNotFoundError)   no such folder, file or bundled model
│   ├── CheckpointError                     a file is truncated, corrupt or contradicts its header
│   ├── WeightError                         a weight nobody took, a parameter nobody filled, a wrong shape
│   ├── UnknownArchitectureError            no family file for this checkpoint
│   └── TokenizerError                      the vocabulary cannot be turned into a tokenizer
└── UnsupportedError (NotImplementedError)  named on the API's page, and not built
    └── UnsupportedSpecError                this backend cannot run that part of a model
BackendUnavailableError (VLLMError, RuntimeError)    neither a kernel library nor torch is there
"""

from __future__ import annotations

from typing import Any


class VLLMError(Exception):
    """Root of everything the project raises on purpose."""


class BadRequestError(VLLMError, ValueError):
    """The caller's input is wrong and the caller can mend it. `parameter` names the field; None if no single one."""

    parameter: str | None

    def __init__(self, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


class PromptTooLongError(BadRequestError):
    """The prompt, or prompt + output, can never fit; the message gives the limit and the length."""


class DuplicateRequestError(BadRequestError):
    """A live request has this id."""


class ConfigError(VLLMError, ValueError):
    """An engine argument is out of range, or arguments contradict each other. `parameter` names the first of them."""

    parameter: str | None

    def __init__(self, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


class QueueFullError(VLLMError, RuntimeError):
    """Too many children are waiting already."""


class EngineError(VLLMError, RuntimeError):
    """Something went wrong inside the engine; the request may have been fine."""


class EngineStartError(EngineError):
    """The engine did not come up."""


class EngineDeadError(EngineError):
    """The engine's process ended, or the engine was shut down; no request can be answered any more."""

    def __init__(self, message: str = "the engine is dead; see the log for the cause") -> None:
        super().__init__(message)


class EngineGenerateError(EngineError):
    """One request failed inside the engine. Other requests go on.

    `outputs`: raised by `LLM.generate`, which finishes the other requests first, the outputs of all of them in order of
    the prompts; a failed one's completions have finish_reason "error" (the child that failed) or "abort".
    """

    outputs: list[Any]

    def __init__(self, message: str, outputs: list[Any] | None = None) -> None:
        super().__init__(message)
        self.outputs = outputs or []


class IntegrityError(EngineError):
    """A debug check found tables that contradict each other; the message has the numbers."""


class ModelLoadError(VLLMError, RuntimeError):
    """A model could not be loaded."""


class ModelNotFoundError(ModelLoadError, FileNotFoundError):
    """There is no such folder, file or bundled model."""


class CheckpointError(ModelLoadError):
    """A checkpoint's file is truncated, corrupt, or contradicts its own header."""


class WeightError(ModelLoadError):
    """A weight nobody took, a parameter nobody filled, or a wrong shape."""


class UnknownArchitectureError(ModelLoadError):
    """No family file describes this checkpoint's architecture."""


class TokenizerError(ModelLoadError):
    """The vocabulary cannot be turned into a tokenizer."""


class UnsupportedError(VLLMError, NotImplementedError):
    """A known feature that is not built here; the message names it."""


class UnsupportedSpecError(UnsupportedError):
    """A backend cannot run a part of a model's description; the message names the part."""


class BackendUnavailableError(VLLMError, RuntimeError):
    """No backend can run here; the message names the remedies."""
