"""Sockets between processes of a host, with threads in place of the processes and
real sockets, and strangers who call first.
"""

import concurrent.futures
import contextlib
import itertools
import os
import pathlib
import socket
import struct
import subprocess
import sys
import threading

import fake_service
import pytest

from jax_ep._setup import bootstrap, links
from jax_ep._setup.links import Links

_numbers = itertools.count(20_000)


@pytest.fixture(autouse=True)
def nothing_stays(request):
    before = os.listdir("/proc/self/fd")
    yield
    assert len(os.listdir("/proc/self/fd")) <= len(before)
    assert not [t for t in threading.enumerate() if t.name == "jax_ep links"]


def connect(count, meddle=lambda me, one: None, timeout_s=10.0, **changes):
    """What connecting `count` processes gave each; meddle(me, links) comes first."""
    service, number = fake_service.Service(), next(_numbers)

    def body(me):
        processes = bootstrap.Processes(
            range(count), me, timeout_s, client=fake_service.Client(service)
        )
        processes._conversation.number = number
        with contextlib.closing(Links()) as one, processes.all_or_none():
            meddle(me, one)
            host = one.host | (changes if me == 0 else {})
            problem = one.connect(processes, processes.gather("hosts", host))
            if problem is not None:
                assert one.sockets == {}
                return problem
            for process, link in one.sockets.items():
                link.sendall(struct.pack("<2i", me, process))
            for process, link in one.sockets.items():
                assert struct.unpack("<2i", links.receive_exactly(link, 8)) == (
                    process,
                    me,
                )
            processes.barrier("said")
            return sorted(one.sockets)

    with concurrent.futures.ThreadPoolExecutor(count) as threads:
        running = [threads.submit(body, me) for me in range(count)]
        return [one.exception() or one.result() for one in running]


def everybody(count):
    return [[p for p in range(count) if p != me] for me in range(count)]


def call(one):
    """A connection to the listener of `one`, which only its name was asked."""
    stranger = socket.socket(socket.AF_UNIX)
    stranger.connect(links._address(one.host["socket"]))
    return stranger


class TestLinks:
    def test_every_pair(self):
        assert connect(9) == everybody(9)

    def test_another_host(self):
        for found in connect(2, boot_id="other", host="far"):
            assert "process 1: cannot reach process 0: it belongs to another" in found
            assert "another host (far" in found

    def test_another_user(self):
        for found in connect(2, uid=-5):
            assert "it belongs to another user" in found

    def test_equal_identity_proves_nothing(self):
        for found in connect(2, socket="0" * 32):
            assert "no socket of that process here (Connection refused)" in found
            assert "containers or network namespaces" in found

    def test_a_process_that_fails_before_it_calls(self):
        def meddle(me, one):
            if me == 1:
                raise ZeroDivisionError

        first, second, third = connect(3, meddle, timeout_s=60.0)
        assert isinstance(second, ZeroDivisionError)
        for error in (first, third):
            assert "hosts: process 1 failed: ZeroDivisionError" in str(error)


HELLO = links._HELLO.pack(1, bytes(16))


class TestStrangers:
    """Who finds the name of a socket and calls before the process does."""

    @pytest.mark.parametrize(
        "said",
        [b"", HELLO[:5], HELLO, b"GET / HTTP/1.1\r\n" * 1000],
        ids=["silent", "slow", "wrong_secret", "much"],
    )
    @pytest.mark.parametrize("hangs_up", [True, False])
    def test_of_the_same_user(self, said, hangs_up):
        with contextlib.ExitStack() as strangers:

            def meddle(me, one):
                for _ in range(20):
                    stranger = call(one)
                    (contextlib.ExitStack() if hangs_up else strangers).callback(
                        stranger.close
                    )
                    with contextlib.suppress(OSError):
                        stranger.sendall(said)
                    if hangs_up:
                        stranger.close()

            assert connect(3, meddle) == everybody(3)

    @pytest.mark.skipif(os.getuid() != 0, reason="only root becomes somebody else")
    def test_of_another_user(self):
        """They keep calling, faster than the queue of the socket is long."""
        caller = pathlib.Path(__file__).parent / "stranger.py"
        with subprocess.Popen(
            [sys.executable, caller],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as stranger:

            def meddle(me, one):
                if me == 0:
                    stranger.stdin.write(one.host["socket"] + "\n")
                    stranger.stdin.flush()
                    assert stranger.stdout.readline() == "called\n"

            try:
                assert connect(3, meddle, timeout_s=60.0) == everybody(3)
                assert stranger.poll() is None
            finally:
                stranger.kill()

    def test_another_user_is_dropped_unheard(self, monkeypatch):
        """As above, where nobody can become somebody else."""
        user_of = links._user_of

        def of(link):
            return -1 if link.getpeername() == b"\0jax_ep-stranger" else user_of(link)

        monkeypatch.setattr(links, "_user_of", of)

        def meddle(me, one):
            if me == 0:
                stranger = socket.socket(socket.AF_UNIX)
                stranger.bind("\0jax_ep-stranger")
                stranger.connect(links._address(one.host["socket"]))
                assert stranger.recv(1) == b""  # hung up on
                stranger.close()

        assert connect(2, meddle) == everybody(2)

    def test_who_does_not_say_enough_in_time(self):
        """The deadline is one for all: strangers do not prolong it."""
        with (
            contextlib.closing(Links()) as one,
            call(one),
            pytest.raises(TimeoutError, match="no call from process 1, 2"),
        ):
            one._door.callers((1, 2), 0)

    def test_a_full_queue_is_waited_for(self):
        """As long as nobody accepts; then the call comes through."""
        with socket.socket(socket.AF_UNIX) as listener, contextlib.ExitStack() as all_:
            listener.bind("\0jax_ep-full-queue")
            listener.listen(0)
            first = all_.enter_context(socket.socket(socket.AF_UNIX))
            first.connect("\0jax_ep-full-queue")
            late = all_.enter_context(socket.socket(socket.AF_UNIX))
            with pytest.raises(BlockingIOError):
                links._connect(late, "\0jax_ep-full-queue", 0)
            accepting = threading.Timer(0.2, lambda: listener.accept()[0].close())
            accepting.start()
            links._connect(late, "\0jax_ep-full-queue", float("inf"))
            accepting.join()


class TestDescriptors:
    def test_shared_memory_travels_with_its_proof(self):
        here, there = socket.socketpair()
        memory = links.create_shared_memory(4096, b"proof")
        with here, there:
            links.send_descriptor(here, memory, b"proof")
            received, note = links.receive_descriptor(there)
        os.pwrite(received, b"hello", 100)
        assert (note, os.pread(memory, 5, 100)) == (b"proof", b"hello")
        with pytest.raises(PermissionError):  # sealed: a peer cannot cut it
            os.ftruncate(received, 10)
        os.close(received)
        os.close(memory)

    def test_a_peer_that_hangs_up(self):
        here, there = socket.socketpair()
        with there:
            here.close()
            with pytest.raises(ConnectionError, match="hung up"):
                links.receive_descriptor(there)

    @pytest.mark.parametrize("length", [(1 << 16) + 1, (1 << 32) - 1])
    def test_a_length_beyond_reason(self, length):
        """Refused before anything is waited for; the descriptor goes."""
        here, there = socket.socketpair()
        with here, there:
            socket.send_fds(here, [struct.pack("<I", length)], [here.fileno()])
            message = f"a note of {length} bytes, at most 65536 may come"
            with pytest.raises(OSError, match=message):
                links.receive_descriptor(there)
            with pytest.raises(OSError, match="at most 65536 may come"):
                links.send_descriptor(here, 0, bytes(length & 0x1FFFF))

    @pytest.mark.parametrize("words", [1, 3, 4, 5])
    def test_a_peer_that_stops_inside_a_note(self, words):
        here, there = socket.socketpair()
        with there:
            said = (struct.pack("<I", 100) + b"note")[:words]
            with open(os.devnull) as file:
                socket.send_fds(here, [said], [file.fileno()])
            here.close()
            with pytest.raises(ConnectionError, match="hung up"):
                links.receive_descriptor(there)

    def test_several_descriptors_at_once(self):
        here, there = socket.socketpair()
        with here, there:
            socket.send_fds(here, [struct.pack("<I", 0)], [here.fileno()] * 3)
            with pytest.raises(ConnectionError):
                links.receive_descriptor(there)


def exchange(meddle):
    """What sharing memory gave two processes, the second of which meddles."""
    service, number = fake_service.Service(), next(_numbers)

    def body(me):
        processes = bootstrap.Processes(
            range(2), me, 10.0, client=fake_service.Client(service)
        )
        processes._conversation.number = number
        with (
            contextlib.ExitStack() as stack,
            contextlib.closing(Links()) as one,
            processes.all_or_none(),
        ):
            one.connect(processes, processes.gather("hosts", one.host))
            memory = links.create_shared_memory(4096, b"proof")
            if me == 1:
                memory = meddle(memory)
            stack.callback(os.close, memory)
            theirs = links.exchange_shared_memory(
                processes, one, memory, 4096, b"proof", stack
            )
            return sorted(theirs)

    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        running = [threads.submit(body, me) for me in range(2)]
        return [one.exception() or one.result() for one in running]


class TestSharedMemory:
    def test_of_two_processes(self):
        assert exchange(lambda memory: memory) == [[1], [0]]

    @pytest.mark.parametrize("what", ["unsealed", "short", "other_bytes"])
    def test_that_is_not_what_it_should_be(self, what):
        def meddle(memory):
            os.close(memory)
            if what == "unsealed":
                memory = os.memfd_create("x")
                os.pwrite(memory, b"proof".ljust(4096, b"\0"), 0)
                return memory
            if what == "short":
                return links.create_shared_memory(4095, b"proof")
            return links.create_shared_memory(4096, b"other")

        for error in exchange(meddle):
            assert isinstance(error, bootstrap.CannotWork)
            assert str(error) == (
                "process 0: the shared memory of process 1 is not what that process "
                "made"
            )

    def test_a_process_that_fails_meanwhile(self):
        def meddle(memory):
            os.close(memory)
            raise ZeroDivisionError

        first, second = exchange(meddle)
        assert isinstance(second, ZeroDivisionError)
        assert "process 1 failed: ZeroDivisionError" in str(first)
