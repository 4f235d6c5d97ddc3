"""vitgraph: decides how to run a vision-language model's vision encoder, by measuring."""

__version__ = "0.1.0"
