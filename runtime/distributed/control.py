"""Agreement among ranks: what all must know, an error that reaches all, and waits that end and say for whom."""

from __future__ import annotations

import hashlib
import json
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import count
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo

from dmuon_tune.errors import PeerError, said
from dmuon_tune.words import counted, ranks_named

from .endings import tell_at_exit

TIMEOUT_S = 600.0  # PyTorch's own for NCCL
LOOK_S = 1.0  # a rank that waits says so after this time, and looks after each whether another has failed
MESSAGE_BYTES = 4096  # of every agreement: gloo ends the process where two ranks' messages differ in size
RECORD_BYTES = 4096  # of what a rank says about itself once an agreement has failed
LATER_S = 5.0  # gloo gives up so much later than we, whose message says more
_HEADER = 17  # whether it failed, eight bytes of where it is, their complement

T = TypeVar("T")

_numbers: defaultdict[str, Iterator[int]] = defaultdict(count)  # of the controls of a group, by its name


class Control:
    """The ranks of ``group`` (default: all) over gloo between their CPUs; made by all of them together.

    Every method that says *collective* is called by all ranks in the same order. Whatever fails raises on every rank:
    on the one that failed its own error, on the others PeerError with its reason. A wait ends after ``timeout``
    seconds; the error names what was waited for, the step and the ranks that did not arrive. From then on every call
    raises. ``rank`` and ``size`` are in the group, ``ranks`` global, as are those in messages; ``step`` is the
    caller's to count, or that of the control that this one ``follows``.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, timeout: float = TIMEOUT_S, follows: Control | None = None
    ) -> None:
        within = group or dist.group.WORLD
        assert within is not None
        self.group = within
        self.ranks: list[int] = dist.get_process_group_ranks(within)
        self.rank, self.size = dist.get_rank(within), len(self.ranks)
        self.timeout, self._step, self._follows = timeout, 0, follows
        self._store = PrefixStore(f"dmuon_tune {next(_numbers[within.group_name])}", within.get_group_store())
        self._broken = ""
        # No new_group: all ranks of the world would have to call it, or have been in equally many groups.
        later = timedelta(seconds=timeout + LATER_S)
        self._meet()
        try:
            self._gloo: Any = ProcessGroupGloo(self._store, self.rank, self.size, later)
        except RuntimeError as error:
            raise PeerError(f"ranks cannot connect: {said(error)}; GLOO_SOCKET_IFNAME names their network") from None
        self._launched: deque[tuple[torch.Event, str, int]] = deque()
        self._awaited: list[dist.Work] = []
        tell_at_exit(self)

    @property
    def step(self) -> int:
        """As messages have it."""
        return self._step if self._follows is None else self._follows.step

    @step.setter
    def step(self, count: int) -> None:
        self._step = count

    def agree(self, what: str, flags: Sequence[int] = (), error: BaseException | None = None) -> list[int]:
        """The elementwise largest of all ranks' ``flags`` (0 … 255, equally many on each); collective.

        ``error`` is why this rank cannot go on. One small message, so that ranks which are not at the same ``what`` of
        the same step hear of it; nothing is broken then, and all may go on from where they raised.
        """
        self._check_launched()
        place = self._place(what) + (f", {counted(len(flags), 'flag')}" if flags else "")
        where = hashlib.sha256(place.encode()).digest()[: (_HEADER - 1) // 2]
        header = bytes([error is not None, *where, *(255 - byte for byte in where)])
        room = MESSAGE_BYTES - _HEADER
        message = bytearray((header + bytes(flags[:room])).ljust(MESSAGE_BYTES, b"\0"))
        self._take_largest(message, what)
        if message[:_HEADER] != header or error is not None:
            self._explain(place, error)
        rest = bytearray(flags[room:])
        if rest:
            self._take_largest(rest, what)
        return [*message[_HEADER : _HEADER + len(flags)], *rest]

    def decide(self, make: Callable[[], T], what: str) -> T:
        """What ``make`` returns on the group's first rank, or its error, on every rank; collective.

        It travels as JSON, so tuples come back as lists, on the first rank too; its hash is compared.
        """
        text, error = b"", None
        if self.rank == 0:
            try:
                text = json.dumps(make()).encode()
            except Exception as raised:
                error = raised
        self.agree(what, error=error)
        length = torch.tensor([len(text)])
        self._run(lambda: self._gloo.broadcast(length, 0), what)
        received = bytearray(text.ljust(int(length)))
        self._run(lambda: self._gloo.broadcast(_tensor(received), 0), what)
        others = self._others(received, what)
        if others:
            raise PeerError(f"{self._place(what)}: not the same on {ranks_named(others)} as on rank {self.ranks[0]}")
        decided: T = json.loads(received)
        return decided

    def gather(self, given: T, what: str, error: BaseException | None = None) -> list[T]:
        """Every rank's ``given``, which travels as JSON, by rank; ``error`` as for :meth:`agree`; collective."""
        text = json.dumps(given).encode()
        self.agree(what, error=error)
        lengths = self._all(torch.tensor([len(text)]), what).flatten().tolist()
        rows = self._all(_tensor(bytearray(text.ljust(max(lengths)))), what)
        return [json.loads(bytes(row.tolist())) for row in rows]

    def differ(self, given: Any, what: str) -> bool:
        """Whether ``given``, as JSON, is another on some rank than on the first; collective."""
        self.agree(what)
        return bool(self._others(json.dumps(given, sort_keys=True).encode(), what))

    def all_to_all(
        self, into: Tensor, given: Tensor, into_sizes: Sequence[int], given_sizes: Sequence[int], what: str
    ) -> dist.Work:
        """Start ``all_to_all_single`` of CPU tensors over this group's own connections."""
        return self.post(lambda: self._gloo.alltoall_base(into, given, list(into_sizes), list(given_sizes)), what)

    def broadcast(self, tensor: Tensor, root: int, what: str) -> dist.Work:
        """Start it, of a CPU tensor of any dtype, over this group's own connections."""
        return self.post(lambda: self._gloo.broadcast(tensor.view(torch.uint8), root), what)

    def sum(self, tensor: Tensor, root: int, what: str) -> dist.Work:
        """Start the sum of all ranks' CPU tensors into ``root``'s; the others' are worth nothing afterwards."""
        return self.post(lambda: self._gloo.reduce(tensor, root), what)

    def check(self) -> None:
        """PeerError once this rank knows that one has failed; it asks nobody."""
        if self._broken:
            raise PeerError(self._broken)

    def post(self, start: Callable[[], dist.Work], what: str) -> dist.Work:
        """Start a collective; PeerError where it cannot be started, because another rank is gone."""
        self.check()
        try:
            return start()
        except RuntimeError as error:
            how = _cause(error)
        self._lost(what, how)

    def wait(self, work: dist.Work, what: str, device: torch.device | None = None) -> None:
        """Until a collective is complete; on a CUDA device until the current stream is made to wait for it.

        There the next step's :meth:`agree` looks whether it has come to its end.
        """
        if device is None or device.type == "cpu":
            self._finish(work, what)
            return
        try:
            work.wait()
        except RuntimeError as error:
            self._lost(what, _cause(error))
        event: torch.Event = torch.Event(device)
        event.record(torch.cuda.current_stream(device))
        self._launched.append((event, what, self.step))

    @contextmanager
    def guard(self, what: str) -> Iterator[None]:
        """What is raised inside reaches the ranks that wait for this one meanwhile, at once."""
        try:
            yield
        except BaseException as error:
            self.fail(f"{said(error)} ({self._place(what)})")
            raise

    def fail(self, reason: str) -> None:
        """Tell the ranks that wait, or will, why this one does not arrive; the first reason told stays."""
        if self._broken:
            return
        self._broken = reason
        with suppress(RuntimeError):  # the store may have gone with the rank that kept it
            self._store.compare_set("failure", "", f"rank {self.ranks[self.rank]} failed: {reason}")

    def failure(self) -> str:
        """Why a rank has failed, "" where none has; from any thread."""
        try:
            if not self._broken and self._store.check(["failure"]):
                return self._store.get("failure").decode()
        except RuntimeError as error:
            return f"the store does not answer: {said(error)}"
        return self._broken

    def gone(self) -> list[int]:
        """The ranks whose connections to this one are closed: nothing can be received from them. As a process ends."""
        found = []
        for at, rank in enumerate(self.ranks):
            if at != self.rank:
                try:
                    self._awaited.append(self._gloo.recv([torch.empty(1)], at, 0))  # and never waited for
                except RuntimeError:
                    found.append(rank)
        return found

    def _meet(self) -> None:
        """Until all ranks have come here; PeerError that names those that have not in time."""
        deadline, pause_s = time.monotonic() + self.timeout, 0.001
        try:
            self._store.set(f"here {self.rank}", "yes")
            if self._store.add("here", 1) == self.size:
                self._store.set("all here", "yes")
            while not (met := self._store.check(["all here"])) and time.monotonic() < deadline:
                time.sleep(pause_s)  # Store.wait would log each look
                pause_s = min(2 * pause_s, LOOK_S / 10)
            missing = [rank for at, rank in enumerate(self.ranks) if not met and not self._store.check([f"here {at}"])]
        except RuntimeError as error:
            raise PeerError(f"the ranks cannot meet: {said(error)}") from None
        if missing:
            self.fail(
                f"waited {self.timeout:g} s for all ranks to make their first call of an optimizer; not arrived: "
                f"{ranks_named(missing)}; give process_group= all ranks that hold the model, and make as many "
                "optimizers on each"
            )
        else:
            self._check_failure()  # of those that did not wait so long
        self.check()

    def _place(self, what: str) -> str:
        return f"{what}, step {self.step}"

    def _take_largest(self, message: bytearray, what: str) -> None:
        self._run(lambda: self._gloo.allreduce(_tensor(message), dist.ReduceOp.MAX), what)

    def _all(self, given: Tensor, what: str) -> Tensor:
        """Every rank's tensor, stacked."""
        found = given.new_empty(self.size, *given.shape)
        self._run(lambda: self._gloo.allgather(list(found), given), what)
        return found

    def _others(self, text: bytes | bytearray, what: str) -> list[int]:
        """The ranks that have another text than the first."""
        found = self._all(_tensor(bytearray(hashlib.sha256(text).digest())), what)
        return [rank for rank, other in zip(self.ranks, found, strict=True) if not other.equal(found[0])]

    def _explain(self, place: str, error: BaseException | None) -> None:
        """Raise, on every rank, why they do not agree."""
        told = {"place": place[:200], "error": said(error)[:300] if error is not None else ""}
        text = json.dumps(told, ensure_ascii=False).encode()
        record = _tensor(bytearray(text.ljust(RECORD_BYTES)))
        records = [json.loads(bytes(row.tolist())) for row in self._all(record, place)]
        if error is not None:
            raise error
        failed = {rank: told["error"] for rank, told in zip(self.ranks, records, strict=True) if told["error"]}
        if failed:
            first, *others = failed
            also = f"; {ranks_named(others)} failed too" if others else ""
            raise PeerError(f"rank {first} failed: {failed[first]} ({place}{also})")
        places: dict[str, list[int]] = {}
        for rank, told in zip(self.ranks, records, strict=True):
            places.setdefault(told["place"], []).append(rank)
        listed = "; ".join(f"{ranks_named(ranks)}: {where}" for where, ranks in places.items())
        raise PeerError(f"the ranks are not at the same place ({listed}); call the optimizer alike on all of them")

    def _run(self, start: Callable[[], dist.Work], what: str) -> None:
        self._finish(self.post(start, what), what)

    def _finish(self, work: dist.Work, what: str) -> None:
        """Wait for a collective's end; PeerError where another rank failed or does not come in time."""
        self.check()
        deadline = time.monotonic() + self.timeout
        how = noted = ""
        try:
            while not _is_complete(work, min(LOOK_S, deadline - time.monotonic())):
                noted = self._note(self._place(what))
                self._check_failure()
                if time.monotonic() >= deadline:
                    how = f"waited {self.timeout:g} s"
                    break
        except RuntimeError as error:
            how = _cause(error)
        except BaseException as error:  # an interrupt or a signal's: the others wait for this rank
            self.fail(f"{said(error)} ({self._place(what)})")
            raise
        if how:
            self._lost(what, how)
        if noted:
            self._note("")

    def _note(self, place: str) -> str:
        """For the others: where this rank waits."""
        with suppress(RuntimeError):
            self._store.set(f"at {self.ranks[self.rank]}", place)
        return place

    def _check_failure(self) -> None:
        """PeerError where a rank has told why it failed."""
        with suppress(RuntimeError):
            if self._store.check(["failure"]):
                self._broken = self._store.get("failure").decode()
        self.check()

    def _lost(self, what: str, how: str) -> NoReturn:
        """Raise that a wait has ended without the others; who they are, is known once all that live have noted."""
        place = self._note(self._place(what))
        self._check_failure()
        time.sleep(2 * LOOK_S)
        self._check_failure()
        missing: list[int] = []
        elsewhere = ""
        try:
            for rank in self.ranks:
                at = self._store.get(f"at {rank}").decode() if self._store.check([f"at {rank}"]) else ""
                if not at:
                    missing.append(rank)
                elif at != place:
                    elsewhere += f"; rank {rank} waits for {at}"
            who = f"not arrived: {ranks_named(missing)}" if missing else "all ranks wait"
        except RuntimeError:
            who = "the store does not answer: its process, mostly the first rank's, is gone"
        self.fail(f"{how} for {place}; {who}{elsewhere}")
        raise PeerError(self._broken)

    def _check_launched(self) -> None:
        """Collectives that streams waited for in earlier steps must have come to their end."""
        deadline = time.monotonic() + self.timeout
        while self._launched:
            event, what, step = self._launched[0]
            if event.query():
                self._launched.popleft()
            elif step == self.step:
                return
            elif time.monotonic() >= deadline:
                self.fail(f"waited {self.timeout:g} s for {what}, step {step}")
                raise PeerError(self._broken)
            else:
                time.sleep(0.0005)


def _tensor(message: bytearray) -> Tensor:
    """The same memory."""
    return torch.frombuffer(message, dtype=torch.uint8)


def _is_complete(work: dist.Work, seconds: float) -> bool:
    """Whether it is after this time; raises the collective's error."""
    try:
        work.wait(timedelta(milliseconds=max(1, round(seconds * 1000))))  # 0 would be without end
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # raises, unless it was completed just now
    return True


def _cause(error: RuntimeError) -> str:
    """What ended a collective, in the place of "waited 600 s"."""
    return "a connection was closed" if "onnection" in str(error) else said(error)
