"""Published checkpoints: config and processor files to a `ModelSource`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitgraph.errors import InputError, ModelError, VitgraphError
from vitgraph.models.family import vision_language_part
from vitgraph.models.files import CONFIG_FILE, download, read_json
from vitgraph.models.processors import IMAGE_FILE, PROCESSOR_FILE, VIDEO_FILE, contradiction, resolve_processor
from vitgraph.models.registry import ModelSource, architecture_of, preset_of, row_of_config

if TYPE_CHECKING:
    from vitgraph.models.encoder import VisionEncoder

ADAPTER_FILE = "adapter_config.json"
HIDDEN_SIZE, TEXT_WIDTH = "hidden_size", "text_hidden_size"
SOME_SIZE = (640, 480)
COUNTS = (
    *("depth", "num_hidden_layers", "hidden_size", "embed_dim", "intermediate_size", "num_heads"),
    *("num_attention_heads", "patch_size", "image_size", "spatial_merge_size", "temporal_patch_size", "in_channels"),
    *("num_channels", "out_hidden_size", "window_size"),
)
"""Fields of a tower that count layers, heads, channels or pixels."""
MOST = 2**20


def source_of(name: str, folder: Path | None = None, revision: str | None = None) -> ModelSource:
    """The model of a local checkpoint folder, or of a hub repository, whose small config files are downloaded.

    Raises:
        ModelError: config.json is missing, not JSON, or of an unknown architecture; the repository does not exist; or
            the hub cannot be reached and nothing is cached.
    """

    def read(file: str) -> dict[str, Any] | None:
        path = folder / file if folder else download(name, file, revision, required=file == CONFIG_FILE)
        return read_json(path) if path is not None else None

    config = read(CONFIG_FILE)
    if config is None and (adapter := read(ADAPTER_FILE)) is not None:
        base = adapter.get("base_model_name_or_path")
        raise ModelError(f"{name} is an adapter of {base}; give that model, or merge the adapter into it and give that")
    if config is None:
        raise ModelError(f"{name} has no {CONFIG_FILE}; give a transformers checkpoint folder, a hub id or a preset")
    architecture = architecture_of(config)
    with _fields_named(name):
        # Rows that share an architecture look at its fields.
        row = row_of_config(config)
    encoder = row.encoder_class()
    # What a checkpoint's files leave open is taken from the preset that documents the architecture.
    preset = preset_of(row, architecture)
    files = {file: read(file) for file in (IMAGE_FILE, VIDEO_FILE, PROCESSOR_FILE)}
    with _fields_named(name):
        part = vision_language_part(config)
        if not isinstance(part.get("vision_config", {}), dict):
            raise ModelError(f"{name}: vision_config of {CONFIG_FILE} is {part['vision_config']!r}, not an object")
        vision_config, extra = encoder.read_model_config(config)
        vision_config = _filled(encoder, vision_config)
        _check_counts(name, vision_config)
    processor = resolve_processor(encoder, name, files, preset["processor"], vision_config)
    # The language model's width is a fact of this checkpoint, never of the preset's.
    known = {fact: value for fact, value in preset["extra"].items() if fact != TEXT_WIDTH}
    # transformers takes a lower bound of pixels above the upper one.
    counts = {setting: value for setting, value in processor.items() if setting not in ("size", "video")}
    if (wrong := contradiction({**counts, **extra})) is not None:
        raise ModelError(f"{name}: its files' settings contradict each other: {wrong}")
    weights, config_source = str(folder or name), "folder" if folder else "hub"
    source = ModelSource(
        row, name, vision_config, processor, {**known, **extra}, weights, architecture, config_source, revision
    )
    with _fields_named(name):
        # Everything that the tower and its rule read, read once.
        rule = source.rule()
        rule.graph_config()
        with suppress(InputError):
            rule.flops(rule.image_geometry(*SOME_SIZE))
        encoder.head_width(vision_config)
    return source


def _filled(encoder: type[VisionEncoder], vision_config: Mapping[str, Any]) -> dict[str, Any]:
    """The tower's config with the defaults of transformers' config class for what it leaves out."""
    if encoder.tower is None:
        return dict(vision_config)
    given = {field: value for field, value in vision_config.items() if value is not None}
    filled = encoder.tower.config_class()(**given)
    values = {field: getattr(filled, field, None) for field in encoder.tower.fields()}
    return {**{field: value for field, value in values.items() if value is not None}, **given}


def _check_counts(name: str, config: Mapping[str, Any]) -> None:
    """Refuses sizes and counts of a tower that no tower has, which its rule would loop over or divide by."""
    for field, value in config.items():
        if isinstance(value, Mapping):
            _check_counts(name, value)
        numbers = value if isinstance(value, list | tuple) else [value]
        if field in COUNTS and any(type(number) is not int or not 0 < number <= MOST for number in numbers):
            raise ModelError(f"{name}: {CONFIG_FILE} has {field} {value!r}; it must be a positive integer up to {MOST}")
    width = config.get("embed_dim") or config.get("hidden_size")
    heads = config.get("num_heads") or config.get("num_attention_heads")
    if width and heads and not config.get("head_dim") and width % heads:
        raise ModelError(
            f"{name}: {CONFIG_FILE} has a width of {width}, which its {heads} attention heads do not divide"
        )


@contextmanager
def _fields_named(name: str) -> Iterator[None]:
    """Turns what goes wrong with a config.json into one line that names the field."""
    try:
        yield
    except VitgraphError:
        raise
    except KeyError as error:
        field = f"text_config.{HIDDEN_SIZE}" if error.args[0] == TEXT_WIDTH else error.args[0]
        raise ModelError(f"{name}: {CONFIG_FILE} has no field {field!r}; copy it again from the model") from error
    except ImportError as error:
        cause = " ".join(str(error.__cause__ or error).split())
        raise ModelError(f"{name}: a module of transformers cannot be imported ({cause}); mend that package") from error
    except Exception as error:
        # transformers' classes check their fields with several libraries, and a rule computes with what they hold.
        what = " ".join(f"{type(error).__name__}: {error}".split())
        raise ModelError(f"{name}: {CONFIG_FILE} cannot be used ({what}); copy it again from the model") from error
