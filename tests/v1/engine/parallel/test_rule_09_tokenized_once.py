"""Rule 9: the prompt is validated and tokenized once per request, whatever n."""

import pytest

from tests.v1.engine.fakes import bundled_tokenizer
from tests.v1.engine.helpers import drain, new_id, params, stream
from vllm.entrypoints.llm import LLM
from vllm.v1.engine.processor import Processor


class Counting:
    """A tokenizer that counts."""

    def __init__(self):
        self._inner = bundled_tokenizer()
        self.texts = []

    def encode(self, text, *rest):
        self.texts.append(text)
        return self._inner.encode(text, *rest)

    def encode_batch(self, texts, *rest):
        self.texts += texts
        return self._inner.encode_batch(texts, *rest)

    def __getattr__(self, name):
        return getattr(self._inner, name)


@pytest.fixture
def counting(monkeypatch):
    checked = []
    check = Processor._check_length
    monkeypatch.setattr(Processor, "_check_length", lambda self, length: (checked.append(length), check(self, length)))

    def install(engine):
        tokenizer = Counting()
        monkeypatch.setattr(engine.processor, "tokenizer", tokenizer)
        return tokenizer.texts, checked

    return install


@pytest.mark.parametrize("n", [1, 8, 100])
def test_llm_engine(engine, counting, n):
    texts, checked = counting(engine)
    engine.add_request(new_id(), "Once upon a time", params(n=n))
    assert texts == ["Once upon a time"]
    assert len(checked) == 1
    drain(engine)
    assert len(texts) == 1


@pytest.mark.parametrize("n", [1, 8])
@pytest.mark.parametrize("text", ["Once upon a time", "word " * 150], ids=["short", "long"])
async def test_async_llm(async_engine, counting, n, text):
    texts, checked = counting(async_engine)
    await stream(async_engine, text, n=n)
    assert texts == [text]
    assert len(checked) == 1


def test_llm_generate(engine, counting):
    texts, checked = counting(engine)
    prompts = ["one", "two", "three"]
    LLM.from_engine(engine).generate(prompts, params(n=5), use_tqdm=False)
    assert texts == prompts
    assert len(checked) == 3


def test_best_of(engine, counting):
    texts, _ = counting(engine)
    engine.add_request(new_id(), "Once upon a time", params(n=2, best_of=6))
    drain(engine)
    assert len(texts) == 1


async def test_a_long_prompt_is_tokenized_in_another_thread(async_engine, monkeypatch):
    import threading

    threads = []
    tokenize = async_engine.processor.tokenize

    def watched(*args):
        threads.append(threading.current_thread())
        return tokenize(*args)

    monkeypatch.setattr(async_engine.processor, "tokenize", watched)
    await stream(async_engine, "short")
    await stream(async_engine, "a" * 3000, truncate_prompt_tokens=8)
    assert threads[0] is threading.main_thread()
    assert threads[1] is not threading.main_thread()
