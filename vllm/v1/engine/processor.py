"""From what a user asked for to what the core runs: everything is checked here, and the prompt is tokenized, once.

Nothing here touches the engine's state, so a refused request leaves no trace. `tokenize` is the part that can take
long; it may run in another thread.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from vllm.config import VllmConfig
from vllm.exceptions import BadRequestError, PromptTooLongError, UnsupportedError
from vllm.inputs import PromptType
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.parallel_sampling import Submission, core_params
from vllm.v1.messages import EngineCoreRequest
from vllm.v1.structured_output.grammar import check as check_constraint

if TYPE_CHECKING:
    from vllm.tokenizers import Tokenizer

_PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")
_BATCH = 256
"""Texts that are encoded at once: bounds what stands in Python lists."""


@dataclass(frozen=True)
class ModelInfo:
    """What the front end needs to know of a checkpoint."""

    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    generation_config: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    text: str | None
    """None for a prompt that came as ids."""
    token_ids: npt.NDArray[np.int32]
    """Checked: not empty, every id in the vocabulary."""
    cache_salt: str | None = None


class Processor:
    """Checks requests against one engine's limits.

    Args:
        config: limits of the engine.
        model: of its checkpoint.
        tokenizer: None takes prompts as token ids only.
        max_prompt_len: longest prompt that the core can ever run (context and KV cache).
        callables: whether the core runs in this process, so that logits processors can reach it.
    """

    def __init__(
        self,
        config: VllmConfig,
        model: ModelInfo,
        tokenizer: Tokenizer | None,
        max_prompt_len: int,
        callables: bool = True,
    ) -> None:
        self.config = config
        self.model = model
        self.tokenizer = tokenizer
        self._max_model_len = config.model.max_model_len
        self._max_prompt_len = min(max_prompt_len, self._max_model_len - 1)
        self._callables = callables
        self._eos = list(model.eos_token_ids)

    # ---- prompts

    def tokenize(self, prompt: PromptType, params: SamplingParams, add_special_tokens: bool = True) -> TokenizedPrompt:
        """Token ids of one prompt: text, ids, or a dict with either.

        Raises BadRequestError for anything else, an empty prompt, or an id outside the vocabulary, and
        PromptTooLongError for a prompt that can never run.
        """
        text: str | None = None
        salt: str | None = None
        ids: Any = None
        if isinstance(prompt, str):
            text = prompt
        elif isinstance(prompt, dict):
            text, ids, salt = self._read_dict(prompt)
        elif isinstance(prompt, (list, tuple, np.ndarray)):
            ids = prompt
        else:
            raise BadRequestError(
                f"a prompt must be a string, a list of token ids, or a dict with 'prompt' or 'prompt_token_ids', "
                f"got {type(prompt).__name__}",
                "prompt",
            )
        if ids is None:
            assert text is not None
            bound = None if params.truncate_prompt_tokens is not None else self._max_prompt_len
            ids = self._encode(text, add_special_tokens, bound)
        else:
            ids = self._check_ids(ids)
        return self._tokenized(text, ids, params, salt)

    def tokenize_batch(
        self, prompts: Sequence[PromptType], params: Sequence[SamplingParams], add_special_tokens: bool = True
    ) -> list[TokenizedPrompt]:
        """`tokenize` for many prompts with their params; texts are encoded on all cores."""
        done: list[TokenizedPrompt | None] = [None] * len(prompts)
        texts = [index for index, prompt in enumerate(prompts) if isinstance(prompt, str)]
        for low in range(0, len(texts), _BATCH):
            chunk = texts[low : low + _BATCH]
            if self.tokenizer is None or len(chunk) < 2:
                continue  # one by one, with one by one's errors
            try:
                encoded = self.tokenizer.encode_batch(
                    [str(prompts[index]) for index in chunk], add_special_tokens, self._max_prompt_len
                )
            except BadRequestError:
                continue
            for index, ids in zip(chunk, encoded, strict=True):
                done[index] = self._tokenized(str(prompts[index]), ids, params[index], None)
        return [
            self.tokenize(prompt, own, add_special_tokens) if ready is None else ready
            for prompt, own, ready in zip(prompts, params, done, strict=True)
        ]

    def _tokenized(self, text: str | None, ids: list[int], params: SamplingParams, salt: str | None) -> TokenizedPrompt:
        if params.truncate_prompt_tokens is not None:
            keep = params.truncate_prompt_tokens if params.truncate_prompt_tokens > 0 else self._max_prompt_len
            ids = ids[-keep:]
        if not ids:
            raise BadRequestError("the prompt is empty: it must have at least one token", "prompt")
        self._check_length(len(ids))
        return TokenizedPrompt(text, np.array(ids, np.int32), salt)

    def _read_dict(self, prompt: Any) -> tuple[str | None, Any, str | None]:
        for key in prompt:
            if key not in _PROMPT_KEYS:
                raise UnsupportedError(f"prompt field {key!r} is not built here; known are {', '.join(_PROMPT_KEYS)}")
        text, ids, salt = prompt.get("prompt"), prompt.get("prompt_token_ids"), prompt.get("cache_salt")
        if text is not None and not isinstance(text, str):
            raise BadRequestError(f"'prompt' must be a string, got {type(text).__name__}", "prompt")
        if salt is not None and (not isinstance(salt, str) or not salt):
            raise BadRequestError(f"'cache_salt' must be a non-empty string, got {salt!r:.80}", "cache_salt")
        if text is None and ids is None:
            raise BadRequestError("a prompt dict needs 'prompt' or 'prompt_token_ids'", "prompt")
        if ids is not None and not isinstance(ids, (list, tuple, np.ndarray)):
            raise BadRequestError(f"'prompt_token_ids' must be a list, got {type(ids).__name__}", "prompt_token_ids")
        return text, ids, salt

    def _encode(self, text: str, add_special_tokens: bool, max_tokens: int | None = None) -> list[int]:
        if self.tokenizer is None:
            raise BadRequestError("this engine has no tokenizer (skip_tokenizer_init): give prompt_token_ids", "prompt")
        try:
            return self.tokenizer.encode(text, add_special_tokens, max_tokens)
        except PromptTooLongError as error:
            raise PromptTooLongError(
                f"the maximum context length is {self._max_model_len} tokens: {error}", "prompt"
            ) from None

    def _check_ids(self, ids: Sequence[int] | npt.NDArray[Any]) -> list[int]:
        if isinstance(ids, np.ndarray):
            if ids.ndim != 1 or (ids.dtype.kind not in "iu" and ids.size):
                raise BadRequestError(
                    f"prompt_token_ids must be ints in one dimension, got {ids.dtype} in {ids.ndim}", "prompt_token_ids"
                )
            ids = ids.tolist()
        elif not set(map(type, ids)) <= {int}:
            for position, value in enumerate(ids):
                if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
                    raise BadRequestError(
                        f"prompt_token_ids must be ints, got {value!r:.80} ({type(value).__name__}) "
                        f"at position {position}",
                        "prompt_token_ids",
                    )
            ids = [int(value) for value in ids]
        token_ids: list[int] = list(ids)
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self.model.vocab_size:
            position, value = next(
                (at, value) for at, value in enumerate(token_ids) if not 0 <= value < self.model.vocab_size
            )
            raise BadRequestError(
                f"token id {value} at position {position} is out of range: the vocabulary has ids 0 to "
                f"{self.model.vocab_size - 1}",
                "prompt_token_ids",
            )
        return token_ids

    def _check_length(self, length: int) -> None:
        if length <= self._max_prompt_len:
            return
        if length >= self._max_model_len:
            raise PromptTooLongError(
                f"the maximum context length is {self._max_model_len} tokens, but the prompt has {length} "
                "and at least one token is to be generated",
                "prompt",
            )
        raise PromptTooLongError(
            f"the prompt has {length} tokens, but the KV cache can hold a prompt of at most {self._max_prompt_len} "
            f"(maximum context length {self._max_model_len})",
            "prompt",
        )

    # ---- parameters

    def check_params(self, params: SamplingParams, kind: RequestOutputKind, own_use: bool = False) -> None:
        """Raise BadRequestError, or UnsupportedError by name, for what this engine cannot do with these parameters.

        `own_use`: for the engine itself, which may ask for more log-probabilities than users.
        """
        if not isinstance(params, SamplingParams):
            raise BadRequestError(
                f"sampling_params must be SamplingParams, got {type(params).__name__}", "sampling_params"
            )
        params.verify(kind)
        limit = self.config.scheduler.max_n
        if params.num_children > limit:
            name = "n" if params.best_of is None else "best_of"
            raise BadRequestError(
                f"{name} must be at most {limit} (max_n of this engine), got {params.num_children}", name
            )
        if params.constraint is not None:
            if self.tokenizer is None:
                raise BadRequestError(
                    "structured_outputs needs a tokenizer, and this engine has none (skip_tokenizer_init)",
                    "structured_outputs",
                )
            check_constraint(params.constraint)
        if params.extra_args:
            raise UnsupportedError("extra_args: no extension that reads them is built here")
        if params.logits_processors and not self._callables:
            raise UnsupportedError(
                "logits_processors are callables, which need the in-process core (VLLM_ENABLE_V1_MULTIPROCESSING=0)"
            )
        if not own_use:
            self._check_logprobs("logprobs", params.logprobs)
            self._check_logprobs("prompt_logprobs", params.prompt_logprobs)
        self._check_vocabulary("stop_token_ids", params.stop_token_ids)
        self._check_vocabulary("allowed_token_ids", params.allowed_token_ids)
        self._check_vocabulary("logit_bias", params.logit_bias)
        if self.tokenizer is None and (params.stop or params.bad_words):
            name = "stop" if params.stop else "bad_words"
            raise BadRequestError(f"{name} needs a tokenizer, and this engine has none (skip_tokenizer_init)", name)

    def _check_logprobs(self, name: str, count: int | None) -> None:
        limit = self.config.model.max_logprobs
        if count is None or limit == -1:
            return
        if count == -1:
            count = self.model.vocab_size
        if count > limit:
            raise BadRequestError(f"{name} must be at most {limit} (max_logprobs of this engine), got {count}", name)

    def _check_vocabulary(self, name: str, ids: Any) -> None:
        if ids and max(ids) >= self.model.vocab_size:
            raise BadRequestError(
                f"{name}: token id {max(ids)} is out of range: the vocabulary has ids 0 to {self.model.vocab_size - 1}",
                name,
            )

    def _for_core(self, params: SamplingParams, room: int) -> SamplingParams:
        """The caller's own object, unless the core needs something filled in."""
        ready = core_params(params, self.config.model.logprobs_mode)
        if params.max_tokens is None or params.bad_words:
            if ready is params:
                ready = params.clone()
            if params.max_tokens is None:
                ready.max_tokens = max(room, params.min_tokens)
            if params.bad_words:
                ready.bad_words_token_ids = self._bad_words(params.bad_words)
        return ready

    def _bad_words(self, words: list[str]) -> list[list[int]]:
        """Token sequences of the words, as they stand at the beginning of a text and after a space."""
        assert self.tokenizer is not None
        sequences: list[list[int]] = []
        for word in words:
            for form in (word, " " + word.lstrip(" ")):
                ids = self._encode(form, False)
                if ids and ids not in sequences:
                    sequences.append(ids)
        return sequences

    def check_options(self, lora_request: LoRARequest | None, priority: int) -> None:
        """Raise BadRequestError for what this engine cannot do with these."""
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise BadRequestError(f"priority must be an int, got {priority!r:.80}", "priority")
        if priority and self.config.scheduler.policy != "priority":
            raise BadRequestError(f"priority={priority} needs an engine with scheduling_policy='priority'", "priority")
        if lora_request is not None:
            raise BadRequestError("lora_request needs an engine with enable_lora=True", "lora_request")

    # ---- both

    def process(
        self,
        request_id: str,
        prompt: PromptType | TokenizedPrompt,
        params: SamplingParams,
        kind: RequestOutputKind | None = None,
        *,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        own_use: bool = False,
    ) -> Submission:
        """Check everything, and make the submission. `kind` overrides the params' output_kind; `own_use` as above.

        Raises BadRequestError (a ValueError) or UnsupportedError (a NotImplementedError); the engine is untouched.
        """
        if not isinstance(request_id, str) or not request_id:
            raise BadRequestError(f"request_id must be a non-empty string, got {request_id!r:.80}", "request_id")
        self.check_options(lora_request, priority)
        if kind is None:
            kind = getattr(params, "output_kind", RequestOutputKind.CUMULATIVE)
        self.check_params(params, kind, own_use)
        if not isinstance(prompt, TokenizedPrompt):
            prompt = self.tokenize(prompt, params)
        core_request = EngineCoreRequest(
            handles=[],
            prompt_token_ids=prompt.token_ids,
            params=self._for_core(params, self._max_model_len - len(prompt.token_ids)),
            arrival_time=time.monotonic() if arrival_time is None else arrival_time,
            stream=kind is not RequestOutputKind.FINAL_ONLY or bool(params.stop),
            eos_token_ids=[] if params.ignore_eos else self._eos,
            priority=priority,
            lora_request=lora_request,
            cache_salt=prompt.cache_salt,
            finish_after=params.finish_after,
        )
        return Submission(request_id, prompt.text, params, kind, core_request)
