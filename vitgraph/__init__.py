"""vitgraph: decides how to run a vision-language model's vision encoder, by measuring.

The names below are the library; `docs/library.md` shows them at work. Importing this brings neither torch nor pandas.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from vitgraph.errors import VitgraphError
    from vitgraph.library import (
        bench,
        capture,
        encode_eagerly,
        explain,
        load_encoder,
        make_inputs,
        plan,
        read_record,
        read_samples,
        read_tables,
    )

__all__ = [
    "VitgraphError",
    "__version__",
    "bench",
    "capture",
    "encode_eagerly",
    "explain",
    "load_encoder",
    "make_inputs",
    "plan",
    "read_record",
    "read_samples",
    "read_tables",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'vitgraph' has no attribute {name!r}; it has {', '.join(__all__)}")
    from vitgraph import errors, library

    return getattr(errors if name == "VitgraphError" else library, name)


def __dir__() -> list[str]:
    return __all__
