"""Paged attention. The reference in torch stands here; other backends bring their own."""
