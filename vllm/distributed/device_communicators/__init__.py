"""Communicators by device."""
