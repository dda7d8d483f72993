"""The runner on a fake backend that reads contexts back through its paged cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.v1.worker.runner_fakes import EOS, VOCAB, Child, Driver, FakeBackend, config, context_logits, fork_of
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.philox import uniforms
from vllm.v1.step import NewSequence, SchedulerOutput
from vllm.v1.worker.model_runner import ModelRunner


def runner_on(backend: FakeBackend | None = None, **options: Any) -> ModelRunner:
    backend = backend or FakeBackend()
    settings = config(**options)
    backend.init_cache(256, settings.cache.block_size)
    return ModelRunner(settings, backend, backend.vocab, [EOS])


def child(handle: int, prompt: list[int], length: int = 6, seed: int | None = None, **params: Any) -> Child:
    made = SamplingParams(max_tokens=length, **params)
    return Child(handle, made, 1000 + handle if seed is None else seed, np.array(prompt, np.int32), length)


def slow_tokens(one: Child, banned_eos: bool = True) -> list[int]:
    """The child's tokens by the plainest program: whole context, Python lists, fp64 (params as far as used)."""
    params, output = one.params, []
    for position in range(one.length):
        logits = context_logits([*one.prompt.tolist(), *output]).astype(np.float64)
        if params.allowed_token_ids is not None:
            outside = np.ones(VOCAB, bool)
            outside[params.allowed_token_ids] = False
            logits[outside] = -np.inf
        if position < params.min_tokens:
            logits[[*([EOS] if banned_eos else []), *(params.stop_token_ids or [])]] = -np.inf
        for word in params.bad_words_token_ids or []:
            if len(word) == 1 or output[-(len(word) - 1) :] == word[:-1]:
                logits[word[-1]] = -np.inf
        for token, value in (params.logit_bias or {}).items():
            logits[token] += value
        for processor in params.logits_processors or []:
            logits = processor(list(output), logits.astype(np.float32)).astype(np.float64)
        for token in {*one.prompt.tolist(), *output}:
            factor = params.repetition_penalty
            logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
        for token in set(output):
            logits[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
        if params.temperature == 0:
            output.append(int(np.argmax(logits)))
            continue
        mass = np.exp((logits - logits.max()) / params.temperature)
        u = uniforms(np.array([one.seed], np.uint64), np.array([position]))[0]
        output.append(int(np.searchsorted(np.cumsum(mass) / mass.sum(), u, side="right")))
    return output


PARAMS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.3},
    {"repetition_penalty": 1.8, "temperature": 0.4},
    {"frequency_penalty": 1.5, "temperature": 0.2},
    {"presence_penalty": 2.0, "temperature": 0.0},
    {"allowed_token_ids": [3, 4, 5, 40, 66]},
    {"logit_bias": {7: 4.0, 8: -3.0}},
    {"min_tokens": 4, "stop_token_ids": [5, 6], "logit_bias": {2: 20.0, 5: 20.0}},
    {
        "bad_words": ["a", "b"],  # as text; the runner sees only the ids
        "bad_words_token_ids": [[9], [10, 11], [11, 12]],
        "logit_bias": {9: 30.0, 10: 6.0, 11: 6.5, 12: 6.2},
    },
    {"logits_processors": [lambda output, logits: np.roll(logits, len(output))]},
]


@pytest.mark.parametrize("params", PARAMS, ids=lambda p: "-".join(p) or "default")
@pytest.mark.parametrize("chunk", [1000, 3, 1])
def test_tokens_are_those_of_the_plainest_program(params: dict[str, Any], chunk: int) -> None:
    one = child(1, [5, 3, 2, 60, 2, 9, 1, 12, 33], length=14, **params)
    assert Driver(runner_on()).run(one, chunk) == slow_tokens(one)


def crowd() -> list[Child]:
    rng = np.random.default_rng(5)
    return [
        child(100 + i, rng.integers(0, VOCAB, rng.integers(1, 20)).tolist(), int(rng.integers(1, 12)), **params)
        for i, params in enumerate(PARAMS)
    ]


@pytest.mark.parametrize("seed", range(8))
def test_a_crowd_with_preemptions_gives_what_each_gives_alone(seed: int) -> None:
    """Random chunks, random rows per step, preemptions at any time: the same tokens and log-probabilities."""
    rng = np.random.default_rng(seed)
    alone, members = crowd(), crowd()
    for one in alone + members:
        one.params.logprobs = 3
    driver = Driver(runner_on(max_num_seqs=5), seed=seed)
    preemptions = 0
    while not all(one.done for one in members):
        running = [one for one in members if one.slot >= 0]
        waiting = [one for one in members if one.slot < 0 and not one.done]
        while waiting and driver.free_slots and rng.random() < 0.7:
            driver.enter(waiting.pop(0))
        running = [one for one in members if one.slot >= 0]
        rng.shuffle(running)
        chosen = [one for one in running if rng.random() < 0.8]
        if chosen:
            driver.step([(one, int(rng.integers(1, 9))) for one in chosen])
        for one in running:
            if one.done or rng.random() < 0.08:
                preemptions += not one.done
                driver.leave(one)
    assert preemptions
    for one, expected in zip(members, alone, strict=True):
        solo = Driver(runner_on(), seed=seed + 1)
        assert one.output == solo.run(expected)
        assert one.logprobs == expected.logprobs
        assert len(one.logprobs[0]) == 4


def prefill_and_fork(
    driver: Driver, children: list[Child], chunk: int = 1000, keep: bool = False, members: int | None = None
) -> None:
    """children[0] leads: it computes the prompt in a slot; the first tokens of all are drawn from its last row."""
    leader = children[0]
    driver.enter(leader)
    while leader.computed < len(leader.prompt):
        remaining = len(leader.prompt) - leader.computed
        drawn = children if members is None else children[:members]
        forks = [fork_of(0, leader.prompt, drawn, keep=keep, keep_key=7)] if remaining <= chunk else []
        out = driver.step([(leader, chunk)], forks=lambda rows, forks=forks: forks)
        if forks:
            driver.take(out, {one.handle: one for one in drawn})
            assert out.handles.tolist() == [one.handle for one in drawn]
    blocks, driver.freed = leader.blocks, [*driver.freed, leader.slot]
    driver.free_slots.append(leader.slot)
    leader.slot, leader.blocks, leader.computed = -1, [], 0
    full = len(leader.prompt) // driver.block_size
    copies = []
    for one in children:  # full blocks shared, the partial one copied
        one.blocks = blocks[:full]
        if len(leader.prompt) % driver.block_size:
            own = driver.free_blocks.pop()
            copies.append((blocks[full], own))
            one.blocks = [*one.blocks, own]
        one.computed = len(leader.prompt)
    driver.copies = copies


@pytest.mark.parametrize("length", [1, 3, 4, 8, 9])
@pytest.mark.parametrize("params", PARAMS, ids=lambda p: "-".join(p) or "default")
def test_forked_children_equal_requests_of_their_own(params: dict[str, Any], length: int) -> None:
    prompt = np.random.default_rng(length).integers(0, VOCAB, length).tolist()
    n = 1 if params.get("temperature") == 0.0 else 4
    shared = SamplingParams(n=n, max_tokens=7, **params)
    children = [Child(i, shared, 50 + i, np.array(prompt, np.int32), 7) for i in range(n)]
    driver = Driver(runner_on())
    prefill_and_fork(driver, children, chunk=3)
    for one in children:
        driver.enter(one)
    copies: dict[str, Any] = {"copies": driver.copies}
    while not all(one.done for one in children):
        driver.step([(one, 1) for one in children if not one.done], **copies)
        copies = {}
    for one in children:
        own = SamplingParams(max_tokens=7, **params)
        alone = Child(one.handle, own, one.seed, one.prompt, 7)
        assert one.output == Driver(runner_on()).run(alone) == slow_tokens(alone)


def test_a_kept_row_serves_members_that_come_later() -> None:
    children = [child(i, [4, 9, 1, 7, 7], 3, seed=i) for i in range(5)]
    driver = Driver(runner_on())
    prefill_and_fork(driver, children, keep=True, members=2)
    other = child(77, [1, 2, 3], 4)
    driver.enter(other)
    driver.step([(other, 9)])  # another forward in between
    late = children[2:4]
    out = driver.step([(other, 1)], forks=lambda rows: [fork_of(-1, late[0].prompt, late, keep=True, keep_key=7)])
    assert out.handles.tolist() == [77, 2, 3]
    driver.take(out, {one.handle: one for one in late})
    out = driver.step([], forks=lambda rows: [fork_of(-1, late[0].prompt, children[4:], keep_key=7)], dropped_keys=[7])
    driver.take(out, {4: children[4]})
    for one in children:
        assert one.output[:1] == slow_tokens(one)[:1]
    assert other.output == slow_tokens(other)[:2]
    with pytest.raises(KeyError):
        driver.step([], forks=lambda rows: [fork_of(-1, late[0].prompt, children[4:], keep_key=7)])


def test_a_key_can_be_dropped_and_kept_in_one_step() -> None:
    children = [child(i, [4, 9, 1], 3) for i in range(2)]
    driver = Driver(runner_on())
    leader = children[0]
    for _ in range(2):
        driver.enter(leader)
        fork = fork_of(0, leader.prompt, [], keep=True, keep_key=7)
        driver.step([(leader, 9)], forks=lambda rows, fork=fork: [fork], dropped_keys=[7])
        driver.leave(leader)
    out = driver.step([], forks=lambda rows: [fork_of(-1, leader.prompt, children, keep_key=7)])
    assert out.token_ids.tolist() == [slow_tokens(one)[0] for one in children]


def test_draws_of_one_forward_go_to_the_backend_in_one_call() -> None:
    runner = runner_on()
    driver = Driver(runner)
    decoding = [child(i, [i, 5], 5) for i in range(3)]
    for one in decoding:
        driver.enter(one)
    driver.step([(one, 9) for one in decoding])
    group = [child(10 + i, [9, 9, 9], 5) for i in range(20)]
    driver.enter(group[0])
    backend = runner.backend
    assert isinstance(backend, FakeBackend)
    backend.calls.clear()
    out = driver.step(
        [(group[0], 9), *((one, 1) for one in decoding)], forks=lambda rows: [fork_of(0, group[0].prompt, group)]
    )
    assert backend.calls == ["forward", "sample"]
    assert out.handles.tolist() == [0, 1, 2, *range(10, 30)]
    assert len(out.token_ids) == 23
    batch = backend.batches[-1]
    assert batch.rows.tolist() == [1, 2, 3] + [0] * 20
    assert batch.positions.tolist() == [1, 1, 1] + [0] * 20
    for name in ("allowed", "banned", "bias", "penalties", "output_tokens", "prompt_tokens"):
        assert getattr(batch, name) is None
    assert not batch.processors


def test_ten_thousand_members_are_columns_not_objects() -> None:
    runner = runner_on(max_model_len=64)
    shared = SamplingParams(n=10_000, max_tokens=4)
    prompt = np.array([3, 1, 4, 1, 5], np.int32)
    children = [Child(i, shared, i, prompt, 4) for i in range(10_000)]
    driver = Driver(runner)
    driver.enter(children[0])
    out = driver.step([(children[0], 99)], forks=lambda rows: [fork_of(0, prompt, children)])
    assert len(out.token_ids) == 10_000
    assert not runner.batch.processors
    assert out.token_ids[[0, 17, 9999]].tolist() == [slow_tokens(children[i])[0] for i in (0, 17, 9999)]


def test_many_draws_that_edit_logits_are_cut_into_calls() -> None:
    runner = runner_on()
    shared = SamplingParams(n=2500, max_tokens=4, repetition_penalty=1.5)
    prompt = np.array([3, 1, 4, 1, 5], np.int32)
    children = [Child(i, shared, i, prompt, 1) for i in range(2500)]
    driver = Driver(runner)
    driver.enter(children[0])
    out = driver.step([(children[0], 99)], forks=lambda rows: [fork_of(0, prompt, children)])
    backend = runner.backend
    assert isinstance(backend, FakeBackend)
    assert [batch.size for batch in backend.batches] == [1024, 1024, 452]
    for i in (0, 1023, 1024, 2499):
        assert [int(out.token_ids[i])] == slow_tokens(children[i])


def test_an_edited_draw_does_not_change_its_plain_neighbours() -> None:
    plain = [child(i, [i, 8], 6) for i in range(3)]
    strange = child(9, [9, 8], 6, logit_bias={3: 50.0}, allowed_token_ids=[3, 4], repetition_penalty=2.0)
    driver = Driver(runner_on())
    for one in [*plain, strange]:
        driver.enter(one)
    while not strange.done:
        driver.step([(plain[0], 9), (strange, 9), (plain[1], 9), (plain[2], 9)])
    for one in plain:
        assert one.output == slow_tokens(one)
    assert set(strange.output) == {3}


class Counting:
    """A processor with state: forbids the token it forbade last, plus one, each time it is called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, output_ids: list[int], logits: np.ndarray) -> np.ndarray:
        logits[:] = -np.inf
        logits[self.calls % VOCAB] = 0
        self.calls += 1
        return logits


def test_each_sibling_has_its_own_processor_through_fork_and_preemption() -> None:
    processor = Counting()
    shared = SamplingParams(n=3, max_tokens=5, logits_processors=[processor])
    prompt = np.array([1, 2, 3, 4, 5], np.int32)
    children = [Child(i, shared, i, prompt, 5) for i in range(3)]
    runner = runner_on()
    driver = Driver(runner)
    prefill_and_fork(driver, children)
    assert len(runner.batch.processors) == 3
    first, second, third = children
    for one in children:
        driver.enter(one)
    driver.step([(first, 1), (second, 1)], copies=driver.copies)
    driver.leave(second)  # preempted
    driver.step([(first, 1), (third, 1)])
    driver.enter(second)
    while not all(one.done for one in children):
        driver.step([(one, 4) for one in children if not one.done])
    assert [one.output for one in children] == [[0, 1, 2, 3, 4]] * 3
    assert processor.calls == 0, "the user's object belongs to no child when n > 1"
    for one in children:
        driver.leave(one)
    driver.step([])
    assert not runner.batch.processors


def test_with_one_child_the_users_own_processor_is_called() -> None:
    processor = Counting()
    one = child(1, [1, 2], 3, logits_processors=[processor])
    driver = Driver(runner_on())
    assert driver.run(one) == [0, 1, 2]
    assert processor.calls == 3


def test_processors_get_ids_as_lists_in_both_forms() -> None:
    seen: list[Any] = []

    def two(output_ids: list[int], logits: Any) -> Any:
        seen.append(("two", output_ids))
        return logits

    def three(prompt_ids: list[int], output_ids: list[int], logits: Any) -> Any:
        seen.append(("three", prompt_ids, output_ids))
        return logits

    one = child(1, [5, 6], 2, logits_processors=[two, three])
    first, _ = Driver(runner_on()).run(one)
    assert seen == [("two", []), ("three", [5, 6], []), ("two", [first]), ("three", [5, 6], [first])]
    assert all(type(part) is list for call in seen for part in call[1:])


class Uncopyable:
    def __call__(self, output_ids: list[int], logits: Any) -> Any:
        return logits

    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("no copies")


@pytest.mark.parametrize(
    ("processor", "text"),
    [
        (lambda output, logits: output[len(output)], "IndexError"),
        (lambda output, logits: None, "None"),
        (lambda output, logits: logits[:5], "shape"),
        (Uncopyable(), "no copies"),
    ],
)
def test_a_failing_processor_is_an_error_of_that_child_alone(processor: Any, text: str) -> None:
    shared = SamplingParams(n=2, max_tokens=3, logits_processors=[processor])
    bad = Child(8, shared, 1, np.array([1, 2], np.int32), 3)
    good = [child(i, [i, 8], 3) for i in range(2)]
    driver = Driver(runner_on())
    for one in [good[0], bad, good[1]]:
        driver.enter(one)
    out = driver.step([(good[0], 9), (bad, 9), (good[1], 9)])
    assert list(out.errors) == [8]
    assert text in out.errors[8]
    driver.leave(bad)
    while not good[0].done:
        driver.step([(one, 1) for one in good])
    assert [one.output for one in good] == [slow_tokens(one) for one in good]


def test_a_clone_method_is_preferred_to_a_deep_copy() -> None:
    class Cloning(Uncopyable):
        def clone(self) -> Counting:
            return Counting()

    shared = SamplingParams(n=2, max_tokens=3, logits_processors=[Cloning()])
    one = Child(8, shared, 1, np.array([1, 2], np.int32), 3)
    assert Driver(runner_on()).run(one) == [0, 1, 2]


def test_stop_ids_past_the_vocabulary_do_no_harm() -> None:
    one = child(1, [1, 2], 3, min_tokens=3, stop_token_ids=[VOCAB, 10**6, 4])
    assert Driver(runner_on()).run(one) == slow_tokens(child(1, [1, 2], 3, min_tokens=3, stop_token_ids=[4]))


def test_min_tokens_leaves_eos_alone_with_ignore_eos() -> None:
    one = child(1, [1, 2], 3, min_tokens=3, ignore_eos=True, logit_bias={EOS: 60.0})
    assert Driver(runner_on()).run(one) == [EOS] * 3
    held = child(1, [1, 2], 4, min_tokens=3, logit_bias={EOS: 60.0})
    assert Driver(runner_on()).run(held)[:4].index(EOS) == 3


# Log-probabilities


def test_logprobs_per_draw() -> None:
    children = [child(0, [1, 2], 3, logprobs=2), child(1, [1, 3], 3), child(2, [1, 4], 3, logprobs=-1)]
    driver = Driver(runner_on())
    for one in children:
        driver.enter(one)
    out = driver.step([(one, 9) for one in children])
    assert out.logprobs is not None
    assert np.diff(out.logprobs.offsets).tolist() == [3, 0, VOCAB + 1]
    assert children[0].logprobs[0][0][0] == children[0].output[0]
    out = driver.step([(children[1], 1)])
    assert out.logprobs is None


@pytest.mark.parametrize("chunk", [1, 2, 5, 100])
@pytest.mark.parametrize("asked", [0, 2, -1])
def test_prompt_logprobs_in_chunks(chunk: int, asked: int) -> None:
    prompt = [5, 3, 2, 60, 2, 9, 1]
    one, beside = child(1, prompt, 2), child(2, [7, 7], 20)
    driver = Driver(runner_on())
    driver.enter(one)
    driver.enter(beside)
    found: list[tuple[list[int], list[float]]] = []
    while not one.done:
        out = driver.step([(beside, 3), (one, chunk)], prompt_logprobs=[(1, asked)])
        columns = out.prompt_logprobs.get(1)
        for entry in range(0 if columns is None else len(columns.ranks)):
            assert columns is not None
            first, stop = columns.offsets[entry : entry + 2]
            found.append((columns.token_ids[first:stop].tolist(), columns.logprobs[first:stop].tolist()))
    assert len(found) == len(prompt) - 1
    assert one.output == slow_tokens(one)
    assert beside.output == slow_tokens(beside)[: len(beside.output)]
    for i, (ids, values) in enumerate(found):
        logits = context_logits(prompt[: i + 1]).astype(np.float64)
        exact = logits - np.log(np.exp(logits).sum())
        assert len(ids) == 1 + (VOCAB if asked < 0 else asked)
        assert ids[0] == prompt[i + 1]
        np.testing.assert_allclose(values, exact[ids], atol=2e-6)


def test_prompt_logprobs_beside_a_fork() -> None:
    one = child(1, [5, 3, 2], 4)
    driver = Driver(runner_on())
    driver.enter(one)
    out = driver.step([(one, 9)], forks=lambda rows: [fork_of(0, one.prompt, [one])], prompt_logprobs=[(0, 1)])
    assert out.token_ids.tolist() == slow_tokens(one)[:1]
    assert len(out.prompt_logprobs[0].ranks) == 2


def test_a_prompt_of_one_token_has_no_prompt_logprobs() -> None:
    one = child(1, [5], 2)
    driver = Driver(runner_on())
    driver.enter(one)
    assert driver.step([(one, 9)], prompt_logprobs=[(0, 1)]).prompt_logprobs == {}


def test_recomputed_output_tokens_are_not_prompt_tokens() -> None:
    one = child(1, [5, 3, 2], 4)
    driver = Driver(runner_on())
    driver.enter(one)
    driver.step([(one, 9)])
    driver.step([(one, 9)])
    driver.leave(one)
    driver.enter(one)
    out = driver.step([(one, 99)], prompt_logprobs=[(0, 0)])
    assert out.prompt_logprobs[0].token_ids.tolist() == [3, 2]
    assert one.output == slow_tokens(one)[:3]


# Batches


def test_sharing_sets_are_handed_on() -> None:
    runner = runner_on()
    driver = Driver(runner)
    children = [child(i, [i, 2], 3) for i in range(3)]
    for one in children:
        driver.enter(one)
    driver.step([(one, 9) for one in children], shared=[(1, 2, 0)])
    batch = runner.backend.last_forward  # type: ignore[attr-defined]
    assert batch.shared_rows.tolist() == [[1, 2]]
    assert batch.shared_blocks.tolist() == [0]
    assert batch.query_start.tolist() == [0, 2, 4, 6]
    assert batch.hidden_rows.tolist() == [1, 3, 5]


def test_the_last_token_of_the_context_fits() -> None:
    one = child(1, list(range(10)), 6)
    driver = Driver(runner_on(max_model_len=16))
    assert len(driver.run(one)) == 6


def test_an_empty_step_does_nothing_but_apply() -> None:
    runner = runner_on()
    driver = Driver(runner)
    one = child(1, [1], 1)
    driver.enter(one)
    out = driver.step([])
    assert len(out.token_ids) == 0
    assert runner.batch.occupied().tolist() == [one.slot]
    assert runner.backend.calls == []  # type: ignore[attr-defined]
    driver.leave(one)
    driver.step([])
    assert runner.batch.occupied().tolist() == []


def test_lora_is_refused_by_name() -> None:
    nothing = np.zeros(0, np.int32)
    sequence = NewSequence(
        0, 1, SamplingParams(), 0, np.array([1], np.int32), [], 0, [0], LoRARequest("adapter", 1, "/nowhere")
    )
    step = SchedulerOutput(nothing, nothing, nothing, np.zeros(0, bool), np.zeros(0, np.int64), [sequence])
    with pytest.raises(NotImplementedError, match="lora_request"):
        runner_on().execute(step)


def test_settings_are_shared_by_siblings_and_not_by_a_later_request() -> None:
    """One params object, changed between two requests: the second request counts."""
    params = SamplingParams(max_tokens=3, temperature=0.0)
    runner = runner_on()
    driver = Driver(runner)
    first = Child(1, params, 1, np.array([1, 2, 3], np.int32), 3)
    driver.run(first)
    params.logit_bias = {9: 90.0}
    second = Child(2, params, 1, np.array([1, 2, 3], np.int32), 3)
    assert driver.run(second) == [9, 9, 9] != first.output
