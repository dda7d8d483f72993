"""Process groups. One process per engine so far: what stands here are names that programs import."""
