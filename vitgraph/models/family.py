"""What a family declares of its published models, and what follows from it: modules, tensors' names, settings.

A family sets the class attributes that are different from the ones here. transformers is imported inside the methods:
sizes, tokens and plans are computed without it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

from vitgraph.errors import ModelError
from vitgraph.models import nn, torch
from vitgraph.models.processor_classes import transformers_class

VISION_LANGUAGE_PARTS = ("thinker_config", "vlm_config")
"""Fields of config.json in which models that also speak or act keep the part that sees."""

TEXT_PARTS = ("text_config", "llm_config", "language_config")
"""Fields of config.json that hold the language model's config; some files have its fields at the top."""

CHANNELS = ("image_mean", "image_std")
"""Settings of processors with a value for each channel."""

QKV = (".q_proj.", ".k_proj.", ".v_proj.")

Names = Sequence[str | tuple[str, str]]
"""Names of settings; a pair is a published name (`a.b` is b within a) and the presets' name for it."""


def vision_language_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json that has `vision_config`: all of it, or the one inside a larger model."""
    return next((config[name] for name in VISION_LANGUAGE_PARTS if isinstance(config.get(name), Mapping)), config)


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's fields in a config.json."""
    return next((config[name] for name in TEXT_PARTS if config.get(name)), config)


def setting_at(settings: Mapping[str, Any], path: str) -> Any:
    """The setting at `a.b`; None where there is none."""
    first, _, rest = path.partition(".")
    found = settings.get(first)
    return found if not rest else setting_at(found, rest) if isinstance(found, Mapping) else None


def named_pairs(names: Names) -> list[tuple[str, str]]:
    """Published name and the presets' name of each."""
    return [(name, name) if isinstance(name, str) else name for name in names]


def field_at(config: Mapping[str, Any], path: str) -> Any:
    """The field at `a.b` of a config.json; where it is left out, that of the class that transformers has for the
    `model_type` beside it, or None."""
    *parents, field = path.split(".")
    part = setting_at(config, ".".join(parents)) if parents else config
    if not isinstance(part, Mapping):
        return None
    model_type = part.get("model_type")
    if part.get(field) is not None or model_type is None:
        return part.get(field)
    from transformers import CONFIG_MAPPING

    return getattr(CONFIG_MAPPING[model_type], field, None) if model_type in CONFIG_MAPPING else None


def given(
    settings: Mapping[str, Any], names: Names, at: Callable[[Mapping[str, Any], str], Any] = setting_at
) -> dict[str, Any]:
    """What settings have `at` these names, nulls left out; of two names for one thing the later one counts."""
    found = ((ours, at(settings, theirs)) for theirs, ours in named_pairs(names))
    return {ours: value for ours, value in found if value is not None}


def pixel_range(settings: Mapping[str, Any]) -> dict[str, int]:
    """Pixel bounds of a processor as `shortest_edge` and `longest_edge`; a plain `min_pixels` or `max_pixels` wins."""
    size = settings.get("size") or {}
    edges = {"shortest_edge": "min_pixels", "longest_edge": "max_pixels"}
    found = {edge: settings.get(plain) or size.get(edge) or size.get(plain) for edge, plain in edges.items()}
    return {edge: int(bound) for edge, bound in found.items() if bound}


def modeling_class(name: str) -> type[Any]:
    """A class of transformers' by `folder:class`, the folder under `transformers.models`."""
    folder, class_name = name.split(":")
    return getattr(import_module(f"transformers.models.{folder}.modeling_{folder}"), class_name)


def halves_of_pairs(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a query or key projection (or its bias) reordered in each head: published rotaries that turn neighbouring
    pairs become transformers', which turn the two halves."""
    return tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2).contiguous()


def own_fields(config_class: type[Any]) -> list[str]:
    """Fields of a config class beside those of every config of transformers."""
    from transformers import PreTrainedConfig

    own, every = (
        {field for parent in known.__mro__ for field in vars(parent).get("__annotations__", ())}
        for known in (config_class, PreTrainedConfig)
    )
    return sorted(own - every)


class Tower(NamedTuple):
    """transformers' classes of a tower: folder under `transformers.models`, config class and model class."""

    folder: str
    config: str
    model: str

    def config_class(self) -> type[Any]:
        module = import_module(f"transformers.models.{self.folder}.configuration_{self.folder}")
        return getattr(module, self.config)

    def fields(self) -> list[str]:
        """Fields of the config class."""
        return own_fields(self.config_class())

    def known_names(self) -> list[str]:
        """Names in published configs that the config class takes: its fields, other names of them, older ones."""
        return [*self.config_class().attribute_map, "rope_theta", *self.fields()]

    def build(self, vision_config: Mapping[str, Any], dtype: torch.dtype) -> Any:
        """The tower with the parameters of its own constructor; buffers that it keeps in float32 stay so."""
        model_class: Any = modeling_class(f"{self.folder}:{self.model}")
        config = self.config_class()(**vision_config)
        return model_class._from_config(config, attn_implementation="sdpa", dtype=dtype)


class Family:
    """The declared side of an adapter; `VisionEncoder` adds what runs."""

    tower: ClassVar[Tower | None] = None
    """transformers' classes of the tower, where it is one of them as it is."""
    projector: ClassVar[str | None] = None
    """transformers' projector after the tower, `folder:class`."""
    projector_fields: ClassVar[Sequence[str]] = ()
    """Fields of a whole model's config that the projector reads, from `extra`."""
    tokens: ClassVar[Sequence[str]] = ()
    """Names of learned rows that are put between an item's rows after the graph."""
    vision_defaults: ClassVar[Mapping[str, Any]] = {}
    """Fields of `vision_config` that published files leave out."""
    vision_fields: ClassVar[Names] = ()
    """Fields of `vision_config` that count beside those of the tower's config class; all do where neither is given."""
    extra_fields: ClassVar[Names] = ()
    """Fields of config.json outside `vision_config` that the rule or the modules read."""
    fixed: ClassVar[Mapping[str, Any]] = {}
    """Fields of config.json (`a.b` is b within a) that all published models have so, and no other value is followed."""
    checkpoint_keys: ClassVar[Sequence[tuple[str, str]]] = ()
    """Published keys after an optional `model.` as regular expressions, each with the name in `modules`; the first
    match holds."""
    fused: ClassVar[Mapping[str, Sequence[str]]] = {}
    """Parts of names that stand for several tensors joined along the first dimension, with a part for each of them."""
    paired: ClassVar[Sequence[str]] = ()
    """Those of `fused` whose queries and keys are published for a rotary that turns neighbouring pairs."""
    image_processor: ClassVar[str | None] = None
    """transformers' image processor of the family, `module:class` under `transformers.models`; without torchvision."""
    video_processor: ClassVar[str | None] = None
    """transformers' video processor of the family."""
    whole_processor: ClassVar[str | None] = None
    """transformers' processor of the whole model, where its calls give videos a size whatever the files say."""
    processor_names: ClassVar[Sequence[str]] = ()
    """Further image and video processors of transformers whose settings mean the same as those of the family's own."""
    image_settings: ClassVar[Names] = CHANNELS
    """Settings of the image processor that the rule or `preprocess` read."""
    video_settings: ClassVar[Names] = ()
    """Settings of the video processor that the rule reads."""
    null_settings: ClassVar[Sequence[str]] = ()
    """Those of `video_settings` whose null is another rule, where the class has a value for what a file leaves out."""
    fixed_settings: ClassVar[Mapping[str, Any]] = {}
    """Settings of the image processor that all published models have so, and no other value is followed."""
    sized_by_pixels: ClassVar[bool] = False
    """The processors have a range of pixels, for images as `size` in the presets."""
    spellings: ClassVar[Mapping[str, str]] = {}
    """Arguments of the processor's call that are another name of a setting that the rule reads."""
    resample: ClassVar[int] = 3
    """PIL's number of the filter that `preprocess` resizes with, where transformers has no processor for it."""
    pixel_processor: ClassVar[str | None] = None
    """transformers' class that makes the pixels, where it reads no published file and so is not `image_processor`."""

    @classmethod
    def build_modules(
        cls, vision_config: Mapping[str, Any], extra: Mapping[str, Any], dtype: torch.dtype, device: torch.device
    ) -> nn.ModuleDict:
        """Modules with uninitialised or default weights, from `vision_config` of the preset or checkpoint and the facts
        outside it that they need; float32 buffers such as rotary frequencies stay float32 whatever the `dtype`."""
        with device:
            tower = cls.build_tower(vision_config, extra, dtype)
            following = cls.following_modules(tower.config, extra)
        # Tables that come from numpy are on the CPU until they are moved.
        following = {name: module.to(device, dtype) for name, module in following.items()}
        return nn.ModuleDict({"visual": tower, **following})

    @classmethod
    def build_tower(cls, vision_config: Mapping[str, Any], extra: Mapping[str, Any], dtype: torch.dtype) -> Any:
        """The tower, with its config as `config`."""
        assert cls.tower is not None
        return cls.tower.build(vision_config, dtype)

    @classmethod
    def following_modules(cls, config: Any, extra: Mapping[str, Any]) -> dict[str, nn.Module]:
        """What follows the tower of that config, by name; nothing, where the tower has its merger."""
        found: dict[str, nn.Module] = {}
        if cls.projector is not None:
            fields = {name: extra[name] for name in cls.projector_fields}
            found["projector"] = cls.build_projector(config, extra, **fields)
        if cls.tokens:
            width = extra["text_hidden_size"]
            found["tokens"] = nn.ParameterDict({name: torch.zeros(width) for name in cls.tokens})
        return found

    @classmethod
    def build_projector(cls, config: Any, extra: Mapping[str, Any], **fields: Any) -> nn.Module:
        """The projector from what it reads of a whole model's config: the tower's, the text's width, and `fields`."""
        assert cls.projector is not None
        text = SimpleNamespace(hidden_size=extra["text_hidden_size"])
        return modeling_class(cls.projector)(SimpleNamespace(vision_config=config, text_config=text, **fields))

    # -- published tensors -----------------------------------------------------------------------------------------

    @classmethod
    def map_checkpoint_key(cls, key: str) -> str | None:
        """Name in `modules` of a published checkpoint's tensor, or None where it is not the encoder's."""
        for pattern, target in cls.checkpoint_keys:
            name, count = re.subn(rf"^(?:model\.)?{pattern}", target, key)
            if count:
                return name
        return None

    @classmethod
    def owns_checkpoint_key(cls, key: str) -> bool:
        """True for the checkpoint's tensors that `convert_tensor` takes."""
        return cls.map_checkpoint_key(key) is not None

    @classmethod
    def convert_tensor(cls, key: str, tensor: torch.Tensor, modules: nn.ModuleDict) -> dict[str, torch.Tensor]:
        """Named tensors of `modules` that one checkpoint tensor holds."""
        name = cls.map_checkpoint_key(key)
        if name is None:
            return {}
        fused = next((part for part in cls.fused if part in name), None)
        if fused is None:
            return {name: tensor}
        pieces = list(tensor.chunk(len(cls.fused[fused])))
        if fused in cls.paired:
            tower: Any = modules["visual"]
            pieces[:2] = [halves_of_pairs(piece, tower.config.num_attention_heads) for piece in pieces[:2]]
        return {name.replace(fused, part): piece for part, piece in zip(cls.fused[fused], pieces, strict=True)}

    # -- published settings ----------------------------------------------------------------------------------------

    @classmethod
    def accepts_model_config(cls, config: Mapping[str, Any]) -> bool:
        """Whether a config.json of one of the row's architectures is this family's; for rows that share one."""
        return True

    @classmethod
    def read_model_config(cls, config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """`vision_config` and the facts outside it (`extra`) of a config.json.

        Raises:
            ModelError: A field that all published models have alike is different.
        """
        config = vision_language_part(config)
        for name, value in cls.fixed.items():
            if (found := field_at(config, name)) not in (None, value):
                raise ModelError(f"{name} is {found!r}; only {value!r}, the published models', is supported")
        width = given(text_part(config), [("hidden_size", "text_hidden_size")], field_at)
        names = (*cls.vision_fields, *(cls.tower.known_names() if cls.tower else ()))
        vision = given(config["vision_config"], names) if names else config["vision_config"]
        return {**cls.vision_defaults, **vision}, {**width, **given(config, cls.extra_fields, field_at)}

    @classmethod
    def image_processor_class(cls) -> type[Any] | None:
        """The class that `image_processor` names."""
        return transformers_class(cls.image_processor) if cls.image_processor else None

    @classmethod
    def video_processor_class(cls) -> type[Any] | None:
        """The class that `video_processor` names."""
        return transformers_class(cls.video_processor) if cls.video_processor else None

    @classmethod
    def read_processor_config(cls, processor: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of an image processor that the family's rule reads, in the presets' shape.

        Raises:
            ModelError: A setting that all published models have alike is different.
        """
        for name, value in cls.fixed_settings.items():
            if (found := processor.get(name)) not in (None, value):
                raise ModelError(f"its processor sets {name} to {found}; only {value} is followed here")
        size = pixel_range(processor) if cls.sized_by_pixels else None
        return {**given(processor, cls.image_settings), **({"size": size} if size else {})}

    @classmethod
    def read_video_processor_config(cls, processor: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of a video processor that the family's rule reads, in the presets' shape."""
        size = pixel_range(processor) if cls.sized_by_pixels else {}
        return {**given(processor, cls.video_settings), **size}

    @classmethod
    def head_width(cls, vision_config: Mapping[str, Any]) -> int:
        """Width of one attention head."""
        if vision_config.get("head_dim"):
            return int(vision_config["head_dim"])
        width = vision_config.get("embed_dim") or vision_config["hidden_size"]
        return int(width) // int(vision_config.get("num_heads") or vision_config["num_attention_heads"])

    @classmethod
    def head_count(cls, vision_config: Mapping[str, Any]) -> int | None:
        """Attention heads of a layer; None where the tower has several kinds."""
        return vision_config.get("num_heads") or vision_config.get("num_attention_heads")
