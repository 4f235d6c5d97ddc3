"""How a launched run is judged by the way its ranks ended, and what a start is refused for."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.launcher import api

from vitgraph import __main__ as program
from vitgraph.errors import UsageError
from vitgraph.ranks import launch
from vitgraph.ranks.launch import RanksEnded, check_ranks, is_follower, judge_failures


def failure(tmp_path: Path, rank: int, exit_code: int, said: str | None = None, when: int = 0) -> ProcessFailure:
    path = tmp_path / f"error-{rank}.json"
    if said is not None:
        extra = {"py_callstack": "", "timestamp": str(when)}
        path.write_text(json.dumps({"message": {"message": said, "extraInfo": extra}}))
    return ProcessFailure(rank, 1000 + rank, exit_code, str(path))


@pytest.mark.parametrize(
    ("ended", "expected"),
    [
        # Rank 0 has told everything.
        ({0: (4, "IncorrectOutputError: item 3"), 1: (4, None)}, RanksEnded(4)),
        ({0: (3, None)}, RanksEnded(3)),
        # It has told that rank 2 does not answer; the launcher kills what hangs, too.
        ({0: (1, None), 2: (-signal.SIGKILL, None)}, RanksEnded(1)),
        # It cannot know of other signals.
        ({0: (1, None), 2: (-signal.SIGSEGV, None)}, RanksEnded(1, "ended by a signal: rank 2 by SIGSEGV")),
        (
            {0: (-signal.SIGSEGV, None), 1: (1, "RankFailedError: rank 0")},
            RanksEnded(1, "ended by a signal: rank 0 by SIGSEGV; what was measured is in the output folder"),
        ),
        # It was ended by the launcher before it could say anything.
        ({0: (-signal.SIGTERM, None), 1: (2, "UsageError: no")}, RanksEnded(2, "rank 1: UsageError: no")),
        ({0: (130, None), 1: (2, "UsageError: no")}, RanksEnded(2, "rank 1: UsageError: no")),
        # It was waiting where no signal is heard.
        ({0: (-signal.SIGKILL, None), 1: (1, "OSError: no")}, RanksEnded(1, "rank 1: OSError: no")),
        # The user stopped it.
        ({0: (130, None), 1: (130, None)}, RanksEnded(130)),
        ({2: (7, None)}, RanksEnded(1, "rank 2 ended with exit code 7")),
    ],
)
def test_what_the_launcher_says(ended: dict[int, tuple[int, str | None]], expected: RanksEnded, tmp_path: Path) -> None:
    failures = {rank: failure(tmp_path, rank, code, said) for rank, (code, said) in ended.items()}
    assert judge_failures(failures) == expected


def test_the_first_word_counts(tmp_path: Path) -> None:
    failures = {
        1: failure(tmp_path, 1, 1, "OSError: second", when=200),
        2: failure(tmp_path, 2, 1, "MemoryError: first", when=100),
    }
    assert judge_failures(failures).message == "rank 2: MemoryError: first"


def test_torchruns_processes_must_be_those_of_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "29501"}.items():
        monkeypatch.setenv(name, value)
    check_ranks(4)
    assert is_follower()
    with pytest.raises(UsageError, match=r"one of 4 processes, but --tensor-parallel-size is 1; pass .*-size 4$"):
        check_ranks(1)
    monkeypatch.setenv("RANK", "0")
    assert not is_follower()
    monkeypatch.delenv("RANK")
    monkeypatch.delenv("WORLD_SIZE")
    check_ranks(1)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"RANK": "5"}, "RANK is '5'; in a run of several ranks it is from 0 to 1"),
        ({"RANK": "x"}, "RANK is 'x'"),
        ({"RANK": "-1"}, "RANK is '-1'"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two'"),
        ({"LOCAL_RANK": "7"}, "LOCAL_RANK is '7'"),
        ({"MASTER_PORT": ""}, "MASTER_PORT is ''"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
    ],
)
def test_an_environment_that_tells_of_no_run_is_refused(
    changed: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29501"}
    for name, value in (right | changed).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=re.escape(said)):
        check_ranks(2)
    if "RANK" in changed or "WORLD_SIZE" in changed:
        assert not is_follower()


def test_a_port_in_use_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, str(value))
        with pytest.raises(UsageError, match=f"MASTER_PORT is {port}, on which rank 0 cannot listen"):
            check_ranks(2)


def test_a_rank_ends_with_its_launcher(tmp_path: Path) -> None:
    """A rank that hears of nothing but a signal is told by one; the launcher is killed, so it cannot tell."""
    rank = (
        "import os, pathlib, signal, time\n"
        "from vitgraph.ranks import launch\n"
        "launch.LOOK_EVERY_S = 0.05\n"
        f"place = pathlib.Path({str(tmp_path)!r})\n"
        "def save(*_):\n"
        "    (place / 'saved').touch()\n"
        "    os._exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "launch.end_with_parent()\n"
        "(place / 'started').touch()\n"
        "time.sleep(240)\n"
    )
    launcher = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {rank!r}])"
    environment = os.environ | {"TORCHELASTIC_RUN_ID": "a run"}
    process = subprocess.Popen([sys.executable, "-c", launcher], env=environment)
    _wait_for(tmp_path / "started")
    process.kill()
    process.wait()
    _wait_for(tmp_path / "saved")


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + 240
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.02)


def test_a_rank_leaves_its_error_where_the_launcher_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "error.json"
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    launch.leave_word(UsageError("--dtype is int3"))
    told: Any = json.loads(path.read_text())
    assert told["message"]["message"] == "UsageError: --dtype is int3"
    path.unlink()
    monkeypatch.delenv("RANK")
    launch.leave_word(UsageError("alone"))
    assert not path.exists()


def test_the_launcher_of_every_supported_torch_takes_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """`LaunchConfig` of torch 2.11 has no `shutdown_timeout`."""
    started: list[Any] = []
    known = [field for field in dataclasses.fields(api.LaunchConfig) if field.name != "shutdown_timeout"]
    older = dataclasses.make_dataclass("LaunchConfig", [(field.name, Any, None) for field in known])
    for config_class in (api.LaunchConfig, older):
        monkeypatch.setattr(api, "LaunchConfig", config_class)
        monkeypatch.setattr(api, "elastic_launch", lambda config, program: lambda *words: started.append(config))
        assert launch.launch_ranks(2, ["bench"]) == RanksEnded()
    assert [config.nproc_per_node for config in started] == [2, 2]
    assert not hasattr(started[1], "shutdown_timeout")


@pytest.mark.slow
def test_ranks_get_the_environment_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a host forbids NCCL to use must hold in every rank."""
    (tmp_path / "vitgraph").mkdir()
    (tmp_path / "vitgraph" / "__init__.py").touch()
    program = "import json, os; open(f\"seen-{os.environ['RANK']}\", 'w').write(json.dumps(dict(os.environ)))"
    (tmp_path / "vitgraph" / "__main__.py").write_text(program)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    assert launch.launch_ranks(2, []) == RanksEnded()
    for rank in range(2):
        seen = json.loads((tmp_path / f"seen-{rank}").read_text())
        assert (seen["NCCL_NVLS_ENABLE"], seen["LOCAL_RANK"], seen["WORLD_SIZE"]) == ("0", str(rank), "2")


def test_a_rank_that_hangs_once_the_others_have_ended_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "LAST_RANK_S", 0.1)
    monkeypatch.setattr(launch, "LOOK_EVERY_S", 0.05)
    ranks = [subprocess.Popen([sys.executable, "-c", program]) for program in ("", "import time; time.sleep(99)")]
    for number, process in enumerate(ranks):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / launch.PID_FILE).write_text(str(process.pid))
    assert ranks[0].wait() == 0
    watch = threading.Thread(target=launch._end_stragglers, args=(tmp_path,), daemon=True)
    watch.start()
    assert ranks[1].wait(30) == -signal.SIGKILL
    shutil.rmtree(tmp_path)
    watch.join(30)
    assert not watch.is_alive()


@pytest.mark.parametrize(
    ("rank", "run", "said"), [("0", "of torchrun", "stopped\n"), ("1", "of torchrun", ""), ("0", "vitgraph-1", "")]
)
def test_one_process_of_a_run_says_that_it_was_stopped(
    rank: str, run: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first rank, or the launcher where that is ours."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(program, "be_stoppable", stop)
    monkeypatch.setattr(program, "leave_stops_to_the_end", lambda _: None)
    for name, value in {"RANK": rank, "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": run}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match="130"):
        program.main()
    assert capsys.readouterr().err == said
