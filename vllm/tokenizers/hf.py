"""`get_tokenizer`: a transformers tokenizer for programs that want one. The engine itself does not use it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm.exceptions import UnsupportedError
from vllm.tokenizers.loading import find_tokenizer, open_gguf
from vllm.tokenizers.tokenizer import Tokenizer


def get_tokenizer(
    tokenizer_name: str | Path,
    *,
    tokenizer_mode: str = "auto",
    trust_remote_code: bool = False,
    revision: str | None = None,
    truncation_side: str | None = None,
    **kwargs: Any,
) -> Any:
    """The transformers tokenizer of a folder, a GGUF file, or a model by its name.

    Raises ImportError naming the package if transformers is not installed, ModelNotFoundError for an unknown name,
    UnsupportedError for another `tokenizer_mode`. Other keywords go to transformers.
    """
    if tokenizer_mode not in ("auto", "hf", "fast", "slow"):
        raise UnsupportedError(f"tokenizer_mode={tokenizer_mode!r}: only 'auto' is built")
    path = find_tokenizer(tokenizer_name)
    if truncation_side is not None:
        kwargs["truncation_side"] = truncation_side
    if path.is_file() and path.suffix != ".json":
        return wrap(open_gguf(path), str(path), **kwargs)
    transformers = _transformers()
    if tokenizer_mode == "slow":
        kwargs["use_fast"] = False
    folder = path if path.is_dir() else path.parent
    return transformers.AutoTokenizer.from_pretrained(
        str(folder), trust_remote_code=trust_remote_code, revision=revision, **kwargs
    )


def wrap(tokenizer: Tokenizer, name: str, **kwargs: Any) -> Any:
    """One of our tokenizers as a transformers one, with its own copy of the library's object."""
    special = tokenizer.special
    roles = {text for text, _ in special.roles.values()}
    library = tokenizer.new_library()
    others = [library.id_to_token(token_id) for token_id in sorted(special.ids)]
    result = _transformers().PreTrainedTokenizerFast(
        tokenizer_object=library,
        name_or_path=name,
        clean_up_tokenization_spaces=False,
        additional_special_tokens=[text for text in others if text and text not in roles],
        **tokenizer.special_tokens_map,
        **kwargs,
    )
    result.chat_template = tokenizer.chat_template
    return result


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ImportError("get_tokenizer gives a transformers tokenizer: pip install transformers") from error
    return transformers
