#!/usr/bin/env python3
"""Counts that do not depend on the machine; --help says more."""

import sys

from vllm.benchmarks.counts import main

if __name__ == "__main__":
    sys.exit(main())
