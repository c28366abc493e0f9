"""Sockets between the processes of a host, and what travels over them.

A Unix socket for each pair carries file descriptors (shared memory, exported GPU
memory) at set-up, and its hang-up tells at once that a process is gone.
docs/security.md says whom a process believes what.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Mapping

from jax_ep._setup import bootstrap
from jax_ep._setup.bootstrap import Processes

_HUNG_UP = "the process hung up"
# Of a note that comes with a descriptor.
_MAX_NOTE_BYTES = 1 << 16
_SECRET_BYTES = 16
# What a caller says first: who it is, and what only the called one has told it.
_HELLO = struct.Struct(f"<q{_SECRET_BYTES}s")
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_RETRY_S = 0.01


class Links:
    """A socket to every other process of the host, both ends the same user's.

    Sockets are abstract: no file remains, whatever kills a process. Whoever is on
    the host finds their names, so a thread takes calls from the beginning on, and
    drops strangers: neither their number nor their silence keeps a process out.

    Attributes:
      sockets: by process.
    """

    def __init__(self) -> None:
        """Listens; the others learn where from `host`."""
        self.sockets: dict[int, socket.socket] = {}
        self._door = _Door()

    @property
    def host(self) -> dict[str, str]:
        """What the others need to connect to this process."""
        return {**bootstrap.host_identity(), **self._door.address}

    def connect(
        self, processes: Processes, hosts: Mapping[int, Mapping[str, str]]
    ) -> str | None:
        """Connects every pair. Collective; all get the same answer.

        Args:
          processes: who takes part.
          hosts: each one's `host`.

        Returns:
          None, or in words which pairs cannot reach each other.
        """
        deadline = time.monotonic() + processes.timeout_s
        problems = []
        for process in processes.members[: processes.position]:
            try:
                self._call(processes, process, hosts, deadline)
            except OSError as error:
                problems.append(f"cannot reach {processes.name(process)}: {error}")
        problem = processes.agree("connections", "; ".join(problems) or None)
        if problem is None:
            # All have called; what they said is on its way.
            callers = processes.members[processes.position + 1 :]
            try:
                self.sockets |= self._door.callers(callers, deadline)
            except OSError as error:
                problem = f"cannot accept connections: {error}"
            problem = processes.agree("links", problem)
        self._door.close()
        if problem is not None:
            self.close()
            return problem
        for link in self.sockets.values():
            link.settimeout(processes.timeout_s)
        return None

    def close(self) -> None:
        """Closes all sockets."""
        self._door.close()
        for link in self.sockets.values():
            link.close()
        self.sockets.clear()

    def _call(self, processes, process, hosts, deadline) -> None:
        host, here = hosts[process], hosts[processes.me]
        for key, meaning in (("boot_id", "host"), ("uid", "user")):
            if host[key] != here[key]:
                reason = (
                    f"it belongs to another {meaning} ({host['host']}, {key} "
                    f"{host[key]}; here {here['host']}, {here[key]})"
                )
                raise OSError(reason)
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sockets[process] = link
        try:
            _connect(link, _address(host["socket"]), deadline)
        except OSError as error:
            reason = (
                f"no socket of that process here ({error.strerror or error}); are "
                "they in different containers or network namespaces?"
            )
            raise OSError(reason) from error
        user = _user_of(link)
        if user != os.getuid():
            reason = f"the other end belongs to user {user}"
            raise PermissionError(reason)
        link.settimeout(max(deadline - time.monotonic(), _RETRY_S))
        link.sendall(_HELLO.pack(processes.me, bytes.fromhex(host["secret"])))


class _Door:
    """Takes calls in a thread, and keeps those that know the secret.

    Attributes:
      address: what a caller needs.
    """

    def __init__(self) -> None:
        """Listens from now on."""
        self.address = {
            "socket": secrets.token_hex(16),
            "secret": secrets.token_hex(_SECRET_BYTES),
        }
        self._secret = bytes.fromhex(self.address["secret"])
        self._changed = threading.Condition()
        self._arrived: dict[int, socket.socket] = {}
        # What others have said so far.
        self._strangers: dict[socket.socket, bytes] = {}
        with contextlib.ExitStack() as stack:
            self._listener = stack.enter_context(
                socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            )
            self._listener.bind(_address(self.address["socket"]))
            self._listener.listen(socket.SOMAXCONN)
            self._listener.setblocking(False)
            self._wake, self._woken = (
                stack.enter_context(end) for end in socket.socketpair()
            )
            self._events = stack.enter_context(selectors.DefaultSelector())
            for end in (self._listener, self._woken):
                self._events.register(end, selectors.EVENT_READ)
            self._thread = threading.Thread(
                target=self._run, daemon=True, name="jax_ep links"
            )
            self._thread.start()
            self._close = stack.pop_all().close

    def callers(
        self, processes: tuple[int, ...], deadline: float
    ) -> dict[int, socket.socket]:
        """The caller's end of each of the processes; TimeoutError names who lacks."""
        with self._changed:

            def all_there() -> bool:
                return self._arrived.keys() >= set(processes)

            if not self._changed.wait_for(
                all_there, max(0, deadline - time.monotonic())
            ):
                lacking = [p for p in processes if p not in self._arrived]
                reason = f"no call from process {', '.join(map(str, lacking))}"
                raise TimeoutError(reason)
            return {process: self._arrived.pop(process) for process in processes}

    def close(self) -> None:
        """Takes no more calls, and drops those that nobody asked for."""
        if self._thread.is_alive():
            self._wake.send(b"!")
            self._thread.join()
        for link in (*self._strangers, *self._arrived.values()):
            link.close()
        self._strangers.clear()
        self._arrived.clear()
        self._close()

    def _run(self) -> None:
        while True:
            for key, _ in self._events.select():
                if key.fileobj is self._woken:
                    return
                # Out of descriptors, say: strangers have to go first.
                with contextlib.suppress(OSError):
                    if key.data is None:
                        self._open()
                    else:
                        self._listen_to(key.data)

    def _open(self) -> None:
        try:
            link, _ = self._listener.accept()
        except BlockingIOError:
            return  # it has hung up
        except OSError:
            time.sleep(_RETRY_S)
            raise
        if _user_of(link) != os.getuid():
            link.close()
            return
        link.setblocking(False)
        self._strangers[link] = b""
        self._events.register(link, selectors.EVENT_READ, data=link)

    def _listen_to(self, link: socket.socket) -> None:
        said = self._strangers[link]
        try:
            more = link.recv(_HELLO.size - len(said))
        except BlockingIOError:
            return
        except OSError:
            more = b""
        self._strangers[link] = said = said + more
        if more and len(said) < _HELLO.size:
            return
        self._events.unregister(link)
        del self._strangers[link]
        if len(said) == _HELLO.size:
            process, secret = _HELLO.unpack(said)
            is_ours = secrets.compare_digest(secret, self._secret)
            with self._changed:
                if is_ours and self._arrived.setdefault(process, link) is link:
                    self._changed.notify_all()
                    return
        link.close()


def _address(name: str) -> str:
    return f"\0jax_ep-{name}"


def _connect(link: socket.socket, address: str, deadline: float) -> None:
    """Connects; waits while the other end's queue is full."""
    link.setblocking(False)
    while True:
        try:
            return link.connect(address)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_RETRY_S)


def _user_of(link: socket.socket) -> int:
    """Whose process the other end belongs to."""
    credentials = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    _, user, _ = struct.unpack("3i", credentials)
    return user


# Descriptors -------------------------------------------------------------------


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
    _check_length(len(note))
    socket.send_fds(link, [struct.pack("<I", len(note))], [descriptor])
    link.sendall(note)


def receive_descriptor(link: socket.socket) -> tuple[int, bytes]:
    """What `send_descriptor` sent; the descriptor is the caller's to close.

    Raises:
      OSError: nothing came, or something else.
    """
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
        (length,) = struct.unpack("<I", data)
        _check_length(length)
        note = receive_exactly(link, length)
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    return descriptors[0], note


def _check_length(length: int) -> None:
    if length > _MAX_NOTE_BYTES:
        reason = f"a note of {length} bytes, at most {_MAX_NOTE_BYTES} may come"
        raise OSError(reason)


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
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(memory)
        raise
    return memory


def exchange_shared_memory(
    processes: Processes,
    links: Links,
    memory: int,
    size: int,
    proof: bytes,
    undo: contextlib.ExitStack,
) -> dict[int, int]:
    """Sends `memory` to every peer and opens theirs. Collective.

    Args:
      processes: who takes part.
      links: between them.
      memory: what `create_shared_memory` made of `size` and `proof`.
      size: of everybody's.
      proof: this process's.
      undo: closes what this opens.

    Returns:
      Each peer's descriptor.

    Raises:
      CannotWork: it did not work somewhere.
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
            undo.callback(os.close, opened[process])
            # The memory itself has to say what its maker told over the socket, and
            # nobody may cut it under our feet.
            if (
                os.fstat(opened[process]).st_size != size
                or os.pread(opened[process], len(note), 0) != note
                or fcntl.fcntl(opened[process], fcntl.F_GET_SEALS) != _SEALS
            ):
                reason = (
                    f"the shared memory of {processes.name(process)} is not what "
                    "that process made"
                )
                raise OSError(reason)
    except OSError as error:
        problem = str(error)
    processes.gather("shared memory", None, problem)
    return opened
