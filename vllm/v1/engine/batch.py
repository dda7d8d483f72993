"""Many requests at once on a synchronous engine, fed to the core in windows.

Any number of prompts x n is taken: the core and the output layer hold at most `window` children at a time (one larger
request is let in alone), and a finished request makes room for the next. Requests with the same prompt enter one after
the other, so that they meet in the core and share its computation.
"""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from vllm.exceptions import EngineDeadError, EngineGenerateError
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.engine.output_processor import Processed
from vllm.v1.engine.parallel_sampling import Submission
from vllm.v1.engine.processor import TokenizedPrompt
from vllm.v1.messages import EngineCoreRequest

MIN_WINDOW = 4096
"""Children in the engine at a time, at least."""
WINDOW_PER_SEQUENCE = 4
"""And at least this many for each sequence that the core runs at a time."""


@dataclass(slots=True)
class Entry:
    """One request of a batch."""

    prompt: TokenizedPrompt
    params: SamplingParams
    lora_request: LoRARequest | None = None
    priority: int = 0
    own_use: bool = False
    """Made by the engine itself: see `Processor.check_params`."""
    continues: int = -1
    """See `EngineCoreRequest.continues`."""
    hold: bool = False
    """Keep the prompt after the request's end: see `Batch.holds`."""


class Progress(Protocol):
    """Told after every step."""

    def update(self, processed: Processed, outputs: Sequence[RequestOutput]) -> None:
        """A step's news, and the outputs of this batch among them."""

    def close(self) -> None: ...


class _Place:
    """Sink of one request: its output goes to its place in the list."""

    __slots__ = ("_batch", "_index")

    def __init__(self, batch: Batch, index: int) -> None:
        self._batch = batch
        self._index = index

    def put(self, output: RequestOutput) -> None:
        self._batch.outputs[self._index] = output
        self._batch.arrived.append(output)

    def fail(self, error: Exception, output: RequestOutput | None = None) -> None:
        self._batch.errors.append((self._index, error))
        if output is not None:
            self.put(output)


class Batch:
    """One run. The engine must be used from this thread only while it lasts."""

    def __init__(self, engine: LLMEngine, entries: Sequence[Entry], request_ids: Iterator[int]) -> None:
        self._engine = engine
        self._entries = entries
        self._window = max(MIN_WINDOW, WINDOW_PER_SEQUENCE * engine.vllm_config.scheduler.max_num_seqs)
        self._request_ids = request_ids
        # Checked before the first of them is submitted: a bad one among them leaves the engine untouched.
        processor = engine.processor
        for entry in {id(entry.params): entry for entry in entries}.values():
            processor.check_params(entry.params, RequestOutputKind.FINAL_ONLY, entry.own_use)
        for entry in entries:
            processor.check_options(entry.lora_request, entry.priority)
        self.outputs: list[RequestOutput | None] = [None] * len(entries)
        self.holds: dict[int, int] = {}
        """By index, handles that keep the prompts of entries which ask for it. To be released by the caller."""
        self.arrived: list[RequestOutput] = []
        """Since the last step."""
        self._live: set[str] = set()
        self.errors: list[tuple[int, Exception]] = []

    def run(self, progress: Progress | None = None) -> list[RequestOutput]:
        """Outputs in the order of the entries.

        A request that fails inside the engine does not disturb the others: they are finished, then EngineGenerateError
        is raised, which has all outputs. Any other exception, Ctrl-C too, aborts what was submitted; the engine stays
        usable (unless it is what died: EngineDeadError).
        """
        waiting = iter(self._order())
        upcoming = next(waiting, None)
        try:
            with _interrupts_between_steps() as check:
                while True:
                    present = self._engine.output_processor.num_children
                    chosen: list[int] = []
                    while upcoming is not None and self._fits(present, upcoming):
                        present += self._entries[upcoming].params.num_children
                        chosen.append(upcoming)
                        upcoming = next(waiting, None)
                    if chosen:
                        self._submit(chosen)
                    if upcoming is None and not self._live:
                        break
                    self._step(progress)
                    check()
        except BaseException:
            self._abort()
            raise
        finally:
            if progress is not None:
                progress.close()
        outputs = [output for output in self.outputs if output is not None]
        if self.errors:
            index, error = min(self.errors, key=lambda entry: entry[0])
            more = "" if len(self.errors) == 1 else f" ({len(self.errors)} requests of {len(outputs)} failed)"
            raise EngineGenerateError(f"prompt {index}: {error}{more}", outputs)
        return outputs

    def _order(self) -> list[int]:
        """Indices in order of submission: as given, but equal prompts beside each other if not all fit the window."""
        if sum(entry.params.num_children for entry in self._entries) <= self._window:
            return list(range(len(self._entries)))
        groups: dict[bytes, list[int]] = {}
        for index, entry in enumerate(self._entries):
            groups.setdefault(entry.prompt.token_ids.tobytes(), []).append(index)
        return list(itertools.chain.from_iterable(groups.values()))

    def _fits(self, present: int, index: int) -> bool:
        return not present or present + self._entries[index].params.num_children <= self._window

    def _submit(self, indices: list[int]) -> None:
        together: list[tuple[Submission, _Place]] = []
        holds: list[EngineCoreRequest] = []
        for index in indices:
            entry = self._entries[index]
            submission = self._engine.processor.process(
                str(next(self._request_ids)),
                entry.prompt,
                entry.params,
                RequestOutputKind.FINAL_ONLY,
                lora_request=entry.lora_request,
                priority=entry.priority,
                own_use=entry.own_use,
            )
            submission.core_request.continues = entry.continues
            together.append((submission, _Place(self, index)))
            if entry.hold:
                (handle,) = self._engine.output_processor.new_handles(1)
                holds.append(msgspec.structs.replace(submission.core_request, handles=[handle], hold=True))
                self.holds[index] = handle
        self._engine.submit_all(together, holds)
        self._live.update(submission.request_id for submission, _ in together)

    def _step(self, progress: Progress | None) -> None:
        processed = self._engine.advance()
        self._engine.hold(processed.outputs)
        for output in self.arrived:
            self._live.discard(output.request_id)
        if progress is not None:
            progress.update(processed, self.arrived)
        self.arrived.clear()

    def _abort(self) -> None:
        """Free everything that was submitted, and wait until the core has done so."""
        engine = self._engine
        try:
            engine.abort_request(self._live)
            while self._live and engine.has_unfinished_requests():
                self._step(None)
        except EngineDeadError:
            pass  # nothing is left to be freed


@contextmanager
def _interrupts_between_steps() -> Iterator[Any]:
    """In the main thread Ctrl-C is noted during a step and raised by the yielded function after it, so that no step is
    cut short. A second Ctrl-C is raised at once."""
    previous = signal.getsignal(signal.SIGINT) if threading.current_thread() is threading.main_thread() else None
    if not callable(previous):
        yield lambda: None
        return
    noted: list[tuple[int, Any]] = []

    def check() -> None:
        if noted:
            previous(*noted.pop())

    def note(signum: int, frame: Any) -> None:
        if noted:
            signal.signal(signal.SIGINT, previous)
            previous(signum, frame)
        noted.append((signum, frame))

    signal.signal(signal.SIGINT, note)
    try:
        yield check
        check()
    finally:
        signal.signal(signal.SIGINT, previous)
