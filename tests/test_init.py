"""`import vllm`: the public names, lazily, and without torch."""

from __future__ import annotations

import importlib
import subprocess
import sys
from importlib import metadata

import pytest

import vllm

PUBLIC = """LLM SamplingParams RequestOutput CompletionOutput TokensPrompt TextPrompt EngineArgs AsyncEngineArgs
LLMEngine AsyncLLMEngine __version__""".split()

PATHS = """vllm.sampling_params:SamplingParams,RequestOutputKind,StructuredOutputsParams,GuidedDecodingParams
vllm.inputs:TextPrompt,TokensPrompt
vllm.outputs:RequestOutput,CompletionOutput
vllm.lora.request:LoRARequest
vllm.engine.arg_utils:EngineArgs,AsyncEngineArgs
vllm.tokenizers:get_tokenizer
vllm.transformers_utils.tokenizer:get_tokenizer
vllm.entrypoints.chat_utils:resolve_hf_chat_template
vllm.utils:random_uuid,get_open_port
vllm.utils.network_utils:get_ip,get_open_port
vllm.v1.engine.async_llm:AsyncLLM
vllm.v1.engine.llm_engine:LLMEngine
vllm.distributed.parallel_state:destroy_model_parallel,destroy_distributed_environment
vllm.distributed.weight_transfer.nccl_common:trainer_init
vllm.distributed.weight_transfer.packed_tensor:packed_nccl_broadcast_producer
vllm.distributed.weight_transfer.nccl_engine:NCCLTrainerSendWeightsArgs,NCCLWeightTransferEngine
vllm.distributed.device_communicators.pynccl:PyNcclCommunicator
vllm.distributed.utils:StatelessProcessGroup""".split()


def fresh(code: str) -> str:
    """What a new interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names(name: str) -> None:
    assert getattr(vllm, name) is not None
    assert name in dir(vllm)
    assert name in vllm.__all__


def test_an_unknown_name() -> None:
    with pytest.raises(AttributeError, match="no attribute 'LLMs'"):
        _ = vllm.LLMs


@pytest.mark.parametrize("path", PATHS)
def test_paths_that_programs_import(path: str) -> None:
    module, names = path.split(":")
    for name in names.split(","):
        assert hasattr(importlib.import_module(module), name)


def test_import_loads_next_to_nothing() -> None:
    heavy = "torch transformers numpy tokenizers msgspec jinja2 zmq rich"
    assert fresh(f"import sys, vllm; print([m for m in {heavy.split()} if m in sys.modules])") == "[]"


def test_the_engine_arguments_and_parameters_load_no_torch() -> None:
    code = "import sys; from vllm import EngineArgs, SamplingParams, LLM; EngineArgs(); print('torch' in sys.modules)"
    assert fresh(code) == "False"


def test_version() -> None:
    assert vllm.__version__ == metadata.version("vllm")
    assert vllm.__version__.startswith("0.29.")
    assert vllm.__version_tuple__[:3] == (0, 29, 0)
