"""Reads the vocabulary in a GGUF file's metadata."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from vllm.exceptions import TokenizerError
from vllm.logger import init_logger
from vllm.tokenizers.byte_table import SPACE
from vllm.tokenizers.pretokenizers import find_pretokenizer
from vllm.tokenizers.vocabulary import TokenType, Vocabulary, merges_from_scores

if TYPE_CHECKING:
    from vllm.model_executor.loader.gguf_file import GGUFMetadata

logger = init_logger(__name__)

_PREFIX = "tokenizer."
_ROLE_KEYS = {
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "unk": "unknown_token_id",
    "pad": "padding_token_id",
    "sep": "separator_token_id",
    "cls": "cls_token_id",
    "mask": "mask_token_id",
}
_SPM_DEFAULTS = {"bos": (1, TokenType.CONTROL), "eos": (2, TokenType.CONTROL), "unk": (0, TokenType.UNKNOWN)}


def vocabulary_fingerprint(metadata: GGUFMetadata) -> list[bytes]:
    """The bytes that decide what `read_vocabulary` returns; equal lists mean equal vocabularies."""
    parts = []
    for key in sorted(metadata):
        if key.startswith(_PREFIX):
            value = metadata.encoded(key)
            parts += [f"{key}\0{len(value)}\0".encode(), value]
    return parts


def read_vocabulary(metadata: GGUFMetadata) -> Vocabulary:
    """Raises TokenizerError naming the key that is missing or wrong, or the kind of vocabulary that is not read."""
    model = metadata.get("tokenizer.ggml.model")
    if model not in ("gpt2", "llama"):
        if model is None:
            raise TokenizerError("the GGUF file has no tokenizer (no key tokenizer.ggml.model)")
        raise TokenizerError(
            f"the GGUF file's tokenizer is of the kind {model!r}; gpt2 (byte-level BPE) and llama (SentencePiece) are "
            "read. Pass tokenizer= with a folder that has the model's tokenizer.json."
        )
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    if not tokens:
        raise TokenizerError("GGUF key tokenizer.ggml.tokens is empty")
    types = _column(metadata, "tokenizer.ggml.token_type", len(tokens))
    token_types = np.full(len(tokens), TokenType.NORMAL, np.uint8) if types is None else types.astype(np.uint8)
    roles = _roles(metadata, len(tokens))
    if "unk" in roles and token_types[roles["unk"]] == TokenType.NORMAL:
        del roles["unk"]  # files of byte-level vocabularies, which need none, name an ordinary word in some cases
    if model == "gpt2":
        return _read_bpe(metadata, tokens, token_types, roles)
    return _read_spm(metadata, tokens, token_types, roles)


def _read_bpe(
    metadata: GGUFMetadata, tokens: list[str], types: npt.NDArray[np.uint8], roles: dict[str, int]
) -> Vocabulary:
    pre = metadata.get("tokenizer.ggml.pre", "")
    defaults = find_pretokenizer(pre)
    ids = _index(tokens)
    merges = []
    for line in _strings(metadata, "tokenizer.ggml.merges"):
        left, _, right = line.partition(" ")
        try:
            merges.append((ids[left], ids[right]))
        except KeyError as error:
            raise TokenizerError(f"GGUF key tokenizer.ggml.merges joins {error}, which is not a token") from None
    return Vocabulary(
        kind="bpe",
        tokens=tokens,
        token_types=types,
        merges=np.array(merges, np.int32).reshape(-1, 2),
        pre=pre,
        roles=roles,
        add_bos=_flag(metadata, "add_bos_token", defaults.adds_bos and "bos" in roles),
        add_eos=_flag(metadata, "add_eos_token", False),
        chat_template=_chat_template(metadata),
    )


def _read_spm(
    metadata: GGUFMetadata, tokens: list[str], types: npt.NDArray[np.uint8], roles: dict[str, int]
) -> Vocabulary:
    scores = _column(metadata, "tokenizer.ggml.scores", len(tokens))
    if scores is None:
        raise TokenizerError("GGUF key tokenizer.ggml.scores is missing; a llama vocabulary needs it")
    # Files differ in how they write the spaces of user-defined symbols; ▁ is how the rest of the vocabulary does.
    for index in np.flatnonzero(types == TokenType.USER_DEFINED).tolist():
        tokens[index] = tokens[index].replace(" ", SPACE)
    _index(tokens)
    for role, (token_id, kind) in _SPM_DEFAULTS.items():
        if role not in roles and token_id < len(tokens) and types[token_id] == kind:
            roles[role] = token_id
    return Vocabulary(
        kind="spm",
        tokens=tokens,
        token_types=types,
        merges=merges_from_scores(tokens, scores.astype(np.float32), types),
        roles=roles,
        add_bos=_flag(metadata, "add_bos_token", "bos" in roles),
        add_eos=_flag(metadata, "add_eos_token", False),
        add_space_prefix=_flag(metadata, "add_space_prefix", True),
        chat_template=_chat_template(metadata),
    )


def _index(tokens: list[str]) -> dict[str, int]:
    ids = dict(zip(tokens, range(len(tokens)), strict=True))
    if len(ids) != len(tokens):
        twice = next(token for index, token in enumerate(tokens) if ids[token] != index)
        raise TokenizerError(f"GGUF key tokenizer.ggml.tokens has {twice!r} twice")
    return ids


def _strings(metadata: GGUFMetadata, key: str) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, list):
        raise TokenizerError(
            f"GGUF key {key} is missing" if value is None else f"GGUF key {key} is not a list of strings"
        )
    return value


def _column(metadata: GGUFMetadata, key: str, length: int) -> npt.NDArray[Any] | None:
    value = metadata.get(key)
    if value is None:
        return None
    if not isinstance(value, np.ndarray):
        raise TokenizerError(f"GGUF key {key} is not an array of numbers")
    if len(value) != length:
        raise TokenizerError(f"GGUF key {key} has {len(value)} entries for {length} tokens")
    return value


def _roles(metadata: GGUFMetadata, size: int) -> dict[str, int]:
    roles = {}
    for role, name in _ROLE_KEYS.items():
        key = f"tokenizer.ggml.{name}"
        value = metadata.get(key)
        if value is None or value in (-1, 0xFFFFFFFF):
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < size:
            raise TokenizerError(f"GGUF key {key} is {value!r}; the vocabulary has {size} tokens")
        roles[role] = value
    return roles


def _flag(metadata: GGUFMetadata, name: str, default: bool) -> bool:
    value = metadata.get(f"tokenizer.ggml.{name}", default)
    if not isinstance(value, (bool, int)):
        raise TokenizerError(f"GGUF key tokenizer.ggml.{name} is {value!r}, not a bool")
    return bool(value)


def _chat_template(metadata: Mapping[str, Any]) -> str | dict[str, str] | None:
    """One template, or several by name, the one without a name as "default"."""
    head = "tokenizer.chat_template"
    named = {key[len(head) + 1 :]: metadata[key] for key in metadata if key.startswith(head + ".")}
    single = metadata.get(head)
    for name, template in (("", single), *named.items()):
        if template is not None and not isinstance(template, str):
            raise TokenizerError(f"GGUF key {head}{'.' if name else ''}{name} is not a string")
    if not named:
        return single
    return named if single is None else {"default": single, **named}
