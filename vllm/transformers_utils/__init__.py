"""The names of transformers-related helpers that programs import."""
