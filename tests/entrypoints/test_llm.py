"""LLM on an engine without a model: the forms of its arguments, and what it does with them."""

import pytest

from tests.v1.engine.conftest import SYNC, make_engine  # noqa: F401 - a fixture
from tests.v1.engine.fakes import FAKE_MODEL, bundled_tokenizer, fake_config
from tests.v1.engine.helpers import params
from vllm import LLM, SamplingParams
from vllm.exceptions import BadRequestError, EngineDeadError, ModelNotFoundError
from vllm.lora.request import LoRARequest
from vllm.sampling_params import BeamSearchParams, RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.engine.processor import ModelInfo

IDS = [5, 6, 7]
TEXT = "Once upon a time"
QUIET = {"use_tqdm": False}


def make_llm(where):
    engine = LLMEngine(
        fake_config(enable_sleep_mode=True),
        multiprocessing=where == "own_process",
        model=ModelInfo(FAKE_MODEL.vocab_size, FAKE_MODEL.eos_token_ids, {"temperature": 0.6, "max_new_tokens": 9}),
        tokenizer=bundled_tokenizer(),
    )
    return LLM.from_engine(engine)


@pytest.fixture(scope="module")
def llms():
    made = {}
    yield made
    for llm in made.values():
        llm.shutdown()


@pytest.fixture(params=SYNC)
def llm(request, llms):
    own = llms.get(request.param)
    if own is None:
        own = llms[request.param] = make_llm(request.param)
    yield own
    own.llm_engine.check_integrity()


@pytest.mark.parametrize(("prompts", "expected"), [
    (TEXT, [TEXT]),
    ([TEXT], [TEXT]),
    ([TEXT, "b"], [TEXT, "b"]),
    (IDS, [IDS]),
    ([IDS], [IDS]),
    ([IDS, [8]], [IDS, [8]]),
    ({"prompt": TEXT}, [TEXT]),
    ({"prompt_token_ids": IDS}, [IDS]),
    ([{"prompt": TEXT}, {"prompt_token_ids": IDS}, "c", [9]], [TEXT, IDS, "c", [9]]),
    (("a", "b"), ["a", "b"]),
    ([], []),
], ids=repr)  # fmt: skip
def test_forms_of_prompts(llm, prompts, expected):
    outputs = llm.generate(prompts, params(max_tokens=2), **QUIET)
    assert len(outputs) == len(expected)
    for output, prompt in zip(outputs, expected, strict=True):
        if isinstance(prompt, str):
            assert output.prompt == prompt
            assert output.prompt_token_ids == bundled_tokenizer().encode(prompt)
        else:
            assert output.prompt is None
            assert output.prompt_token_ids == prompt
        assert output.finished


def test_the_legacy_keyword(llm):
    assert llm.generate(prompt_token_ids=IDS, sampling_params=params(), **QUIET)[0].prompt_token_ids == IDS
    outputs = llm.generate(["a", "b"], params(), prompt_token_ids=[IDS, [8]], **QUIET)
    assert [(output.prompt, output.prompt_token_ids) for output in outputs] == [("a", IDS), ("b", [8])]
    with pytest.raises(ValueError, match="one length"):
        llm.generate(["a"], params(), prompt_token_ids=[IDS, [8]], **QUIET)


@pytest.mark.parametrize("bad", [None, 5, 5.0, ..., b"x"], ids=repr)
def test_bad_prompts(llm, bad):
    with pytest.raises(ValueError, match="prompts"):
        llm.generate(bad, params(), **QUIET)


@pytest.mark.parametrize("bad", ["", [], None, 5, [-1], [5, 10**6], "x" * 10**6, [1] * 256], ids=lambda v: repr(v)[:20])
def test_one_bad_prompt_among_good_ones(llm, bad):
    """Refused before anything is computed; the next call works."""
    before = llm.llm_engine.metrics.scheduler.prompt_tokens
    with pytest.raises(ValueError, match=r"."):
        llm.generate(["good", bad, "good"], params(), **QUIET)
    assert llm.llm_engine.metrics.scheduler.prompt_tokens == before
    assert not llm.llm_engine.has_unfinished_requests()
    assert llm.generate("good", params(), **QUIET)[0].finished


def test_outputs_are_in_the_order_of_the_prompts(llm):
    lengths = [9, 1, 5, 3, 7] * 4
    outputs = llm.generate([[100 + i] for i in range(20)], [params(max_tokens=m) for m in lengths], **QUIET)
    assert [output.prompt_token_ids for output in outputs] == [[100 + i] for i in range(20)]
    assert [len(output.outputs[0].token_ids) for output in outputs] == lengths


def test_params_one_or_each(llm):
    with pytest.raises(ValueError, match="one per prompt: got 3 for 2"):
        llm.generate(["a", "b"], [params()] * 3, **QUIET)
    for bad in ("params", 5, {"n": 1}, [None, 5]):
        with pytest.raises(ValueError, match="SamplingParams"):
            llm.generate(["a", "b"], bad, **QUIET)
    outputs = llm.generate(["a", "b"], [params(n=2), None], **QUIET)
    assert [len(output.outputs) for output in outputs] == [2, 1]


def test_defaults_come_from_the_model(llm):
    defaults = llm.get_default_sampling_params()
    assert (defaults.temperature, defaults.max_tokens) == (0.6, 9)
    assert len(llm.generate(TEXT, **QUIET)[0].outputs[0].token_ids) == 9
    defaults.n = 5  # a client's own object
    assert len(llm.generate(TEXT, **QUIET)[0].outputs) == 1


def test_request_ids_never_repeat(llm):
    ids = [output.request_id for _ in range(3) for output in llm.generate(["a", "b"], params(), **QUIET)]
    assert len(set(ids)) == 6


def test_lora_and_priority_are_refused_by_name(llm):
    with pytest.raises(ValueError, match="enable_lora"):
        llm.generate(TEXT, params(), lora_request=LoRARequest("x", 1), **QUIET)
    with pytest.raises(ValueError, match="scheduling_policy"):
        llm.generate([TEXT], params(), priority=[1], **QUIET)
    with pytest.raises(ValueError, match="one per prompt"):
        llm.generate([TEXT], params(), priority=[0, 0], **QUIET)


def test_others_requests_are_kept_for_them(llm):
    """Somebody steps the engine by hand, and `generate` runs in between."""
    llm.llm_engine.add_request("mine", IDS, params(n=2, max_tokens=3))
    assert len(llm.generate(["a", "b"], params(max_tokens=20), **QUIET)) == 2
    assert llm.llm_engine.has_unfinished_requests()
    outputs = []
    while llm.llm_engine.has_unfinished_requests():
        outputs += llm.llm_engine.step()
    assert [output.request_id for output in outputs] == ["mine"]
    assert not llm.llm_engine.step()


def test_the_bar_is_tqdm(llm, capsys):
    llm.generate(["a", "b"], params(n=2))
    shown = capsys.readouterr().err
    assert "Processed prompts" in shown
    assert "2/2" in shown
    assert "completions: 4/4" in shown


def test_sleep_and_wake(llm):
    llm.sleep(level=1)
    with pytest.raises(RuntimeError, match="asleep"):
        llm.generate(TEXT, params(), **QUIET)
    llm.wake_up()
    assert llm.generate(TEXT, params(), **QUIET)[0].finished


def test_calls(llm):
    assert llm.collective_rpc("echo", args=(5,)) == [5]
    assert llm.reset_prefix_cache() is True
    assert llm.llm_engine.model_config.max_model_len == 256


@pytest.mark.parametrize("where", SYNC)
def test_shutdown_twice_and_use_after(where):
    with make_llm(where) as llm:
        llm.generate(TEXT, params(), **QUIET)
        llm.shutdown()
    llm.shutdown()
    with pytest.raises(EngineDeadError):
        llm.generate(TEXT, params(), **QUIET)


def test_unknown_keywords():
    with pytest.raises(TypeError, match=r"max_modellen.*max_model_len"):
        LLM("smollm2-135m-instruct", max_modellen=5)
    with pytest.raises(ModelNotFoundError, match="no such folder or file"):
        LLM("/no/such/model-folder")


MESSAGES = [{"role": "user", "content": "Hi"}]


def test_chat(llm):
    outputs = llm.chat(MESSAGES, params(n=2), **QUIET)
    assert len(outputs) == 1
    assert "<|im_start|>user\nHi<|im_end|>" in outputs[0].prompt
    assert outputs[0].prompt.endswith("<|im_start|>assistant\n")
    assert outputs[0].prompt_token_ids == bundled_tokenizer().encode(outputs[0].prompt, add_special_tokens=False)
    several = llm.chat([MESSAGES, MESSAGES], params(), add_generation_prompt=False, **QUIET)
    assert len(several) == 2
    assert not several[0].prompt.endswith("assistant\n")


def test_chat_options(llm):
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}{{ mood }}"
    (output,) = llm.chat(MESSAGES, params(), chat_template=template, chat_template_kwargs={"mood": "!"}, **QUIET)
    assert output.prompt == "[Hi]!"
    continued = [*MESSAGES, {"role": "assistant", "content": "Hello, my"}]
    (output,) = llm.chat(continued, params(), add_generation_prompt=False, continue_final_message=True, **QUIET)
    assert output.prompt.endswith("Hello, my")


@pytest.mark.parametrize(("arguments", "error", "match"), [
    ({"messages": "Hi"}, ValueError, "messages must be a list"),
    ({"messages": [{"content": "Hi"}]}, ValueError, "role"),
    ({"messages": MESSAGES, "chat_template_kwargs": {"tools": []}}, ValueError, "cannot set tools"),
    ({"messages": MESSAGES, "chat_template_content_format": "x"}, ValueError, "chat_template_content_format"),
    ({"messages": MESSAGES, "mm_processor_kwargs": {"a": 1}}, NotImplementedError, "mm_processor_kwargs"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}, Exception, "image_url"),
], ids=str)  # fmt: skip
def test_bad_chats(llm, arguments, error, match):
    with pytest.raises(error, match=match):
        llm.chat(sampling_params=params(), **QUIET, **arguments)


def test_without_a_tokenizer(make_engine):  # noqa: F811
    llm = LLM.from_engine(make_engine(skip_tokenizer_init=True))
    (output,) = llm.generate([IDS], params(n=2), **QUIET)
    assert [completion.text for completion in output.outputs] == ["", ""]
    assert [len(completion.token_ids) for completion in output.outputs] == [6, 6]
    for act in (
        lambda: llm.generate(TEXT, params(), **QUIET),
        lambda: llm.chat(MESSAGES, params(), **QUIET),
        llm.get_tokenizer,
    ):
        with pytest.raises(BadRequestError, match=r"tokenizer.*skip_tokenizer_init"):
            act()


def test_beam_search_arguments(llm, make_engine):  # noqa: F811
    with pytest.raises(ValueError, match="BeamSearchParams"):
        llm.beam_search([TEXT], SamplingParams())
    for fields in (
        {"beam_width": 0},
        {"beam_width": True},
        {"max_tokens": 0},
        {"temperature": -1.0},
        {"ignore_eos": 1},
    ):
        with pytest.raises(ValueError, match=next(iter(fields))):
            BeamSearchParams(**({"beam_width": 2, "max_tokens": 2} | fields))
    off = LLM.from_engine(make_engine(enable_prefix_caching=False))
    with pytest.raises(ValueError, match="enable_prefix_caching"):
        off.beam_search([TEXT], BeamSearchParams(beam_width=2, max_tokens=2))


def test_the_callers_params_are_not_touched(llm):
    own = SamplingParams(n=2, max_tokens=3)
    llm.generate([TEXT, "b"], own, **QUIET)
    assert own == SamplingParams(n=2, max_tokens=3)
    assert own.output_kind is RequestOutputKind.CUMULATIVE
