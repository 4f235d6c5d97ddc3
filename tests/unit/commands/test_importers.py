"""Command lines of vLLM and SGLang become vitgraph's options; what is left out is named."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest
from typer.testing import CliRunner

from vitgraph.cli import app
from vitgraph.commands.import_settings import import_settings
from vitgraph.errors import UsageError

UPSTREAM = {"--packing": "greedy-defer", "--single-slot-tier": ""}


def options_of(line: str) -> dict[str, str]:
    return import_settings(line).options


def test_a_serve_line_gives_its_encoder_settings() -> None:
    found = import_settings(
        "vllm serve Qwen/Qwen3-VL-32B --max-model-len 32768 --port 8000 \\\n --compilation-config "
        '\'{"cudagraph_mm_encoder": true, "encoder_cudagraph_token_budgets": [2048, 4096], '
        '"encoder_cudagraph_max_vision_items_per_batch": 8, "encoder_cudagraph_max_frames_per_batch": 64, "level": 3}\''
    )
    assert found.server == "vLLM"
    assert found.options == {
        "--model": "Qwen/Qwen3-VL-32B",
        "--max-model-len": "32768",
        "--token-budgets": "2048,4096",
        "--max-vision-items-per-batch": "8",
        "--max-frames-per-batch": "64",
        **UPSTREAM,
    }
    assert found.left_out == ["--port 8000"]
    assert len(found.notes) == 1
    assert "--packing greedy-defer" in found.notes[0]


def test_the_json_alone_is_enough_and_a_model_is_asked_for() -> None:
    found = import_settings(' {"cudagraph_mm_encoder": true, "encoder_cudagraph_token_budgets": [64]} ')
    assert found.options == {"--token-budgets": "64", **UPSTREAM}
    assert "no model is named in the line; add --model" in found.notes


@pytest.mark.parametrize(
    "spelling",
    [
        "--compilation-config.encoder_cudagraph_token_budgets '[64, 128]'",
        "--compilation_config.encoder_cudagraph_token_budgets=[64,128]",
        "-cc.encoder_cudagraph_token_budgets='[64, 128]'",
        "-O.encoder_cudagraph_token_budgets='[64, 128]'",
        "-O '{\"encoder_cudagraph_token_budgets\": [64, 128]}'",
        "-O3 -cc '{\"encoder_cudagraph_token_budgets\": [64, 128]}' -O 3",
    ],
)
def test_vllms_spellings_of_the_config_are_read(spelling: str) -> None:
    assert options_of(f"vllm serve m/m {spelling}")["--token-budgets"] == "64,128"


def test_the_dotted_spelling_wins_and_takes_pythons_true() -> None:
    found = import_settings(
        "vllm serve m/m --compilation-config '{\"cudagraph_mm_encoder\": false}' -cc.cudagraph_mm_encoder=True"
    )
    assert not any("without graphs" in note for note in found.notes)


@pytest.mark.parametrize("config", ["", "--compilation-config '{\"cudagraph_mm_encoder\": false}'"])
def test_a_line_without_encoder_graphs_says_so(config: str) -> None:
    notes = import_settings(f"vllm serve m/m {config}").notes
    assert any("cudagraph_mm_encoder is not true" in note for note in notes)


@pytest.mark.parametrize(
    "line",
    [
        "vllm serve m/m --port 1",
        "vllm serve --max-model-len 4096 m/m",
        "/opt/bin/vllm serve --model=m/m",
        "CUDA_VISIBLE_DEVICES=0 python -m vllm.entrypoints.openai.api_server --model m/m",
        "docker run --gpus all vllm/vllm-openai:latest --model m/m",
        "python3 -m sglang.launch_server --model-path m/m",
        "nohup vllm serve --enforce-eager m/m > log 2>&1 &",
        "# start\n$ cd /opt && conda activate vllm; uv run --with vllm vllm serve m/m | tee log; sleep 9",
        "docker run -it -m 64g --name vllm -v ~/.cache/vllm:/root/.cache/vllm --ipc=host vllm/vllm-openai:v0.11.0 m/m",
        "docker exec vllm bash -c 'vllm serve m/m'",
        "tmux new -d -s vllm 'python -m vllm.entrypoints.openai.api_server --model m/m'",
        "kubectl exec -it pod -- env X=1 vllm serve m/m",
        "singularity exec --nv vllm.sif vllm serve m/m --compilation-config '{\n\"level\": 3\n}'",
        "[Service]\nExecStart=/usr/bin/vllm serve m/m \\\r\n --port 1\nRestart=always\n",
        'NAME=m/m\nvllm serve "$NAME"\n --port 1 # why',
        "python3 /opt/vllm/entrypoints/openai/api_server.py --model m/m",
    ],
)
def test_the_model_is_found_wherever_it_stands(line: str) -> None:
    assert options_of(line)["--model"] == "m/m"


def test_what_the_line_leaves_to_others_is_said() -> None:
    found = import_settings("vllm serve m/m n/n --config x.yaml —dtype half --media-io-kwargs '{}' --port 1")
    unread = [note.split(" is not read")[0] for note in found.notes if "may change what the encoder gets" in note]
    assert unread == ["--config", "--media-io-kwargs"]
    assert {"n/n", "—dtype", "half", "--port 1"} <= {*found.left_out}


def test_the_dotted_spelling_of_every_json_option_is_read() -> None:
    found = options_of("vllm serve m/m --limit-mm-per-prompt.video 0 --mm-processor-kwargs.max_pixels=500000")
    assert found["--mm-processor-kwargs"] == '{"max_pixels": 500000}'
    assert found["--max-frames-per-batch"] == "0"


@pytest.mark.parametrize(
    ("value", "tokens"),
    [("32768", "32768"), ("32k", "32000"), ("32K", "32768"), ("1.5k", "1500"), ("2M", "2097152")],
)
def test_human_token_counts(value: str, tokens: str) -> None:
    assert options_of(f"vllm serve m/m --max-model-len {value}")["--max-model-len"] == tokens


@pytest.mark.parametrize("value", ["auto", "-1"])
def test_a_length_that_the_server_chooses_is_left_out(value: str) -> None:
    found = import_settings(f"vllm serve m/m --max-model-len {value}")
    assert "--max-model-len" not in found.options
    assert found.left_out == [f"--max-model-len {value}"]


def test_videos_that_the_server_takes_are_kept() -> None:
    """They decide how many frames graphs hold, where the line does not say."""
    assert (
        options_of("vllm serve m/m --limit-mm-per-prompt '{\"video\": 2}'")["--limit-mm-per-prompt"] == '{"video": 2}'
    )


@pytest.mark.parametrize(
    ("limit", "frames"),
    [
        ('{"image": 4, "video": 0}', "0"),
        ("image=4,video=0", "0"),
        ('{"video": {"count": 0}}', "0"),
        ('{"image": 4}', None),
        ('{"video": 1}', None),
    ],
)
def test_a_limit_of_no_videos_means_image_only_graphs(limit: str, frames: str | None) -> None:
    found = options_of(f"vllm serve m/m --limit-mm-per-prompt {shlex.quote(limit)}")
    assert found.get("--max-frames-per-batch") == frames


def test_options_of_the_encoder_and_of_the_benchmark_are_kept() -> None:
    found = options_of(
        "vllm bench mm-processor --model m/m --dtype half --load-format dummy --revision abc --seed 42 "
        "--mm-encoder-attn-backend flashinfer --mm-processor-kwargs '{\"max_pixels\": 4}' --video-pruning-rate 0.5 "
        "--dataset-name random-mm --random-mm-bucket-config '{\"(336,336,1)\": 1.0}' --num-prompts 10 --num-warmups 2"
    )
    assert found == {
        "--model": "m/m",
        "--dtype": "float16",
        "--load-format": "dummy",
        "--mm-encoder-attn-backend": "FLASHINFER",
        "--dataset-name": "random-mm",
        "--num-prompts": "10",
        "--num-warmups": "2",
        "--random-mm-bucket-config": '{"(336,336,1)": 1.0}',
        "--mm-processor-kwargs": '{"max_pixels": 4}',
        "--video-pruning-rate": "0.5",
        "--revision": "abc",
        "--seed": "42",
        **UPSTREAM,
    }


@pytest.mark.parametrize(
    "line",
    [
        "vllm serve m/m --tensor-parallel-size=4 --mm-encoder-tp-mode data",
        "vllm serve m/m -tp 4 --mm-encoder-tp-mode=data",
        "vllm bench mm-processor --model m/m --mm_encoder_tp_mode data --tensor_parallel_size 4",
        "python -m sglang.launch_server --model-path m/m --tp 4 --mm-enable-dp-encoder",
        "python -m sglang.launch_server --model-path m/m --tp-size 4 --mm-enable-dp-encoder",
        "python -m sglang.launch_server --model-path m/m --tensor-parallel-size 4 --mm-enable-dp-encoder",
    ],
)
def test_gpus_that_share_the_items_are_carried_through(line: str) -> None:
    found = import_settings(line)
    assert found.options["--mm-encoder-tp-mode"] == "data"
    assert found.options["--tensor-parallel-size"] == "4"
    assert "--mm-encoder-tp-mode data --tensor-parallel-size 4" in found.command()
    assert not any("GPU" in note for note in found.notes)
    assert not any("tp" in option or "tensor" in option for option in found.left_out)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("vllm serve m/m --tensor-parallel-size 4", "--mm-encoder-tp-mode weights"),
        ("vllm serve m/m --tensor-parallel-size 4 --mm-encoder-tp-mode weights", "--mm-encoder-tp-mode weights"),
        ("sglang serve --model-path m/m --tp 4", "no --mm-enable-dp-encoder"),
    ],
)
def test_gpus_that_split_the_encoder_are_named_as_not_measured(line: str, why: str) -> None:
    found = import_settings(line)
    assert not {"--mm-encoder-tp-mode", "--tensor-parallel-size"} & set(found.options)
    (note,) = (note for note in found.notes if "GPUs" in note)
    assert f"over 4 GPUs ({why}), which is not measured here" in note
    assert "add --mm-encoder-tp-mode data --tensor-parallel-size 4" in note


def test_one_gpu_needs_no_word() -> None:
    found = import_settings("vllm serve m/m --tensor-parallel-size 1 --mm-encoder-tp-mode data")
    assert "--tensor-parallel-size" not in found.options
    assert not any("GPU" in note for note in found.notes)


def test_an_imported_command_of_several_gpus_is_one_that_bench_takes() -> None:
    from typer.testing import CliRunner

    from vitgraph.cli import app

    found = import_settings(
        "vllm serve qwen3-vl-debug --tensor-parallel-size 2 --mm-encoder-tp-mode data --load-format dummy "
        """--compilation-config '{"cudagraph_mm_encoder": true, "encoder_cudagraph_token_budgets": [4096]}'"""
    )
    here = ["--device", "cpu", "--num-prompts", "4", "--dry-run"]
    result = CliRunner().invoke(app, ["bench", *found.arguments(), *here])
    assert result.exit_code == 0, result.stderr
    assert "2 ranks share the items of each call" in " ".join(result.stdout.split())


@pytest.mark.parametrize("budgets", ["1024 2048 4096", "1024,2048,4096", "'[1024, 2048, 4096]'"])
def test_sglangs_budgets_count_the_same_tokens(budgets: str) -> None:
    found = import_settings(
        "python -m sglang.launch_server --model-path m/m --enable-vit-cuda-graph "
        f"--vit-cuda-graph-token-budgets {budgets} --vit-cuda-graph-max-batch-size 16 --context-length 8192 --tp 2"
    )
    assert found.server == "SGLang"
    assert found.options == {
        "--model": "m/m",
        "--max-model-len": "8192",
        "--token-budgets": "1024,2048,4096",
        "--max-vision-items-per-batch": "16",
    }
    assert any("splits the encoder's weights over 2 GPUs" in note for note in found.notes)
    assert not any("without graphs" in note for note in found.notes)


@pytest.mark.parametrize(
    ("backend", "expected"),
    [
        ("sdpa", {"--mm-encoder-attn-backend": "TORCH_SDPA"}),
        ("fa3", {"--mm-encoder-attn-backend": "FLASH_ATTN", "--flash-attn-version": "3"}),
        ("triton_attn", {"--mm-encoder-attn-backend": "TRITON_ATTN"}),
        ("ascend_attn", {}),
    ],
)
def test_sglangs_backends(backend: str, expected: dict[str, str]) -> None:
    found = import_settings(f"sglang serve --model-path m/m --mm-attention-backend {backend}")
    assert found.options == {"--model": "m/m", **expected}
    assert any(f"{backend} has no counterpart" in note for note in found.notes) == (not expected)


@pytest.mark.parametrize(
    ("prefix", "is_enabled"),
    [("SGLANG_VIT_ENABLE_CUDA_GRAPH=1", True), ("SGLANG_VIT_ENABLE_CUDA_GRAPH=0", False), ("", False)],
)
def test_sglangs_variable_enables_graphs_of_exact_lengths(prefix: str, is_enabled: bool) -> None:
    notes = import_settings(f"{prefix} python -m sglang.launch_server --model-path m/m").notes
    assert any("without graphs" in note for note in notes) != is_enabled
    assert any("--packing exact" in note for note in notes)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", "no command of vLLM or SGLang"),
        ("ls -l", "no command of vLLM or SGLang.*'ls -l'"),
        ("vllm serve 'm", "No closing quotation"),
        ("vllm serve m --compilation-config '{'", "not valid JSON"),
        ("vllm serve m --compilation-config '[1]'", "takes a JSON object"),
        ('{"encoder_cudagraph_token_budget": [1]}', "unknown field 'encoder_cudagraph_token_budget'"),
        ('{"encoder_cudagraph_token_budgets": 64}', "must be of type list"),
        ("vllm serve m --max-model-len lots", "--max-model-len is 'lots'; it must be a number of tokens"),
        ("vllm serve m --max-model-len --port 1", "--max-model-len has no value"),
        ("vllm serve m -cc.cudagraph_mm_encoder", "has no value"),
        ("sglang serve --vit-cuda-graph-token-budgets 64 x", "'64 x' in the line"),
        ("sglang serve --vit-cuda-graph-max-batch-size 0", "'0' in the line"),
        ("vllm serve ${MODEL:-m/m}", "the model is .*write the value itself"),
        ("vllm serve m/m --max-model-len $LENGTH", "--max-model-len is .*write the value itself"),
        ("vllm serve m/m\nvllm serve n/n", "has 2 commands of servers"),
        ("# mine\nservices:\n  vllm:\n    command: --model m/m", "the text is YAML"),
        ("- --model\n- m/m", "the text is YAML"),
    ],
)
def test_lines_that_cannot_be_read(line: str, expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        import_settings(line)


def run(*arguments: str, text: str | None = None) -> Any:
    return CliRunner().invoke(app, ["import", *arguments], input=text)


def test_the_command_alone_goes_to_stdout_and_runs() -> None:
    line = (
        "vllm serve Qwen/Qwen3-VL-32B-Instruct --port 1 --mm-processor-kwargs '{\"max_pixels\": 500000}' "
        '--compilation-config \'{"cudagraph_mm_encoder": true, "encoder_cudagraph_token_budgets": [256, 512]}\''
    )
    result = run(line)
    assert result.exit_code == 0
    assert "left out: --port 1" in result.stderr
    words = shlex.split(result.stdout)
    assert words[:2] == ["vitgraph", "bench"]
    plan = CliRunner().invoke(app, [*words[1:], "--num-prompts", "20", "--load-format", "dummy", "--dry-run", "--json"])
    assert plan.exit_code == 0, plan.stderr
    resolved = json.loads(plan.stdout)
    assert resolved["resolved"]["token_budgets"]["default"] == [256, 512]
    assert resolved["settings"]["graph"]["packing"] == "greedy-defer"
    assert resolved["settings"]["model"]["mm_processor_kwargs"] == {"max_pixels": 500000}


def test_a_line_on_stdin_gives_json() -> None:
    result = run("-", "--json", text="vllm serve m/m\n")
    assert json.loads(result.stdout)["options"]["--model"] == "m/m"


def test_an_unreadable_line_ends_with_2() -> None:
    result = run("nothing known")
    assert result.exit_code == 2
    assert "no command of vLLM or SGLang" in result.stderr
