"""LoRA adapters: how a request names one."""
