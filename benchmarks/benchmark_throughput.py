#!/usr/bin/env python3
"""`vllm bench throughput` under upstream's name; --help says more."""

import sys

from vllm.benchmarks import main

if __name__ == "__main__":
    sys.exit(main("throughput"))
