"""Grammars where the model runs: compiled in a thread, then one state per child.

    begin(handles, params)      when the request comes; the prompt may be computed meanwhile
    take_ready()                children whose grammar is there (or has failed): they may draw
    state(handle, params)       the child's own state, from its first draw to its end
    end(handles)                they have ended

A grammar that cannot be compiled, or that runs into a limit later, raises where its child draws, which ends that
request and no other.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from vllm.exceptions import EngineError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.structured_output.grammar import NAME, library, limits, to_grammar

if TYPE_CHECKING:
    from vllm.tokenizers import Tokenizer

Mask = npt.NDArray[np.uint32]

KEPT = 64
"""Compiled grammars that are kept for further requests."""


class GrammarError(EngineError):
    """A child's grammar failed."""


class ChildGrammar:
    """The state of one child's grammar: follows its output, and says which tokens may come next.

    Args:
        matcher: this child's own.
        words: 32-bit words of a mask.
    """

    def __init__(self, matcher: Any, words: int) -> None:
        self._matcher = matcher
        self._words = words
        self._seen = 0
        """Output tokens that have been followed."""

    def mask(self, output_ids: Sequence[int] | npt.NDArray[np.int32]) -> Mask:
        """Tokens that may follow `output_ids`, which begin with what was given before, or with a part of it (a draw
        that was undone). Raises GrammarError."""
        matcher = self._matcher
        if len(output_ids) < self._seen:
            matcher.rollback(self._seen - len(output_ids))
            self._seen = len(output_ids)
        more = [int(token) for token in output_ids[self._seen :]]
        if more and not matcher.is_stopped():
            matcher.consume_tokens(more)
        self._seen = len(output_ids)
        if matcher.is_error():
            raise GrammarError(f"{NAME}: {' '.join(matcher.get_error().split())[:500]}")
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint32)
        if matcher.is_error():
            raise GrammarError(f"{NAME}: {' '.join(matcher.get_error().split())[:500]}")
        return mask[: self._words]


class GrammarManager:
    """All grammars of one engine.

    Args:
        load_tokenizer: called once, in the compiling thread, when the first grammar comes.
        vocab_size: of the model.
        eos_token_ids: what ends an output.
    """

    def __init__(self, load_tokenizer: Callable[[], Tokenizer], vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._load_tokenizer = load_tokenizer
        self._vocab_size = vocab_size
        self._eos = list(eos_token_ids)
        self._tokenizer: Any = None
        self._compiled: OrderedDict[bytes, Future[Any]] = OrderedDict()
        self._waiting: dict[int, tuple[Future[Any], list[int]]] = {}
        """Handles of requests by a number of their own, until their grammar is there."""
        self._number = 0
        self._states: dict[int, ChildGrammar] = {}
        self._threads: ThreadPoolExecutor | None = None
        self._news = threading.Event()

    def begin(self, handles: Sequence[int], params: SamplingParams) -> bool:
        """Start to compile; whether it is done already (the children need not wait)."""
        assert params.constraint is not None
        compiled = self._compile(params.constraint)
        if compiled.done():
            return True
        self._number += 1
        self._waiting[self._number] = (compiled, list(handles))
        return False

    def take_ready(self, wait: float = 0.0) -> list[int]:
        """Handles whose grammar has come since; waits up to so many seconds for the first if there is none."""
        if not self._waiting:
            return []
        self._news.clear()
        done = [number for number, (compiled, _) in self._waiting.items() if compiled.done()]
        if not done and wait:
            self._news.wait(wait)
            done = [number for number, (compiled, _) in self._waiting.items() if compiled.done()]
        return [handle for number in done for handle in self._waiting.pop(number)[1]]

    def state(self, handle: int, params: SamplingParams) -> ChildGrammar:
        """The child's own state. Raises GrammarError if its grammar could not be compiled."""
        state = self._states.get(handle)
        if state is None:
            assert params.constraint is not None
            try:
                matcher = self._compile(params.constraint).result()
            except GrammarError:
                raise
            except Exception as error:
                raise GrammarError(f"{NAME}: {error}") from error
            state = self._states[handle] = ChildGrammar(matcher.deep_copy(), -(-self._vocab_size // 32))
        return state

    def end(self, handles: Iterable[int]) -> None:
        """Forget children. Unknown ones are passed over."""
        for handle in handles:
            self._states.pop(handle, None)

    @property
    def num_states(self) -> int:
        return len(self._states)

    def shutdown(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    # ---- compiling

    def _compile(self, constraint: StructuredOutputsParams) -> Future[Any]:
        import msgspec

        key = msgspec.msgpack.encode(constraint)
        compiled = self._compiled.get(key)
        if compiled is None:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(1, "vllm-grammar")
            compiled = self._threads.submit(self._work, constraint)
            compiled.add_done_callback(lambda _: self._news.set())
            self._compiled[key] = compiled
            while len(self._compiled) > KEPT and next(iter(self._compiled.values())).done():
                self._compiled.popitem(last=False)
        else:
            self._compiled.move_to_end(key)
        return compiled

    def _work(self, constraint: StructuredOutputsParams) -> Any:
        if self._tokenizer is None:
            self._tokenizer = self._make_tokenizer()
        matcher = library().LLMatcher(self._tokenizer, to_grammar(constraint), log_level=0, limits=limits())
        if matcher.is_error():
            raise GrammarError(f"{NAME}: {' '.join(matcher.get_error().split())[:500]}")
        return matcher

    def _make_tokenizer(self) -> Any:
        """llguidance's view of the vocabulary: what each token writes, byte for byte."""
        own = self._load_tokenizer()
        eos = [token for token in self._eos if token < self._vocab_size]
        if not eos and own.eos_token_id is not None:
            eos = [own.eos_token_id]
        wrapper = library().TokenizerWrapper(_Vocabulary(own, self._vocab_size, eos))
        return library().LLTokenizer(wrapper, n_vocab=self._vocab_size, eos_token=eos)


class _Vocabulary:
    """What `TokenizerWrapper` asks for."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos: Sequence[int]) -> None:
        self.eos_token_id = eos[0] if eos else 0
        self.bos_token_id = tokenizer.bos_token_id
        self.special_token_ids = sorted(token for token in tokenizer.special_ids if token < vocab_size)
        special = set(self.special_token_ids)
        self.tokens = [self._bytes(tokenizer, token, token in special) for token in range(vocab_size)]
        self._tokenizer = tokenizer

    @staticmethod
    def _bytes(tokenizer: Tokenizer, token: int, special: bool) -> bytes:
        if special:  # 0xFF marks what no text can contain
            return b"\xff" + (tokenizer.id_to_token(token) or f"[{token}]").encode()
        written = tokenizer.token_bytes(token)
        if written is None:
            written = tokenizer.decode([token]).encode()
        return written or b"\xff" + f"[{token}]".encode()

    def __call__(self, text: bytes | str) -> list[int]:
        """Only used to guess at forced tokens, which are not used here."""
        return self._tokenizer.encode(text.decode("utf-8", "replace") if isinstance(text, bytes) else text, False)
