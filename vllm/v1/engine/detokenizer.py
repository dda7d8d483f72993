"""From token ids to text, token by token: what may be shown so far, what is new, and whether a stop string came up.

What a child's text is, whichever way it is asked for (`update` in any portions, or `decode_all`):

    text(prompt + output) without its first len(text(prompt)) characters

- A character that begins in the prompt belongs to the prompt: if the prompt ends in the middle of one, the output
  begins with the character after it.
- A leading space that the tokenizer takes away at a text's beginning is taken away only if the prompt has no text.
- A character that is still incomplete is not shown. At the very end, what is left of it is one U+FFFD.
- Ids that no token has (a padded vocabulary) write nothing.

Stop strings: the one that *ends* first ends the text; of two that end at the same character, the longer one. That is
what a reader of the stream sees first, and it does not depend on how the text was cut into tokens or the tokens into
steps. Text from before token `min_tokens` is never searched, so a match lies wholly behind it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from vllm.exceptions import BadRequestError
from vllm.tokenizers.byte_table import decode_prefix

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams
    from vllm.tokenizers.tokenizer import TextTable, Tokenizer

REPLACEMENT = "\ufffd"
_INCOMPLETE = 3
"""A character's bytes that can stand without its last one, at most."""


class IncrementalDetokenizer:
    """One child's text. The kinds differ in how a token becomes text; stop strings are the same for all."""

    __slots__ = ("_given", "_held", "_joined", "_pieces", "_state", "_stops", "_text", "num_tokens_used", "stop")

    def __init__(self, stops: StopSearch | None) -> None:
        self.stop: str | None = None
        """The stop string that was found; nothing is added to the text after it."""
        self.num_tokens_used = 0
        """How many of all the token ids given so far count: those up to the one that completed the stop string."""
        self._pieces: list[str] = []  # text that may be shown; entries never change
        self._given = 0  # pieces that `delta` has handed out
        self._joined = 0  # pieces that are in `_text`
        self._text = ""
        self._stops = stops
        self._state = 0  # of the automaton
        self._held = ""  # text that may be the beginning of a stop string

    def update(self, token_ids: Sequence[int], finished: bool = False) -> None:
        """Add tokens. With `finished` there will be no more: what was held back is shown."""
        if self._stops is not None:
            self._update_searching(token_ids, finished, self._stops)
            return
        for token_id in token_ids:
            self._pieces.append(self._decode(token_id))
        self.num_tokens_used += len(token_ids)
        if finished:
            self._pieces.append(self._flush())

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """The text of a whole output, as a new detokenizer without stop strings would end up with. Changes nothing
        here."""
        raise NotImplementedError

    @property
    def output_text(self) -> str:
        """All text that may be shown so far: without incomplete characters, and without an end that may turn out to be
        the beginning of a stop string."""
        pieces = self._pieces
        count = len(pieces)
        if self._joined != count:
            self._text += pieces[-1] if self._joined == count - 1 else "".join(pieces[self._joined :])
            self._joined = count
        return self._text

    def delta(self) -> str:
        """The part of `output_text` that this method has not returned before."""
        pieces, given = self._pieces, self._given
        count = len(pieces)
        self._given = count
        return pieces[given] if given == count - 1 else "".join(pieces[given:])

    def _decode(self, token_id: int) -> str:
        """The text that one more token completes."""
        raise NotImplementedError

    def _flush(self) -> str:
        """What is left of a character that will not be completed."""
        raise NotImplementedError

    def _update_searching(self, token_ids: Sequence[int], finished: bool, stops: StopSearch) -> None:
        if self.stop is not None:
            return
        decode, pieces, first_letters = self._decode, self._pieces, stops.automaton.first_letters
        for token_id in token_ids:
            text = decode(token_id)
            self.num_tokens_used += 1
            if self.num_tokens_used < stops.min_tokens or (not self._state and first_letters.isdisjoint(text)):
                pieces.append(text)
            elif self._find(text, stops):
                return
        if finished:
            text = self._flush()
            if self.num_tokens_used < stops.min_tokens:
                pieces.append(text)
            elif not self._find(text, stops):
                pieces.append(self._held)
                self._held, self._state = "", 0

    def _find(self, text: str, stops: StopSearch) -> bool:
        """Search new text; what cannot be part of a stop string any more, or all up to a match, becomes showable.

        The automaton's state is the longest end of the text that begins a stop string: exactly what is held back.
        """
        automaton, state = stops.automaton, self._state
        step, found = automaton.step, automaton.found
        for position, letter in enumerate(text, 1):
            state = step(state, letter)
            stop = found[state]
            if stop is not None:
                self.stop = stop
                text = self._held + text[:position]  # nothing is held where the stop string stays
                self._pieces.append(text if stops.include else text[: -len(stop)])
                self._held = ""
                return True
        self._state = state
        if stops.include:  # a stop string may be seen then, and nothing is ever held back
            self._pieces.append(text)
            return False
        text = self._held + text
        shown = len(text) - automaton.depth[state]
        self._pieces.append(text[:shown])
        self._held = text[shown:]
        return False


class NoDetokenizer(IncrementalDetokenizer):
    """`detokenize=False`, or no tokenizer: there is no text."""

    __slots__ = ()

    def _decode(self, token_id: int) -> str:  # noqa: ARG002
        return ""

    def _flush(self) -> str:
        return ""

    def decode_all(self, token_ids: Sequence[int]) -> str:  # noqa: ARG002
        return ""


class TableDetokenizer(IncrementalDetokenizer):
    """By a table of the bytes that each token writes."""

    __slots__ = ("_at_start", "_begin", "_data", "_odd", "_pending", "_size", "_texts")

    def __init__(self, table: TextTable, begin: bytes | None, stops: StopSearch | None) -> None:
        """`begin`: the prompt's incomplete last character, b"" if it ends with a whole one; None if a leading space of
        the output is to be taken away."""
        super().__init__(stops)
        self._data, self._texts = table.data, table.texts
        self._size = len(table.data)
        self._begin = begin
        self._at_start = begin != b""  # until the output's first character is behind
        self._pending = begin or b""  # bytes of a character that is not complete
        self._odd = self._at_start  # whether the next token needs `_decode_part`

    def update(self, token_ids: Sequence[int], finished: bool = False) -> None:
        if self._stops is not None:
            self._update_searching(token_ids, finished, self._stops)
            return
        pieces, texts, size = self._pieces, self._texts, self._size
        for token_id in token_ids:  # `_decode`, without the call
            text = texts[token_id] if 0 <= token_id < size else ""
            pieces.append(self._decode_part(token_id) if text is None or self._odd else text)
        self.num_tokens_used += len(token_ids)
        if finished:
            pieces.append(self._flush())

    def decode_all(self, token_ids: Sequence[int]) -> str:
        data, begin = self._data, self._begin
        try:
            if token_ids and min(token_ids) < 0:
                raise IndexError
            written = b"".join(map(data.__getitem__, token_ids))
        except IndexError:
            written = b"".join([data[i] for i in token_ids if 0 <= i < self._size])
        if begin == b"":
            return written.decode("utf-8", "replace")
        return _first(begin, ((begin or b"") + written).decode("utf-8", "replace"))

    def _decode(self, token_id: int) -> str:
        text = self._texts[token_id] if 0 <= token_id < self._size else ""
        return self._decode_part(token_id) if text is None or self._odd else text

    def _decode_part(self, token_id: int) -> str:
        """The general case: a character in parts, or the output's first one."""
        data = self._data[token_id] if 0 <= token_id < self._size else b""
        text, self._pending = decode_prefix(self._pending + data)
        if text and self._at_start:
            text = _first(self._begin, text)
            self._at_start = False
        self._odd = self._at_start or self._pending != b""
        return text

    def _flush(self) -> str:
        if not self._pending:
            return ""
        text = self._pending.decode("utf-8", "replace")
        if self._at_start:
            text = _first(self._begin, text)
        self._at_start = self._odd = False
        self._pending = b""
        return text


def _first(begin: bytes | None, text: str) -> str:
    """A text that is the output's first, without what is not the output's."""
    return text[1:] if begin or (begin is None and text.startswith(" ")) else text


class LibraryDetokenizer(IncrementalDetokenizer):
    """By the `tokenizers` library's own decoder, for vocabularies whose tokens have no text of their own (WordPiece's
    ##, spaces between words).

    A token's text is the difference that it makes to its predecessors': decode(window + new) against decode(window). It
    costs two calls of the library per token.
    """

    __slots__ = (
        "_at_boundary",
        "_ids",
        "_prefix",
        "_prompt_ids",
        "_read",
        "_skip",
        "_spaces",
        "_tokenizer",
        "_was_special",
    )

    _CONTEXT = 6  # visible tokens before the output that may change how it begins
    _PATIENCE = 8  # tokens after which a character that is still incomplete will not be completed

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        skip: bool,
        spaces: bool,
        stops: StopSearch | None = None,
    ) -> None:
        super().__init__(stops)
        self._tokenizer = tokenizer
        self._prompt_ids = prompt_token_ids
        self._skip = skip
        self._spaces = spaces
        self._was_special = False
        self._ids = _last_visible(prompt_token_ids, tokenizer, skip, self._CONTEXT)
        self._prefix = 0
        self._read = len(self._ids)
        self._at_boundary = not tokenizer.decode(self._ids, skip).endswith(REPLACEMENT)

    def decode_all(self, token_ids: Sequence[int]) -> str:
        fresh = LibraryDetokenizer(self._tokenizer, self._prompt_ids, self._skip, self._spaces)
        fresh.update(token_ids, True)
        return fresh.output_text

    def _decode(self, token_id: int) -> str:
        tokenizer = self._tokenizer
        special = token_id in tokenizer.special_ids
        if (special and self._skip) or not 0 <= token_id < tokenizer.vocab_size:
            return ""
        bare = special and self._was_special and not self._spaces
        self._was_special = special
        self._ids.append(token_id)
        text, complete = self._difference()
        if not complete and len(self._ids) - self._read < self._PATIENCE:
            return ""
        if self._at_boundary or len(self._ids) - self._prefix > 2 * self._PATIENCE:
            self._prefix = self._read
        self._read = len(self._ids)
        self._at_boundary = complete
        return tokenizer.token_text(token_id) if bare else text

    def _flush(self) -> str:
        text, complete = self._difference()
        self._prefix, self._read = self._read, len(self._ids)
        return text if complete or not text else text.rstrip(REPLACEMENT) + REPLACEMENT

    def _difference(self) -> tuple[str, bool]:
        """(text that the ids from `_read` on add, whether it ends with a whole character)."""
        decode = self._tokenizer.decode
        before = decode(self._ids[self._prefix : self._read], self._skip)
        after = decode(self._ids[self._prefix :], self._skip)
        if self._at_boundary:
            text = after[len(before) :]
        else:  # the character in which `before` ends is not part of the new text, whatever becomes of it
            text = after[len(before.rstrip(REPLACEMENT)) :]
            text = text.lstrip(REPLACEMENT) if text.startswith(REPLACEMENT) else text[1:]
        return text, not after.endswith(REPLACEMENT)


class StopAutomaton:
    """Aho and Corasick's automaton (1975): finds any of several strings, looking at each character of the text once.

    State 0 is the beginning; the text's last `depth[state]` characters are the longest beginning of a stop string that
    it ends with; `found[state]` is the longest stop string that it ends with.
    """

    def __init__(self, strings: Iterable[str]) -> None:
        strings = list(strings)
        self.first_letters = frozenset(string[0] for string in strings)
        self.depth = [0]
        self.found: list[str | None] = [None]
        self._next: list[dict[str, int]] = [{}]
        self._fail = [0]
        for string in strings:
            state = 0
            for depth, letter in enumerate(string, 1):
                following = self._next[state].get(letter)
                if following is None:
                    following = self._next[state][letter] = len(self._next)
                    self._next.append({})
                    self._fail.append(0)
                    self.depth.append(depth)
                    self.found.append(None)
                state = following
            self.found[state] = string
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for letter, following in self._next[state].items():
                fallback = self._fail[following] = self.step(self._fail[state], letter)
                if self.found[following] is None:
                    self.found[following] = self.found[fallback]
                queue.append(following)

    def step(self, state: int, letter: str) -> int:
        """The state after one more character."""
        while True:
            following = self._next[state].get(letter)
            if following is not None:
                return following
            if not state:
                return 0
            state = self._fail[state]


class StopSearch(NamedTuple):
    """What the children of one request look for; shared by them."""

    automaton: StopAutomaton
    include: bool
    """The stop string stays in the text."""
    min_tokens: int
    """The first token whose text is searched, counting from 1."""


@lru_cache(maxsize=16)
def _automaton(strings: tuple[str, ...]) -> StopAutomaton:
    return StopAutomaton(strings)


def make_detokenizer(
    tokenizer: Tokenizer | None, prompt_token_ids: Sequence[int], params: SamplingParams
) -> IncrementalDetokenizer:
    """A detokenizer for one child. Raises BadRequestError if there are stop strings and no text to look for them in.

    `spaces_between_special_tokens=False` matters only where the vocabulary's decoder writes such spaces.
    """
    if tokenizer is None or not params.detokenize:
        if params.stop:
            raise BadRequestError("stop strings need the text: a tokenizer, and detokenize=True", "stop")
        return NoDetokenizer(None)
    stops = None
    if params.stop:
        strings = (params.stop,) if isinstance(params.stop, str) else tuple(params.stop)
        stops = StopSearch(_automaton(strings), params.include_stop_str_in_output, params.min_tokens)
    table = tokenizer.text_table(params.skip_special_tokens)
    if table is not None:
        return TableDetokenizer(table, _beginning(table, prompt_token_ids), stops)
    return LibraryDetokenizer(
        tokenizer, prompt_token_ids, params.skip_special_tokens, params.spaces_between_special_tokens, stops
    )


def _beginning(table: TextTable, prompt_token_ids: Sequence[int]) -> bytes | None:
    """What `TableDetokenizer` needs to know of the prompt: see there."""
    data, size = table.data, len(table.data)
    if table.strips_space and not any(0 <= i < size and data[i] for i in prompt_token_ids):
        return None
    tail = b""
    for token_id in reversed(prompt_token_ids):
        tail = (data[token_id] if 0 <= token_id < size else b"") + tail
        if len(tail) >= _INCOMPLETE or (tail and tail[-1] < 0x80):
            break
    return decode_prefix(tail[-_INCOMPLETE:])[1]


def _last_visible(ids: Sequence[int], tokenizer: Tokenizer, skip: bool, count: int) -> list[int]:
    """The last `count` ids that write something, in order."""
    found: list[int] = []
    for token_id in reversed(ids):
        if 0 <= token_id < tokenizer.vocab_size and not (skip and token_id in tokenizer.special_ids):
            found.append(int(token_id))
            if len(found) == count:
                break
    return found[::-1]
