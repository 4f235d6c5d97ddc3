"""Which tensors of a checkpoint are read: quantised towers, copies, stray files, prefixes, damage."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from tests.unit.models.encoder_checks import CPU, debug_encoder, plain_backend, relative_error, stock_state
from vitgraph.cli import app
from vitgraph.errors import ModelError
from vitgraph.models.encoder import VisionEncoder
from vitgraph.models.loading import load_encoder
from vitgraph.models.registry import resolve_preset
from vitgraph.models.weights import encoder_tensors, wrapped_copies

Tensors = dict[str, torch.Tensor]
PRESET = "qwen3.5-debug"
PREFIX = "model.visual."


def tower() -> Tensors:
    """The debug tower's tensors under their published names."""
    return {
        name.replace("visual.", PREFIX, 1): value.detach().clone().contiguous()
        for name, value in stock_state(debug_encoder("qwen3_5")).items()
    }


def write(folder: Path, tensors: Mapping[str, torch.Tensor], file: str = "model.safetensors", **config: Any) -> Path:
    """A checkpoint folder of the debug model; `config` joins its config.json."""
    source = resolve_preset(PRESET)
    assert source is not None
    folder.mkdir(exist_ok=True)
    save_file({**tensors, "lm_head.weight": torch.ones(4, 4)}, folder / file)
    content = {"architectures": [source.architecture], "vision_config": dict(source.vision_config), **config}
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def load(folder: Path) -> VisionEncoder:
    source = resolve_preset(PRESET)
    assert source is not None
    return load_encoder(
        replace(source, weights=str(folder), name=folder.name), plain_backend(), device=CPU, dtype=torch.float32
    )


def matrices(tensors: Tensors) -> list[str]:
    return [key for key, value in tensors.items() if value.ndim == 2 and key.endswith("weight") and "pos" not in key]


def largest_error(folder: Path) -> float:
    """Largest relative distance of a loaded tensor from the debug tower's own."""
    wanted, found = stock_state(debug_encoder("qwen3_5")), stock_state(load(folder))
    return max(relative_error(found[name], wanted[name]) for name in wanted)


def test_a_good_folder_is_loaded_as_it_is(tmp_path: Path) -> None:
    assert largest_error(write(tmp_path / "good", tower())) == 0


def test_kernels_of_mlx_with_their_channels_last_load(tmp_path: Path) -> None:
    tensors = tower()
    key = PREFIX + "patch_embed.proj.weight"
    assert tensors[key].ndim == 5
    assert largest_error(write(tmp_path / "mlx", {**tensors, key: tensors[key].movedim(1, -1).contiguous()})) == 0


# -- quantised -----------------------------------------------------------------------------------------------------


def fp8_rows(value: torch.Tensor, ending: str = "_scale") -> Tensors:
    scale = value.abs().amax(1, keepdim=True) / 448
    return {"": (value / scale).to(torch.float8_e4m3fn), ending: scale}


def fp8_tensor(value: torch.Tensor) -> Tensors:
    scale = value.abs().max() / 448
    return {"": (value / scale).to(torch.float8_e4m3fn), "_scale": scale}


def fp8_blocks(value: torch.Tensor) -> Tensors:
    """Blocks of 32 x 32, the last ones cut."""
    rows, columns = (-(-size // 32) for size in value.shape)
    scale = torch.rand(rows, columns) * 0.01 + 0.01
    spread = scale.repeat_interleave(32, 0)[: value.shape[0]].repeat_interleave(32, 1)[:, : value.shape[1]]
    return {"": (value / spread).to(torch.float8_e4m3fn), "_scale_inv": scale}


def int8_rows(value: torch.Tensor) -> Tensors:
    scale = value.abs().amax(1) / 127
    return {"": (value / scale[:, None]).round().to(torch.int8), "_scale": scale}


@pytest.mark.parametrize("store", [fp8_rows, fp8_tensor, fp8_blocks, int8_rows])
def test_simple_scales_are_applied(store: Callable[[torch.Tensor], Tensors], tmp_path: Path) -> None:
    tensors = tower()
    for key in matrices(tensors):
        tensors.update({key + ending: part for ending, part in store(tensors.pop(key)).items()})
        tensors[key.replace("weight", "input_scale")] = torch.ones(())
    assert 0 < largest_error(write(tmp_path / "stored", tensors)) < 0.05


QUANTISED: dict[str, Callable[[torch.Tensor], Tensors]] = {
    "FP8 without a scale": lambda v: {"weight": v.to(torch.float8_e4m3fn)},
    "FP8 of an odd scale": lambda v: {"weight": v.to(torch.float8_e5m2), "weight_scale": torch.ones(3)},
    "VPTQ": lambda v: {"indices": torch.zeros(3, 4, dtype=torch.int32), "centroids.weight": torch.ones(1, 16)},
    "MXFP8": lambda v: {
        "weight": v.to(torch.float8_e4m3fn),
        "weight_scale": torch.ones(v.shape[0], v.shape[1] // 32, dtype=torch.uint8),
    },
    "INT8 without a scale": lambda v: {"weight": v.to(torch.int8)},
    "INT8 with zero points": lambda v: {
        "weight": v.to(torch.int8),
        "weight_scale": torch.ones(v.shape[0], 1),
        "weight_zero_point": torch.zeros(v.shape[0], 1),
    },
    "bitsandbytes INT8": lambda v: {"weight": v.to(torch.int8), "SCB": torch.ones(v.shape[0])},
    "bitsandbytes NF4": lambda v: {
        "weight": torch.zeros(v.numel() // 2, 1, dtype=torch.uint8),
        "weight.absmax": torch.ones(v.numel() // 64, dtype=torch.uint8),
        "weight.quant_map": torch.ones(16),
        "weight.quant_state.bitsandbytes__nf4": torch.zeros(8, dtype=torch.uint8),
    },
    "AWQ": lambda v: {
        "qweight": torch.zeros(v.shape[1], v.shape[0] // 8, dtype=torch.int32),
        "qzeros": torch.zeros(1, v.shape[0] // 8, dtype=torch.int32),
        "scales": torch.ones(1, v.shape[0], dtype=torch.float16),
    },
    "compressed-tensors W4A16": lambda v: {
        "weight_packed": torch.zeros(v.shape[0], v.shape[1] // 8, dtype=torch.int32),
        "weight_scale": torch.ones(v.shape[0], 1),
        "weight_shape": torch.tensor(v.shape),
    },
    "NVFP4": lambda v: {
        "weight": torch.zeros(v.shape[0], v.shape[1] // 2, dtype=torch.uint8),
        "weight_scale": torch.ones(v.shape[0], v.shape[1] // 16).to(torch.float8_e4m3fn),
        "weight_scale_2": torch.ones(()),
    },
    "MXFP4": lambda v: {
        "weight_blocks": torch.zeros(v.shape[0], v.shape[1] // 32, 16, dtype=torch.uint8),
        "weight_scales": torch.zeros(v.shape[0], v.shape[1] // 32, dtype=torch.uint8),
    },
    "a float beside a scale": lambda v: {"weight": v, "weight_scale": torch.ones(v.shape[0], 1)},
}


@pytest.mark.parametrize("kind", QUANTISED)
def test_codes_are_refused_as_quantised(kind: str, tmp_path: Path) -> None:
    tensors = tower()
    for key in matrices(tensors)[:2]:
        base = key.removesuffix("weight")
        tensors.update({base + name: part for name, part in QUANTISED[kind](tensors.pop(key)).items()})
    folder = write(tmp_path / "stored", tensors, quantization_config={"quant_method": "made-up"})
    with pytest.raises(ModelError, match=r"stored quantised \(quant_method made-up\).*--load-format dummy"):
        load(folder)


def test_a_quantised_language_model_leaves_the_tower_alone(tmp_path: Path) -> None:
    layers = {
        "model.language_model.layers.0.mlp.up_proj.qweight": torch.zeros(4, 4, dtype=torch.int32),
        "model.language_model.layers.0.mlp.up_proj.scales": torch.ones(4),
    }
    assert largest_error(write(tmp_path / "mixed", {**tower(), **layers})) == 0


# -- which tensor, which file --------------------------------------------------------------------------------------


def renamed(prefix: str, factor: float = 1.0) -> Tensors:
    return {key.replace(PREFIX, prefix, 1): value * factor for key, value in tower().items()}


def test_two_tensors_for_one_parameter_are_refused_unless_equal(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model\.visual\.\S+ and visual\.\S+ both are"):
        load(write(tmp_path / "stale", {**tower(), **renamed("visual.", 0.5)}))
    assert largest_error(write(tmp_path / "equal", {**tower(), **renamed("visual.")})) == 0


@pytest.mark.parametrize(
    "stray", ["other.safetensors", "model-00001-of-00002.safetensors", "adapter_model.safetensors"]
)
def test_files_beside_the_model_are_no_part_of_it(stray: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "stray", tower())
    save_file(renamed(PREFIX, 0.5), folder / f"{stray}.safetensors")
    assert largest_error(folder) == 0


@pytest.mark.parametrize("files", [("model-00001-of-00001.safetensors",), ("a.safetensors", "b.safetensors")])
def test_shards_without_an_index_are_refused(files: tuple[str, ...], tmp_path: Path) -> None:
    for file in files:
        folder = write(tmp_path / "shards", tower(), file)
    with pytest.raises(ModelError, match=r"transformers reads model\.safetensors, or the shards that"):
        load(folder)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("gone.safetensors", r"lacks gone\.safetensors"),
        ("../good/model.safetensors", r"names '\.\./good/model\.safetensors', which is no safetensors file inside"),
        ("/tmp/model.safetensors", "which is no safetensors file inside"),
        ("model.bin", r"'model\.bin', which is no safetensors file"),
    ],
)
def test_an_index_names_files_of_the_folder(entry: str, words: str, tmp_path: Path) -> None:
    write(tmp_path / "good", tower())
    folder = write(tmp_path / "indexed", tower(), "part.safetensors")
    weight_map = dict.fromkeys(tower(), entry)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelError, match=words):
        load(folder)


def test_an_index_that_promises_too_much_or_two_shards_with_one_tensor_are_refused(tmp_path: Path) -> None:
    tensors = tower()
    first = next(iter(tensors))
    folder = write(tmp_path / "indexed", tensors, "one.safetensors")
    save_file({first: tensors[first] * 2}, folder / "two.safetensors")
    index = folder / "model.safetensors.index.json"
    weight_map = dict.fromkeys([*tensors, PREFIX + "blocks.9.norm1.bias"], "one.safetensors")
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelError, match=r"lacks 1 tensors that the index promises: model\.visual\.blocks\.9"):
        load(folder)
    index.write_text(
        json.dumps({"weight_map": {**dict.fromkeys(tensors, "one.safetensors"), first: "two.safetensors"}})
    )
    with pytest.raises(ModelError, match="two files hold the tensor"):
        load(folder)
    index.write_text("[]")
    with pytest.raises(ModelError, match="holds a JSON list, not an object"):
        load(folder)


def test_tensors_of_the_tower_that_are_not_read_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    block = {key: value for key, value in tower().items() if ".blocks.0." in key}
    deeper = {key.replace("blocks.0.", "blocks.99."): value for key, value in block.items()}
    with pytest.raises(ModelError, match=rf"{len(block)} tensors of the tower were not read \(model\.visual\.blocks"):
        load(write(tmp_path / "deeper", {**tower(), **deeper}))
    load(write(tmp_path / "more", {**tower(), PREFIX + "head.bias": torch.ones(3)}))
    assert "1 tensors of the vision encoder were not read: model.visual.head.bias" in caplog.text
    missing = tower()
    del missing[PREFIX + "blocks.0.norm1.bias"]
    with pytest.raises(ModelError, match=r"lacks 1 tensors of the vision encoder: visual\.blocks\.0\.norm1\.bias"):
        load(write(tmp_path / "missing", missing))


@pytest.mark.parametrize(
    "prefix",
    [
        "visual.",
        "module.model.visual.",
        "base_model.model.model.visual.",
        "model.language_model.visual.",
        "thinker.visual.",
        "_orig_mod.model.visual.",
    ],
)
def test_wrapped_prefixes_load(prefix: str, tmp_path: Path) -> None:
    assert largest_error(write(tmp_path / "wrapped", renamed(prefix))) == 0


def test_a_wrapper_before_names_of_which_some_begin_with_model_is_one_copy() -> None:
    """Kimi-K2.5 as transformers saves it: of its projector, one part keeps the prefix that the others lose."""
    owns = resolve_preset("kimi-k2.5-debug").row.encoder_class().owns_checkpoint_key  # type: ignore[union-attr]
    names = [
        "vision_tower.encoder.final_layernorm.bias",
        "mm_projector.proj.0.bias",
        "model.mm_projector.pre_norm.bias",
    ]
    (copy,) = wrapped_copies([f"base_model.model.{name}" for name in names], owns).values()
    assert len(copy) == 3
    twice = [
        "a.model.vision_tower.encoder.final_layernorm.bias",
        "a.model.model.vision_tower.encoder.final_layernorm.bias",
    ]
    assert len(wrapped_copies(twice, owns)) == 2


@pytest.mark.parametrize("prefix", ["vision_tower.vision_model.", "model.visual._orig_mod."])
def test_prefixes_that_a_known_one_begins_are_named_with_their_count(prefix: str, tmp_path: Path) -> None:
    tensors = renamed(prefix)
    with pytest.raises(ModelError, match=rf"{len(tensors)} under '{prefix}'"):
        load(write(tmp_path / "renamed", tensors))


def test_other_prefixes_are_named_with_their_count(tmp_path: Path) -> None:
    count = len(tower())
    other, names = (
        write(tmp_path / "other", renamed("encoder.vit.")),
        [key.replace(PREFIX, "visual.") for key in tower()],
    )
    with pytest.raises(ModelError, match=rf"{count} under 'encoder\.vit\.'"):
        list(encoder_tensors(str(other), lambda key: key.startswith("visual."), names=names))
    with pytest.raises(ModelError, match=rf"{count} under 'a\.', {count} under 'b\.'"):
        load(write(tmp_path / "twice", {**renamed("a." + PREFIX), **renamed("b." + PREFIX, 2.0)}))
    with pytest.raises(ModelError, match=r"it has 1 others: lm_head\.weight.*language-model-only"):
        load(write(tmp_path / "none", {}))
    adapter = {"base_model.model." + PREFIX + "blocks.0.attn.qkv.lora_A.weight": torch.ones(2, 2)}
    with pytest.raises(ModelError, match=r"lora_A\.weight is part of an adapter"):
        load(write(tmp_path / "adapter", adapter))


@pytest.mark.parametrize(("value", "word"), [(float("nan"), "NaN"), (float("inf"), "infinity")])
def test_weights_that_are_not_finite_are_named(value: float, word: str, tmp_path: Path) -> None:
    tensors = tower()
    tensors[PREFIX + "merger.norm.weight"][0] = value
    with pytest.raises(ModelError, match=rf"model\.visual\.merger\.norm\.weight holds {word}"):
        load(write(tmp_path / "damaged", tensors))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "0 bytes long"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer"),
        (b"\xff" * 64, "cannot be read as safetensors"),
    ],
)
def test_damaged_files_are_named(content: bytes, words: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "damaged", tower())
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=words):
        load(folder)


@pytest.mark.slow
def test_verify_tells_a_good_a_quantised_and_a_damaged_folder_apart(tmp_path: Path) -> None:
    def verify(folder: Path) -> Any:
        processor = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 16, "merge_size": 2}
        processor["size"] = {"shortest_edge": 4096, "longest_edge": 65536}  # type: ignore[assignment]
        (folder / "preprocessor_config.json").write_text(json.dumps(processor))
        arguments = ["verify", "--model", str(folder), "--load-format", "auto", "--device", "cpu", "--calls", "5"]
        result = CliRunner().invoke(app, [*arguments, "--quiet", "--json"])
        (row,) = json.loads(result.stdout)["result"]["models"]
        return result.exit_code == 0, row["status"], row["error"]

    text: dict[str, Any] = {"text_config": {"hidden_size": 64}}
    assert verify(write(tmp_path / "good", tower(), **text)) == (True, "ok", None)
    codes = {key: value.to(torch.int8) if key in matrices(tower()) else value for key, value in tower().items()}
    passed, status, error = verify(write(tmp_path / "quantised", codes, **text))
    assert (passed, status, "stored quantised" in error) == (False, "error", True), error
    broken = write(tmp_path / "broken", tower(), **text)
    path = broken / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    passed, status, error = verify(broken)
    assert (passed, status, "cannot be read as safetensors" in error) == (False, "error", True), error
