"""LLM with the bundled model: the whole way, once per question."""

import math

import pytest

from vllm import LLM, SamplingParams
from vllm.sampling_params import BeamSearchParams

pytestmark = pytest.mark.slow
QUIET = {"use_tqdm": False}


@pytest.fixture(scope="module")
def llm():
    with LLM("smollm2-135m-instruct", max_model_len=512, max_num_seqs=32, num_gpu_blocks_override=400) as llm:
        yield llm
        llm.llm_engine.check_integrity()


def test_four_completions(llm):
    (output,) = llm.generate("The capital of France is", SamplingParams(n=4, max_tokens=8, seed=7, logprobs=1), **QUIET)
    assert [completion.index for completion in output.outputs] == [0, 1, 2, 3]
    assert len({completion.text for completion in output.outputs}) == 4
    assert all(completion.cumulative_logprob < 0 for completion in output.outputs)
    for index, completion in enumerate(output.outputs):
        alone = SamplingParams(max_tokens=8, seed=7 + index, logprobs=1)
        assert llm.generate("The capital of France is", alone, **QUIET)[0].outputs[0].logprobs == completion.logprobs


def test_greedy_chat(llm):
    (output,) = llm.chat([{"role": "user", "content": "Hi! What is 2+2?"}], SamplingParams(temperature=0), **QUIET)
    assert "4" in output.outputs[0].text


def test_the_longest_prompt_and_one_token(llm):
    prompt = [50 + i % 1000 for i in range(511)]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    (output,) = llm.generate([prompt], params, **QUIET)
    assert len(output.prompt_logprobs) == 511
    assert len(output.outputs[0].token_ids) == 1


def test_own_process_says_the_same(llm, monkeypatch):
    params = SamplingParams(n=3, max_tokens=6, seed=3, logprobs=2)
    here = llm.generate(["Hello there", [5, 6, 7]], params, **QUIET)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    with LLM("smollm2-135m-instruct", max_model_len=512, num_gpu_blocks_override=100) as far:
        assert not far.llm_engine.client.in_process
        there = far.generate(["Hello there", [5, 6, 7]], params, **QUIET)
        far.llm_engine.check_integrity()
    assert [output.outputs for output in here] == [output.outputs for output in there]


def test_weights_are_replaced_as_trl_does(llm):
    model = llm.llm_engine.model_executor.driver_worker.model_runner.model
    prompt = list(range(300, 364))
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=0)
    before = llm.generate([prompt], params, **QUIET)[0].outputs[0]
    assert llm.generate([prompt], params, **QUIET)[0].num_cached_tokens > 0
    weights = {}

    def collect(name):
        from vllm.model_executor.loader import open_checkpoint

        checkpoint = open_checkpoint(llm.llm_engine.model_config.path, "auto", {})
        weights[name] = next(weight for weight in checkpoint.weights() if weight.name == "final_norm").read().copy()
        checkpoint.close()

    collect("model.norm.weight")
    model.load_weights([("model.norm.weight", weights["model.norm.weight"] * 0.5)])
    (output,) = llm.generate([prompt], params, **QUIET)
    assert output.num_cached_tokens == 0  # what was cached belongs to other weights
    assert output.outputs[0].cumulative_logprob != before.cumulative_logprob
    model.load_weights([("model.norm.weight", weights["model.norm.weight"])])
    assert llm.generate([prompt], params, **QUIET)[0].outputs[0] == before


def test_apply_model(llm):
    (count,) = llm.apply_model(lambda model: model.spec.num_layers)
    assert count == 30


def greedy(llm, tokens, count):
    return llm.generate([tokens], SamplingParams(temperature=0, max_tokens=count, ignore_eos=True), **QUIET)[0].outputs[
        0
    ]


def exhaustive(llm, prompt, width, steps):
    """Beam search written down naively: every prefix computed anew."""
    beams = [([], 0.0)]
    for _ in range(steps):
        found = []
        for tokens, total in beams:
            params = SamplingParams(temperature=0, max_tokens=1, logprobs=2 * width, ignore_eos=True)
            entry = llm.generate([prompt + tokens], params, **QUIET)[0].outputs[0].logprobs[0]
            found += [([*tokens, token], total + value.logprob) for token, value in entry.items()]
        beams = sorted(found, key=lambda beam: -beam[1])[:width]
    return beams


def test_beam_search(llm):
    prompt = list(range(1000, 1040))
    expected = exhaustive(llm, prompt, 3, 4)
    params = BeamSearchParams(beam_width=3, max_tokens=4, ignore_eos=True)
    (output,) = llm.beam_search([prompt], params)
    assert [sequence.tokens for sequence in output.sequences] == [prompt + tokens for tokens, _ in expected]
    for sequence, (_, total) in zip(output.sequences, expected, strict=True):
        assert math.isclose(sequence.cum_logprob, total, rel_tol=1e-6)
        assert sequence.finish_reason == "length"
        assert len(sequence.logprobs) == 4
        assert sequence.text == llm.llm_engine.tokenizer.decode(sequence.tokens)


def test_one_beam_is_greedy(llm):
    prompt = list(range(2000, 2010))
    (output,) = llm.beam_search([prompt], BeamSearchParams(beam_width=1, max_tokens=6, ignore_eos=True))
    assert output.sequences[0].tokens[10:] == greedy(llm, prompt, 6).token_ids


def test_beams_do_not_compute_their_prefix_again(llm):
    """One token per beam and step, beside the prompt."""
    llm.reset_prefix_cache()
    before = llm.llm_engine.metrics.scheduler.prompt_tokens_computed
    width, steps, length = 3, 17, 100
    llm.beam_search([list(range(3000, 3000 + length))], BeamSearchParams(width, steps, ignore_eos=True))
    computed = llm.llm_engine.metrics.scheduler.prompt_tokens_computed - before
    assert computed == length + width * (steps - 1)


def test_several_prompts_and_end_of_sequence(llm):
    params = BeamSearchParams(beam_width=2, max_tokens=9)
    chat = "<|im_start|>user\nSay: Yes.<|im_end|>\n<|im_start|>assistant\n"
    alone = [llm.beam_search([prompt], params)[0] for prompt in (chat, "One two three")]
    together = llm.beam_search([chat, "One two three"], params)
    assert together == alone
    assert "stop" in {sequence.finish_reason for sequence in together[0].sequences}
    for sequence in together[0].sequences:
        if sequence.finish_reason == "stop":
            assert sequence.tokens[-1] != sequence.stop_reason
    kept = llm.beam_search([chat], BeamSearchParams(2, 9, include_stop_str_in_output=True))[0]
    for sequence in kept.sequences:
        if sequence.finish_reason == "stop":
            assert sequence.tokens[-1] == sequence.stop_reason
