"""The `vllm` command: `main` finds the subcommands, which are one module each."""
