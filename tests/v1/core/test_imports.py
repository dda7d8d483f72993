"""The core knows no torch."""

from __future__ import annotations

import subprocess
import sys


def test_the_scheduler_imports_no_torch_and_no_transformers():
    code = (
        "import sys, vllm.v1.core.sched.scheduler\n"
        "loaded = {name.split('.')[0] for name in sys.modules} & {'torch', 'transformers', 'tokenizers', 'zmq'}\n"
        "assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
