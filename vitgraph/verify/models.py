"""`verify` from a model's name on: builds its encoder, verifies it and frees it, one model after the other."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from vitgraph.attention.registry import AUTO, create_backend
from vitgraph.errors import RankFailedError
from vitgraph.models.compile.compilation import compile_encoder
from vitgraph.models.loading import load_encoder
from vitgraph.models.registry import ModelSource, resolve_model
from vitgraph.models.rows import ModelRow
from vitgraph.verify.findings import VerifyResult
from vitgraph.verify.run import describe_error, dtype_name, verify_row


def verify_model(
    source: ModelSource,
    *,
    device: torch.device,
    dtype: torch.dtype,
    backend: str = AUTO,
    flash_attn_version: int | None = None,
    load_format: str = "dummy",
    compiles: bool = False,
    seed: int = 0,
    **settings: Any,
) -> VerifyResult:
    """Builds the encoder of a resolved model, verifies it and frees it.

    Args:
        source: The model.
        device: Where it runs.
        dtype: Its dtype.
        backend: Attention backend, or `auto`.
        flash_attn_version: Generation of `FLASH_ATTN`; None is the newest that runs.
        load_format: `dummy` draws seeded weights, `auto` reads the checkpoint.
        compiles: Compile the repeated block, in eager and in the graphs.
        seed: Seed of weights, pixels and draws.
        settings: The other settings of `verify_row`.

    Returns:
        The result, also where the encoder could not be built.
    """
    try:
        attention = create_backend(backend, device, flash_attn_version=flash_attn_version)
        encoder = load_encoder(source, attention, device=device, dtype=dtype, load_format=load_format, seed=seed)
        # Before anything is counted: the compiler keeps memory of its own.
        compiled = compile_encoder(encoder)["compiled_blocks"] if compiles else 0
        result = replace(verify_row(encoder, seed=seed, **settings), compiled_blocks=compiled)
        # Its reference cycles hold device memory until they are collected.
        del encoder, attention
    except RankFailedError:
        raise
    except Exception as error:
        # As in `verify_row`: the reason goes into the result.
        result = VerifyResult("", device=str(device), dtype=dtype_name(dtype), seed=seed, error=describe_error(error))
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
    return replace(
        result,
        architecture=source.architecture,
        row=source.row.name,
        preset=source.name,
        backend_requested=backend,
    )


@contextmanager
def _threads_for(device: torch.device, debug_size: bool) -> Iterator[None]:
    """One CPU thread for small towers: more gain little there, and wait for each other where cores are busy."""
    threads = torch.get_num_threads()
    if device.type == "cpu" and debug_size:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def verify_rows(
    rows: Iterable[ModelRow],
    *,
    debug_size: bool,
    device: torch.device,
    dtype: torch.dtype,
    backend: str = AUTO,
    load_format: str = "dummy",
    on_result: Callable[[VerifyResult], None] | None = None,
    **settings: Any,
) -> list[VerifyResult]:
    """Verifies the encoder of each row of the compatibility matrix, one after the other.

    Args:
        rows: Rows of `registry.ROWS`.
        debug_size: Use the small presets instead of the full-size ones.
        device: Where they run.
        dtype: Their dtype.
        backend: Attention backend, or `auto`.
        load_format: `dummy` draws seeded weights, `auto` reads the checkpoints.
        on_result: Called with each result as soon as it is there.
        settings: The other settings of `verify_model` and `verify_row`.
    """
    results = []
    for row in rows:
        preset = row.debug_preset if debug_size else row.full_preset
        try:
            source = resolve_model(preset)
        except Exception as error:
            # A row whose preset does not resolve is reported like one that does not verify.
            result = VerifyResult(row.architectures[0], row.name, preset, error=describe_error(error))
        else:
            with _threads_for(device, debug_size):
                result = verify_model(
                    source, device=device, dtype=dtype, backend=backend, load_format=load_format, **settings
                )
        results.append(result)
        if on_result is not None:
            on_result(result)
    return results
