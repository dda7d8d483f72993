"""The core's bookkeeping: KV cache blocks, prefill groups, and the scheduler. Plain data, numpy, no torch."""
