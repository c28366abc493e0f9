"""How processes compare notes: threads in their place, on a service made of Python
and on JAX's own.
"""

import concurrent.futures
import itertools
import re
import threading
import types

import fake_service
import jax
import pytest

from jax_ep._setup import bootstrap

_numbers = itertools.count(10_000)


class Job:
    """Processes of one conversation, each in a thread."""

    def __init__(self, count, clients=None, timeout_s=5.0):
        service = fake_service.Service()
        self.clients = clients or [fake_service.Client(service) for _ in range(count)]
        self.service = service
        number = next(_numbers)
        self.processes = []
        for me in range(count):
            one = bootstrap.Processes(
                range(count), me, timeout_s, client=self.clients[me]
            )
            one._conversation.number = number
            self.processes.append(one)

    def run(self, body, absent=()):
        """What body(processes, me) gave or raised, by process."""
        members = [p for p in self.processes if p.me not in absent]
        with concurrent.futures.ThreadPoolExecutor(len(members)) as threads:
            running = [threads.submit(body, one, one.me) for one in members]
            return [one.exception() or one.result() for one in running]

    def requests(self):
        return sum(client.requests.total() for client in self.clients)


def messages(outcomes):
    assert all(isinstance(one, RuntimeError) for one in outcomes), outcomes
    return {re.sub(r"process \d+ waited", "process N waited", str(e)) for e in outcomes}


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
        with pytest.raises(
            RuntimeError, match="lacks blocking_key_value_get, key_value_dir_get"
        ):
            bootstrap.distributed_client()


class TestProcesses:
    @pytest.mark.parametrize("count", [1, 2, 5])
    def test_gather(self, count):
        job = Job(count)

        def body(processes, me):
            first = processes.gather("a", {"k": me})
            return first, processes.gather("b", None), processes.gather("c", [me])

        everybody = range(count)
        right = (
            {p: {"k": p} for p in everybody},
            dict.fromkeys(everybody),
            {p: [p] for p in everybody},
        )
        assert job.run(body) == [right] * count
        # What all have read is gone: of one step the notes and the answer stand.
        assert len(job.service.values) == count + 1

    def test_a_part_hears_its_members_and_everybodys_problem(self):
        job = Job(4)

        def body(processes, me):
            part = processes.part([me, me ^ 1])
            assert (part.position, part.others) == (me & 1, (me ^ 1,))
            found = part.gather("a", me)
            return found, part.agree("b", "broken" if me == 2 else None)

        for me, (found, problem) in enumerate(job.run(body)):
            assert found == {me & ~1: me & ~1, me | 1: me | 1}
            assert problem == "process 2: broken"

    def test_names_all_that_did_not_come(self):
        job = Job(5, timeout_s=0.3)
        told = messages(job.run(lambda one, _: one.gather("a", 1), absent=(2, 4)))
        assert len(told) == 1
        assert (
            "a: process N waited 0.3 s for process 2, process 4, which did not come"
            in told.pop()
        )

    @pytest.mark.parametrize("count", [2, 3])
    def test_the_one_that_collects_does_not_come(self, count):
        job = Job(count, timeout_s=0.3)
        told = messages(job.run(lambda one, _: one.gather("a", 1), absent=(0,)))
        assert all("waited 0.3 s for process 0, which did" in text for text in told)

    def test_the_one_that_collects_dies_between_its_note_and_the_answer(self):
        job = Job(3, timeout_s=0.3)

        def body(one, me):
            if me == 0:
                one._conversation._set(0, 0, {"what": "a", "value": [1, None]})
                return RuntimeError("process N waited 0.3 s for process 0, which did")
            return one.gather("a", 1)

        told = messages(job.run(body))
        assert all("waited 0.3 s for process 0, which did" in text for text in told)

    def test_who_comes_too_late_is_told(self):
        job = Job(2, timeout_s=0.3)
        gone = threading.Event()

        def body(one, me):
            if me == 1:
                gone.wait()
            try:
                return one.gather("a", 1)
            finally:
                gone.set()

        early, late = job.run(body)
        assert "process 0 waited 0.3 s for process 1" in str(early)
        assert str(early) == str(late)

    def test_processes_at_different_steps_are_told_at_once(self):
        job = Job(3, timeout_s=60.0)
        told = messages(
            job.run(lambda one, me: one.gather("create" if me < 2 else "close", 1))
        )
        apart = "different steps: process 0 at 'create', process 2 at 'close'"
        assert all(apart in text for text in told)

    @pytest.mark.parametrize("failing", [0, 1, 3])
    @pytest.mark.parametrize("error", [ValueError, KeyError, KeyboardInterrupt])
    def test_a_process_that_fails_reaches_all_at_once(self, failing, error):
        job = Job(4, timeout_s=60.0)

        def body(one, me):
            with one.all_or_none():
                one.barrier("a")
                if me == failing:
                    raise error("odd")
                one.barrier("b")

        for me, outcome in enumerate(job.run(body)):
            if me == failing:
                assert type(outcome) is error
            else:
                assert type(outcome) is RuntimeError
                text = f"b: process {failing} failed: {error.__name__}: "
                assert text in str(outcome) and "odd" in str(outcome)

    def test_a_process_that_fails_reaches_who_waits_for_another(self):
        """Process 3 neither comes nor fails; nobody waits for it any more."""
        job = Job(4, timeout_s=60.0)

        def body(one, me):
            with one.all_or_none():
                if me == 1:
                    raise ValueError("odd")
                one.barrier("a")

        told = job.run(body, absent=(3,))
        assert [type(one) for one in told] == [RuntimeError, ValueError, RuntimeError]
        assert all("process 1 failed: ValueError: odd" in str(told[i]) for i in (0, 2))

    def test_a_service_that_fails(self):
        job = Job(2)

        def lost(*_):
            raise jax.errors.JaxRuntimeError("UNAVAILABLE: gone")

        job.clients[1]._methods["key_value_set"] = lost
        (error,) = job.run(lambda one, _: one.gather("a", 1), absent=(0,))
        assert str(error) == (
            "jax_ep.Communicator: a: JAX's distributed client failed: JAX's service, "
            "which runs in process 0: UNAVAILABLE: gone"
        )

    def test_a_service_that_does_not_answer(self):
        """As where the network swallows what is sent."""
        job, answer, asked = Job(2, timeout_s=1.0), threading.Event(), []

        def silent(*arguments):
            asked.append(arguments)
            answer.wait()

        def gather(one, _):
            with one.all_or_none():
                one.gather("a", 1)

        job.clients[1]._methods["key_value_set"] = silent
        (error,) = job.run(gather, absent=(0,))
        answer.set()
        # Nobody is told of the failure by the same service: that would take as long.
        assert len(asked) == 1
        assert str(error) == (
            "jax_ep.Communicator: a: JAX's distributed client failed: JAX's service, "
            "which runs in process 0, did not answer within 1.0 s"
        )

    def test_numbers_count_up_for_the_same_processes(self):
        client = fake_service.Client()
        first, other, second = (
            bootstrap.Processes(members, 20, 1.0, client=client)._conversation.number
            for members in ([20, 21], [20, 22], [21, 20])
        )
        assert (first, other, second) == (0, 0, 1)

    def test_agree_tells_everybodys_problem(self):
        job = Job(3)

        def body(one, me):
            return one.agree("x", f"no {me}" if me else None), one.agree("y", None)

        assert job.run(body) == [("process 1: no 1; process 2: no 2", None)] * 3


def steps(number):
    def body(one, me):
        for step in range(number):
            assert len(one.gather(f"step {step}", "x" * 300)) == len(one.members)

    return body


class TestRequests:
    """Two a process and step, and a few."""

    def test_of_256_processes(self):
        job = Job(256, timeout_s=100.0)
        assert job.run(steps(4)) == [None] * 256
        # The notes and answers, and how often the first one looks.
        assert 4 * 2 * 256 < job.requests() < 4 * (2 * 256 + 40)

    def test_of_a_real_service(self):
        with fake_service.real_clients(16) as real:
            clients = [fake_service.Client(real=client) for client in real]
            job = Job(16, clients, timeout_s=100.0)
            assert job.run(steps(10)) == [None] * 16
            assert job.requests() < 10 * (2 * 16 + 30)
            left = real[0].key_value_dir_get(job.processes[0]._conversation._key(8))
            assert left == []

    def test_who_is_missing_of_a_real_service(self):
        with fake_service.real_clients(3) as real:
            clients = [fake_service.Client(real=client) for client in real]
            job = Job(3, clients, timeout_s=1.5)
            told = job.run(lambda one, _: one.gather("a", 1), absent=(1,))
            for error in told:
                assert "waited 1.5 s for process 1, which did not" in str(error)


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
