"""A vocabulary as plain data, whatever file it came from, and the `tokenizers` object that is built from it."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from vllm.exceptions import TokenizerError
from vllm.tokenizers.byte_table import SPACE
from vllm.tokenizers.pretokenizers import find_pretokenizer

if TYPE_CHECKING:
    import tokenizers
    from tokenizers import models

_MAX_MERGED_CHARACTERS = 4096

SPECIAL_ROLES = ("bos", "eos", "unk", "pad", "sep", "cls", "mask")


class TokenType(IntEnum):
    """Kinds of tokens; GGUF and SentencePiece files use the same numbers."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Vocabulary:
    """Everything a tokenizer is made of.

    `kind` "bpe" is byte-level BPE: tokens are written in the GPT-2 byte alphabet and text is split by the pre-tokenizer
    named `pre`. "spm" is SentencePiece's BPE: spaces are written ▁, bytes outside the vocabulary <0xNN>, and merges
    follow from the scores.
    """

    kind: Literal["bpe", "spm"]
    tokens: list[str]
    token_types: npt.NDArray[np.uint8]  # [V]
    merges: npt.NDArray[np.int32]  # [M, 2], ids of the left and the right part, best first
    pre: str = ""
    roles: dict[str, int] = field(default_factory=dict)
    """Of SPECIAL_ROLES: id."""
    add_bos: bool = False
    add_eos: bool = False
    add_space_prefix: bool = False
    chat_template: str | dict[str, str] | None = None

    @property
    def special_ids(self) -> frozenset[int]:
        """Tokens that `skip_special_tokens` hides: control and unknown tokens, and those that have a role."""
        types = self.token_types
        marked = np.flatnonzero((types == TokenType.CONTROL) | (types == TokenType.UNKNOWN))
        return frozenset(marked.tolist()) | frozenset(self.roles.values())


def merges_from_scores(
    tokens: list[str], scores: npt.NDArray[np.float32], types: npt.NDArray[np.uint8]
) -> npt.NDArray[np.int32]:
    """The pairs that make each normal token, best score first: SentencePiece's BPE joins the neighbours whose result
    scores highest, which is what a merge list in that order says.

    Two ways to make one token score the same; they are ordered by their parts' ids.
    """
    ids = {token: index for index, token in enumerate(tokens)}
    find = ids.get
    made: list[int] = []
    lefts: list[int] = []
    rights: list[int] = []
    for index in np.flatnonzero(types == TokenType.NORMAL).tolist():
        token = tokens[index]
        if len(token) > _MAX_MERGED_CHARACTERS:
            raise TokenizerError(f"token {index} has {len(token)} characters; {_MAX_MERGED_CHARACTERS} are the limit")
        for cut in range(1, len(token)):
            left = find(token[:cut])
            if left is not None:
                right = find(token[cut:])
                if right is not None:
                    made.append(index)
                    lefts.append(left)
                    rights.append(right)
    pairs = np.array([lefts, rights], np.int32).reshape(2, -1).T
    order = np.lexsort((pairs[:, 1], pairs[:, 0], -scores[made]))
    return np.ascontiguousarray(pairs[order])


def build(vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    """A new `tokenizers` object. Raises TokenizerError where the vocabulary contradicts itself."""
    import tokenizers
    from tokenizers import decoders, normalizers, processors

    tokens = vocabulary.tokens
    unknown = vocabulary.roles.get("unk")
    if vocabulary.kind == "bpe":
        pretokenizer = find_pretokenizer(vocabulary.pre)
        result = tokenizers.Tokenizer(_bpe(vocabulary, ignore_merges=pretokenizer.ignore_merges))
        if pretokenizer.nfc:
            result.normalizer = normalizers.NFC()
        result.pre_tokenizer = pretokenizer.build()
        result.decoder = decoders.ByteLevel()
    else:
        model = _bpe(
            vocabulary,
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=bool((vocabulary.token_types == TokenType.BYTE).any()),
        )
        result = tokenizers.Tokenizer(model)
        replace = normalizers.Replace(" ", SPACE)
        decoding = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        if vocabulary.add_space_prefix:
            result.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), replace])
            decoding.append(decoders.Strip(" ", 1, 0))
        else:
            result.normalizer = replace
        result.decoder = decoders.Sequence(decoding)

    # Without a space prefix, user-defined symbols are looked for in the normalized text, as SentencePiece does: two
    # spaces are ▁▁ there. With one, the library would write the prefix into each symbol too.
    in_normalized = vocabulary.kind == "spm" and not vocabulary.add_space_prefix
    special = vocabulary.special_ids
    added = special | frozenset(np.flatnonzero(vocabulary.token_types == TokenType.USER_DEFINED).tolist())
    result.add_tokens(
        [
            tokenizers.AddedToken(tokens[i], special=i in special, normalized=in_normalized and i not in special)
            for i in sorted(added)
            if tokens[i]
        ]
    )
    before = [_role(vocabulary, "bos")] if vocabulary.add_bos else []
    after = [_role(vocabulary, "eos")] if vocabulary.add_eos else []
    if before or after:
        names = [name for name, _ in before + after]
        result.post_processor = processors.TemplateProcessing(
            single=[*[name for name, _ in before], "$A", *[name for name, _ in after]],
            pair=[*[name for name, _ in before], "$A", "$B", *[name for name, _ in after]],
            special_tokens=list(dict(zip(names, before + after, strict=True)).values()),
        )
    return result


def _bpe(vocabulary: Vocabulary, **options: Any) -> models.BPE:
    from tokenizers import models

    tokens = vocabulary.tokens
    collecting = gc.isenabled()
    gc.disable()  # half a million pairs of strings make it run often, and find nothing
    try:
        ids = dict(zip(tokens, range(len(tokens)), strict=True))
        lefts = map(tokens.__getitem__, vocabulary.merges[:, 0].tolist())
        rights = map(tokens.__getitem__, vocabulary.merges[:, 1].tolist())
        return models.BPE(ids, list(zip(lefts, rights, strict=True)), **options)
    except Exception as error:  # the library raises plain Exception
        raise TokenizerError(f"the vocabulary contradicts itself: {error}") from error
    finally:
        if collecting:
            gc.enable()


def _role(vocabulary: Vocabulary, role: str) -> tuple[str, int]:
    token_id = vocabulary.roles.get(role)
    if token_id is None:
        raise TokenizerError(f"the vocabulary asks for a {role} token around each prompt and does not say which it is")
    return vocabulary.tokens[token_id], token_id
