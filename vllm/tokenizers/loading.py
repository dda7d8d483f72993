"""Finds what a model's tokenizer is made of, and makes it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from vllm.exceptions import ModelNotFoundError, TokenizerError, UnsupportedError
from vllm.tokenizers import byte_table, cache
from vllm.tokenizers.byte_table import ByteTable
from vllm.tokenizers.pretokenizers import NFC_GROWTH, find_pretokenizer
from vllm.tokenizers.tokenizer import SpecialTokens, Tokenizer
from vllm.tokenizers.vocabulary import TokenType, Vocabulary, build

if TYPE_CHECKING:
    from vllm.config import ModelConfig


def load_tokenizer(model_config: ModelConfig) -> Tokenizer:
    """The tokenizer of a model: of `model_config.tokenizer`, or of the checkpoint itself.

    Raises TokenizerError (the vocabulary is unusable), ModelNotFoundError, UnsupportedError (another tokenizer_mode).
    """
    mode = model_config.tokenizer_mode
    if mode not in ("auto", "hf", "fast"):
        raise UnsupportedError(f"tokenizer_mode={mode!r}: only 'auto' is built")
    return open_tokenizer(model_config.tokenizer or model_config.path or model_config.model)


def open_tokenizer(name: str | Path) -> Tokenizer:
    """The tokenizer of a folder, of a GGUF or tokenizer.json file, or of a model by its name."""
    path = find_tokenizer(name)
    if path.is_dir() or path.suffix == ".json":
        from vllm.tokenizers.hf_folder import open_folder

        return open_folder(path)
    return open_gguf(path)


def find_tokenizer(name: str | Path) -> Path:
    """The file or folder that `name` means. The folder needs no model in it."""
    path = Path(name).expanduser()
    if path.is_dir() and any((path / file).is_file() for file in ("tokenizer.json", "tokenizer.model")):
        return path
    from vllm.model_executor.loader.resolve import resolve_model

    try:
        return resolve_model(str(name))
    except ModelNotFoundError:
        if path.is_dir():
            return path  # opening it says what a tokenizer's folder needs
        raise


def open_gguf(path: Path) -> Tokenizer:
    """The tokenizer in a GGUF file; converted at the first time, read from the cache folder later."""
    from vllm.model_executor.loader.gguf_file import GGUFFile
    from vllm.tokenizers.gguf_vocab import read_vocabulary, vocabulary_fingerprint

    file = GGUFFile(path)
    try:
        place = cache.cache_path(vocabulary_fingerprint(file.metadata))
        found = cache.load(place)
        if found is None:
            try:
                found = convert(read_vocabulary(file.metadata))
            except TokenizerError as error:
                raise TokenizerError(f"{path}: {error}") from error
            cache.store(place, *found)
    finally:
        file.close()
    return from_vocabulary(*found)


def convert(vocabulary: Vocabulary) -> tuple[Vocabulary, ByteTable | None]:
    """The byte table beside a vocabulary, compared with the library's own decoding; None if they differ."""
    if vocabulary.kind == "bpe":
        table = ByteTable(byte_table.byte_level_table(vocabulary.tokens))
    else:
        table = ByteTable(byte_table.sentencepiece_table(vocabulary.tokens), strips_space=vocabulary.add_space_prefix)
    return vocabulary, table if byte_table.reproduces(table, build(vocabulary)) else None


def from_vocabulary(vocabulary: Vocabulary, table: ByteTable | None) -> Tokenizer:
    """The library's object is built when the first text is encoded."""
    tokens = vocabulary.tokens
    bound = None
    if table is not None and (vocabulary.kind == "bpe" or int((vocabulary.token_types == TokenType.BYTE).sum()) == 256):
        # Every byte of a text is in some token, but for a few control characters that some vocabularies do without.
        composes = vocabulary.kind == "bpe" and find_pretokenizer(vocabulary.pre).nfc
        bound = max(map(len, table.data)) * (NFC_GROWTH if composes else 1)
    return Tokenizer(
        library=partial(build, vocabulary),
        vocab_size=len(tokens),
        special=SpecialTokens(
            {role: (tokens[token_id], token_id) for role, token_id in vocabulary.roles.items()}, vocabulary.special_ids
        ),
        table=table,
        chat_template=vocabulary.chat_template,
        bytes_per_token=bound,
    )
