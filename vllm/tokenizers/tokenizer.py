"""The engine's tokenizer: text to ids by the `tokenizers` library, ids to text by a table of bytes.

Immutable once loaded, and safe to use from several threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.exceptions import BadRequestError, PromptTooLongError
from vllm.tokenizers.byte_table import ByteTable, join

if TYPE_CHECKING:
    import tokenizers


@dataclass(frozen=True)
class TextTable:
    """A ByteTable for output: with special tokens hidden or not, and each entry's text where it is whole characters."""

    data: list[bytes]
    """By id, what the token writes; b"" for hidden tokens and for ids that no token has."""
    texts: list[str | None]
    """By id, the same as text; None where the bytes are not UTF-8 on their own."""
    strips_space: bool


@dataclass(frozen=True)
class SpecialTokens:
    """The tokens with a role, and those that are hidden."""

    roles: dict[str, tuple[str, int]]
    """"bos" | "eos" | "unk" | "pad" | "sep" | "cls" | "mask" -> (text, id)."""
    ids: frozenset[int]


class Tokenizer:
    """Text to token ids and back.

    `chat_template` is the checkpoint's own template, or several by name; None if it has none.
    """

    def __init__(
        self,
        library: Callable[[], tokenizers.Tokenizer],
        vocab_size: int,
        special: SpecialTokens,
        table: ByteTable | None,
        chat_template: str | dict[str, str] | None = None,
        bytes_per_token: int | None = None,
    ) -> None:
        """`library` makes the library's object when it is first needed. No token stands for more than
        `bytes_per_token` bytes of a prompt; None if there is no such bound."""
        self._make_library = library
        self._library: tokenizers.Tokenizer | None = None
        self._lock = threading.Lock()
        self._texts: dict[bool, TextTable] = {}
        self._bytes_per_token = bytes_per_token
        self.table = table
        self.vocab_size = vocab_size
        """One more than the largest id."""
        self.chat_template = chat_template
        self.special = special

    @property
    def library(self) -> tokenizers.Tokenizer:
        """The `tokenizers` object; not to be changed."""
        if self._library is None:
            with self._lock:
                if self._library is None:
                    self._library = self._make_library()
        return self._library

    def new_library(self) -> tokenizers.Tokenizer:
        """A `tokenizers` object of the caller's own."""
        return self._make_library()

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that `skip_special_tokens` hides."""
        return self.special.ids

    @property
    def special_tokens_map(self) -> dict[str, str]:
        """ "bos_token" and so on -> text: the names that chat templates use."""
        return {f"{role}_token": text for role, (text, _) in self.special.roles.items()}

    def _role_id(self, role: str) -> int | None:
        entry = self.special.roles.get(role)
        return None if entry is None else entry[1]

    @property
    def bos_token_id(self) -> int | None:
        return self._role_id("bos")

    @property
    def eos_token_id(self) -> int | None:
        return self._role_id("eos")

    @property
    def unk_token_id(self) -> int | None:
        return self._role_id("unk")

    @property
    def pad_token_id(self) -> int | None:
        return self._role_id("pad")

    def __len__(self) -> int:
        return self.vocab_size

    def encode(self, text: str, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        """Token ids of `text`. Special tokens written in the text become those tokens.

        With `max_tokens`, a text that is too long to be encoded in that many is refused before it is encoded; one that
        is not may still be longer, which the caller sees. Raises BadRequestError.
        """
        self._check(text, max_tokens)
        ids: list[int] = self.library.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> list[list[int]]:
        """The same for several texts, on all cores."""
        for text in texts:
            self._check(text, max_tokens)
        encodings = self.library.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def _check(self, text: str, max_tokens: int | None) -> None:
        if not isinstance(text, str):
            raise BadRequestError(f"the text to encode must be a string, got {type(text).__name__}", "prompt")
        try:
            size = len(text) if text.isascii() else len(text.encode())
        except UnicodeEncodeError as error:
            raise BadRequestError(
                f"the text is not valid Unicode: a lone surrogate at character {error.start}", "prompt"
            ) from None
        if max_tokens is not None and self._bytes_per_token is not None and size > max_tokens * self._bytes_per_token:
            raise PromptTooLongError(
                f"the text has {size} bytes, which is at least {size // self._bytes_per_token} tokens; "
                f"at most {max_tokens} fit",
                "prompt",
            )

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence. Ids that no token has write nothing."""
        if self.table is not None:
            hidden = self.special_ids if skip_special_tokens else ()
            return join(self.table, [i for i in ids if i not in hidden])
        text: str = self.library.decode(
            [int(i) for i in ids if 0 <= i < self.vocab_size], skip_special_tokens=skip_special_tokens
        )
        return text

    def token_bytes(self, token_id: int) -> bytes | None:
        """What one token writes after other text; None if this vocabulary cannot say so token by token."""
        if self.table is None:
            return None
        return self.table.data[token_id] if 0 <= token_id < len(self.table.data) else b""

    def token_text(self, token_id: int) -> str:
        """One token for display, special ones too; U+FFFD where it holds part of a character."""
        data = self.token_bytes(token_id)
        return self.decode([token_id], skip_special_tokens=False) if data is None else data.decode("utf-8", "replace")

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling (Ġthe, ▁the); None for an id that no token has."""
        token: str | None = self.library.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
        return token

    def token_to_id(self, token: str) -> int | None:
        token_id: int | None = self.library.token_to_id(token)
        return token_id

    def text_table(self, skip_special_tokens: bool) -> TextTable | None:
        """The table that the incremental detokenizer reads; None if this vocabulary has none. Made once."""
        if self.table is None:
            return None
        with self._lock:
            found = self._texts.get(skip_special_tokens)
            if found is None:
                found = self._texts[skip_special_tokens] = self._make_texts(self.table, skip_special_tokens)
            return found

    def _make_texts(self, table: ByteTable, skip_special_tokens: bool) -> TextTable:
        other = self._texts.get(not skip_special_tokens)
        if other is None or skip_special_tokens is False:
            data, texts = list(table.data), list(map(_text, table.data))
        else:
            data, texts = list(other.data), list(other.texts)
        if skip_special_tokens:
            for token_id in self.special_ids:
                if token_id < len(data):
                    data[token_id], texts[token_id] = b"", ""
        return TextTable(data, texts, table.strips_space)


def _text(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None
