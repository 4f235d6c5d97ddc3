"""`vitgraph verify --load-format auto` on a checkpoint folder that is good, damaged, or stored quantised."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from tests.unit.models.encoder_checks import debug_encoder, published, stock_state
from vitgraph.cli import app

CODES = torch.float8_e4m3fn


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A good checkpoint of the debug-size Qwen3-VL tower."""
    encoder = debug_encoder("qwen3_vl")
    tensors = published(stock_state(encoder), lambda key: f"model.{key}")
    config = {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "vision_config": encoder.rule.vision_config,
        "text_config": {"hidden_size": 64},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def quantise(folder: Path, is_packed: bool) -> None:
    """Stores the blocks' matrices as FP8 codes with a scale each row, or as packed integers."""
    encoder = debug_encoder("qwen3_vl")
    tensors = published(stock_state(encoder), lambda key: f"model.{key}")
    for key, value in list(tensors.items()):
        if ".blocks." not in key or value.ndim != 2:
            continue
        scale = value.abs().amax(1, keepdim=True) / 448
        tensors[f"{key}_scale"] = scale
        if is_packed:
            del tensors[key]
            tensors[f"{key}_packed"] = torch.zeros(len(value), value.shape[1] // 8, dtype=torch.int32)
        else:
            tensors[key] = (value / scale).to(CODES)
    save_file(tensors, folder / "model.safetensors")


def verify(folder: Path) -> tuple[int, str, str]:
    """Exit status, the model's status in the record, and what was said."""
    arguments = ["verify", "--model", str(folder), "--load-format", "auto", "--device", "cpu", "--calls", "5"]
    result = CliRunner().invoke(app, [*arguments, "--json"])
    models = json.loads(result.stdout)["result"]["models"] if result.stdout.strip() else [{"status": "none"}]
    return result.exit_code, models[0]["status"], f"{result.stderr} {models[0]}"


@pytest.mark.slow
def test_a_good_folder_is_verified(folder: Path) -> None:
    assert verify(folder)[:2] == (0, "ok")


@pytest.mark.parametrize("left", [0.5, 0.999])
def test_a_damaged_folder_is_not_verified(folder: Path, left: float) -> None:
    path = folder / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: int(left * len(content))])
    code, status, said = verify(folder)
    assert code != 0 and status != "ok"
    assert "cannot be read as safetensors" in said and "copy it again" in said


def test_a_folder_with_a_tensor_that_is_not_finite_is_not_verified(folder: Path) -> None:
    tensors = published(stock_state(debug_encoder("qwen3_vl")), lambda key: f"model.{key}")
    tensors["model.visual.blocks.1.mlp.linear_fc1.weight"][3, 4] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    code, status, said = verify(folder)
    assert code != 0 and status != "ok" and "holds NaN: the checkpoint is damaged" in said


@pytest.mark.slow
def test_a_quantised_folder_is_dequantised_where_that_is_certain(folder: Path) -> None:
    quantise(folder, is_packed=False)
    assert verify(folder)[:2] == (0, "ok")


def test_another_quantised_folder_is_not_verified(folder: Path) -> None:
    quantise(folder, is_packed=True)
    code, status, said = verify(folder)
    assert code != 0 and status != "ok"
    assert "its vision encoder is stored quantised" in said and "--load-format dummy" in said
