"""Several nodes: rows cross to each once, sums are the nodes' in their order.

`pytest --node-size=2` runs any other test of operations on nodes, too.
"""

import types

import cases
import harness
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import payloads
import process_runs
import pytest
from jax.sharding import PartitionSpec as P
from processes import run_script

import jax_ep
from jax_ep._setup import backends, topology

pytestmark = [
    pytest.mark.skipif(
        harness.ON_GPU or harness.PROCESSES > 1, reason="nodes of virtual CPU devices"
    ),
    pytest.mark.timeout(900),  # it waits for whole suites
]

SHAPES = ((2, 2), (2, 4), (4, 2), (3, 1))  # nodes, ranks of each
on_each_shape = pytest.mark.parametrize(
    ("nodes", "size"), SHAPES, ids=lambda value: str(value)
)
BY_NAME = {str(case): case for case in cases.CASES}


@pytest.fixture(autouse=True)
def _one_node_again(monkeypatch):
    monkeypatch.setattr(oracle, "NODE_SIZE", None)


def assert_right(case, nodes, size, monkeypatch, node_capacity=None):
    """Plan, dispatch and combine of a case are the oracle's."""
    monkeypatch.setattr(oracle, "NODE_SIZE", size)
    return harness.check_case(case, "cpu", nodes * size, node_capacity)


def _cases_of_shapes():
    """All cases on 2 x 2; elsewhere those that share a program, and some others."""
    for number, (nodes, size) in enumerate(SHAPES):
        own = 0
        for case in cases.CASES + cases.MANY_EXPERTS:
            shared = case.program == cases.CASES[0].program
            own += not shared
            if number == 0 or shared or own % len(SHAPES) == number:
                yield pytest.param(nodes, size, case, id=f"{nodes}-{size}-{case}")


@pytest.mark.parametrize(("nodes", "size", "case"), list(_cases_of_shapes()))
def test_every_case(nodes, size, case, monkeypatch):
    assert_right(case, nodes, size, monkeypatch)


@pytest.mark.parametrize("node_capacity", (1, 5, 12, 100))
@pytest.mark.parametrize(
    "name", ("uniform", "one_rank", "duplicates", "half_capacity", "all_missing")
)
@pytest.mark.parametrize(("nodes", "size"), [(2, 2), (4, 2), (3, 1)])
def test_node_capacity(nodes, size, name, node_capacity, monkeypatch):
    right = assert_right(BY_NAME[name], nodes, size, monkeypatch, node_capacity)
    if (name, node_capacity) == ("one_rank", 5):
        # 13 tokens of every rank of the other nodes, 5 of which cross.
        assert right.node_demand.tolist() == [13] * (nodes - 1) * size + [0] * size
        assert right.fields["num_demand"][-1] == 5 * (nodes - 1) * size + 13 * size


# Gradients and transformations ------------------------------------------------


def _layer(comm, node_capacity=None):
    """(ids, weights, x, w) -> output of a small layer that is exact in float32."""

    def expert(w):
        def apply(rows, group_sizes):
            return jax.lax.ragged_dot(rows, w, group_sizes)

        return apply

    def body(ids, weights, x, w):
        plan = jax_ep.make_plan(
            ids, comm=comm, num_experts=2 * comm.num_ranks, node_capacity=node_capacity
        )
        return jax_ep.moe_with_plan(x, weights, expert(w), plan)

    return body


def _arguments(ranks, tokens=9, top_k=3):
    ids = cases.holes(ranks, tokens, top_k, 2 * ranks).astype(np.int32)
    weights = 1 + cases.lattice(ranks, tokens, top_k).round()
    x = (4 * cases.lattice(ranks, tokens, 8)).round()
    w = (2 * cases.lattice(ranks, 2 * 8, 8)).round().reshape(ranks, 2, 8, 8)
    return ids, weights.astype(np.float32), x, w


def _on(nodes, size):
    return jax_ep.Communicator(
        harness.mesh(nodes * size), "ep", backend="cpu", node_size=size
    )


@on_each_shape
def test_a_layer_and_its_gradients_are_those_of_one_node(nodes, size):
    ids, *arguments = _arguments(nodes * size)

    def program(comm):
        def shard(ids, *arguments):
            args = [a[0] for a in arguments]
            out = _layer(comm)(ids[0], *args)

            def loss(*args):
                return (_layer(comm)(ids[0], *args) ** 2).sum()

            gradients = jax.grad(loss, (0, 1, 2))(*args)
            tangents = jax.jvp(
                lambda x: _layer(comm)(ids[0], args[0], x, args[2]),
                (args[1],),
                (args[1] + 1,),
            )[1]
            return jax.tree.map(lambda a: a[None], (out, gradients, tangents))

        spec = P("ep")
        return jax.jit(
            jax.shard_map(shard, mesh=comm.mesh, in_specs=spec, out_specs=spec)
        )(*jax.device_put((ids, *arguments), jax.NamedSharding(comm.mesh, spec)))

    with _on(nodes, size) as comm, _on(1, nodes * size) as flat:
        got, want = jax.device_get((program(comm), program(flat)))
    # Integers below 2**24 in all sums: their order does not matter.
    payloads.assert_same_trees(got, want, "one node")


def test_what_does_not_cross_has_no_gradient():
    def body(comm, ids, x):
        plan = jax_ep.make_plan(ids, comm=comm, num_experts=4, node_capacity=2)
        gradient = jax.grad(lambda x: jax_ep.dispatch(x, plan).sum())(x)
        ones = jnp.ones(ids.shape)
        options = {"comm": comm, "num_experts": 4, "node_capacity": 2}
        layer = jax_ep.moe(x, ids, ones, lambda rows, _: rows, **options)
        return gradient, layer

    ids = np.full((4, 5, 1), 3, np.int32)
    with _on(2, 2) as comm:
        gradient, layer = harness.run(body, comm, ids, np.ones((4, 5, 3), np.float32))
    assert (layer == gradient).all()
    assert gradient[2:].tolist() == np.ones((2, 5, 3)).tolist()
    assert gradient[:2, :2].all() and not gradient[:2, 2:].any()


@pytest.mark.parametrize("op", ("dispatch", "combine"))
def test_transposes_of_each_other(op):
    """<f(x), y> = <x, f'(y)> with the transpose that JAX finds."""

    def body(comm, ids, x, y):
        plan = jax_ep.make_plan(ids, comm=comm, num_experts=8, node_capacity=4)
        move = getattr(jax_ep, op)
        out, transpose = jax.vjp(lambda x: move(x, plan), x)
        return (out * y).sum(), (x * transpose(y)[0]).sum()

    ids = cases.uniform(4, 6, 3, 8).astype(np.int32)
    tokens, slots = cases.lattice(4, 6, 5), cases.lattice(4, 24, 5)
    with _on(2, 2) as comm:
        x, y = (tokens, slots) if op == "dispatch" else (slots, tokens)
        one, other = harness.run(body, comm, ids, x, y)
    assert one.sum() == other.sum() != 0


def test_flights_are_done_at_their_start():
    def body(comm, ids, x):
        plan = jax_ep.make_plan(ids, comm=comm, num_experts=8)

        def there_and_back(x):
            flight = jax_ep.dispatch_start(x, plan)
            flight, more = jax_ep.overlap(flight, lambda x: 2 * x, x)
            flight = jax_ep.combine_start(jax_ep.dispatch_done(flight), plan)
            return jax_ep.combine_done(flight) + more

        whole = jax_ep.combine(jax_ep.dispatch(x, plan), plan) + 2 * x
        out, transpose = jax.vjp(there_and_back, x)
        return out, whole, transpose(jnp.ones_like(x))[0]

    ids = cases.uniform(4, 6, 3, 8).astype(np.int32)
    with _on(2, 2) as comm:
        out, whole, gradient = harness.run(body, comm, ids, cases.lattice(4, 6, 5))
    assert (out == whole).all()
    owners = [[len(set(token // 2)) for token in rank] for rank in ids]
    assert (gradient[..., 0] == np.array(owners) + 2).all()


@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_operations_and_transformations_on_nodes():
    files = "transforms layer_gradients fp8 dispatch combine"
    # Outside jit every operation of a plan is a program: 550 a test. Nothing of
    # nodes asks for vma there, and inside jit both ways run.
    twice = "no_vma and (eager or around_shard_map)"
    done = run_script(
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", "--node-size=2"),
        *("-k", f"cpu and not ({twice})"),
        *(f"tests/{name}_test.py" for name in files.split()),
        timeout=1500,
    )
    assert done.returncode == 0, done.stdout[-3000:]


# Over several processes -------------------------------------------------------


@pytest.mark.timeout(600)
@pytest.mark.parametrize("staging", ["", "--tiny-staging"], ids=["default", "tiny"])
@pytest.mark.parametrize(("processes", "devices"), [(2, 2), (4, 1)])
def test_operations_between_processes(processes, devices, staging, tmp_path):
    passed = process_runs.run_suite(
        "tests/every_case_test.py",
        *("--node-size=2", *filter(None, [staging])),
        *("-k", "(uniform or holes or top_22 or half or one_rank)"),
        place=(processes, devices),
        logs=tmp_path,
    )
    assert passed >= 5


def test_a_process_of_another_node_is_killed(tmp_path):
    process_runs.run(
        "killed_in_another_node", tmp_path, processes=4, devices=1, killed=[2]
    )


def test_300_steps_with_delays(tmp_path):
    process_runs.run("random_delays_in_nodes", tmp_path, 300, processes=4, devices=1)


# Topology ---------------------------------------------------------------------


def test_describe():
    with _on(2, 2) as comm:
        about = comm.describe()
        near = "in-process"
        assert about["groups"][0]["paths"] == [
            [near, near, "wire", "wire"],
            [near, near, "wire", "wire"],
            ["wire", "wire", near, near],
            ["wire", "wire", near, near],
        ]
        assert (about["num_nodes"], about["node_size"]) == (2, 2)
        assert (comm.num_nodes, comm.node_size) == (2, 2)
        assert "4 ranks on 2 nodes" in str(comm)


def test_plain_jax_has_one_node():
    comm = jax_ep.Communicator(harness.mesh(4), "ep", backend="xla", node_size=2)
    assert (comm.num_nodes, comm.node_size) == (1, 4)


def test_low_latency_buffers_need_one_node():
    with (
        jax_ep.Communicator(harness.mesh(4), "ep", backend="cpu", node_size=2) as comm,
        pytest.raises(ValueError, match="found 2 nodes"),
    ):
        jax_ep.LowLatencyBuffer(comm, max_tokens=4, hidden=8, num_experts=8)


def test_two_groups_of_two_nodes():
    harness.mesh(8)
    mesh = jax.make_mesh((2, 4), ("data", "ep"), devices=jax.devices()[:8])
    x = np.arange(8 * 3, dtype=np.float32).reshape(24, 1)
    ids = (np.arange(24) * 5 % 4).astype(np.int32)[:, None]
    with jax_ep.Communicator(mesh, "ep", backend="cpu", node_size=2) as comm:

        def body(ids, x):
            plan = jax_ep.make_plan(ids, comm=comm, num_experts=4)
            rows = jax_ep.dispatch(x, plan)
            rank = jax.lax.axis_index("ep")
            return jax_ep.combine(rows * (rank + 1).astype(rows.dtype), plan)

        spec = P(("data", "ep"))
        out = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec))(
            *jax.device_put((ids, x), jax.NamedSharding(mesh, spec))
        )
    assert (np.asarray(out) == x * (ids + 1)).all()


@pytest.mark.parametrize("node_size", (0, 3, 8, -1, 2.0, True, "2"))
def test_bad_node_size(node_size):
    with pytest.raises(ValueError, match="node_size must be None or an integer >= 1"):
        jax_ep.Communicator(harness.mesh(4), "ep", node_size=node_size)


def test_bad_node_capacity():
    def make(capacity):
        def body(comm, ids):
            return jax_ep.make_plan(
                ids, comm=comm, num_experts=4, node_capacity=capacity
            ).num_recv

        with _on(2, 2) as comm:
            harness.run(body, comm, np.zeros((4, 3, 1), np.int32))

    with pytest.raises(ValueError, match="node_capacity must be >= 1, found 0"):
        make(0)
    with pytest.raises(TypeError, match="node_capacity must be a Python integer"):
        make(1.5)


def _group(*processes):
    return [types.SimpleNamespace(process_index=p) for p in processes]


@pytest.mark.parametrize(
    ("groups", "hosts", "size"),
    [
        ([(0, 0, 1, 1)], "ab", 2),
        ([(0, 0, 1, 1)], "aa", 4),
        ([(0, 1, 2, 3)], "aabb", 2),
        ([(0, 1), (2, 3)], "aabb", 2),
        ([(0, 2), (1, 3)], "aabb", 1),
        ([tuple(range(72 * 2))], ["a"] * 72 + ["b"] * 72, 72),
    ],
)
def test_nodes_are_found(groups, hosts, size):
    groups = [_group(*group) for group in groups]
    assert topology.find_node_size(groups, dict(enumerate(hosts))) == size


@pytest.mark.parametrize(
    ("groups", "hosts", "found"),
    [
        ([(0, 0, 0, 1)], "ab", "3 of a, 1 of b"),
        ([(0, 1, 0, 1)], "ab", "1 of a, 1 of b, 1 of a, 1 of b"),
        ([(0, 1, 2)], "aab", "2 of a, 1 of b"),
        ([(0, 1), (2, 3)], "aabc", "1 of b, 1 of c"),
    ],
)
def test_unequal_nodes_are_refused(groups, hosts, found):
    groups = [_group(*group) for group in groups]
    with pytest.raises(ValueError, match="equally many ranks") as error:
        topology.find_node_size(groups, dict(enumerate(hosts)))
    assert f"found {found};" in str(error.value)


def test_set_up_on_two_hosts(tmp_path):
    process_runs.run("two_hosts", tmp_path, processes=4, devices=1)


def test_hosts_are_told_apart():
    hosts = [
        ("pod-1", "12345678-ab"),
        ("pod-2", "12345678-ab"),
        ("pod-1", "9"),
        ("x", ""),
    ]
    hosts = {p: {"host": h, "boot_id": b} for p, (h, b) in enumerate(hosts)}
    assert topology.host_names(hosts) == {
        0: "pod-1 12345678",
        1: "pod-1 12345678",
        2: "pod-1 9",
        3: "x ",
    }


def test_processes_that_share_groups():
    groups = [_group(0, 1), _group(2, 3), _group(1, 4)]
    assert topology.connected(groups, 0) == (0, 1, 4)
    assert topology.connected(groups, 2) == (2, 3)


def test_too_many_ranks_of_a_node():
    job = types.SimpleNamespace(axis_name="ep", num_ranks=194)
    with pytest.raises(ValueError, match="a node must have at most 96 ranks, found 97"):
        backends._check_nodes(job, 97)
    with pytest.raises(ValueError, match="at most 96 nodes, found 194 of 1 ranks"):
        backends._check_nodes(job, 1)


# The example ------------------------------------------------------------------


def test_the_example_here():
    done = run_script(
        *("examples/multi_host/train.py", "--local", "4", "--node-size", "2"),
        *("--steps", "11"),
        JAX_PLATFORMS="cpu",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 ranks on 2 nodes in 4 processes" in done.stdout
