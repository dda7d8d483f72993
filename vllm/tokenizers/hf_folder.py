"""Opens the tokenizer of a Hugging Face folder: tokenizer.json as it is, roles and templates from the files beside."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.exceptions import TokenizerError
from vllm.tokenizers import cache
from vllm.tokenizers.byte_table import table_of
from vllm.tokenizers.pretokenizers import NFC_GROWTH
from vllm.tokenizers.tokenizer import SpecialTokens, Tokenizer
from vllm.tokenizers.vocabulary import SPECIAL_ROLES

if TYPE_CHECKING:
    import tokenizers


def open_folder(path: Path) -> Tokenizer:
    """A folder, or a tokenizer.json. Raises TokenizerError saying which file is missing or what is wrong with it."""
    folder, file = (path, path / "tokenizer.json") if path.is_dir() else (path.parent, path)
    config = _read_json(folder / "tokenizer_config.json")
    if file.is_file():
        return _open_json(file, folder, config)
    if (folder / "tokenizer.model").is_file():
        return _open_sentencepiece(folder, config)
    there = ", ".join(
        sorted(entry.name for entry in folder.iterdir() if entry.name.startswith(("tok", "vocab", "merg")))
    )
    raise TokenizerError(
        f"{folder} has no tokenizer.json and no tokenizer.model (found: {there or 'no tokenizer file'}). "
        "transformers makes one of other kinds: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)."
    )


def _open_json(file: Path, folder: Path, config: dict[str, Any]) -> Tokenizer:
    roles = _role_texts(folder, config)
    make = partial(_load_library, file, config, tuple(roles.values()))
    library = make()
    ids = ((role, text, library.token_to_id(text)) for role, text in roles.items())
    added = library.get_added_tokens_decoder()
    special = frozenset(token_id for token_id, token in added.items() if token.special)
    vocabulary = library.get_vocab(with_added_tokens=True)
    size = max(vocabulary.values(), default=-1) + 1
    table = table_of(library)
    bounded = table is not None and _keeps_length(library, list(added.values()))
    first = [library]  # the one that was just made serves the tokenizer; later ones are for those who change theirs
    return Tokenizer(
        library=lambda: first.pop() if first else make(),
        vocab_size=size,
        special=SpecialTokens(
            {role: (text, token_id) for role, text, token_id in ids if token_id is not None}, special
        ),
        table=table,
        chat_template=_chat_template(folder, config),
        bytes_per_token=NFC_GROWTH * max(map(len, table.data)) if table is not None and bounded else None,
    )


def _load_library(file: Path, config: dict[str, Any], role_texts: tuple[str, ...]) -> tokenizers.Tokenizer:
    import tokenizers

    try:
        library = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise TokenizerError(f"{file}: {error}") from error
    library.no_truncation()
    library.no_padding()
    for key, entry in sorted(_mapping(config.get("added_tokens_decoder")).items(), key=lambda item: int(item[0])):
        token_id = int(key)
        if not isinstance(entry, dict) or library.id_to_token(token_id) not in (None, entry.get("content")):
            raise TokenizerError(f"{file.parent}/tokenizer_config.json: added token {key} contradicts tokenizer.json")
        flags = {name: bool(entry.get(name, False)) for name in ("single_word", "lstrip", "rstrip", "special")}
        token = tokenizers.AddedToken(entry["content"], normalized=bool(entry.get("normalized", True)), **flags)
        library.add_tokens([token])
        if library.token_to_id(entry["content"]) != token_id:
            raise TokenizerError(f"{file.parent}/tokenizer_config.json: added token {key} leaves a gap in the ids")
    known = {token.content for token in library.get_added_tokens_decoder().values() if token.special}
    library.add_special_tokens(
        [
            tokenizers.AddedToken(text, special=True, normalized=False)
            for text in role_texts
            if text not in known and library.token_to_id(text) is not None
        ]
    )
    return library


def _open_sentencepiece(folder: Path, config: dict[str, Any]) -> Tokenizer:
    from vllm.tokenizers.loading import convert, from_vocabulary
    from vllm.tokenizers.sentencepiece_model import read_sentencepiece

    file = folder / "tokenizer.model"
    place = cache.cache_path([b"sentencepiece", file.read_bytes()])
    found = cache.load(place)
    if found is None:
        found = convert(read_sentencepiece(file))
        cache.store(place, *found)
    vocabulary, table = found
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    roles = {role: ids[text] for role, text in _role_texts(folder, config).items() if text in ids}
    vocabulary = replace(
        vocabulary,
        roles={**vocabulary.roles, **roles},
        add_bos=bool(config.get("add_bos_token", vocabulary.add_bos)),
        add_eos=bool(config.get("add_eos_token", False)),
        chat_template=_chat_template(folder, config),
    )
    return from_vocabulary(vocabulary, table)


def _keeps_length(library: tokenizers.Tokenizer, added: list[tokenizers.AddedToken]) -> bool:
    """Whether a token stands for no more of the prompt than its own bytes (or three times that, composed)."""
    normalizer = library.normalizer
    kept = normalizer is None or json.loads(normalizer.__getstate__()).get("type") == "NFC"
    return kept and library.model.__class__.__name__ == "BPE" and not any(t.lstrip or t.rstrip for t in added)


def _role_texts(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Role -> the token's text, from tokenizer_config.json or, in older folders, special_tokens_map.json."""
    older = _read_json(folder / "special_tokens_map.json")
    roles = {}
    for role in SPECIAL_ROLES:
        key = f"{role}_token"
        value = config[key] if key in config else older.get(key)
        if isinstance(value, dict):
            value = value.get("content")
        if value is None:
            continue
        if not isinstance(value, str):
            raise TokenizerError(f"{folder}/tokenizer_config.json: {key} is {value!r}, not a string")
        roles[role] = value
    return roles


def _chat_template(folder: Path, config: dict[str, Any]) -> str | dict[str, str] | None:
    """chat_template.jinja (and those in additional_chat_templates/), else what tokenizer_config.json has."""
    named: dict[str, str] = {}
    main = folder / "chat_template.jinja"
    if main.is_file():
        named["default"] = _read_text(main)
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        named[file.stem] = _read_text(file)
    if not named:
        value = config.get("chat_template")
        if isinstance(value, list):
            try:
                named = {str(entry["name"]): str(entry["template"]) for entry in value}
            except (TypeError, KeyError):
                raise TokenizerError(
                    f"{folder}/tokenizer_config.json: chat_template is a list without names and templates"
                ) from None
        elif isinstance(value, str):
            return value
        elif value is not None:
            raise TokenizerError(f"{folder}/tokenizer_config.json: chat_template is neither a string nor a list")
    if set(named) == {"default"}:
        return named["default"]
    return named or None


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{file}: {error}") from error


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(_read_text(file))
    except json.JSONDecodeError as error:
        raise TokenizerError(f"{file}: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{file}: not a JSON object")
    return value


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
