"""The offline API: `LLM(model).generate(prompts, SamplingParams(n=4))`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.progress import ProgressBar
from vllm.entrypoints.prompts import one_each, split_prompts
from vllm.exceptions import BadRequestError, UnsupportedError
from vllm.inputs import PromptType
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from vllm.v1.engine.batch import Batch, Entry
from vllm.v1.engine.front_end import default_sampling_params
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.metrics.stats import Metric

if TYPE_CHECKING:
    from typing_extensions import Self

    from vllm.entrypoints.beam_search import BeamSearchOutput

_CHAT_ARGUMENTS = frozenset(
    (
        "add_generation_prompt",
        "chat_template",
        "content_format",
        "continue_final_message",
        "messages",
        "tokenizer",
        "tools",
    )
)

Message = dict[str, Any]
"""One message of a conversation: role, content, and what the chat template reads besides."""


class LLM:
    """A model, ready to generate. Keywords are those of `EngineArgs`; `None` means the default for each.

    Raises TypeError for an unknown keyword (naming the nearest known one), ConfigError (a ValueError), ModelLoadError,
    or UnsupportedError (a NotImplementedError) for what is known and not built. Use it as a context manager, or call
    `shutdown()`; at the latest its end comes with the program's.
    """

    llm_engine: LLMEngine

    def __init__(self, model: str | None = None, **engine_args: Any) -> None:
        if model is not None:
            engine_args["model"] = model
        self._start(EngineArgs(**engine_args))

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        self = cls.__new__(cls)
        self._start(engine_args)
        return self

    @classmethod
    def from_engine(cls, engine: LLMEngine) -> Self:
        """On an engine that exists; the LLM owns it from now on."""
        self = cls.__new__(cls)
        self._use(engine)
        return self

    def _start(self, engine_args: EngineArgs) -> None:
        self._use(LLMEngine.from_engine_args(engine_args))

    def _use(self, engine: LLMEngine) -> None:
        self.llm_engine = engine
        self._request_ids = itertools.count()
        self._default_params: SamplingParams | None = None

    # ---- generation

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int | Sequence[int] | None = None,
        prompt_token_ids: list[int] | list[list[int]] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts; outputs are in their order, each with all n completions.

        Args:
            prompts: a string, a list of token ids, a dict with `prompt` or `prompt_token_ids`, or a list of those.
            sampling_params: one for all, or one per prompt; None: the model's defaults.
            use_tqdm: False for no progress bar; a function to make another one.
            lora_request, priority: one for all, or one per prompt.
            prompt_token_ids: legacy form of `prompts`.

        Raises BadRequestError (a ValueError) or UnsupportedError (a NotImplementedError) before anything is computed if
        one of the prompts or params is wrong. If a request fails inside the engine (a logits processor raised), the
        others are finished; then EngineGenerateError is raised, whose `outputs` has them all. Ctrl-C, or any other
        exception, aborts what was submitted; the engine stays usable.
        """
        return self._run(split_prompts(prompts, prompt_token_ids), sampling_params, use_tqdm, lora_request, priority)

    def chat(
        self,
        messages: list[Message] | list[list[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: Literal["auto", "string", "openai"] = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Complete conversations: one list of messages, or several. Raises as `generate`, and BadRequestError for
        messages that the chat template does not take."""
        from vllm.entrypoints.chat_utils import render

        if mm_processor_kwargs:
            raise UnsupportedError("mm_processor_kwargs (input other than text) is not built here")
        if chat_template_content_format not in ("auto", "string", "openai"):
            raise BadRequestError(
                f"chat_template_content_format must be auto, string or openai, got {chat_template_content_format!r}",
                "chat_template_content_format",
            )
        variables = dict(chat_template_kwargs or {})
        own = sorted(_CHAT_ARGUMENTS.intersection(variables))
        if own:
            raise BadRequestError(f"chat_template_kwargs cannot set {', '.join(own)}", "chat_template_kwargs")
        tokenizer = self.llm_engine.tokenizer
        if tokenizer is None:
            raise BadRequestError("chat() needs a tokenizer, and this engine has none (skip_tokenizer_init)")
        if not isinstance(messages, (list, tuple)):
            raise BadRequestError(f"messages must be a list, got {type(messages).__name__}", "messages")
        conversations: list[Any] = [messages] if messages and isinstance(messages[0], dict) else list(messages)
        prompts: list[PromptType] = [
            render(
                tokenizer,
                conversation,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                content_format=chat_template_content_format,
                **variables,
            )
            for conversation in conversations
        ]
        return self._run(prompts, sampling_params, use_tqdm, lora_request, None, add_special_tokens=False)

    def _run(
        self,
        prompts: list[PromptType],
        sampling_params: Any,
        use_tqdm: bool | Callable[..., Any],
        lora_request: Any,
        priority: Any,
        add_special_tokens: bool = True,
    ) -> list[RequestOutput]:
        count = len(prompts)
        processor = self.llm_engine.processor
        params = one_each("sampling_params", sampling_params, count, self._defaults())
        loras = one_each("lora_request", lora_request, count, None)
        priorities = one_each("priority", priority, count, 0)
        for own in {id(own): own for own in params}.values():
            if not isinstance(own, SamplingParams):
                raise BadRequestError(
                    f"sampling_params must be SamplingParams, got {type(own).__name__}", "sampling_params"
                )
            own.verify(RequestOutputKind.FINAL_ONLY)
        tokenized = processor.tokenize_batch(prompts, params, add_special_tokens)
        entries = [Entry(*fields) for fields in zip(tokenized, params, loras, priorities, strict=True)]
        batch = Batch(self.llm_engine, entries, self._request_ids)
        if not count:
            return []
        return batch.run(_progress(use_tqdm, count, sum(own.num_children for own in params)))

    def beam_search(
        self,
        prompts: PromptType | Sequence[PromptType],
        params: BeamSearchParams,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        use_tqdm: bool | Callable[..., Any] = False,
    ) -> list[BeamSearchOutput]:
        """The `beam_width` most likely continuations of each prompt, best first.

        All beams share what they have in common through the prefix cache, so that an engine without it is refused.
        Raises as `generate`.
        """
        from vllm.entrypoints.beam_search import beam_search

        if not isinstance(params, BeamSearchParams):
            raise BadRequestError(f"params must be BeamSearchParams, got {type(params).__name__}", "params")
        params.verify()
        if not self.llm_engine.vllm_config.cache.enable_prefix_caching:
            raise BadRequestError(
                "beam_search needs an engine with enable_prefix_caching=True: beams share their prefixes through it",
                "enable_prefix_caching",
            )
        single = split_prompts(prompts)
        loras = one_each("lora_request", lora_request, len(single), None)
        tokenized = self.llm_engine.processor.tokenize_batch(single, [SamplingParams()] * len(single))
        progress = _progress(use_tqdm, len(single), len(single) * params.beam_width)
        return beam_search(self.llm_engine, tokenized, params, loras, self._request_ids, progress)

    # ---- what clients ask for besides

    def get_tokenizer(self) -> Any:
        """A transformers tokenizer of this model (transformers is imported now)."""
        return self.llm_engine.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """A new object with the defaults of the model's generation_config.json."""
        return default_sampling_params(self.llm_engine.model_info.generation_config)

    def _defaults(self) -> SamplingParams:
        if self._default_params is None:
            self._default_params = self.get_default_sampling_params()
        return self._default_params

    def reset_prefix_cache(self) -> bool:
        """Forget cached prompts; False while requests hold some."""
        return self.llm_engine.reset_prefix_cache()

    def sleep(self, level: int = 1) -> None:
        """Give memory back (needs enable_sleep_mode=True): 1 the KV cache, 2 the weights too."""
        self.llm_engine.sleep(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Take the memory again; `tags` ("weights", "kv_cache") for a part of it."""
        self.llm_engine.wake_up(tags)

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a worker's method by name, or a function of the worker (in-process core only), on every worker."""
        return self.llm_engine.collective_rpc(method, timeout, args, kwargs)

    def apply_model(self, function: Callable[[Any], Any]) -> list[Any]:
        """Call a function of the model on every worker (in-process core only)."""
        return self.llm_engine.apply_model(function)

    def get_metrics(self) -> list[Metric]:
        """Counters, gauges and histograms under upstream's names, and `vllm:prompt_tokens_computed_total`."""
        return self.llm_engine.get_metrics()

    def shutdown(self) -> None:
        """Stop the engine and give everything back; also twice."""
        self.llm_engine.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def _progress(use_tqdm: bool | Callable[..., Any], prompts: int, children: int) -> ProgressBar | None:
    if use_tqdm is False or use_tqdm is None:
        return None
    if callable(use_tqdm):
        return ProgressBar(use_tqdm, prompts, children)
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    return ProgressBar(tqdm, prompts, children)
