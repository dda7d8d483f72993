"""Process groups. There is one process per engine so far; what stands here are the names that existing programs import."""
