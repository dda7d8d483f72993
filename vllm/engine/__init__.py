"""Engine arguments, and the engine classes under the names that programs import."""
