"""Vision encoders: the protocol, the registry, one file a model family."""
