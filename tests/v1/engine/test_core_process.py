"""A core in its own process: start, failure to start, death, orphans, the end. Nothing hangs, nothing is left."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest

from tests.v1.engine.fakes import FAKE_MODEL, bundled_tokenizer, fake_config
from tests.v1.engine.helpers import KINDS, PROMPT, drain, new_id, params, run_one, stream
from vllm.exceptions import ConfigError, EngineDeadError, EngineError, EngineStartError
from vllm.v1.engine.async_client import AsyncMPClient
from vllm.v1.engine.core_client import SyncMPClient
from vllm.v1.engine.llm_engine import LLMEngine

FAKES = "tests.v1.engine.fakes:"
SLOW = {"distributed_executor_backend": FAKES + "SlowExecutor"}


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()


def wait_for_end(pid, seconds=10.0):
    deadline = time.monotonic() + seconds
    while is_alive(pid):
        assert time.monotonic() < deadline, f"process {pid} goes on"
        time.sleep(0.01)


def open_files():
    return sorted(os.listdir("/proc/self/fd"))


def test_start_and_end_leave_nothing(make_engine, tmp_path, monkeypatch):
    # zmq keeps a few descriptors per process from its first context on
    make_engine(multiprocessing=True).shutdown()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    files = len(open_files())
    for _ in range(3):
        engine = make_engine(multiprocessing=True)
        assert engine.client.info.pid != os.getpid()
        assert is_alive(engine.client.info.pid)
        assert not os.listdir(tmp_path)  # gone as soon as both sides are connected
        run_one(engine)
        engine.shutdown()
        engine.shutdown()
        assert not is_alive(engine.client.info.pid)
        with pytest.raises(EngineDeadError, match="shut down"):
            engine.add_request(new_id(), PROMPT, params())
    assert len(open_files()) <= files


def test_a_dropped_client_ends_its_process():
    client = SyncMPClient(fake_config())
    pid = client.info.pid
    del client
    wait_for_end(pid)


def test_the_childs_error_is_the_parents(capfd):
    with pytest.raises(ValueError, match="no weights in this drawer"):
        SyncMPClient(fake_config(distributed_executor_backend=FAKES + "FailingExecutor"))


def test_an_error_before_the_sockets_are_up(monkeypatch, capfd):
    monkeypatch.setattr("vllm.v1.engine.mp_process._START", "import sys; sys.exit(7) # {path}{inbox}{outbox}{lifeline}")
    with pytest.raises(EngineDeadError, match="exit code 7"):
        SyncMPClient(fake_config())


def test_a_start_that_takes_too_long(monkeypatch):
    monkeypatch.setenv("VLLM_ENGINE_READY_TIMEOUT_S", "0.5")
    monkeypatch.setattr("vllm.v1.engine.mp_process.SHUTDOWN_GRACE", 0.2)
    with pytest.raises(EngineStartError, match=r"within 0.5 s.*VLLM_ENGINE_READY_TIMEOUT_S"):
        SyncMPClient(fake_config(distributed_executor_backend=FAKES + "HangingExecutor"))


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSEGV])
def test_sudden_death_while_a_caller_waits(make_engine, sign):
    engine = make_engine(multiprocessing=True, **SLOW)
    engine.add_request(new_id(), PROMPT, params(n=3, max_tokens=200))
    os.kill(engine.client.info.pid, sign)
    with pytest.raises(EngineDeadError, match=f"killed by signal {int(sign)}"):
        drain(engine)
    assert not engine.has_unfinished_requests()
    for act in (
        lambda: engine.add_request(new_id(), PROMPT, params()),
        engine.reset_prefix_cache,
        engine.check_integrity,
    ):
        with pytest.raises(EngineDeadError):
            act()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
async def test_sudden_death_while_consumers_wait(make_async_engine, kind):
    engine = make_async_engine(multiprocessing=True, **SLOW)
    consumers = [asyncio.create_task(stream(engine, n=n, max_tokens=200, kind=kind)) for n in (1, 3, 5)]
    calls = []
    await asyncio.sleep(0.05)
    os.kill(engine.client.info.pid, signal.SIGKILL)
    results = await asyncio.wait_for(asyncio.gather(*consumers, *calls, return_exceptions=True), 10)
    assert [type(result) for result in results] == [EngineDeadError] * 3
    assert "killed by signal 9" in str(results[0])
    with pytest.raises(EngineDeadError):
        await engine.check_health()
    assert engine.errored
    assert not engine.is_running
    with pytest.raises(EngineDeadError):
        await stream(engine)
    with pytest.raises(EngineDeadError):
        await engine.reset_prefix_cache()
    engine.check_idle()
    await engine.abort("whoever")  # harmless


async def test_sudden_death_while_a_call_waits(make_async_engine):
    engine = make_async_engine(multiprocessing=True)
    call = asyncio.create_task(engine.collective_rpc("pause", args=(30,)))
    await asyncio.sleep(0.1)
    os.kill(engine.client.info.pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError):
        await asyncio.wait_for(call, 10)


async def test_death_while_idle_is_noticed(make_async_engine):
    engine = make_async_engine(multiprocessing=True)
    await engine.check_health()
    os.kill(engine.client.info.pid, signal.SIGKILL)
    for _ in range(500):
        if engine.errored:
            break
        await asyncio.sleep(0.01)
    with pytest.raises(EngineDeadError, match="killed by signal 9"):
        await engine.check_health()


def test_a_step_that_fails(make_engine, capfd):
    for multiprocessing in (False, True):
        engine = make_engine(multiprocessing)
        engine.collective_rpc("crash")
        engine.add_request(new_id(), PROMPT, params(n=2))
        with pytest.raises(EngineDeadError, match=r"RuntimeError: the roof fell in"):
            engine.step()
        with pytest.raises(EngineDeadError):
            engine.add_request(new_id(), PROMPT, params())


async def test_a_step_that_fails_asynchronously(make_async_engine, capfd):
    for multiprocessing in (False, True):
        engine = make_async_engine(multiprocessing)
        await engine.collective_rpc("crash")
        results = await asyncio.wait_for(
            asyncio.gather(stream(engine, n=2), stream(engine), return_exceptions=True), 10
        )
        assert [type(result) for result in results] == [EngineDeadError] * 2
        assert "the roof fell in" in str(results[0])
        with pytest.raises(EngineDeadError):
            await engine.check_health()


def test_ctrl_c_is_for_the_front_end(make_engine):
    """A terminal sends SIGINT to the whole group; the core ignores it."""
    engine = make_engine(multiprocessing=True)
    os.kill(engine.client.info.pid, signal.SIGINT)
    assert len(run_one(engine, n=3).outputs) == 3


def test_sigterm_ends_the_core(make_engine):
    engine = make_engine(multiprocessing=True)
    os.kill(engine.client.info.pid, signal.SIGTERM)
    with pytest.raises(EngineDeadError, match="exit code 0"):
        engine.reset_prefix_cache()


@pytest.mark.parametrize("busy", [False, True])
def test_a_core_ends_when_its_parent_is_killed(busy, tmp_path):
    script = textwrap.dedent(f"""
        import sys, time
        from tests.v1.engine.fakes import FAKE_MODEL, bundled_tokenizer, fake_config
        from tests.v1.engine.helpers import PROMPT, params
        from vllm.v1.engine.llm_engine import LLMEngine

        slow = "{FAKES}SlowExecutor"
        config = fake_config(distributed_executor_backend=slow, max_model_len=100_000, num_blocks=10_000)
        engine = LLMEngine(config, multiprocessing=True, model=FAKE_MODEL, tokenizer=bundled_tokenizer())
        if {busy}:
            engine.add_request("x", PROMPT, params(n=3, max_tokens=90_000))
            engine.step()
        print(engine.client.info.pid, flush=True)
        time.sleep(60)
    """)
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
    )  # fmt: skip
    try:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_alive(pid)
        parent.kill()
        parent.wait()
        wait_for_end(pid)
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # Python 3.12 warns of threads; the child runs none
def test_a_forked_child_of_the_parent_does_not_keep_the_core_alive():
    client = SyncMPClient(fake_config())
    pid = client.info.pid
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:  # holds every descriptor that was not closed on purpose, for a while
        os.close(writer)
        os.read(reader, 1)
        os._exit(0)
    try:
        client._process._finalizer.detach()
        client._process._lifeline.close()
        wait_for_end(pid)
    finally:
        os.close(writer)
        os.waitpid(child, 0)
        os.close(reader)
        client._process._process.wait()
        client._process._to_core.close(linger=0)
        client._process._from_core.close(linger=0)
        client._process._context.term()


def test_an_idle_core_costs_nothing(make_engine):
    engine = make_engine(multiprocessing=True)
    run_one(engine)

    def ticks():
        fields = Path(f"/proc/{engine.client.info.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return int(fields[11]) + int(fields[12])

    before = ticks()
    time.sleep(0.5)
    assert ticks() - before <= 2  # of 100 per second; a loop that spins takes 50


def test_the_main_module_is_not_imported(tmp_path):
    """No guard is needed in a script, as there is with multiprocessing's spawn."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        print("main module", flush=True)
        from tests.v1.engine.fakes import FAKE_MODEL, bundled_tokenizer, fake_config
        from tests.v1.engine.helpers import run_one
        from vllm.v1.engine.llm_engine import LLMEngine

        engine = LLMEngine(fake_config(), multiprocessing=True, model=FAKE_MODEL, tokenizer=bundled_tokenizer())
        print(len(run_one(engine, n=3).outputs), flush=True)
    """)
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", script], capture_output=True, text=True, timeout=60, check=False,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
    )  # fmt: skip
    assert (done.stdout, done.returncode) == ("main module\n3\n", 0), done.stderr
    assert done.stderr == ""


def test_calls(engine):
    assert engine.collective_rpc("echo", args=("hello",)) == ["hello"]
    assert engine.collective_rpc("echo", kwargs={"value": [1, {"a": None}]}) == [[1, {"a": None}]]
    with pytest.raises(ConfigError, match="enable_sleep_mode"):
        engine.sleep()
    with pytest.raises((AttributeError, EngineError), match="nonsense"):
        engine.collective_rpc("nonsense")


def test_the_cores_own_totals(engine):
    before = engine.client.call("stats")["prompt_tokens"]
    run_one(engine, n=2)
    assert engine.client.call("stats")["prompt_tokens"] == before + len(PROMPT)


def test_only_some_methods_can_be_called_by_name(make_engine):
    engine = make_engine(multiprocessing=True)
    with pytest.raises(EngineError, match="no method 'shutdown'"):
        engine.client.call("shutdown")


def test_functions_need_the_core_in_process(make_engine):
    seen = []
    engine = make_engine()
    assert engine.collective_rpc(lambda worker, value: seen.append(worker) or value, args=(5,)) == [5]
    assert seen
    far = make_engine(multiprocessing=True)
    with pytest.raises(NotImplementedError, match="in-process core"):
        far.collective_rpc(lambda worker: None)
    with pytest.raises(NotImplementedError, match="in-process core"):
        far.apply_model(lambda model: None)
    with pytest.raises(NotImplementedError, match="in-process core"):
        _ = far.model_executor


def test_an_executor_object_cannot_cross():
    from tests.v1.engine.fakes import FakeExecutor

    config = fake_config()
    with pytest.raises(NotImplementedError, match="name its class"):
        LLMEngine(config, multiprocessing=True, model=FAKE_MODEL, executor=FakeExecutor(config))
    engine = LLMEngine(config, model=FAKE_MODEL, tokenizer=bundled_tokenizer(), executor=FakeExecutor(config))
    assert len(run_one(engine).outputs) == 1
    engine.shutdown()


def test_the_environment_chooses(monkeypatch):
    for value, in_process in (("0", True), ("1", False)):
        monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", value)
        engine = LLMEngine(fake_config(), model=FAKE_MODEL, tokenizer=bundled_tokenizer())
        assert engine.client.in_process is in_process
        engine.shutdown()


def test_unknown_executors_are_refused_by_name():
    with pytest.raises(NotImplementedError, match="distributed_executor_backend='ray'"):
        LLMEngine(fake_config(distributed_executor_backend="ray"), model=FAKE_MODEL)


async def test_the_async_client_by_itself():
    outputs, deaths = [], []
    client = AsyncMPClient(fake_config(), outputs.append, deaths.append)
    client.attach(asyncio.get_running_loop())
    assert await client.call("reset_prefix_cache") is True
    client.shutdown()
    assert [type(death) for death in deaths] == [EngineDeadError]
    with pytest.raises(EngineDeadError):
        client.abort([1])
