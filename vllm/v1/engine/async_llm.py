"""The asynchronous engine: many requests at once in one event loop, each with its own stream of outputs."""

from __future__ import annotations

import asyncio
import copy
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from vllm import envs
from vllm.config import ModelConfig, VllmConfig
from vllm.exceptions import BadRequestError, EngineDeadError, UnsupportedError
from vllm.inputs import PromptType
from vllm.logger import init_logger
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_client import AsyncClient, make_async_client
from vllm.v1.engine.collector import RequestOutputCollector
from vllm.v1.engine.front_end import load_front_end
from vllm.v1.engine.llm_engine import client_tokenizer
from vllm.v1.engine.output_processor import OutputProcessor, slices
from vllm.v1.engine.parallel_sampling import SamplingRequest
from vllm.v1.engine.processor import ModelInfo, Processor, TokenizedPrompt
from vllm.v1.executor.abstract import Executor
from vllm.v1.messages import EngineCoreOutputs
from vllm.v1.metrics.stats import EngineMetrics, Metric

if TYPE_CHECKING:
    from typing_extensions import Self

    from vllm.engine.arg_utils import EngineArgs
    from vllm.tokenizers import Tokenizer

logger = init_logger(__name__)

INLINE_CHARACTERS = 2_000
"""Longer texts (and id lists) are tokenized (checked) in another thread."""
SLICE = 256
"""Children of one message that are processed before the event loop gets a turn."""


class AsyncLLM:
    """Serves one event loop at a time. The core runs in a process of its own unless told otherwise.

    Args:
        vllm_config: everything.
        multiprocessing: False runs the core in a thread of this process. None: a process, unless
            VLLM_ENABLE_V1_MULTIPROCESSING=0 is set.
        model, tokenizer, executor: as for `LLMEngine`.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        *,
        multiprocessing: bool | None = None,
        model: ModelInfo | None = None,
        tokenizer: Tokenizer | None = None,
        executor: Executor | None = None,
    ) -> None:
        self.vllm_config = vllm_config
        if model is None:
            model, tokenizer = load_front_end(vllm_config.model)
        self.model_info = model
        self.tokenizer = tokenizer
        if multiprocessing is None:
            explicit = envs.is_set("VLLM_ENABLE_V1_MULTIPROCESSING")
            multiprocessing = vllm_config.multiprocessing if explicit else executor is None
        self.client: AsyncClient = make_async_client(
            vllm_config, self._on_outputs, self._on_death, multiprocessing, executor
        )
        self.processor = Processor(
            vllm_config, model, tokenizer, self.client.info.max_prompt_len, callables=self.client.in_process
        )
        self.output_processor = OutputProcessor(tokenizer)
        self.metrics = EngineMetrics(
            vllm_config.model.served_model_name or vllm_config.model.model, vllm_config.observability.log_stats
        )
        self._threads = ThreadPoolExecutor(1, "vllm-tokenizer")
        self._backlog: deque[tuple[EngineCoreOutputs, bool]] = deque()
        """Slices of the core's messages that wait for their turn, and whether each is the last of its step."""
        self._loop: asyncio.AbstractEventLoop | None = None

    @classmethod
    def from_vllm_config(cls, vllm_config: VllmConfig, **options: Any) -> Self:
        return cls(vllm_config, **options)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **options: Any) -> Self:
        """Resolve the arguments and start."""
        return cls(engine_args.create_engine_config(), **options)

    @property
    def model_config(self) -> ModelConfig:
        return self.vllm_config.model

    # ---- requests

    async def add_request(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
    ) -> RequestOutputCollector:
        """Submit one request; its outputs come to the collector. Raises as `LLMEngine.add_request` does, and
        EngineDeadError."""
        collector, _ = await self._submit(
            request_id, prompt, params, arrival_time, lora_request, tokenization_kwargs, trace_headers, priority
        )
        return collector

    async def _submit(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams,
        arrival_time: float | None,
        lora_request: LoRARequest | None,
        tokenization_kwargs: Mapping[str, Any] | None,
        trace_headers: Mapping[str, str] | None,
        priority: int,
    ) -> tuple[RequestOutputCollector, SamplingRequest]:
        if tokenization_kwargs:
            raise UnsupportedError("tokenization_kwargs is not built here")
        if trace_headers:
            raise UnsupportedError("trace_headers (tracing) is not built yet")
        if not isinstance(params, SamplingParams):
            raise BadRequestError(f"params must be SamplingParams, got {type(params).__name__}", "params")
        if self.client.error is not None:
            raise self.client.error
        loop = asyncio.get_running_loop()
        self._loop = loop
        self.client.attach(loop)
        own = copy.copy(params)  # the caller may change the object while the prompt is tokenized, or later
        self.processor.check_params(own, own.output_kind)
        tokenized = await self._tokenize(loop, prompt, own)
        # From here to the core there is no await: a cancelled caller has submitted nothing, or everything.
        submission = self.processor.process(
            request_id, tokenized, own, arrival_time=arrival_time, lora_request=lora_request, priority=priority
        )
        collector = RequestOutputCollector(submission.kind)
        request = self.output_processor.add(submission, collector)
        try:
            self.client.add_requests([submission.core_request])
        except BaseException:
            self.output_processor.withdraw(request)
            raise
        return collector, request

    async def _tokenize(
        self, loop: asyncio.AbstractEventLoop, prompt: PromptType, params: SamplingParams
    ) -> TokenizedPrompt:
        body: Any = prompt
        if isinstance(prompt, dict):
            body = prompt.get("prompt_token_ids") or prompt.get("prompt")
        if not hasattr(body, "__len__") or len(body) <= INLINE_CHARACTERS:
            return self.processor.tokenize(prompt, params)
        return await loop.run_in_executor(self._threads, self.processor.tokenize, prompt, params)

    async def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams,
        request_id: str,
        lora_request: LoRARequest | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        arrival_time: float | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Submit a request and yield its outputs, of the kind that its params ask for.

        Closing or cancelling the generator ends all children. Raises what `add_request` raises, EngineGenerateError
        when this request failed inside the engine, and EngineDeadError.
        """
        collector, request = await self._submit(
            request_id,
            prompt,
            sampling_params,
            arrival_time,
            lora_request,
            tokenization_kwargs,
            trace_headers,
            priority,
        )
        finished = False
        try:
            while not finished:
                output = collector.get_nowait() or await collector.get()
                finished = output.finished
                yield output
        finally:
            if not finished:
                self._abort_request(request)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests with all their children: each consumer gets a last output with what there is, and
        finish_reason "abort" for the children that had not ended. Unknown ids are passed over."""
        ids = [request_id] if isinstance(request_id, str) else request_id
        self._abort_handles(self.output_processor.abort(ids))

    def _abort_request(self, request: SamplingRequest) -> None:
        """For a consumer that has gone. Its id may already belong to another request."""
        self._abort_handles(self.output_processor.abort_request(request))

    def _abort_handles(self, handles: list[int]) -> None:
        if handles and self.client.error is None:
            self.client.abort(handles)

    # ---- outputs, in the event loop

    def _on_outputs(self, message: EngineCoreOutputs) -> None:
        idle = not self._backlog
        self._backlog.extend(slices(message, SLICE))
        if idle:
            self._process_next()

    def _process_next(self) -> None:
        """Process one slice; the others when the loop has looked around."""
        message, step_ends = self._backlog[0]
        try:
            processed = self.output_processor.process(message, step_ends)
            if processed.stops:
                self.client.stop_children(processed.stops)
            if processed.aborts:
                self.client.abort(processed.aborts)
            self.metrics.record(message.stats, processed.stats)
        except EngineDeadError:
            return  # everybody has been told
        except Exception as error:
            logger.exception("processing the engine core's outputs failed")
            self._backlog.clear()
            self._on_death(EngineDeadError(f"processing the engine core's outputs failed: {error}"))
            self.client.shutdown()
            return
        if self._backlog:
            self._backlog.popleft()
        if self._backlog and self._loop is not None:
            self._loop.call_soon(self._process_next)

    def _on_death(self, error: EngineDeadError) -> None:
        self._backlog.clear()
        self.output_processor.fail_all(error)

    # ---- state

    @property
    def errored(self) -> bool:
        return self.client.error is not None

    @property
    def dead_error(self) -> EngineDeadError:
        return self.client.error or EngineDeadError()

    @property
    def is_running(self) -> bool:
        return self.client.error is None

    @property
    def is_stopped(self) -> bool:
        return self.client.error is not None

    async def check_health(self) -> None:
        """Raise EngineDeadError if the core has died."""
        self.client.attach(asyncio.get_running_loop())
        await asyncio.sleep(0)  # lets a death that has been noticed be told
        if self.client.error is not None:
            raise self.client.error

    def check_idle(self) -> None:
        """Raise IntegrityError unless the front end's tables are empty."""
        self.output_processor.check_idle()

    async def _call(self, method: str, *args: Any) -> Any:
        loop = asyncio.get_running_loop()
        self._loop = loop
        if self.client.error is None:
            self.client.attach(loop)
        return await self.client.call(method, *args)

    async def check_integrity(self) -> None:
        """For an idle engine: raise IntegrityError unless all tables are empty and all blocks free."""
        self.output_processor.check_idle()
        await self._call("check_integrity")

    async def reset_prefix_cache(self) -> bool:
        return bool(await self._call("reset_prefix_cache"))

    async def sleep(self, level: int = 1) -> None:
        await self._call("sleep", level)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        await self._call("wake_up", tags)

    async def is_sleeping(self) -> bool:
        return bool(await self._call("is_sleeping"))

    async def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a worker's method on every worker; a function needs the in-process core."""
        if callable(method) and not self.client.in_process:
            raise UnsupportedError("collective_rpc with a function needs the in-process core; give a method's name")
        result: list[Any] = await self._call("collective_rpc", method, timeout, list(args), kwargs)
        return result

    async def get_tokenizer(self, lora_request: LoRARequest | None = None) -> Any:
        """A transformers tokenizer (transformers is imported now)."""
        if lora_request is not None:
            raise UnsupportedError("get_tokenizer with a lora_request is not built here")
        return client_tokenizer(self.vllm_config.model)

    async def get_model_config(self) -> ModelConfig:
        return self.vllm_config.model

    async def get_vllm_config(self) -> VllmConfig:
        return self.vllm_config

    def get_metrics(self) -> list[Metric]:
        return self.metrics.read()

    def shutdown(self) -> None:
        """Stop the core; whoever waits gets EngineDeadError. Also twice."""
        self.client.shutdown()
        self._threads.shutdown(wait=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
