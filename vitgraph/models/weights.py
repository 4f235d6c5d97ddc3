"""The encoder's tensors of a checkpoint: which files hold them, under which names, and how they are stored."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from vitgraph.errors import ModelError
from vitgraph.hub import CONFIG_FILE, download, hub_problem, read_json
from vitgraph.models import torch
from vitgraph.reading import LFS_POINTER, LFS_WAY_OUT

SINGLE_FILE = "model.safetensors"
INDEX_ENDING = ".safetensors.index.json"
INDEX_FILE = "model" + INDEX_ENDING
OTHER_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf", "*.pth", "*.pt", "*.msgpack")

FLOATS = ("F64", "F32", "F16", "BF16")
"""safetensors' names of the dtypes whose values are the weights themselves."""

BLOCK_SIDES = (16, 32, 64, 128, 256)
COMPANION = re.compile(
    r"(?:^|[._])(?:scales?|scale_inv|scale_\d|scale_weight|scale_ub|zero_points?|q?zeros|qweight|packed|g_idx|weight_shape"
    r"|absmax|quant_map|SCB|weight_format|q?data|blocks|codebook|amax|lut)$|quant_state|quantizer"
)
"""Names of tensors that stand beside quantised weights: of FP8, compressed-tensors, AWQ, GPTQ, bitsandbytes, ModelOpt,
MXFP4, torchao and quanto checkpoints."""

WEIGHT_SCALE = re.compile(r"\.weight_scale(?:_inv)?$")
ACTIVATION_SCALE = re.compile(r"\.(?:input|output)_scale(?:_ub)?$|\.activation_scale$")
ADAPTER = re.compile(r"\.lora_|\.base_layer\.|\.modules_to_save\.")

UNQUANTISED = (
    "vitgraph runs unquantised towers: give the checkpoint that it was made from (bfloat16 or float16), or use "
    "--load-format dummy, whose random weights take the same time"
)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of the encoder in an opened file, as its header describes it.

    Attributes:
        key: Its published name, without what a wrapper put before it.
        stored_key: Its name in the file.
        dtype: safetensors' name of its dtype.
    """

    key: str
    stored_key: str
    dtype: str
    shape: tuple[int, ...]
    file: Any

    def read(self) -> torch.Tensor:
        return self.file.get_tensor(self.stored_key)


def encoder_tensors(
    weights: str, owns: Callable[[str], bool], revision: str | None = None, *, names: Sequence[str] = ()
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the encoder's tensors by published name, reading only the shards that hold one.

    Args:
        weights: Local folder or hub id.
        owns: Says whether a published key belongs to the encoder.
        names: Names of the encoder's own tensors; they tell a scale that the tower has from one of a quantised weight,
            and an unknown prefix from another model.

    Raises:
        ModelError: No safetensors files that transformers would read, a damaged file, not one tensor of the encoder,
            two copies of the encoder, an adapter, or a tower that is quantised in a way that is not undone here.
    """
    from safetensors import SafetensorError, safe_open

    with ExitStack() as opened:
        keys: dict[str, Any] = {}
        for path, listed in _files(weights, owns, revision).items():
            try:
                file = opened.enter_context(safe_open(path, framework="pt", device="cpu"))
                found = list(file.keys())
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{path} cannot be read as safetensors: {_damage(path, error)}") from error
            missing = sorted(set(listed) - set(found))
            if missing:
                raise ModelError(f"{path} lacks {len(missing)} tensors that the index promises: {some_of(missing)}")
            for key in found:
                if key in keys and owns(key):
                    raise ModelError(f"{weights}: two files hold the tensor {key}; remove the one that is not meant")
                keys[key] = file
        stored = _chosen_copy(weights, keys, owns, names)
        yield from _as_floats(weights, stored, names, quantisation(weights, revision))


def _as_floats(
    weights: str, stored: Mapping[str, StoredTensor], names: Sequence[str], config: Mapping[str, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in floating point: as they are, or with their scales applied where that is simple and certain."""
    from safetensors import SafetensorError

    tails = {name.split(".", 1)[-1] for name in names}
    own = {key for key in stored if any(key.endswith(tail) for tail in tails if COMPANION.search(tail))}
    companions = {key for key in stored if COMPANION.search(key) and key not in own}
    for key, tensor in stored.items():
        if ADAPTER.search(key):
            raise ModelError(f"{weights}: {tensor.stored_key} is part of an adapter; merge it into the model first")
        if key in companions:
            base = WEIGHT_SCALE.sub(".weight", key)
            is_used = base != key and base in stored and stored[base].dtype not in FLOATS
            if not is_used and not ACTIVATION_SCALE.search(key):
                raise quantised(weights, tensor.stored_key, "stands beside a quantised weight", config)
            continue
        try:
            scales = [stored[name] for name in (f"{key}_scale", f"{key}_scale_inv") if name in companions]
            is_coded = tensor.dtype not in FLOATS and scales
            yield key, _dequantised(weights, tensor, scales, config) if is_coded else tensor.read()
        except SafetensorError as error:
            raise ModelError(f"{weights}: tensor {tensor.stored_key} cannot be read: {error}") from error


def _dequantised(
    weights: str, tensor: StoredTensor, scales: Sequence[StoredTensor], config: Mapping[str, Any]
) -> torch.Tensor:
    if len(scales) != 1 or scales[0].dtype not in FLOATS or tensor.dtype not in ("F8_E4M3", "F8_E5M2", "I8"):
        raise quantised(weights, tensor.stored_key, f"is {tensor.dtype}", config)
    factor = _spread_scale(scales[0], tensor, config)
    if factor is None:
        what = f"is {tensor.dtype} with scales of shape {list(scales[0].shape)}"
        raise quantised(weights, tensor.stored_key, what, config)
    return tensor.read().to(torch.float32) * factor


def _spread_scale(scale: StoredTensor, tensor: StoredTensor, config: Mapping[str, Any]) -> torch.Tensor | None:
    """The scale with a shape that multiplies the codes: of the tensor, its rows, or (FP8) its blocks; else None."""
    values = scale.read().float()
    rows = tensor.shape[0] if tensor.shape else 1
    if values.numel() == 1:
        return values.reshape(())
    if values.numel() == rows and scale.shape[0] == rows:
        return values.reshape(-1, *[1] * (len(tensor.shape) - 1))
    if tensor.dtype == "I8" or len(tensor.shape) != 2 or len(scale.shape) != 2:
        return None
    sides = config.get("weight_block_size") or [
        next((side for side in BLOCK_SIDES if -(-size // side) == count), 0)
        for size, count in zip(tensor.shape, scale.shape, strict=True)
    ]
    if any(not side or -(-n // side) != count for n, side, count in zip(tensor.shape, sides, scale.shape, strict=True)):
        return None
    for dim, side in enumerate(sides):
        values = values.repeat_interleave(int(side), dim).narrow(dim, 0, tensor.shape[dim])
    return values


def quantised(weights: str, key: str, what: str, config: Mapping[str, Any]) -> ModelError:
    """The error that refuses a tower which is stored in codes."""
    method = f" (quant_method {config['quant_method']})" if config.get("quant_method") else ""
    return ModelError(f"{weights}: its vision encoder is stored quantised{method}: {key} {what}. {UNQUANTISED}")


def quantisation(weights: str, revision: str | None) -> Mapping[str, Any]:
    """`quantization_config` of the checkpoint; empty where it has none."""
    config = _config(weights, revision)
    found = config.get("quantization_config") or config.get("compression_config")
    return found if isinstance(found, dict) else {}


def _config(weights: str, revision: str | None, *, required: bool = False) -> dict[str, Any]:
    """config.json of the checkpoint; empty where it has none."""
    folder = Path(weights)
    path = folder / CONFIG_FILE if folder.is_dir() else download(weights, CONFIG_FILE, revision, required=required)
    return (read_json(path) if path is not None else None) or {}


# -- names ---------------------------------------------------------------------------------------------------------


def _chosen_copy(
    weights: str, keys: Mapping[str, Any], owns: Callable[[str], bool], names: Sequence[str]
) -> dict[str, StoredTensor]:
    """The encoder's tensors under their published names, or under the one prefix that a wrapper put before them.

    Raises:
        ModelError: None, or several such prefixes.
    """
    direct = {key: key for key in keys if owns(key)}
    copies = {"": direct} if direct else wrapped_copies(keys, owns)
    if not copies:
        raise ModelError(nothing_found(weights, list(keys), names))
    if len(copies) > 1:
        found = ", ".join(f"{len(copy)} under {prefix!r}" for prefix, copy in copies.items())
        raise ModelError(f"{weights} holds several copies of the vision encoder ({found}); keep the one that is meant")
    (chosen,) = copies.values()
    headers = {end: keys[key].get_slice(key) for end, key in chosen.items()}
    return {
        end: StoredTensor(end, key, headers[end].get_dtype(), tuple(headers[end].get_shape()), keys[key])
        for end, key in chosen.items()
    }


def wrapped_copies(keys: Iterable[str], owns: Callable[[str], bool]) -> dict[str, dict[str, str]]:
    """For each prefix that wrappers put before published names: published name to name in the file."""
    copies: dict[str, dict[str, str]] = defaultdict(dict)
    for key in keys:
        parts = key.split(".")
        end = next((end for i in range(1, len(parts)) if owns(end := ".".join(parts[i:]))), None)
        if end is not None:
            prefix = key.removesuffix(end)
            # A `model.` between them may be the wrapper's in one name and the model's own in another.
            joined = re.sub(r"(?:\bmodel\.)+$", "", prefix)
            copies[prefix if end in copies[joined] else joined][end] = key
    return copies


def nothing_found(weights: str, keys: Sequence[str], names: Sequence[str]) -> str:
    """What a checkpoint without a published name of the encoder holds instead."""
    tails = {name.split(".", 1)[-1] for name in names if name.count(".") > 1}
    counts: dict[str, int] = defaultdict(int)
    for key in keys:
        parts = key.split(".")
        start = next((i for i in range(len(parts)) if ".".join(parts[i:]) in tails), None)
        if start is not None:
            counts[".".join([*parts[:start], ""])] += 1
    if not counts:
        for key in keys:
            if re.search(r"vis|vit|image", key):
                counts[".".join([*key.split(".")[:2], ""])] += 1
    if not counts:
        first = f" (it has {len(keys)} others: {some_of(keys)})" if keys else ""
        return f"{weights} holds no tensor of the vision encoder{first}; is it a language-model-only checkpoint?"
    found = ", ".join(f"{count} under {prefix!r}" for prefix, count in sorted(counts.items(), key=lambda p: -p[1])[:3])
    return (
        f"{weights} holds no tensor under the vision encoder's published names, but tensors like it: {found}. "
        "Save it with transformers' save_pretrained, or rename them"
    )


def some_of(keys: Sequence[str], most: int = 3) -> str:
    """The first of some names, and an ellipsis where there are more."""
    return ", ".join(keys[:most]) + (", …" if len(keys) > most else "")


# -- files ---------------------------------------------------------------------------------------------------------


def check_files(weights: str, owns: Callable[[str], bool], revision: str | None = None) -> None:
    """Refuses weights that are not there or not to be had; reads none of them, and fetches none from the hub.

    Raises:
        ModelError: No safetensors files that transformers would read.
        HubUnreachableError: They are not cached, and the hub does not answer.
    """
    from huggingface_hub import file_exists
    from huggingface_hub.errors import HfHubHTTPError

    if Path(weights).is_dir() or hub_problem() is not None:
        _files(weights, owns, revision)
        return
    named = _config(weights, revision, required=True).get("transformers_weights")
    names = [SINGLE_FILE, INDEX_FILE] if named is None else [_checked_name(weights, named)]
    try:
        has_one = any(file_exists(weights, name, revision=revision) for name in names)
    except (HfHubHTTPError, OSError):
        return  # Loading asks again, and says what is wrong.
    if not has_one:
        raise ModelError(f"{weights} has no {' and no '.join(names)} on the hub; use --load-format dummy")


def _files(weights: str, owns: Callable[[str], bool], revision: str | None) -> dict[Path, list[str]]:
    """The files that transformers reads and that hold the encoder, each with the tensors that an index promises.

    transformers takes the file that config.json names, else model.safetensors, else the shards of the index; other
    files of the folder are no part of the model.
    """
    folder = Path(weights)

    def find(name: str, required: bool = False) -> Path | None:
        if not folder.is_dir():
            return download(weights, name, revision, required=required)
        if (folder / name).is_file():
            return folder / name
        if required:
            raise ModelError(f"{folder} lacks {name}, a file of its weights; copy the checkpoint again")
        return None

    named = _config(weights, revision).get("transformers_weights")
    if named is not None:
        chosen = find(_checked_name(weights, named), required=True)
    else:
        chosen = find(SINGLE_FILE) or find(INDEX_FILE)
    if chosen is None:
        if folder.is_dir():
            raise ModelError(_no_weights(weights, folder))
        chosen = find(SINGLE_FILE, required=True)
        assert chosen is not None
    if not chosen.name.endswith(INDEX_ENDING):
        return {chosen: []}
    weight_map = (read_json(chosen) or {}).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ModelError(f"{chosen} has no weight_map of tensor names to files; copy the checkpoint again")
    read = [key for key in weight_map if owns(key)]
    read = read or [key for copy in wrapped_copies(weight_map, owns).values() for key in copy.values()]
    promised: dict[str, list[str]] = defaultdict(list)
    for key in read or weight_map:
        promised[_checked_name(weights, weight_map[key])].append(key)
    return {path: listed for name, listed in sorted(promised.items()) if (path := find(name, required=True))}


def _checked_name(weights: str, name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not name.endswith((".safetensors", INDEX_ENDING)):
        raise ModelError(f"{weights}: its index names {name!r}, which is no safetensors file inside the checkpoint")
    return name


def _no_weights(weights: str, folder: Path) -> str:
    others = [path.name for pattern in OTHER_WEIGHTS for path in sorted(folder.glob(pattern))]
    rule = f"transformers reads {SINGLE_FILE}, or the shards that {INDEX_FILE} names"
    if not others:
        return f"{weights} holds no *.safetensors file; {rule}. Use --load-format dummy for random weights"
    return f"{weights} holds {some_of(others)}, but {rule}; save it with transformers' save_pretrained"


def _damage(path: Path, error: Exception) -> str:
    with path.open("rb") as file:
        if file.read(64).startswith(LFS_POINTER.encode()):
            return LFS_WAY_OUT
    return f"{error}; it is {path.stat().st_size} bytes long, copy it again"
