"""What one process of several does in processes_test.py: one function a test.

launch.py starts it; the arguments after the place are a function's name and its
own. It prints what the test waits for, and ends with an error that it must not
have got.
"""

import contextlib
import ctypes
import gc
import itertools
import os
import pathlib
import random
import signal
import time
import warnings

import jax
import jax.numpy as jnp
import launch
import numpy as np
import on_device
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep._setup import (
    backends,
    bootstrap,
    fabric,
    node_wire,
    peer_memory,
    reach,
    window_memory,
)
from jax_ep._setup.native_resource import Memory

warnings.simplefilter("error")
TOKENS, COLUMNS = 16, 24


def say(*words):
    print(*words, flush=True)


def mesh(axis="ep"):
    return jax.make_mesh((jax.device_count(),), (axis,))


def communicator(timeout_s=20.0, **options):
    return jax_ep.Communicator(mesh(), "ep", timeout_s=timeout_s, **options)


def put(comm, array):
    sharding = NamedSharding(comm.mesh, P(comm.axis_name))
    return jax.make_array_from_callback(array.shape, sharding, lambda i: array[i])


def on_ranks(comm, body):
    spec = P(comm.axis_name)
    return jax.jit(jax.shard_map(body, mesh=comm.mesh, in_specs=spec, out_specs=spec))


def inputs(comm, columns=COLUMNS):
    """(ids, x): every token goes to two ranks, one of them the next."""
    token = np.arange(comm.num_ranks * TOKENS)
    rank = token // TOKENS
    ids = np.stack([rank, (rank + 1 + token % 2) % comm.num_ranks], -1)
    x = (token[:, None] * 5 + np.arange(columns) % 7).astype(np.float32)
    return put(comm, ids.astype(np.int32)), put(comm, x)


def there_and_back(comm):
    """x -> 2 x, by way of two ranks."""

    def body(ids, x):
        plan = jax_ep.make_plan(ids, comm=comm, num_experts=comm.num_ranks)
        return jax_ep.combine(jax_ep.dispatch(x, plan), plan)

    return on_ranks(comm, body)


def assert_right(out, x):
    for got, sent in zip(out.addressable_shards, x.addressable_shards):
        destinations = 2 if out.shape[0] > TOKENS else 1
        np.testing.assert_array_equal(got.data, destinations * np.asarray(sent.data))


def fails(function, *words):
    """Calls it; says the error, which must name all `words`; returns seconds."""
    start = time.monotonic()
    try:
        jax.block_until_ready(function())
    except Exception as error:
        seconds = time.monotonic() - start
        say(f"FAILED after {seconds:.1f} s: {type(error).__name__}: {error}")
        missing = [word for word in words if word not in str(error)]
        assert not missing, f"not in the error: {missing}"
        return seconds
    raise AssertionError(f"no error; it should have said {words}")


def leave(*, together=False, without=()):
    """Ends without JAX's farewell, which waits for processes that are gone.

    JAX ends every process whose process 0 has left: `together` has it wait for all
    but those in `without`, which are dead.
    """
    if together:
        alive = [p for p in range(jax.process_count()) if p not in without]
        bootstrap.distributed_client().wait_at_barrier("leave", 60_000, alive)
        if jax.process_index() == 0:
            time.sleep(0.5)
    say("END")
    os._exit(0)


# Programs ---------------------------------------------------------------------


def many_ranks():
    """Exchanges over more ranks than a word has bits, checked where they are."""
    comm = communicator(timeout_s=60.0)
    ranks = comm.num_ranks
    assert ranks > 64
    assert comm.backend == "cpu"
    traffic = on_device.Traffic(ranks, 7, 4, 2 * ranks + 3, 12, capacity=5 * ranks)

    def body(first):
        # Everything to rank 0, which drops some; and to all of them.
        steps = first[0], first[0] + 1
        return jnp.stack([traffic.exchange(comm, step).wrong for step in steps])[None]

    wrong = on_ranks(comm, body)(put(comm, np.full(ranks, 3, np.int32)))
    for shard in wrong.addressable_shards:
        assert not np.asarray(shard.data).any()
    comm.close()


def works():
    with communicator() as comm:
        ids, x = inputs(comm)
        assert_right(there_and_back(comm)(ids, x), x)


def killed_in_set_up():
    if jax.process_index() == 1:
        say("dies")
        os.kill(os.getpid(), signal.SIGKILL)
    create = lambda: communicator(setup_timeout_s=3.0)  # noqa: E731
    assert fails(create, "process 1", "waited 3.0 s") < 4.5
    leave()


def killed_inside_set_up():
    """At its third step, of three processes."""
    if jax.process_index() == 2:
        fail_at(3, lambda: os.kill(os.getpid(), signal.SIGKILL))
    create = lambda: communicator(setup_timeout_s=3.0)  # noqa: E731
    assert fails(create, "process 2", "waited 3.0 s") < 4.5
    leave()


class Injected(Exception):
    """What goes wrong on purpose."""


def fail_at(step, act, when="before"):
    """The set-up's so-many-th step has `act` called before or after it."""
    gather, steps = bootstrap.Processes.gather, itertools.count(1)

    def counted(self, what, value, problem=None):
        its = next(steps) == step
        if its and when == "before":
            act()
        found = gather(self, what, value, problem)
        if its and when == "after":
            act()
        return found

    bootstrap.Processes.gather = counted
    return gather


def held():
    """What a set-up may leave: descriptors, mappings, threads of its own."""
    gc.collect()
    tasks = pathlib.Path("/proc/self/task")
    mine = (tasks / str(os.getpid()) / "comm").read_text()
    names = []
    for task in tasks.iterdir():
        # gRPC's come and go.
        with contextlib.suppress(OSError):
            names.append((task / "comm").read_text())
    maps = pathlib.Path("/proc/self/maps").read_text()
    files = pathlib.Path("/proc/self/fd")
    targets = []
    for file in files.iterdir():
        with contextlib.suppress(OSError):
            targets.append(os.readlink(file))
    return {
        "mappings": maps.count("memfd:jax_ep"),
        "threads": names.count(mine),
        "memory": sum("memfd:jax_ep" in target for target in targets),
        "sockets": len(unix_sockets() & set(targets)),
    }


def unix_sockets():
    lines = pathlib.Path("/proc/net/unix").read_text().splitlines()[1:]
    return {f"socket:[{line.split()[6]}]" for line in lines}


def fails_at_each_step(when, node_size):
    """Process 1 fails at each step in turn, all give everything back, and go on."""

    def act():
        raise Injected

    options = {"node_size": int(node_size)} if int(node_size) else {}
    with communicator(**options):  # what JAX starts at first sight stays
        pass
    before, its, error = held(), jax.process_index() == 1, None
    for step in range(1, 100):
        gather = fail_at(step if its else 0, act, when)
        comm, error = None, None
        try:
            comm = communicator(**options)
        except (Injected, RuntimeError) as raised:
            error = raised.with_traceback(None)
        finally:
            bootstrap.Processes.gather = gather
        if comm is not None:
            comm._finalizer()
        client = bootstrap.distributed_client()
        if jax.process_index() == 0:
            client.key_value_set(f"step {step}", "fails" if error else "works")
        # What the others hold of this one goes with theirs.
        client.wait_at_barrier(f"step {step}", 60_000)
        assert held() == before, (step, held(), before)
        # Behind the last step the others do not hear of it.
        if client.blocking_key_value_get(f"step {step}", 1000) == "works":
            break
        right = Injected if its else RuntimeError
        assert isinstance(error, right), error
        assert its or "process 1 (ranks 2, 3) failed: Injected" in str(error), error
    say("STEPS", step)
    assert (error is None) == (not its or when == "before"), error
    with communicator(**options) as comm:
        ids, x = inputs(comm)
        assert_right(there_and_back(comm)(ids, x), x)


def killed_between_calls():
    comm = communicator(30.0)
    ids, x = inputs(comm)
    step = there_and_back(comm)
    for _ in range(3):
        assert_right(step(ids, x), x)
    if jax.process_index() == 1:
        say("dies")
        os.kill(os.getpid(), signal.SIGKILL)
    seconds = fails(lambda: step(ids, x), "process 1", "has ended", "jax_ep plan")
    assert seconds < 10
    # And at once from then on.
    assert fails(lambda: step(ids, x), "process 1", "has ended") < 2
    leave()


def killed_in_another_node():
    """Process 2 of 4, two nodes of two processes."""
    comm = communicator(4.0, node_size=2)
    ids, x = inputs(comm)
    step = there_and_back(comm)
    assert_right(step(ids, x), x)
    if jax.process_index() == 2:
        say("dies")
        os.kill(os.getpid(), signal.SIGKILL)
    if jax.process_index() == 1:
        # Neither on its node nor on its rail: the others do not come.
        seconds = fails(lambda: step(ids, x), "rank")
    else:
        seconds = fails(lambda: step(ids, x), "process 2", "has ended")
    assert seconds < 9
    # Nobody's end is to be taken for the one above.
    time.sleep(10 - seconds + (jax.process_index() == 0))
    leave()


class TwoHosts:
    """Makes set-up see GPUs on two hosts, half of the processes on each.

    GPUs and NCCL are left out; what is said between processes is not.
    """

    def __init__(self, problems=(), domain="", no_handles=""):
        self.half = jax.process_count() // 2
        self.problems = problems  # processes whose GPUs do not work
        self.released = []
        setattr(backends.Job, "platforms", {"gpu"})  # noqa: B010
        bootstrap.host_identity = lambda: {
            "boot_id": f"boot-{jax.process_index() // self.half}",
            "host": "cloned",
            "uid": os.getuid(),
        }
        fabric.note = lambda devices: {"domain": domain, "problem": no_handles}
        reach.unsupported_reason = lambda groups: None
        reach.places = lambda groups, processes: {}
        reach.unsupported_between = lambda groups, where, processes: None
        reach.why_torn = lambda groups, where: None
        peer_memory.set_up_cuda = self.set_up_cuda
        node_wire.set_up_wire = self.set_up_wire
        window_memory.free_bytes = lambda groups: 1 << 40
        window_memory.set_up_windows = self.set_up_windows

    def set_up_cuda(self, identity, groups, *, processes, links, **_):
        self.nodes, self.near = groups, processes.members
        self.sockets = sockets(processes, links)
        problem = "broken" if processes.me in self.problems else None
        processes.gather("memory", None, problem)
        return Memory(lambda: self.released.append("node"), 1)

    def set_up_windows(self, identity, groups, size, *, processes, links, **_):
        self.window_near = processes.members
        self.window_sockets = sockets(processes, links)
        return lambda: self.released.append("windows")

    def set_up_wire(self, identity, rails, *, processes, **_):
        self.rails, self.all = rails, processes.members
        return lambda: self.released.append("rail")


def sockets(processes, links):
    """Whom this one has sockets to, and itself; of several hosts nobody has."""
    return links and set(links.sockets) | {processes.me}


def two_hosts():
    """Nodes are found, each host's processes meet apart, all get the same answer."""
    hosts = TwoHosts()
    me, count = jax.process_index(), jax.process_count()
    half = count // 2
    with communicator(backend="cuda") as comm:
        assert (comm.num_nodes, comm.node_size) == (2, half), comm
        mine = range(me // half * half, me // half * half + half)
        assert hosts.near == tuple(mine), hosts.near
        assert hosts.sockets == set(mine)
        assert hosts.all == tuple(range(count))
        ids = [[d.process_index for d in node] for node in hosts.nodes]
        assert ids == [list(range(half)), list(range(half, count))]
        ids = [[d.process_index for d in rail] for rail in hosts.rails]
        assert ids == [[r, r + half] for r in range(half)]
    assert hosts.released == ["rail", "node"]

    # Interleaved: no two neighbours on one host.
    devices = np.array(jax.devices()).reshape(2, -1).T.ravel()
    over = jax.sharding.Mesh(devices, ("ep",))
    with pytest.raises(ValueError, match="found 1 of cloned boot-0, 1 of cloned boot"):
        jax_ep.Communicator(over, "ep", backend="cuda", timeout_s=20.0)

    # Groups that stay on their hosts: one node each.
    over = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, -1), ("data", "ep"))
    with jax_ep.Communicator(over, "ep", backend="cuda", timeout_s=20.0) as comm:
        assert (comm.num_nodes, comm.node_size) == (1, half)
        assert hosts.near == tuple(mine), hosts.near
        with jax_ep.LowLatencyBuffer(comm, max_tokens=2, hidden=16, num_experts=half):
            assert hosts.window_near == tuple(mine)
            assert hosts.window_sockets == set(mine)
    assert hosts.released == ["rail", "node", "windows", "node"]

    # An NVLink domain over both is a node, and hosts in it where asked for.
    hosts = TwoHosts(domain="x")
    with communicator(backend="cuda") as comm:
        assert (comm.num_nodes, comm.node_size) == (1, count), comm
        assert (hosts.near, hosts.sockets) == (tuple(range(count)), None)
        with jax_ep.LowLatencyBuffer(comm, max_tokens=2, hidden=16, num_experts=count):
            assert hosts.window_near == tuple(range(count))
            assert hosts.window_sockets is None
    with communicator(backend="cuda", node_size=half) as comm:
        assert (comm.num_nodes, comm.node_size) == (2, half), comm
        assert (hosts.near, hosts.sockets) == (tuple(mine), set(mine))
    hosts = TwoHosts(domain="x", no_handles="no channel")
    with (
        pytest.warns(UserWarning, match=f"one node: .*process {count - 1}: no channel"),
        communicator(backend="cuda") as comm,
    ):
        assert (comm.num_nodes, comm.node_size) == (2, half), comm

    TwoHosts(problems=(count - 1,))
    with pytest.raises(RuntimeError, match=f"process {count - 1} .*: broken"):
        communicator(backend="cuda")


def random_delays_in_nodes(steps):
    random_delays(steps, node_size=2)


def killed_inside_a_dispatch():
    """A large one over tiny rings: the kill comes while rows are on their way."""
    comm = communicator(30.0, num_channels=1, staging_bytes=1 << 16)
    ids, x = inputs(comm, columns=1 << 16)

    def body(ids, x):
        plan = jax_ep.make_plan(ids, comm=comm, num_experts=comm.num_ranks)

        def again(_, x):
            return jax_ep.dispatch(x, plan)[:TOKENS]

        return lax.fori_loop(0, 100_000, again, x)

    say("runs")
    out = on_ranks(comm, body)(ids, x)
    fails(lambda: out, "process 1", "has ended", "jax_ep dispatch")
    leave()


def stopped_for_a_while():
    comm = communicator(20.0)
    ids, x = inputs(comm)
    step = there_and_back(comm)
    assert_right(step(ids, x), x)
    say("runs")
    start = time.monotonic()
    while time.monotonic() - start < 6:
        assert_right(step(ids, x), x)
        # All stop after the same number of steps.
        if stop_together(comm, time.monotonic() - start > 5):
            break
    comm.close()


def stop_together(comm, mine):
    values = np.full((comm.num_ranks,), mine, np.int32)
    total = on_ranks(comm, lambda v: lax.psum(v, "ep"))(put(comm, values))
    return bool(np.asarray(total.addressable_shards[0].data)[0])


def stopped_for_good():
    comm = communicator(3.0)
    ids, x = inputs(comm)
    step = there_and_back(comm)
    assert_right(step(ids, x), x)
    say("runs")
    if jax.process_index() == 1:
        time.sleep(100)
    time.sleep(1)
    seconds = fails(
        lambda: step(ids, x), "waited 3.0 s", "missing ranks: 2, 3 (process 1)"
    )
    assert 2.5 < seconds < 6
    leave()


def random_delays(steps, **options):
    """One process comes late to every step, by another time."""
    comm = communicator(**options)
    ids, x = inputs(comm)
    step = there_and_back(comm)
    delays = random.Random(0)
    for number in range(int(steps)):
        if jax.process_index() == number % jax.process_count():
            time.sleep(delays.random() * 0.002)
        out = step(ids, x)
        if number % 10 == 0:
            assert_right(out, x)
    assert_right(step(ids, x), x)
    comm.close()


def other_operation():
    """Ranks 0 and 1 dispatch where the others combine."""
    comm = communicator(3.0)
    ids, x = inputs(comm)

    def body(ids, x):
        plan = jax_ep.make_plan(
            ids, comm=comm, num_experts=comm.num_ranks, capacity=TOKENS
        )
        return lax.cond(
            lax.axis_index("ep") < 2,
            lambda x: jax_ep.dispatch(x, plan),
            lambda x: jax_ep.combine(x, plan),
            x,
        )

    there = "dispatch" if jax.process_index() else "combine"
    missing = "0, 1 (process 0)" if jax.process_index() else "2, 3 (process 1)"
    fails(
        lambda: on_ranks(comm, body)(ids, x),
        f"missing ranks: {missing}",
        f"waiting in {there} (channel",
    )
    leave(together=True)


def other_shapes():
    """Processes whose programs differ in a size that no rank can see."""
    comm = communicator(3.0)
    ids, x = inputs(comm)
    columns = 8 + jax.process_index()

    def body(ids, x):
        plan = jax_ep.make_plan(ids, comm=comm, num_experts=comm.num_ranks)
        return jax_ep.dispatch(x[:, :columns], plan)

    fails(
        lambda: on_ranks(comm, body)(ids, x),
        "missing ranks: ",
        "of another run or program",
    )
    leave(together=True)


def other_arguments(axis, staging_bytes):
    other = jax.process_index() == 1
    over = mesh(axis if other else "ep")
    options = {"staging_bytes": int(staging_bytes)} if other else {}
    fails(
        lambda: jax_ep.Communicator(over, over.axis_names[0], timeout_s=20, **options),
        "process 0",
        "process 1",
        "but",
    )
    leave(together=True)


def on_other_mesh(comm):
    """Runs `there_and_back` on its mesh, and returns what runs it on another one.

    There the first two devices have changed places; JAX does not lower it again.
    """
    devices = comm.mesh.devices[[1, 0, *range(2, comm.num_ranks)]]
    other = jax.sharding.Mesh(devices, ("ep",), axis_types=comm.mesh.axis_types)

    def body(ids, x):
        plan = jax_ep.make_plan(ids, comm=comm, num_experts=comm.num_ranks)
        return jax_ep.combine(jax_ep.dispatch(x, plan), plan)

    f = jax.jit(jax.shard_map(body, in_specs=P("ep"), out_specs=P("ep")))

    def run(mesh):
        args = [
            jax.make_array_from_callback(
                a.shape, NamedSharding(mesh, P("ep")), lambda i, a=a: a[i]
            )
            for a in host
        ]
        with jax.set_mesh(mesh):
            return f(*args), args[1]

    token = np.arange(comm.num_ranks * TOKENS)
    ids = np.stack([token, token + 1], -1) % comm.num_ranks
    host = ids.astype(np.int32), (token[:, None] * 3 + np.arange(5)).astype(np.float32)
    assert_right(*run(comm.mesh))
    # On a shared GPU the first trap ends every process, also who still reads rows.
    bootstrap.distributed_client().wait_at_barrier("on its mesh", 60_000)
    return lambda: run(other), lambda: assert_right(*run(comm.mesh))


def other_mesh():
    """Only process 0 has devices that stand elsewhere; all hear of them."""
    with communicator() as comm:
        elsewhere, again = on_other_mesh(comm)
        seconds = fails(lambda: elsewhere()[0], "found its device at position")
        assert seconds < 15
        again()


def never_comes():
    if jax.process_index() == 1:
        time.sleep(100)  # process 0 ends, and JAX ends this one
    create = lambda: communicator(setup_timeout_s=3.0)  # noqa: E731
    seconds = fails(create, "process 1 (ranks 2, 3)", "waited 3.0 s")
    assert seconds < 5
    leave()


def closed_with_work_in_flight():
    comm = communicator()
    ids, x = inputs(comm)
    step = there_and_back(comm)
    assert_right(step(ids, x), x)
    out = x
    for _ in range(10):
        out = step(ids, out)
    comm.close()
    comm.close()
    assert comm.closed
    np.testing.assert_array_equal(
        out.addressable_shards[0].data, 1024 * np.asarray(x.addressable_shards[0].data)
    )
    # The executable holds on to what it needs.
    assert_right(step(ids, x), x)
    fails(lambda: there_and_back(comm)(ids, x), "the communicator is closed")


def collected_with_a_live_program():
    comm = communicator()
    ids, x = inputs(comm)
    step = there_and_back(comm).lower(ids, x).compile()
    jax.clear_caches()
    del comm
    gc.collect()
    assert_right(step(ids, x), x)


def created_again_and_again(times):
    """Memory, descriptors and threads are back where they were."""

    def once():
        with communicator() as comm:
            ids, x = inputs(comm)
            assert_right(there_and_back(comm)(ids, x), x)
        del comm
        jax.clear_caches()
        gc.collect()

    def held():
        time.sleep(0.2)
        maps = pathlib.Path("/proc/self/maps").read_text()
        ctypes.CDLL(None).malloc_trim(0)
        status = dict(
            line.split(":", 1)
            for line in pathlib.Path("/proc/self/status").read_text().splitlines()
        )
        return {
            "files": len(os.listdir("/proc/self/fd")),
            "shared": maps.count("memfd:jax_ep"),
            "memory": int(status["VmRSS"].split()[0]) / 1024,
        }

    for _ in range(3):
        once()
    before = held()
    for _ in range(int(times)):
        once()
    after = held()
    say("HELD", before, after)
    assert after["shared"] == 0
    assert after["files"] <= before["files"] + 1
    assert after["memory"] < before["memory"] + 40


def forked():
    comm = communicator()
    ids, x = inputs(comm)
    step = there_and_back(comm)
    assert_right(step(ids, x), x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX's own, about fork
        child = os.fork()
    if child == 0:
        try:
            from jax_ep._data import checks

            checks.check_open(comm, "dispatch")
        except RuntimeError as error:
            say("CHILD", error)
            comm.close()
            os._exit(0)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert status == 0
    assert_right(step(ids, x), x)
    comm.close()


def orphaned_sockets():
    """A forked child does not hide that its parent was killed."""
    comm = communicator(30.0)
    ids, x = inputs(comm)
    step = there_and_back(comm)
    assert_right(step(ids, x), x)
    if jax.process_index() == 1:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if os.fork() == 0:
                time.sleep(15)
                os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    assert fails(lambda: step(ids, x), "process 1", "has ended") < 10
    leave()


def many_at_once(count):
    """Independent operations, which every process runs in an order of its own."""
    comm = communicator(60.0, num_channels=2, staging_bytes=1 << 15)
    ids, x = inputs(comm)
    count = int(count)

    @jax.jit
    def twice(ids, x):  # lowered once: its call sites share channels
        plan = jax_ep.make_plan(ids, comm=comm, num_experts=comm.num_ranks)
        return jax_ep.combine(jax_ep.dispatch(x, plan), plan)

    def body(ids, x):
        parts = [twice(ids, x + float(n)) for n in range(count)]
        return jnp.stack(parts, axis=1)

    step = on_ranks(comm, body)
    for _ in range(3):
        out = step(ids, x)
        for got, sent in zip(out.addressable_shards, x.addressable_shards):
            for n in range(count):
                want = 2 * (np.asarray(sent.data) + np.float32(n))
                np.testing.assert_array_equal(np.asarray(got.data)[:, n], want)
    comm.close()


def two_axes():
    """("data", "ep"): groups inside a process, and groups across all of them."""
    devices = np.array(jax.devices()).reshape(jax.process_count(), -1)
    for layout in (devices, devices.T):
        over = jax.sharding.Mesh(layout, ("data", "ep"))
        with jax_ep.Communicator(over, "ep", timeout_s=20) as comm:
            ranks = comm.num_ranks
            token = np.arange(layout.size * TOKENS)
            x = np.stack([token, token * 3 + 1], -1).astype(np.float32)
            ids = (token % ranks)[:, None].astype(np.int32)
            spec = P(("data", "ep"))

            def body(ids, x, comm=comm):
                plan = jax_ep.make_plan(ids, comm=comm, num_experts=comm.num_ranks)
                return jax_ep.combine(jax_ep.dispatch(x, plan), plan)

            sharding = NamedSharding(over, spec)
            args = [
                jax.make_array_from_callback(a.shape, sharding, lambda i, a=a: a[i])
                for a in (ids, x)
            ]
            out = jax.jit(
                jax.shard_map(body, mesh=over, in_specs=spec, out_specs=spec)
            )(*args)
            for got, sent in zip(out.addressable_shards, args[1].addressable_shards):
                np.testing.assert_array_equal(got.data, sent.data)
            about = comm.describe()
            paths = np.array(about["groups"][0]["paths"])
            inside = layout is devices
            assert (paths == "in-process").all() == inside, paths
            assert paths[0, 0] == "in-process"
            assert about["memory_bytes"] > 0
            say(comm)


if __name__ == "__main__":
    name, *rest = launch.join()
    globals()[name](*rest)
    say("END")
