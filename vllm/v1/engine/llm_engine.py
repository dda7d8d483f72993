"""The synchronous engine: add requests, step, read outputs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm.config import ModelConfig, VllmConfig
from vllm.exceptions import BadRequestError, UnsupportedError
from vllm.inputs import PromptType
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.core_client import SyncClient, make_sync_client
from vllm.v1.engine.front_end import load_front_end
from vllm.v1.engine.output_processor import OutputProcessor, Processed
from vllm.v1.engine.parallel_sampling import SamplingRequest, Sink, Submission
from vllm.v1.engine.processor import ModelInfo, Processor
from vllm.v1.executor.abstract import Executor
from vllm.v1.messages import EngineCoreRequest
from vllm.v1.metrics.stats import EngineMetrics, IterationStats, Metric

if TYPE_CHECKING:
    from typing_extensions import Self

    from vllm.engine.arg_utils import EngineArgs
    from vllm.tokenizers import Tokenizer


class LLMEngine:
    """Requests of one thread. `step` until `has_unfinished_requests` is false.

    Args:
        vllm_config: everything.
        multiprocessing: whether the core runs in a process of its own; None: as VLLM_ENABLE_V1_MULTIPROCESSING says.
        model: facts of the checkpoint, and
        tokenizer: its tokenizer, where the caller has them already.
        executor: runs the steps, in place of the one that the configuration names (in-process core only).
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
        if vllm_config.observability.otlp_traces_endpoint is not None:
            raise UnsupportedError("otlp_traces_endpoint: only `vllm serve` sends traces")
        if model is None:
            model, tokenizer = load_front_end(vllm_config.model)
        self.model_info = model
        self.tokenizer = tokenizer
        self.client: SyncClient = make_sync_client(vllm_config, multiprocessing, executor)
        self.processor = Processor(
            vllm_config, model, tokenizer, self.client.info.max_prompt_len, callables=self.client.in_process
        )
        self.output_processor = OutputProcessor(tokenizer)
        self._held: list[RequestOutput] = []
        self.metrics = EngineMetrics(
            vllm_config.model.served_model_name or vllm_config.model.model, vllm_config.observability.log_stats
        )

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

    @property
    def model_executor(self) -> Executor:
        """The in-process executor; UnsupportedError with the core in its own process."""
        return self.client.executor

    # ---- requests

    def add_request(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
    ) -> None:
        """Submit one request with all its children.

        Raises BadRequestError (a ValueError; DuplicateRequestError for an id in use) or UnsupportedError; the engine is
        as before. The params are copied, so that the caller may go on changing the object. `arrival_time` is
        time.monotonic().
        """
        if tokenization_kwargs:
            raise UnsupportedError("tokenization_kwargs is not built here")
        if trace_headers:
            raise UnsupportedError("trace_headers (tracing) is not built yet")
        if not isinstance(params, SamplingParams):
            raise BadRequestError(f"params must be SamplingParams, got {type(params).__name__}", "params")
        self.output_processor.check_id(request_id)
        own = copy.copy(params) if self.client.in_process else params
        self.submit(
            self.processor.process(
                request_id, prompt, own, arrival_time=arrival_time, lora_request=lora_request, priority=priority
            )
        )

    def submit(self, submission: Submission, sink: Sink | None = None) -> None:
        """Hand a checked request to the core, as it is. Its outputs go to the sink, if there is one."""
        self.submit_all([(submission, sink)])

    def submit_all(
        self, submissions: Sequence[tuple[Submission, Sink | None]], holds: Sequence[EngineCoreRequest] = ()
    ) -> None:
        """Hand checked requests to the core in one message, so that they meet there. All are taken, or none.

        `holds` are requests that only keep a prompt, until their handles are given to `release`.
        """
        requests: list[SamplingRequest] = []
        try:
            for submission, sink in submissions:
                requests.append(self.output_processor.add(submission, sink))
            self.client.add_requests([*(request.submission.core_request for request in requests), *holds])
        except BaseException:
            for request in requests:
                self.output_processor.withdraw(request)
            if self.client.error is None:
                handles = [handle for request in requests for handle in request.handles]
                self.client.abort(handles + [handle for hold in holds for handle in hold.handles])
            raise

    def release(self, handles: list[int]) -> None:
        """End what `submit_all` was told to hold."""
        if handles and self.client.error is None:
            self.client.abort(handles)

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End requests with all their children; unknown ids are passed over. A later `step` returns what they have."""
        ids = [request_ids] if isinstance(request_ids, str) else request_ids
        handles = self.output_processor.abort(ids)
        if handles:
            self.client.abort(handles)

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has something to return: live requests, and aborted ones whose last output is due."""
        return self.output_processor.num_children > 0 or bool(self._held)

    def get_num_unfinished_requests(self) -> int:
        """Live requests; aborted ones do not count."""
        return self.output_processor.num_requests

    def step(self) -> list[RequestOutput]:
        """One step of the engine (or, with a core in its own process, its next message). Raises EngineDeadError."""
        held, self._held = self._held, []
        return held + self.advance().outputs

    def hold(self, outputs: list[RequestOutput]) -> None:
        """Keep outputs, which came while somebody else was stepping, for the next `step`."""
        self._held += outputs

    def advance(self) -> Processed:
        """`step`, with its statistics."""
        if not self.output_processor.num_children:
            return Processed([], [], [], IterationStats())
        try:
            message = self.client.get_outputs()
        except Exception as error:
            self.output_processor.fail_all(error)
            raise
        if message is None:
            return Processed([], [], [], IterationStats())
        processed = self.output_processor.process(message)
        if processed.stops:
            self.client.stop_children(processed.stops)
        if processed.aborts:
            self.client.abort(processed.aborts)
        self.metrics.record(message.stats, processed.stats)
        return processed

    # ---- everything else

    def check_integrity(self) -> None:
        """For an idle engine: raise IntegrityError with the numbers unless all tables are empty and all blocks free."""
        self.output_processor.check_idle()
        self.client.call("check_integrity")

    def reset_prefix_cache(self) -> bool:
        return bool(self.client.call("reset_prefix_cache"))

    def sleep(self, level: int = 1) -> None:
        self.client.call("sleep", level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.client.call("wake_up", tags)

    def is_sleeping(self) -> bool:
        return bool(self.client.call("is_sleeping"))

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a worker's method on every worker; a function needs the in-process core."""
        if callable(method) and not self.client.in_process:
            raise UnsupportedError(
                "collective_rpc with a function needs the in-process core (VLLM_ENABLE_V1_MULTIPROCESSING=0); "
                "give the name of a worker's method"
            )
        result: list[Any] = self.client.call("collective_rpc", method, timeout, list(args), kwargs)
        return result

    def apply_model(self, function: Callable[[Any], Any]) -> list[Any]:
        """Call a function with each worker's model; needs the in-process core."""
        if not self.client.in_process:
            raise UnsupportedError("apply_model needs the in-process core (VLLM_ENABLE_V1_MULTIPROCESSING=0)")
        return self.collective_rpc("apply_model", args=(function,))

    def get_tokenizer(self) -> Any:
        """A transformers tokenizer (transformers is imported now)."""
        return client_tokenizer(self.vllm_config.model)

    def get_metrics(self) -> list[Metric]:
        return self.metrics.read()

    def shutdown(self) -> None:
        """Stop the core and give everything back; also twice. Later use raises EngineDeadError."""
        self.client.shutdown()


def client_tokenizer(config: ModelConfig) -> Any:
    """The transformers tokenizer of a model. Raises BadRequestError with skip_tokenizer_init."""
    if config.skip_tokenizer_init:
        raise BadRequestError("this engine has no tokenizer (skip_tokenizer_init)")
    from vllm.tokenizers import get_tokenizer

    return get_tokenizer(config.tokenizer or config.path or config.model)
