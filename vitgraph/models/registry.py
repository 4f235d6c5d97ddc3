"""The families that `rows.json` declares, what is known of each, and how a `--model` argument becomes one of them.

Nothing here imports torch, nor a family file until one is resolved.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module, resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitgraph.errors import InputError, ModelError, VitgraphError
from vitgraph.hub import CONFIG_FILE, download, read_json
from vitgraph.models.family import vision_language_part
from vitgraph.models.processors import IMAGE_FILE, PROCESSOR_FILE, VIDEO_FILE, contradiction, resolve_processor
from vitgraph.planning.budgets import IMAGE, VIDEO
from vitgraph.reading import is_folder

if TYPE_CHECKING:
    from vitgraph.models.encoder import VisionEncoder
    from vitgraph.models.geometry import GeometryRule

FAMILIES = "vitgraph.models.families"


@dataclass(frozen=True, slots=True)
class ModelRow:
    """One row of the compatibility matrix.

    Attributes:
        name: Row name; also the name of its presets file.
        tower: The kind of tower; rows of one kind are shown together.
        models: The published models, for people.
        encoder: `module:class` of the adapter, the module among the families.
        architectures: Values of `architectures` in config.json that belong to the row.
        full_preset: Full-size preset that stands for the row in measurements.
        debug_preset: Small preset for tests and CPUs.
        images_only: Those of `architectures` that take images alone, of a family that takes videos too.
    """

    name: str
    tower: str
    models: str
    encoder: str
    architectures: tuple[str, ...]
    full_preset: str
    debug_preset: str
    images_only: tuple[str, ...] = ()

    def encoder_class(self) -> type[VisionEncoder]:
        """The adapter class; its module is imported here, torch is not."""
        module, class_name = self.encoder.split(":")
        return getattr(import_module(f"{FAMILIES}.{module}"), class_name)


def _packaged(name: str) -> dict[str, Any]:
    return json.loads((resources.files("vitgraph.models") / name).read_text(encoding="utf-8"))


_DECLARED = _packaged("rows.json")

_LISTS = ("architectures", "images_only")

ROWS = tuple(ModelRow(**row | {name: tuple(row.get(name, ())) for name in _LISTS}) for row in _DECLARED["rows"])
"""The rows that `rows.json` declares; those with one kind of tower stand together."""

NOT_YET: Mapping[str, str] = _DECLARED["not_yet"]
"""Names whose relatives have an adapter, and what is different in them."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A resolved model: its family, its config, and where its weights are.

    Attributes:
        row: The family.
        name: What the user gave.
        processor: Processor settings in the shape of the presets.
        extra: Facts outside the vision config that the encoder needs.
        weights: Hub id or local folder with the safetensors files, or None (presets without a published model).
        config_source: `preset`, `folder` or `hub`.
    """

    row: ModelRow
    name: str
    vision_config: Mapping[str, Any]
    processor: Mapping[str, Any]
    extra: Mapping[str, Any]
    weights: str | None
    architecture: str
    config_source: str
    revision: str | None = None

    def rule(self) -> GeometryRule:
        """The family's rule for this config; needs no torch."""
        rule = self.row.encoder_class().rule_class(self.vision_config, self.processor, self.extra)
        if self.architecture in self.row.images_only:
            rule.modalities = (IMAGE,)
        return rule


@cache
def row_presets(row_name: str) -> dict[str, dict[str, Any]]:
    """Presets of one row by name."""
    return _packaged(f"presets/{row_name}.json")


def preset_of(row: ModelRow, architecture: str) -> dict[str, Any]:
    """The preset that documents an architecture: the row's first one of that name, or else its full-size one."""
    presets = row_presets(row.name)
    full = presets[row.full_preset]
    for preset in (full, *presets.values()):
        if preset["hub_id"] and architecture in (preset["architecture"], *preset.get("also", ())):
            return preset
    return full


def all_presets() -> dict[str, ModelRow]:
    """Preset name to row, in registry order."""
    return {preset: row for row in ROWS for preset in row_presets(row.name)}


def architecture_of(config: Mapping[str, Any]) -> str:
    """The architecture that a config.json names, or the one that transformers has for its `model_type`.

    Raises:
        ModelError: It names neither.
    """
    named = config.get("architectures")
    if isinstance(named, list) and named and isinstance(named[0], str):
        return named[0]
    found = _architecture_of_type(config)
    if found is None:
        raise ModelError(
            f"config.json names no model: architectures is {named!r} and model_type {config.get('model_type')!r}; give "
            "the config of a vision-language checkpoint"
        )
    return found


def _architecture_of_type(config: Mapping[str, Any]) -> str | None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    model_type = config.get("model_type")
    if any(model_type in row.architectures for row in ROWS):
        return str(model_type)
    found = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(model_type if isinstance(model_type, str) else "")
    return found if isinstance(found, str) else None


def row_of_config(config: Mapping[str, Any]) -> ModelRow:
    """The row that a config.json belongs to, by its architecture and, where rows share one, by the row's own test.

    Raises:
        ModelError: No row takes it.
    """
    architecture = architecture_of(config)
    sharing = [row for row in ROWS if architecture in row.architectures]
    for row in sharing:
        if row.encoder_class().accepts_model_config(config):
            return row
    if sharing:
        raise ModelError(
            f"architecture {architecture!r} has an adapter for {'; '.join(row.models for row in sharing)}, and this "
            f"config.json (version {config.get('version')!r}) is of none of them: not yet"
        )
    if architecture in NOT_YET:
        raise ModelError(f"architecture {architecture!r} has no vision-encoder adapter yet: {NOT_YET[architecture]}")
    known = sorted({name for row in ROWS for name in row.architectures})
    none = f"architecture {architecture!r} has no vision-encoder adapter here"
    if (usual := _architecture_of_type(config)) in known:
        raise ModelError(
            f"{none}; its model_type is {usual}'s: where the vision encoder is too, name that in architectures"
        )
    raise ModelError(f"{none}; known: {', '.join(known)}")


def resolve_preset(name: str) -> ModelSource | None:
    """The preset called `name` (or the preset of that hub id), or None where there is none."""
    for row in ROWS:
        for preset_name, preset in row_presets(row.name).items():
            if name == preset_name or name == preset["hub_id"]:
                facts = {fact: preset[fact] for fact in ("vision_config", "processor", "extra", "architecture")}
                return ModelSource(row, name, weights=preset["hub_id"], config_source="preset", **facts)
    return None


def resolve_model(name: str, *, revision: str | None = None) -> ModelSource:
    """Resolves `--model`: a preset name, a local folder, or a hub id.

    A hub id that a preset describes uses the preset's config, so that no network is needed to plan or to run with
    random weights.

    Raises:
        ModelError: Nothing of that name is known or reachable; the message lists the presets.
    """

    folder = Path(name)
    if is_folder(folder):
        return source_of(name, folder)
    preset = resolve_preset(name)
    if preset is not None:
        return preset
    if "/" in name and not name.startswith((".", "/", "~")):
        return source_of(name, revision=revision)
    raise ModelError(f"model {name!r} is neither a preset, a local folder nor a hub id; {_near_presets(name)}")


def _near_presets(name: str) -> str:
    """The few presets that are like a name, also where it says more or less than they do."""
    plain = {re.sub(r"[^a-z0-9]", "", preset.lower()): preset for preset in all_presets()}
    wanted = re.sub(r"[^a-z0-9]", "", name.lower())
    close = [preset for text, preset in plain.items() if len(wanted) > 2 and (text in wanted or wanted in text)]
    close += [plain[text] for text in difflib.get_close_matches(wanted, plain, n=3, cutoff=0.6)]
    few = list(dict.fromkeys(close))[:4]
    listed = "`vitgraph models` lists the presets"
    return f"did you mean {', '.join(few)}? {listed}" if few else listed


@cache
def verifications() -> dict[str, list[dict[str, Any]]]:
    """Committed verifications by row name."""
    return _packaged("verified.json")["rows"]


def catalog() -> list[dict[str, Any]]:
    """Facts of every row for `vitgraph models --json`, in registry order: budgets by path, keys by capture axis."""
    entries = []
    for row in ROWS:
        source = resolve_preset(row.full_preset)
        assert source is not None, f"{row.name}: preset {row.full_preset} is missing"
        config = source.rule().graph_config()
        entries.append(
            {
                "row": row.name,
                "tower": row.tower,
                "models": row.models,
                "architectures": list(row.architectures),
                "encoder": row.encoder,
                "presets": list(row_presets(row.name)),
                "full_preset": row.full_preset,
                "debug_preset": row.debug_preset,
                "image": IMAGE in config.modalities,
                "video": VIDEO in config.modalities,
                "paths": {path: policy.min_token_budget for path, policy in config.paths.items()},
                "axes": {axis.name: len(axis.keys) for axis in config.axes},
                "verified": verifications().get(row.name, []),
            }
        )
    return entries


ADAPTER_FILE = "adapter_config.json"
HIDDEN_SIZE, TEXT_WIDTH = "hidden_size", "text_hidden_size"
SOME_SIZE = (640, 480)
COUNTS = (
    *("depth", "num_hidden_layers", "hidden_size", "embed_dim", "intermediate_size", "num_heads"),
    *("num_attention_heads", "patch_size", "image_size", "spatial_merge_size", "temporal_patch_size", "in_channels"),
    *("num_channels", "out_hidden_size", "window_size", "min_dynamic_patch", "max_dynamic_patch"),
    *("mm_tokens_per_image", "scale_factor", "query_num", "num_position_embeddings", "num_patches"),
)
"""Fields that count layers, heads, channels, pixels, tiles or tokens."""
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
        _check_counts(name, {**vision_config, **extra})
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
