"""The process group of a data-parallel run: joining it, waiting within a time limit, and naming the rank that failed.

Everything that one rank waits for another for goes through here. A rank that fails says why in the store of the group;
the others look there when a wait breaks off or lasts too long, and name it. A rank that says nothing was killed, or
hangs.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType, TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

from vitgraph.errors import EXIT_UNEXPECTED, RankFailedError, UsageError, VitgraphError
from vitgraph.ranks.launch import OWN_PROCESSES, Place, rank_device, read_place

JOIN_LIMIT_S = 180.0
"""How long a rank waits for the others to start: Python and torch may be read from a slow disk."""

SETUP_LIMIT_S = 900.0
"""How long a rank waits for the others while they load, capture and compile, and while one of them times replays."""

ANSWER_S = 3.0
"""How long the ranks have to say that they are alive once something went wrong."""

_LOOK_EVERY_S = 0.5
_SPIN_S, _NAP_S, _LONG_NAP_S = 2e-3, 2e-4, 2e-2
_GLOO_TRIES = 5
"""Gloo tries so often to connect to a rank, each time for the whole time limit of its group."""
_WATCHDOG_MARGIN_S = 60.0
"""torch's own limits come later than ours: NCCL's ends the whole process, and gloo's does not say who is missing."""

gather_equal_parts = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""torch 2.13 renamed it."""
_set_timeout = dist.distributed_c10d._set_pg_timeout

ERROR, LOST, STOPPED = "error", "lost", "stopped"
"""What a rank may say: it failed; it lost another one; a signal told it to stop."""

ADVICE = {"vitgraph": "install one version on every host"}
"""What to do where ranks differ in a fact; of any other one, they were not given the same."""

_abandoned = False


def was_abandoned() -> bool:
    """True where this process left its group without a good-bye, so that a collective may still be on its GPU."""
    return _abandoned


class ParallelGroup:
    """This process among the ranks of a run. Use it as a context manager: leaving it with an error tells the others.

    Args:
        limit_s: Longest wait for another rank while calls are measured.

    Attributes:
        places: Host and device of each rank, in words.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, device: torch.device, limit_s: float) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self.limit_s = limit_s
        self.places: list[str] = [f"rank {index}" for index in range(size)]
        self._run_store = store
        self._store = dist.PrefixStore("vitgraph", store)
        self._is_ending = False
        self._signal: int | None = None
        self._old_handlers: dict[int, Any] = {}
        self._token = torch.zeros(1, device=device)

    @classmethod
    def join(cls, device_name: str, limit_s: float) -> Self:
        """This process as a rank of the run that the environment describes as torchrun does.

        RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say which; entering the group is meeting the others.

        Args:
            limit_s: Longest wait for another rank while calls are measured.

        Raises:
            UsageError: The environment describes no such run, this rank has no device of its own, or rank 0's port is
                taken.
            RankFailedError: The others did not come.
        """
        place = read_place()
        device = rank_device(device_name, place.local_rank)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        elif "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // place.local_size))
        return cls(*_find_store(place), device, limit_s)

    def _meet(self) -> None:
        """Connects the ranks once all of them are there."""
        what = "the meeting of the ranks"
        keys = [f"here/{rank}" for rank in range(self.size)]
        watchdog = timedelta(seconds=self.limit_s + ANSWER_S + _WATCHDOG_MARGIN_S)
        connecting = timedelta(seconds=JOIN_LIMIT_S / _GLOO_TRIES)
        is_cuda = self.device.type == "cuda"
        with self.collective(what):
            # A launcher has the store open before any rank comes, and no wait within torch names who does not.
            self._store.set(keys[self.rank], "")
            self._poll(lambda: self._store.check(keys), what, JOIN_LIMIT_S, nap_s=_LONG_NAP_S)
            dist.init_process_group(
                "nccl" if is_cuda else "gloo",
                store=self._run_store,
                rank=self.rank,
                world_size=self.size,
                timeout=watchdog if is_cuda else connecting,
                # Without it NCCL guesses the device by rank where no tensor tells, and connects only when first used.
                device_id=self.device if is_cuda else None,
            )
            self._control = dist.new_group(backend="gloo", timeout=connecting)
        if not is_cuda:
            _set_timeout(watchdog)
        _set_timeout(timedelta(seconds=max(SETUP_LIMIT_S, self.limit_s) + _WATCHDOG_MARGIN_S), self._control)
        here = socket.gethostname()
        own = f"rank {self.rank} ({here}, {self.device})", here, os.getpid()
        everyone = self.exchange(own, "its place", slow=True)
        self.places = [place for place, _, _ in everyone]
        OWN_PROCESSES.update(pid for _, host, pid in everyone if host == here)
        self.connect()

    def connect(self) -> None:
        """Runs each kind of collective once; NCCL sets channels up in the first of a kind, which no call should pay."""
        if self.device.type == "cuda":
            with self.collective("the first collectives"):
                sizes = [rank + 1 for rank in range(self.size)]
                parts = self._token.new_empty(sum(sizes)).split_with_sizes(sizes)
                unequal = dist.all_gather(list(parts), self._token.new_zeros(self.rank + 1), async_op=True)
                equal = gather_equal_parts(self._token.new_empty(self.size), self._token, async_op=True)
            for work in (unequal, equal):
                self.finish(work, "the first collectives")
        self.align()

    @property
    def is_leader(self) -> bool:
        """Rank 0 reports and saves."""
        return self.rank == 0

    # -- waiting for others --------------------------------------------------------------------------------------------

    def exchange(self, value: Any, what: str, *, slow: bool = False) -> list[Any]:
        """Every rank's value, by rank, on every rank.

        Args:
            value: Anything that JSON holds; sequences come as lists.
            what: What is exchanged, in words; the same on every rank.
            slow: Allow for what ranks do before it at their own pace: loading, capturing, compiling.

        Raises:
            RankFailedError: A rank failed, did not come within the limit, or came with something else.
        """
        limit_s = SETUP_LIMIT_S if slow else self.limit_s
        text = json.dumps((what, value), default=lambda number: number.item()).encode()
        packed = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        sizes = torch.zeros(self.size, dtype=torch.int64)
        self._gather_bytes(sizes, torch.tensor([len(packed)]), what, limit_s)
        longest = int(sizes.max())
        mine = torch.zeros(longest, dtype=torch.uint8)
        mine[: len(packed)] = packed
        everyone = torch.empty(self.size * longest, dtype=torch.uint8)
        self._gather_bytes(everyone, mine, what, limit_s)
        parts = everyone.view(self.size, longest)
        found = [json.loads(parts[rank, : int(sizes[rank])].numpy().tobytes()) for rank in range(self.size)]
        for rank, (theirs, _) in enumerate(found):
            if theirs != what:
                raise RankFailedError(f"{self.places[rank]} is at {theirs!r}, {self.places[self.rank]} at {what!r}")
        return [theirs for _, theirs in found]

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Refuses a run whose ranks do not do the same; `facts`, by name, must be equal on all of them.

        Raises:
            UsageError: A rank differs from rank 0; the message names both and their values.
        """
        everyone = self.exchange(dict(facts), "what it will do", slow=True)
        for rank, theirs in enumerate(everyone):
            for name, value in everyone[0].items():
                if theirs.get(name) != value:
                    raise UsageError(
                        f"{self.places[rank]} has {name} {theirs.get(name)}, {self.places[0]} has {value}; "
                        f"{ADVICE.get(name, 'give every rank the same command and files')}"
                    )

    def _gather_bytes(self, everyone: torch.Tensor, mine: torch.Tensor, what: str, limit_s: float) -> None:
        with self.collective(what):
            work = gather_equal_parts(everyone, mine, group=self._control, async_op=True)
        self.finish(work, what, limit_s)

    def align(self) -> None:
        """Returns on all ranks at nearly the same time."""
        with self.collective("the start of a call"):
            group = None if self.device.type == "cuda" else self._control
            work = dist.all_reduce(self._token, group=group, async_op=True)
        self.finish(work, "the start of a call")
        self.wait_device()

    def finish(self, work: dist.Work | None, what: str, limit_s: float | None = None) -> None:
        """Waits for a collective; on a GPU only the current stream does, and `wait_device` waits for that.

        Raises:
            RankFailedError: A rank failed, or did not come within the limit (the group's, unless given).
        """
        assert work is not None
        if self.device.type != "cuda" or limit_s is not None:
            self._poll(work.is_completed, what, self.limit_s if limit_s is None else limit_s)
        with self.collective(what):
            work.wait()

    def wait_device(self) -> None:
        """Waits until this rank's device has done everything, collectives included."""
        if self.device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
            self.wait_event(event)

    def wait_event(self, event: torch.cuda.Event, own: torch.cuda.Event | None = None) -> None:
        """Waits for an event of this rank's device.

        Args:
            event: Comes after a collective.
            own: Comes before it, when this rank's own work is done.

        Raises:
            RankFailedError: A rank failed, or did not come within the limit; this one, where its own work did not end.
        """
        self._poll(event.query, "a call", self.limit_s, nap_s=None, is_own_done=None if own is None else own.query)

    def _poll(
        self,
        is_done: Callable[[], bool],
        what: str,
        limit_s: float,
        *,
        nap_s: float | None = _NAP_S,
        is_own_done: Callable[[], bool] | None = None,
    ) -> None:
        """Waits for something that other ranks have a part in.

        Waiting inside torch or the driver would hold the thread where neither a signal nor what other ranks say
        reaches it, for as long as a rank that is gone does not come.
        """
        started = looked = time.monotonic()
        while not is_done():
            now = time.monotonic()
            if nap_s is not None:
                # A core is worth more to the rank that is waited for.
                time.sleep(0 if now - started < _SPIN_S else nap_s)
            if now - looked < _LOOK_EVERY_S:
                continue
            looked, waited_s = now, now - started
            is_given_up = bool(self._reports())
            # Ranks begin a call together, but not all look at the same moment.
            is_about_late = waited_s > max(limit_s / 2, limit_s - 2 * _LOOK_EVERY_S)
            if (is_given_up or waited_s > limit_s) and is_about_late and is_own_done is not None and not is_own_done():
                late = VitgraphError(f"its own work took more than {limit_s:g} s")
                self.announce(late)
                raise RankFailedError(f"{self.places[self.rank]} failed: {late}")
            if is_given_up:
                raise self._explain(f"{what} was given up by other ranks")
            if waited_s > limit_s:
                raise self._explain(f"{what} took more than {limit_s:g} s")

    @contextmanager
    def collective(self, what: str) -> Iterator[None]:
        """Turns the error of a collective that was entered within it into one that names the rank at fault."""
        try:
            yield
        except RuntimeError as error:
            raise self._explain(f"{what} broke off: {in_short(error)}") from error

    # -- saying what went wrong ----------------------------------------------------------------------------------------

    def failure_behind_stop(self) -> RankFailedError | None:
        """After a signal stopped this rank: the failure of another rank that brought it about, or None."""
        if self._signal != signal.SIGTERM:
            return None
        # A launcher ends the other ranks when one of them is gone; else it is the run as a whole that has to stop.
        return self._find_fault("the run was told to stop (SIGTERM)")

    def announce(self, error: BaseException) -> None:
        """Tells the other ranks why this one ends."""
        self._is_ending = True
        if isinstance(error, RankFailedError):
            return
        kind = STOPPED if isinstance(error, KeyboardInterrupt) else ERROR
        text = str(error) if isinstance(error, VitgraphError) else f"{type(error).__name__}: {error}"
        self._post(kind, text, getattr(error, "exit_status", EXIT_UNEXPECTED))

    def _post(self, kind: str, text: str, exit_status: int = EXIT_UNEXPECTED) -> None:
        try:
            report = {"kind": kind, "text": text, "exit_status": exit_status, "time": time.time()}
            self._store.set(f"report/{self.rank}", json.dumps(report))
        except RuntimeError:
            # The store went with the process that kept it; those who ask will find it gone.
            return

    def _reports(self) -> dict[int, dict[str, Any]]:
        """What other ranks have said of themselves."""
        found = {}
        try:
            for rank in range(self.size):
                key = f"report/{rank}"
                if rank != self.rank and self._store.check([key]):
                    found[rank] = json.loads(self._store.get(key))
        except RuntimeError as error:
            self._is_ending = True
            raise RankFailedError("the store of the run is gone with the process that kept it") from error
        return found

    def _explain(self, symptom: str) -> RankFailedError:
        """The error that a wait for others ends with: which rank is at fault, or at least what was noticed."""
        return self._find_fault(symptom) or RankFailedError(f"{symptom}; every rank still answers")

    def _find_fault(self, symptom: str) -> RankFailedError | None:
        """Waits for the other ranks to answer, and says which is at fault, if any."""
        self._is_ending = True
        self._post(STOPPED if self._signal else LOST, symptom)
        deadline = time.monotonic() + ANSWER_S
        reports: dict[int, dict[str, Any]] = {}
        try:
            while time.monotonic() < deadline and len(reports) < self.size - 1:
                reports = self._reports()
                if any(report["kind"] == ERROR for report in reports.values()):
                    break
                time.sleep(0.05)
        except RankFailedError as error:
            return RankFailedError(f"{symptom}; {error}")
        was_stopped = self._signal is not None
        return find_fault(symptom, self.rank, self.places, reports, waited_s=ANSWER_S, was_stopped=was_stopped)

    # -- coming and going ----------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._old_handlers[number] = signal.signal(number, self._stop)
        try:
            self._meet()
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def _stop(self, number: int, frame: FrameType | None) -> None:
        # Only the first one counts: a second must not break off the saving that the first one led to.
        if not self._is_ending:
            self._is_ending, self._signal = True, number
            raise KeyboardInterrupt

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _abandoned
        _abandoned = True
        if error is not None:
            self.announce(error)
        elif not self._is_ending:
            try:
                self.exchange(None, "the end of the run", slow=True)
            except BaseException as stop:
                self.announce(stop)
                raise
            for number, handler in self._old_handlers.items():
                signal.signal(number, handler)
            dist.destroy_process_group()
            _abandoned = False


def _find_store(place: Place) -> tuple[dist.Store, int, int]:
    """The store of a run, this rank, and how many there are."""
    try:
        return next(iter(dist.rendezvous("env://", timeout=timedelta(seconds=JOIN_LIMIT_S))))
    except (RuntimeError, ValueError) as error:
        raise RankFailedError(
            f"rank {place.rank} did not meet the other {place.size - 1} at {place.address}:{place.port} within "
            f"{JOIN_LIMIT_S:g} s ({in_short(error)}); start every rank, each with the same MASTER_ADDR and MASTER_PORT"
        ) from error


def in_short(error: Exception) -> str:
    """The first sentence of an error of torch's, without the place in its source."""
    sentence = re.sub(r"\[\S+:\d+\] ", "", str(error)).strip().split(". ")[0].splitlines()
    return sentence[0] if sentence else type(error).__name__


def find_fault(
    symptom: str,
    own_rank: int,
    places: Sequence[str],
    reports: Mapping[int, Mapping[str, Any]],
    *,
    waited_s: float,
    was_stopped: bool,
) -> RankFailedError | None:
    """Names the rank at fault from what the ranks said; None where all answered and none of them failed.

    Args:
        places: Each rank in words.
        reports: What each other rank said of itself in that time.
        was_stopped: A signal told this rank to stop, and so perhaps the others.
    """
    own_errors = {rank: report for rank, report in reports.items() if report["kind"] == ERROR}
    if own_errors:
        first = min(own_errors, key=lambda rank: own_errors[rank]["time"])
        return RankFailedError(f"{places[first]} failed: {own_errors[first]['text']}", own_errors[first]["exit_status"])
    silent = [place for rank, place in enumerate(places) if rank != own_rank and rank not in reports]
    if silent:
        return RankFailedError(
            f"{' and '.join(silent)} did not answer within {waited_s:g} s: killed, or hanging. Noticed as {symptom}"
        )
    stopped = {rank: report["time"] for rank, report in reports.items() if report["kind"] == STOPPED}
    if stopped and not was_stopped:
        return RankFailedError(f"{places[min(stopped, key=lambda rank: stopped[rank])]} was told to stop by a signal")
    return None
