"""How processes compare notes, outside any program.

Notes go through the key-value store of JAX's distributed client, step by step. In
each step everybody leaves a note, the first process collects them and leaves one
answer that all others read: 2 P requests and a few, where everybody reading
everybody's would take P^2. `links` connects processes of one host by sockets.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import json
import os
import pathlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from jax_ep._setup.bounded_client import BoundedClient

_METHODS = (
    "key_value_set",
    "blocking_key_value_get",
    "key_value_dir_get",
    "key_value_delete",
)
# How often the process that collects looks whether somebody has given up while
# it waits for another.
_LOOK_EVERY_S = 1.0

# Set-ups so far over the same processes; equal on all of them, because they
# create their communicators in the same order.
_numbers: dict[tuple[int, ...], itertools.count] = {}
_numbers_lock = threading.Lock()


class CannotWork(RuntimeError):
    """A backend cannot work here, with the reason; the same on all processes."""


def distributed_client() -> Any:
    """JAX's distributed client, a private part of JAX.

    Raises:
      RuntimeError: JAX moved it, or jax.distributed.initialize() was not called.
    """
    try:
        from jax._src import distributed

        client = distributed.global_state.client
    except (ImportError, AttributeError) as error:
        raise RuntimeError(
            f"jax_ep: jax {jax.__version__} has no "
            "jax._src.distributed.global_state.client any more; install a jax "
            "that this jax_ep knows, or a newer jax_ep"
        ) from error
    if client is None:
        raise RuntimeError(
            "jax_ep: a mesh over several processes needs "
            "jax.distributed.initialize() in each of them, before any array"
        )
    missing = [name for name in _METHODS if not hasattr(client, name)]
    if missing:
        raise RuntimeError(
            f"jax_ep: the distributed client of jax {jax.__version__} lacks "
            f"{', '.join(missing)}; install a jax that this jax_ep knows, or a "
            "newer jax_ep"
        )
    return client


@dataclasses.dataclass
class _Conversation:
    """What the processes of one set-up say to each other, step by step.

    Attributes:
      client: JAX's distributed client.
      members: JAX's process indices, ascending; the first collects.
      me: this process's.
      number: how many conversations these processes had before.
      timeout_s: how long a step waits for the others.
      name: what errors call a process.
      next_step: whose note, at the first whose answer, this process has not left.
      is_over: no step can follow, and all members hear so.
    """

    client: Any
    members: tuple[int, ...]
    me: int
    number: int
    timeout_s: float
    name: Callable[[int], str]
    next_step: int = 0
    is_over: bool = False

    def step(self, what: str, value: Any) -> dict[int, Any]:
        """Everybody's `value` (JSON) by process. Collective."""
        step, deadline = self.next_step, time.monotonic() + self.timeout_s
        self.client.deadline = deadline
        try:
            self._set(step, self.me, {"what": what, "value": value})
            if self.me == self.members[0]:
                answer = self._collect(step, what, deadline)
                self._set(step, "all", answer)
                self.next_step += 1
                if step > 0 and "problem" not in answer:
                    # Everybody came, so everybody has read the step before.
                    self.client.key_value_delete(self._key(step - 1))
            else:
                self.next_step += 1
                answer = self._read(step, what, deadline)
        except jax.errors.JaxRuntimeError as error:
            # Nobody can be told by a service that does not answer.
            self.is_over = True
            raise RuntimeError(
                f"jax_ep.Communicator: {what}: JAX's distributed client failed: {error}"
            ) from error
        if "problem" in answer:
            self.is_over = True
            raise RuntimeError(f"jax_ep.Communicator: {what}: {answer['problem']}")
        return {int(process): its for process, its in answer["values"].items()}

    def give_up(self, error: BaseException) -> None:
        """Tells all members in their next step that this process has failed."""
        if self.is_over:
            return
        self.is_over = True
        self.client.deadline = time.monotonic() + self.timeout_s
        problem = f"{type(error).__name__}: {error}"
        # Without JAX's service the others hear nothing, and time out.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            if self.me == self.members[0]:
                told = {"problem": self._failed({self.me: problem})}
                self._set(self.next_step, "all", told)
            else:
                self._set(self.next_step, self.me, {"failed": problem})

    def _collect(self, step: int, what: str, deadline: float) -> dict[str, Any]:
        """The answer to all, from everybody's notes."""
        missing = list(self.members[1:])
        while True:
            left = deadline - time.monotonic()
            if missing and left > 0:
                # Who is asked last has often come last.
                self._wait(self._key(step, missing[-1]), min(left, _LOOK_EVERY_S))
            notes = self._notes(step)
            failed = {p: n["failed"] for p, n in notes.items() if "failed" in n}
            if failed:
                return {"problem": self._failed(failed)}
            elsewhere = {p: n["what"] for p, n in notes.items() if n["what"] != what}
            if elsewhere:
                return {"problem": self._apart({self.me: what, **elsewhere})}
            missing = [p for p in self.members if p not in notes]
            if not missing:
                return {"values": {p: n["value"] for p, n in notes.items()}}
            if left <= 0:
                return {"problem": self._late(missing)}

    def _read(self, step: int, what: str, deadline: float) -> dict[str, Any]:
        """The first member's answer."""
        left = max(deadline - time.monotonic(), 0.001)
        text = self._wait(self._key(step, "all"), left)
        if text is not None:
            return json.loads(text)
        notes = self._notes(step)
        missing = [p for p in self.members if p not in notes]
        problem = self._late(missing or list(self.members[:1]))
        raise RuntimeError(f"jax_ep.Communicator: {what}: {problem}")

    def _wait(self, key: str, seconds: float) -> str | None:
        """What stands there, None where nothing does in time."""
        try:
            return self.client.blocking_key_value_get(key, max(1, int(seconds * 1000)))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            return None

    def _notes(self, step: int) -> dict[int, dict[str, Any]]:
        found = {
            key.rpartition("/")[2]: text
            for key, text in self.client.key_value_dir_get(self._key(step))
        }
        return {p: json.loads(found[str(p)]) for p in self.members if str(p) in found}

    def _set(self, step: int, whose: int | str, note: Mapping[str, Any]) -> None:
        self.client.key_value_set(self._key(step, whose), json.dumps(note))

    def _key(self, step: int, *whose: int | str) -> str:
        members = "-".join(map(str, self.members))
        return "/".join(map(str, ("jax_ep", members, self.number, step, *whose)))

    def _failed(self, problems: Mapping[int, str]) -> str:
        told = [f"{self.name(p)} failed: {text}" for p, text in problems.items()]
        return "; ".join(told)

    def _late(self, missing: Sequence[int]) -> str:
        names = ", ".join(map(self.name, missing))
        return (
            f"{self.name(self.me)} waited {self.timeout_s:.1f} s for {names}, which "
            f"did not come; {self._order()}"
        )

    def _apart(self, steps: Mapping[int, str]) -> str:
        places = ", ".join(
            f"{self.name(p)} at {what!r}" for p, what in sorted(steps.items())
        )
        return f"processes are at different steps: {places}; {self._order()}"

    def _order(self) -> str:
        return (
            "every process creates and closes its communicators in the same order, "
            f"and this is number {self.number} over processes "
            f"{', '.join(map(str, self.members))}"
        )


class Processes:
    """The processes of one communicator, or a part of them, seen from one.

    Attributes:
      members: JAX's process indices, ascending.
      me: this process's.
      position: where this process stands in `members`.
      timeout_s: how long to wait for the others each time.
    """

    def __init__(
        self,
        members: Sequence[int],
        me: int,
        timeout_s: float,
        *,
        client: Any = None,
        names: Mapping[int, str] | None = None,
    ):
        """Talks to nobody yet.

        Args:
          members: JAX's process indices, this one's among them.
          me: this process's.
          timeout_s: how long to wait for the others each time.
          client: in place of JAX's distributed client, for tests.
          names: what errors call each process, default "process 1".
        """
        self.members = tuple(sorted(members))
        self.me = me
        self.timeout_s = timeout_s
        self._names = names or {}
        client = distributed_client() if client is None else client
        client = BoundedClient(client, timeout_s)
        with _numbers_lock:
            number = next(_numbers.setdefault(self.members, itertools.count()))
        self._conversation = _Conversation(
            client, self.members, me, number, timeout_s, self.name
        )

    @property
    def position(self) -> int:
        """Where this process stands in `members`."""
        return self.members.index(self.me)

    @property
    def others(self) -> tuple[int, ...]:
        """All members but this process."""
        return tuple(p for p in self.members if p != self.me)

    def name(self, process: int) -> str:
        """What errors call a process."""
        return self._names.get(process, f"process {process}")

    def part(self, members: Sequence[int]) -> Processes:
        """Some of the processes, this one among them, in the same conversation.

        What the part does, all do in step: each in the part that it is in. A problem
        of one is everybody's.
        """
        part = copy.copy(self)
        part.members = tuple(sorted(members))
        return part

    def gather(
        self, what: str, value: Any, problem: str | None = None
    ) -> dict[int, Any]:
        """Everybody's `value` (JSON) by process. Collective.

        Args:
          what: the name of this step.
          value: this process's.
          problem: why this process cannot go on.

        Raises:
          CannotWork: somebody has a problem; has all of them.
          RuntimeError: a process did not come in time, which is named, or has
            failed, or is at another step.
        """
        notes = self._conversation.step(what, [value, problem])
        told = [f"{self.name(p)}: {text}" for p, (_, text) in notes.items() if text]
        if told:
            raise CannotWork("; ".join(told))
        return {process: notes[process][0] for process in self.members}

    def agree(self, what: str, problem: str | None) -> str | None:
        """None where nobody has a problem, else all of them. Collective."""
        try:
            self.gather(what, None, problem)
        except CannotWork as error:
            return str(error)
        return None

    def barrier(self, what: str) -> None:
        """Returns when every process has come. Raises as `gather` does."""
        self.gather(what, None)

    @contextlib.contextmanager
    def all_or_none(self) -> Iterator[None]:
        """What fails in its block in one process, in any way, fails in all.

        The others hear of it in their next step, so a block ends with a step
        (`barrier`) behind all that may fail. Each process itself gives back what it
        has; what all raise alike needs no other word.
        """
        try:
            yield
        except BaseException as error:
            self._conversation.give_up(error)
            raise


def all_or_none(
    processes: Processes | None,
) -> contextlib.AbstractContextManager[None]:
    """`processes.all_or_none()`, where there are any."""
    return contextlib.nullcontext() if processes is None else processes.all_or_none()


def compare_arguments(
    arguments: Mapping[int, Mapping[str, Any]], name: Callable[[int], str]
) -> None:
    """Raises ValueError, showing both, where two processes disagree."""
    first, *rest = sorted(arguments)
    for process in rest:
        differing = [
            key
            for key in {**arguments[first], **arguments[process]}
            if arguments[first].get(key) != arguments[process].get(key)
        ]
        if differing:
            mine, its = (
                ", ".join(f"{key} = {arguments[p].get(key)!r}" for key in differing)
                for p in (first, process)
            )
            raise ValueError(
                f"jax_ep.Communicator: processes must agree; {name(first)} has {mine} "
                f"but {name(process)} has {its}"
            )


def host_identity() -> dict[str, Any]:
    """What two processes of one host have in common, as far as can be told.

    Equal values prove nothing, as containers and cloned machines show: the proof
    is that `connect` opens what the peer made.
    """
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id")
    return {
        "boot_id": boot.read_text().strip() if boot.exists() else "",
        "host": socket.gethostname(),
        "uid": os.getuid(),
    }
