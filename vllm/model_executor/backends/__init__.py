"""Backends: each runs every `DecoderSpec` it can on one device, behind `interface.Backend`."""
