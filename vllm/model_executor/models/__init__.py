"""One short file per family: it turns a checkpoint's config into a `DecoderSpec`. No forward pass stands here."""
