"""How processes find each other, compare notes and connect, outside any program.

Notes go through the key-value store of JAX's distributed client. Processes of
one host then hold a Unix socket for each pair: it carries file descriptors
(shared memory, exported GPU memory) at set-up, and its hang-up tells at once
that a process is gone.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import itertools
import json
import os
import pathlib
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jax_ep.bounded_client import BoundedClient

_HUNG_UP = "the process hung up"
_METHODS = ("key_value_set", "blocking_key_value_get", "key_value_delete")

# Set-ups so far over the same processes; equal on all of them, because they
# create their communicators in the same order.
_numbers: dict[tuple[int, ...], itertools.count] = {}
_numbers_lock = threading.Lock()


def distributed_client() -> Any:
    """JAX's distributed client: the only private part of JAX in this package.

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


class Processes:
    """The processes of one communicator, seen from one of them.

    Attributes:
      members: JAX's process indices, ascending.
      me: this process's.
      position: where this process stands in `members`.
      number: how many communicators these processes had set up before.
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
        self.position = self.members.index(me)
        self.timeout_s = timeout_s
        client = distributed_client() if client is None else client
        self._client = BoundedClient(client, timeout_s)
        self._names = names or {}
        self._last_key: str | None = None
        with _numbers_lock:
            numbers = _numbers.setdefault(self.members, itertools.count())
            self.number = next(numbers)

    @property
    def others(self) -> tuple[int, ...]:
        """All members but this process."""
        return tuple(p for p in self.members if p != self.me)

    def name(self, process: int) -> str:
        """What errors call a process."""
        return self._names.get(process, f"process {process}")

    def gather(self, what: str, value: Any) -> dict[int, Any]:
        """Everybody's `value` (JSON) by process. Collective.

        Raises:
          RuntimeError: a process did not come in time; names it.
        """
        mine = self._key(what, self.me)
        deadline = time.monotonic() + self.timeout_s
        try:
            self._client.key_value_set(mine, json.dumps(value))
        except jax.errors.JaxRuntimeError as error:
            raise RuntimeError(
                f"jax_ep.Communicator: {what}: JAX's distributed client failed: {error}"
            ) from error
        found, missing = {self.me: value}, []
        for process in self.others:
            # Once the time is up, one quick look at each of the rest.
            left = max(deadline - time.monotonic(), 0.05)
            try:
                text = self._client.blocking_key_value_get(
                    self._key(what, process), max(1, int(left * 1000))
                )
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise RuntimeError(
                        f"jax_ep.Communicator: {what}: JAX's distributed client "
                        f"failed while waiting for {self.name(process)}: {error}"
                    ) from error
                missing.append(self.name(process))
            else:
                found[process] = json.loads(text)
        if missing:
            raise RuntimeError(
                f"jax_ep.Communicator: {what}: {self.name(self.me)} waited "
                f"{self.timeout_s:.1f} s for {', '.join(missing)}, which did not "
                "come; every process creates and closes its communicators in the "
                f"same order, and this is number {self.number} over processes "
                f"{', '.join(map(str, self.members))}"
            )
        # Everybody published this note, so everybody has read the one before.
        if self._last_key is not None:
            self._client.key_value_delete(self._last_key)
        self._last_key = mine
        return dict(sorted(found.items()))

    def agree(self, what: str, problem: str | None) -> str | None:
        """None where nobody has a problem, else all of them. Collective."""
        problems = self.gather(what, problem)
        told = [f"{self.name(p)}: {text}" for p, text in problems.items() if text]
        return "; ".join(told) or None

    def barrier(self, what: str) -> None:
        """Returns when every process has come. Raises as `gather` does."""
        self.gather(what, None)

    def _key(self, what: str, process: int) -> str:
        members = "-".join(map(str, self.members))
        return f"jax_ep/{members}/{self.number}/{what}/{process}"


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


# Hosts and sockets ------------------------------------------------------------


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


class Links:
    """A socket to every other process of the host, both ends the same user's.

    Sockets are abstract: no file remains, whatever kills a process.

    Attributes:
      sockets: by process.
    """

    def __init__(self) -> None:
        """Listens; the others learn where from `address`."""
        self.sockets: dict[int, socket.socket] = {}
        self._token = secrets.token_hex(16)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(f"\0jax_ep-{self._token}")
        self._listener.listen(1024)

    @property
    def host(self) -> dict[str, Any]:
        """What the others need to connect to this process."""
        return {**host_identity(), "address": self._token}

    def connect(
        self, processes: Processes, hosts: Mapping[int, Mapping[str, Any]]
    ) -> str | None:
        """Connects every pair. Collective; all get the same answer.

        Args:
          processes: who takes part.
          hosts: each one's `host`.

        Returns:
          None, or in words which pairs cannot reach each other.
        """
        problems = []
        for process in processes.members[: processes.position]:
            try:
                self._call(processes, process, hosts[process], hosts[processes.me])
            except OSError as error:
                problems.append(f"cannot reach {processes.name(process)}: {error}")
        problem = processes.agree("connections", "; ".join(problems) or None)
        if problem is None:
            try:
                self._answer(processes)
            except OSError as error:
                problem = f"cannot accept connections: {error}"
            problem = processes.agree("links", problem)
        self._listener.close()
        if problem is not None:
            self.close()
        return problem

    def close(self) -> None:
        """Closes all sockets."""
        for link in (self._listener, *self.sockets.values()):
            link.close()
        self.sockets.clear()

    def _call(self, processes, process, host, here) -> None:
        for key, meaning in (("boot_id", "host"), ("uid", "user")):
            if host[key] != here[key]:
                reason = (
                    f"it belongs to another {meaning} ({host['host']}, {key} "
                    f"{host[key]}; here {here['host']}, {here[key]})"
                )
                raise OSError(reason)
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sockets[process] = link
        link.settimeout(processes.timeout_s)
        try:
            link.connect(f"\0jax_ep-{host['address']}")
        except OSError as error:
            reason = (
                f"no socket of that process here ({error.strerror}); are they in "
                "different containers or network namespaces?"
            )
            raise OSError(reason) from error
        _check_user(link)
        link.sendall(struct.pack("<q", processes.me) + self._hello(host["address"]))

    def _answer(self, processes: Processes) -> None:
        """Accepts the higher processes; all of them have connected already."""
        self._listener.settimeout(processes.timeout_s)
        expected = set(processes.members[processes.position + 1 :])
        while expected:
            link, _ = self._listener.accept()
            link.settimeout(processes.timeout_s)
            with contextlib.ExitStack() as stack:
                stack.callback(link.close)
                _check_user(link)
                hello = receive_exactly(link, 8 + len(self._hello(self._token)))
                (process,) = struct.unpack_from("<q", hello)
                if hello[8:] != self._hello(self._token) or process not in expected:
                    continue  # somebody else who found the name
                stack.pop_all()
            expected.remove(process)
            self.sockets[process] = link

    @staticmethod
    def _hello(token: str) -> bytes:
        return f"jax_ep {token}".encode()


def _check_user(link: socket.socket) -> None:
    credentials = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    _, user, _ = struct.unpack("3i", credentials)
    if user != os.getuid():
        reason = f"the other end belongs to user {user}"
        raise PermissionError(reason)


def receive_exactly(link: socket.socket, size: int) -> bytes:
    """`size` bytes; ConnectionError where the peer hangs up before."""
    data = b""
    while len(data) < size:
        more = link.recv(size - len(data))
        if not more:
            raise ConnectionError(_HUNG_UP)
        data += more
    return data


def send_descriptor(link: socket.socket, descriptor: int, note: bytes = b"") -> None:
    """Sends an open file with a note of at most 64 KiB."""
    socket.send_fds(link, [struct.pack("<I", len(note))], [descriptor])
    link.sendall(note)


def receive_descriptor(link: socket.socket) -> tuple[int, bytes]:
    """What `send_descriptor` sent; the descriptor is the caller's to close."""
    size = array.array("i").itemsize
    data, ancillary, _, _ = link.recvmsg(
        4, socket.CMSG_SPACE(size), socket.MSG_CMSG_CLOEXEC
    )
    descriptors = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(payload[: len(payload) // size * size])
    try:
        if len(descriptors) != 1 or not data:
            raise ConnectionError(_HUNG_UP)
        data += receive_exactly(link, 4 - len(data))
        note = receive_exactly(link, struct.unpack("<I", data)[0])
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    return descriptors[0], note


# Shared memory ----------------------------------------------------------------


def create_shared_memory(size: int, proof: bytes) -> int:
    """Zeroed memory without a name, that begins with `proof`: its descriptor.

    Nobody can open it who is not sent the descriptor, and it goes with the last
    process that has it. Its size is sealed, so no peer can make it fault.
    """
    memory = os.memfd_create("jax_ep", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(memory, size)
        os.pwrite(memory, proof, 0)
        fcntl.fcntl(
            memory,
            fcntl.F_ADD_SEALS,
            fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL,
        )
    except BaseException:
        os.close(memory)
        raise
    return memory


def exchange_shared_memory(
    processes: Processes, links: Links, memory: int, size: int, proof: bytes
) -> tuple[dict[int, int], str | None]:
    """Sends `memory` to every peer and opens theirs. Collective.

    Returns:
      Each peer's descriptor, and None or what did not work, in words. Every
      process gets the same answer; with a problem there are no descriptors.
    """
    opened: dict[int, int] = {}
    problem = None
    try:
        for link in links.sockets.values():
            send_descriptor(link, memory, proof)
        for process, link in links.sockets.items():
            try:
                opened[process], note = receive_descriptor(link)
            except OSError as error:
                reason = f"no shared memory from {processes.name(process)}: {error}"
                raise OSError(reason) from error
            # The memory itself has to say what its maker told over the socket.
            if (
                os.fstat(opened[process]).st_size != size
                or os.pread(opened[process], len(note), 0) != note
            ):
                reason = (
                    f"the shared memory of {processes.name(process)} is not what "
                    "that process made"
                )
                raise OSError(reason)
    except OSError as error:
        problem = str(error)
    try:
        problem = processes.agree("shared memory", problem)
    except BaseException as error:
        problem = str(error)
        raise
    finally:
        if problem is not None:
            for descriptor in opened.values():
                os.close(descriptor)
            opened.clear()
    return opened, problem
