"""How processes find each other, with fakes in place of the other processes."""

import json
import os
import socket
import threading
import time
import types

import jax
import pytest

from jax_ep import bootstrap


class Client:
    """A key-value store as JAX's, that nobody else writes to."""

    def __init__(self, **stored):
        self.stored = stored
        self.deleted = []

    def key_value_set(self, key, value):
        self.stored[key] = value

    def blocking_key_value_get(self, key, timeout_ms):
        for suffix, value in self.stored.items():
            if key.endswith(suffix):
                return value
        raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: GetKeyValue() timed out")

    def key_value_delete(self, key):
        self.deleted.append(key)


def processes(members, me, client, timeout_s=0.2):
    return bootstrap.Processes(members, me, timeout_s, client=client)


class TestDistributedClient:
    def test_jax_has_it_where_jax_ep_looks(self):
        """Fails when JAX moves or renames what this package uses of it."""
        from jax._src import distributed

        assert hasattr(distributed.global_state, "client")
        client = jax._src.lib._jax.DistributedRuntimeClient
        for name in bootstrap._METHODS:
            assert hasattr(client, name), name

    def test_not_initialized(self, monkeypatch):
        from jax._src import distributed

        monkeypatch.setattr(distributed.global_state, "client", None)
        with pytest.raises(RuntimeError, match=r"needs jax.distributed.initialize\(\)"):
            bootstrap.distributed_client()

    def test_moved(self, monkeypatch):
        from jax._src import distributed

        monkeypatch.delattr(distributed, "global_state")
        with pytest.raises(RuntimeError, match=r"has no jax\._src\.distributed"):
            bootstrap.distributed_client()

    def test_lacks_a_method(self, monkeypatch):
        from jax._src import distributed

        client = types.SimpleNamespace(key_value_set=None, key_value_delete=None)
        monkeypatch.setattr(distributed.global_state, "client", client)
        with pytest.raises(RuntimeError, match="lacks blocking_key_value_get"):
            bootstrap.distributed_client()


class TestProcesses:
    def test_gather(self):
        client = Client(**{"/a/7": json.dumps([1]), "/b/7": json.dumps("x")})
        group = processes([7, 3], 3, client)
        assert (group.members, group.position, group.others) == ((3, 7), 0, (7,))
        assert group.gather("a", {"k": 2}) == {3: {"k": 2}, 7: [1]}
        assert client.deleted == []
        assert group.gather("b", None) == {3: None, 7: "x"}
        assert [key.rsplit("/", 2)[1:] for key in client.deleted] == [["a", "3"]]

    def test_names_all_that_did_not_come(self):
        group = processes([0, 4, 5, 6], 4, Client(**{"/a/5": "1"}))
        with pytest.raises(RuntimeError) as error:
            group.gather("a", 1)
        assert (
            "a: process 4 waited 0.2 s for process 0, process 6, which did not come"
            in str(error.value)
        )

    def test_a_service_that_does_not_answer(self):
        """As where the network swallows what is sent."""
        client, answer = Client(), threading.Event()

        def silent(key, value):
            answer.wait()

        client.key_value_set = silent
        start = time.monotonic()
        with pytest.raises(
            RuntimeError,
            match=r"^jax_ep.Communicator: a: JAX's distributed client failed: JAX's "
            r"service, which runs in process 0, did not answer within 0\.2 s$",
        ):
            processes([0, 1], 1, client).gather("a", 1)
        assert time.monotonic() - start < 5
        answer.set()

    @pytest.mark.parametrize("name", ["key_value_set", "blocking_key_value_get"])
    def test_a_service_that_is_gone(self, name):
        def gone(*args):
            raise jax.errors.JaxRuntimeError("UNAVAILABLE: connection reset")

        client = Client()
        setattr(client, name, gone)
        with pytest.raises(
            RuntimeError,
            match=r"failed.*: JAX's service, which runs in process 0: UNA",
        ):
            processes([0, 1], 1, client).gather("a", 1)

    def test_numbers_count_up_for_the_same_processes(self):
        first, other, second = (
            processes(members, 20, Client())
            for members in ([20, 21], [20, 22], [21, 20])
        )
        assert (first.number, other.number, second.number) == (0, 0, 1)

    def test_agree_tells_everybodys_problem(self):
        group = processes([0, 1], 0, Client(**{"/x/1": json.dumps("no memory")}))
        assert group.agree("x", None) == "process 1: no memory"
        group = processes([0, 1], 0, Client(**{"/x/1": "null"}))
        assert group.agree("x", None) is None


def test_compare_arguments_shows_both():
    same = {"axis_name": "ep", "timeout_s": 3.0}
    name = "process {}".format
    bootstrap.compare_arguments({0: same, 1: dict(same)}, name)
    with pytest.raises(ValueError) as error:
        bootstrap.compare_arguments({0: same, 1: same, 4: {"axis_name": "x"}}, name)
    assert str(error.value) == (
        "jax_ep.Communicator: processes must agree; process 0 has axis_name = 'ep', "
        "timeout_s = 3.0 but process 4 has axis_name = 'x', timeout_s = None"
    )


class TestLinks:
    HOST = bootstrap.host_identity()

    def connect(self, **changes):
        """Process 1's side, towards a process 0 that is not there."""
        links = bootstrap.Links()
        client = Client(**{"/connections/0": "null"})
        hosts = {
            0: {**self.HOST, "address": "0" * 32, **changes},
            1: links.host,
        }
        return links.connect(processes([0, 1], 1, client), hosts)

    def test_another_host(self):
        found = self.connect(boot_id="other", host="far")
        assert "process 1: cannot reach process 0: it belongs to another host" in found

    def test_another_user(self):
        assert "it belongs to another user" in self.connect(uid=-5)

    def test_equal_identity_proves_nothing(self):
        found = self.connect()
        assert "no socket of that process here (Connection refused)" in found
        assert "containers or network namespaces" in found


class TestDescriptors:
    def test_shared_memory_travels_with_its_proof(self):
        here, there = socket.socketpair()
        memory = bootstrap.create_shared_memory(4096, b"proof")
        with here, there:
            bootstrap.send_descriptor(here, memory, b"proof")
            received, note = bootstrap.receive_descriptor(there)
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
                bootstrap.receive_descriptor(there)
