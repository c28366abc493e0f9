"""Operations between nodes as programs for CUDA: calls, operands and staging.

Needs no GPU: only compiling would. And the set-up of the wire, on a module that
only remembers.
"""

import dataclasses
import re
import threading
import types

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep._operations import node_exchanges
from jax_ep._setup import node_wire
from jax_ep._setup.bootstrap import CannotWork

pytestmark = pytest.mark.skipif(
    harness.ON_GPU or harness.PROCESSES > 1, reason="virtual CPU devices stand in"
)

TOKENS, TOP_K, HIDDEN = 6, 3, 5


@pytest.fixture
def comm():
    """Two nodes of two, as if on GPUs."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("ep",))
    comm = jax_ep.Communicator(mesh, "ep", backend="cpu", node_size=2)
    assert comm._node is not None and comm._rail is not None
    comm.backend = "cuda"
    comm._node = dataclasses.replace(comm._node, backend="cuda")
    comm._rail = dataclasses.replace(comm._rail, backend="cuda")
    return comm


def lower(comm, body, node_capacity=None):
    def shard(x, ids):
        plan = jax_ep.make_plan(
            ids, comm=comm, num_experts=8, node_capacity=node_capacity
        )
        return body(x, plan)

    spec = P("ep")
    f = jax.jit(jax.shard_map(shard, mesh=comm.mesh, in_specs=spec, out_specs=spec))
    shapes = (
        jax.ShapeDtypeStruct((4 * TOKENS, HIDDEN), jnp.bfloat16),
        jax.ShapeDtypeStruct((4 * TOKENS, TOP_K), jnp.int32),
    )
    return f.trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


def calls(text):
    """{target: its lines}."""
    found = {}
    for line in text.splitlines():
        if match := re.search(r"custom_call @(jax_ep_\w+)", line):
            found.setdefault(match[1], []).append(line)
    return found


def test_a_round_trip_and_its_gradient(comm):
    def body(x, plan):
        def there_and_back(x):
            return jax_ep.combine(jnp.sin(jax_ep.dispatch(x, plan)), plan)

        out, pull = jax.vjp(there_and_back, x)
        return pull(out)[0]

    found = calls(lower(comm, body))
    # The plan: ids over the rail, then to all ranks of the node.
    assert {target: len(lines) for target, lines in found.items()} == {
        "jax_ep_node_exchange": 1,
        "jax_ep_dispatch": 1,
        "jax_ep_node_dispatch": 2,
        "jax_ep_node_combine": 2,
    }


def test_operands_and_staging(comm):
    text = lower(comm, lambda x, plan: jax_ep.dispatch(x, plan), node_capacity=4)
    (line,) = calls(text)["jax_ep_node_dispatch"]
    capacity = 4 * TOKENS
    # Position, routes of T + 4 wire rows, num_recv, arrivals, sends, the leaf; one
    # chunk of 4 rows of 10 bytes, one in flight, to and fro.
    assert (
        f"(tensor<ui32>, tensor<{TOKENS + 4}x2x2xi32>, tensor<i32>, "
        f"tensor<{capacity}xi32>, tensor<4xi32>, tensor<{TOKENS}x{HIDDEN}xbf16>) -> "
        f"(tensor<{capacity}x{HIDDEN}xbf16>, tensor<80xui8>)"
    ) in line
    assert "chunk_rows = 4 : i64" in line and "in_flight = 1 : i64" in line
    assert f"comm = {comm._node.id} : i64" in line
    assert f"rail = {comm._rail.id} : i64" in line

    text = lower(comm, lambda x, plan: jax_ep.combine(jax_ep.dispatch(x, plan), plan))
    (line,) = calls(text)["jax_ep_node_combine"]
    # Places for arrivals; W wire rows and a chunk of T rows.
    assert (
        f"tensor<{capacity}xi32>, tensor<{TOKENS}x2xi32>, "
        f"tensor<{capacity}x{HIDDEN}xbf16>) -> (tensor<{TOKENS}x{HIDDEN}xbf16>, "
        f"tensor<{(2 * TOKENS + TOKENS) * 10}xui8>)"
    ) in line


def test_no_collective_and_no_fused_launch(comm):
    def body(x, plan):
        weights = jnp.ones((TOKENS, TOP_K), jnp.float32)
        return jax_ep.moe_with_plan(x, weights, lambda rows, _: rows, plan)

    text = lower(comm, body)
    assert "jax_ep_dispatch_permute" not in text
    assert not re.search(r"all_(gather|reduce|to_all)|collective", text)


@pytest.mark.parametrize(
    ("block", "row_bytes", "nodes", "num_channels", "want"),
    [
        (4096, 14336, 2, None, (512, 3)),  # 56 MiB: eight chunks
        (4096, 14336, 64, None, (512, 3)),
        (512, 14336, 8, None, (512, 3)),  # 7 MiB: one, but to seven nodes
        (512, 14336, 2, None, (512, 1)),
        (1, 2, 2, None, (1, 1)),
        (1000, 14336, 2, None, (334, 3)),
        (4096, 14336, 2, 5, (512, 5)),
        (4096, 14336, 2, 100, (512, 8)),
        (7, 1 << 30, 2, None, (1, 3)),
    ],
)
def test_chunks(block, row_bytes, nodes, num_channels, want):
    comm = types.SimpleNamespace(num_nodes=nodes, _num_channels=num_channels)
    assert node_exchanges.chunks(comm, block, row_bytes) == want


# Set-up of the wire -----------------------------------------------------------


class Module:
    """What jax_ep._cuda has for the wire; notes what it was called with."""

    def __init__(self, version=22803, problem="", connects=""):
        self.loaded = (version, problem)
        self.connects = connects
        self.released = []
        self.names = iter(range(100))

    def load_nccl(self, files):
        assert all(file.endswith("libnccl.so.2") for file in files)
        return self.loaded

    def nccl_version_name(self, version):
        return f"{version // 10000}.{version // 100 % 100}.{version % 100}"

    def new_rail(self):
        return bytes([next(self.names)]) * 128

    def connect_rails(self, identity, places, *seconds):
        self.connected = (identity, places, *seconds)
        if isinstance(self.connects, Exception):
            raise self.connects
        return self.connects

    def release_rails(self, identity):
        self.released.append(identity)


class Peers:
    """Another process that says the same, or what `others` says instead."""

    def __init__(self, **others):
        self.others = others

    def name(self, process):
        return f"process {process}"

    def gather(self, what, value, problem=None):
        its = self.others.get(what, value)
        if problem or isinstance(its, str):
            raise CannotWork(problem or its)
        return {0: value, 1: its}


def rails(nodes=2, size=2):
    def device(rank):
        return types.SimpleNamespace(
            id=rank, process_index=0, local_hardware_id=10 + rank
        )

    return [
        [device(node * size + local) for node in range(nodes)] for local in range(size)
    ]


def set_up(monkeypatch, module, processes=None):
    monkeypatch.setattr(node_wire.native, "cuda", lambda: module)
    return node_wire.set_up_wire(
        7,
        rails(),
        mesh_places={rank: (rank, 4, 1) for rank in range(4)},
        node_size=2,
        setup_timeout_s=3.0,
        timeout_s=5.0,
        warn_after_s=4.0,
        processes=processes,
    )


@pytest.mark.parametrize("processes", (None, Peers()))
def test_rails_are_connected_and_released(monkeypatch, processes):
    module = Module()
    release = set_up(monkeypatch, module, processes)
    one, two = bytes(128), bytes([1]) * 128
    assert module.connected == (
        7,
        [
            (10, 0, 0, 2, (0, 4, 1), one),
            (12, 2, 1, 2, (2, 4, 1), one),
            (11, 1, 0, 2, (1, 4, 1), two),
            (13, 3, 1, 2, (3, 4, 1), two),
        ],
        3.0,
        5.0,
        4.0,
    )
    release()
    assert module.released == [7]


@pytest.mark.parametrize(
    ("module", "processes", "words"),
    [
        (Module(0, "NCCL cannot be loaded: no file"), None, "cannot be loaded"),
        (Module(), Peers(NCCL="process 1: none"), "process 1: none"),
        (
            Module(),
            Peers(NCCL=22304),
            "the same everywhere: process 0 has 2.28.3, process 1 has 2.23.4",
        ),
        (Module(connects="no route"), None, r"no route \(NCCL 2\.28\.3; NCCL_DEBUG"),
        (Module(connects=OSError("odd")), None, "OSError: odd"),
        (Module(), Peers(rails="process 1: no route"), "process 1: no route"),
    ],
)
def test_all_hear_what_does_not_work(monkeypatch, module, processes, words):
    with pytest.raises(CannotWork, match=words):
        set_up(monkeypatch, module, processes)
    # What was connected here is let go where another process failed.
    assert module.released == ([7] if hasattr(module, "connected") else [])


@pytest.mark.parametrize("is_late", [True, False])
def test_a_rail_that_nobody_else_comes_to(is_late):
    """What a late thread connects after all it gives back itself."""
    goes_on, released = threading.Event(), threading.Event()

    def connect():
        goes_on.wait()
        return ""

    if not is_late:
        goes_on.set()
    attempt = node_wire._Attempt(connect, released.set)
    late = "NCCL did not connect the nodes within 0.1 s"
    assert attempt.wait(0.1 if is_late else 60) == (late if is_late else None)
    attempt.give_back()
    assert released.is_set() == (not is_late)
    goes_on.set()
    attempt._thread.join()
    assert released.is_set()
