"""Runs operations on R ranks of this machine and returns NumPy arrays.

What an operation writes was poisoned first: every output takes over the memory
of a donated array full of NaN, and the host's allocator hands out 0x7f bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import cases
import jax
import ml_dtypes
import numpy as np
import oracle
import payloads
import pytest
from jax import lax
from jax import numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep._setup import bootstrap

ON_GPU = jax.default_backend() == "gpu"
# process_suite.py runs these tests in several processes, all in step; each of
# them gets the results of all ranks and compares them.
PROCESSES = jax.process_count()
# What this machine runs; the names are Communicator's.
BACKENDS = ("cuda", "xla") if ON_GPU else ("cpu", "xla")
if PROCESSES > 1 or oracle.NODE_SIZE is not None:
    BACKENDS = BACKENDS[:1]
# Further arguments of every Communicator; conftest.py sets them.
COMMUNICATOR_OPTIONS: dict[str, Any] = {}

# Several processes may have a number of devices that is not in the table.
RANKS = cases.RANKS
if PROCESSES > 1:
    RANKS = tuple(sorted({*RANKS, jax.device_count()}))

PLAN_FIELDS = (
    "num_recv",
    "num_demand",
    "overflow",
    "recv_counts",
    "recv_topk_idx",
    "recv_src",
    "expert_counts",
    "group_sizes",
)

on_each_backend = pytest.mark.parametrize("backend", BACKENDS)


def most_ranks() -> int:
    """The largest of RANKS that this machine has devices for."""
    return max(r for r in RANKS if r <= jax.device_count())


def few_ranks() -> int:
    """4, or as many as there are; where there are more processes, one for each."""
    return max(min(4, most_ranks()), PROCESSES)


def _combinations(table):
    """Every case on every backend and rank count, with one economy.

    Plain JAX takes seconds to compile and has one path for all rank counts: a case
    that needs a program of its own runs there on 3 ranks or on the most, in turn;
    on both where the number of experts does not follow the ranks.
    """
    most = most_ranks()
    some = [3, most] if most > 3 else [most]
    programs = {cases.CASES[0].program}
    for number, case in enumerate(table):
        own = case.program not in programs
        programs.add(case.program)
        few = some if case.experts > 0 else [some[number % len(some)]]
        for backend in BACKENDS:
            for ranks in few if own and backend == "xla" else RANKS:
                yield pytest.param(backend, case, ranks, id=f"{backend}-{case}-{ranks}")


def on_each_combination_of(table):
    """Parametrizes by (backend, case, ranks)."""
    return pytest.mark.parametrize(
        ("backend", "case", "ranks"), list(_combinations(table))
    )


def _combinations_of_one_launch(table):
    """All where it is one launch; a fourth where it is lowered to its two steps."""
    for number, case in enumerate(table):
        for backend in BACKENDS:
            if backend == "cuda":
                counts = RANKS
            else:
                counts = [few_ranks()] if number % 4 == 0 else []
            for ranks in counts:
                yield pytest.param(backend, case, ranks, id=f"{backend}-{case}-{ranks}")


def on_each_combination_of_one_launch(table):
    """As on_each_combination_of, for an operation that is one launch on GPUs."""
    return pytest.mark.parametrize(
        ("backend", "case", "ranks"), list(_combinations_of_one_launch(table))
    )


def mesh(ranks: int) -> Mesh:
    """A mesh of one axis "ep"; skips where there are too few devices.

    Where there are several processes it takes some devices of each.
    """
    found = jax.device_count()
    if ranks > found:
        pytest.skip(f"needs {ranks} devices; this machine has {found}")
    if ranks < PROCESSES:
        pytest.skip(f"{ranks} ranks are too few for {PROCESSES} processes")
    of_process = [
        [d for d in jax.devices() if d.process_index == p] for p in range(PROCESSES)
    ]
    devices = [d for same_place in zip(*of_process) for d in same_place][:ranks]
    return Mesh(np.array(devices), ("ep",), axis_types=(AxisType.Explicit,))


def communicator(backend: str, ranks: int) -> jax_ep.Communicator:
    """One communicator for each (backend, ranks), kept for all tests."""
    return _communicator(mesh(ranks), backend, oracle.node_size(ranks))


@functools.cache
def _communicator(over: Mesh, backend: str, _: int) -> jax_ep.Communicator:
    cut = oracle.cut(over.size, backend)
    # Below pytest's own limit, which says less.
    return jax_ep.Communicator(
        over, "ep", backend=backend, timeout_s=60.0, **cut, **COMMUNICATOR_OPTIONS
    )


class Program:
    """`body(comm, *shards)` on every rank, under jit(shard_map).

    Arguments and results are pytrees of arrays stacked over ranks, [R, ...].
    """

    def __init__(self, body: Callable, comm: jax_ep.Communicator):
        """Compiles nothing yet: the first call does."""
        spec = P(comm.axis_name)

        def shard(args):
            args = jax.tree.map(lambda a: a[0], args)
            return jax.tree.map(lambda a: a[None], body(comm, *args))

        mapped = jax.shard_map(shard, mesh=comm.mesh, in_specs=spec, out_specs=spec)
        self.jitted = jax.jit(mapped)
        self._over_poison = jax.jit(
            lambda args, poison: self.jitted(args), donate_argnums=1, keep_unused=True
        )
        self._sharding = NamedSharding(comm.mesh, spec)

    def put(self, *args):
        """Puts stacked arrays on the ranks' devices, for `launch`."""
        if PROCESSES == 1:
            return jax.device_put(args, self._sharding)
        return jax.tree.map(lambda a: _put_rows(np.asarray(a), self._sharding), args)

    def launch(self, args):
        """Starts one run and returns its device arrays, waiting for nothing."""
        return self.jitted(args)

    def __call__(self, *args):
        """Runs over poisoned memory; NumPy arrays in, NumPy arrays out."""
        with perturbed_allocator():
            args = self.put(*args)
            outputs = self._over_poison(args, self._poison(args))
            return fetch(outputs)

    def _poison(self, args):
        def put(out):
            poison = payloads.poison(out.shape, out.dtype)
            if PROCESSES > 1:
                return _put_rows(poison, self._sharding)
            # may_alias=False: memory lent by NumPy would not be written over.
            return jax.device_put(poison, self._sharding, may_alias=False)

        return jax.tree.map(put, self.jitted.eval_shape(args))


def _put_rows(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """[R, ...] to the ranks, where some of them belong to other processes."""
    shards = [
        jax.device_put(array[rank : rank + 1], device, may_alias=False)
        for rank, device in enumerate(sharding.mesh.devices.flat)
        if device.process_index == jax.process_index()
    ]
    return jax.make_array_from_single_device_arrays(array.shape, sharding, shards)


def fetch(outputs: Any) -> Any:
    """The results of all ranks, [R, ...] each, as NumPy arrays.

    Other processes' come through JAX's key-value store: exact for every dtype,
    and apart from the collectives under test.
    """
    if PROCESSES == 1:
        return jax.tree.map(np.asarray, outputs)
    leaves, structure = jax.tree.flatten(outputs)
    mine = [
        {
            shard.index[0].start or 0: np.asarray(shard.data)
            for shard in leaf.addressable_shards
        }
        for leaf in leaves
    ]
    everybody = _gather(mine)
    rows: list[dict[int, np.ndarray]] = [{} for _ in leaves]
    for process in everybody:
        for have, more in zip(rows, process):
            have.update(more)
    return structure.unflatten(
        [np.concatenate([by_rank[r] for r in sorted(by_rank)]) for by_rank in rows]
    )


_gathered = itertools.count()


def _gather(value: Any) -> list[Any]:
    """Everybody's value, by process; every process calls this in step."""
    client = bootstrap.distributed_client()
    number, me = next(_gathered), jax.process_index()
    client.key_value_set_bytes(f"harness/{number}/{me}", pickle.dumps(value))
    if number > 1:
        client.key_value_delete(f"harness/{number - 2}/{me}")
    return [
        value
        if process == me
        else pickle.loads(
            client.blocking_key_value_get_bytes(f"harness/{number}/{process}", 60_000)
        )
        for process in range(PROCESSES)
    ]


@contextlib.contextmanager
def perturbed_allocator():
    """Lets glibc fill what it hands out with 0x7f; other libcs do nothing."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda *_: 0)
    m_perturb, filled_with_complement = -6, 0x80
    mallopt(m_perturb, filled_with_complement)
    try:
        yield
    finally:
        mallopt(m_perturb, 0)


def plan_fields(plan: jax_ep.Plan) -> dict[str, jax.Array]:
    """The public array fields by name."""
    return {name: getattr(plan, name) for name in PLAN_FIELDS}


def delayed(x: jax.Array, steps: jax.Array, zero: jax.Array) -> jax.Array:
    """`x`, bit for bit, after this rank has worked for a while on it.

    The work is part of the program: it starts when `x` is there and whoever
    reads the result waits for it.

    Args:
      x: an array of 2- or 4-byte elements, not empty.
      steps: i32[], rounds of work; may differ from rank to rank.
      zero: i32[] that is 0 at run time, which XLA cannot know.
    """
    unsigned = f"uint{8 * x.dtype.itemsize}"
    bits = lax.bitcast_convert_type(x, unsigned)
    field = jnp.full((4096,), bits.ravel()[0].astype(jnp.uint32))
    field = lax.fori_loop(
        0, steps, lambda _, f: f * jnp.uint32(1664525) + (f >> 7), field
    )
    nothing = field.max().astype(jnp.int32) & zero
    return lax.bitcast_convert_type(bits + nothing.astype(unsigned), x.dtype)


# The program that every routing case runs


ROWS = {
    "bfloat16[9]": ((9,), ml_dtypes.bfloat16),
    "float32[]": ((), np.float32),
    "uint8[3,7]": ((3, 7), np.uint8),
}
SUMS = {
    "bfloat16[9]": ((9,), ml_dtypes.bfloat16),
    "float32[2,2]": ((2, 2), np.float32),
}


def check_case(
    case: cases.Case, backend: str, ranks: int, node_capacity: int | None = None
) -> oracle.Oracle:
    """Plan, dispatch and combine of a case are the oracle's, which it returns."""
    routing = case.routing(ranks)
    right = oracle.plan(
        routing.topk_idx,
        routing.num_experts,
        routing.capacity,
        routing.expert_alignment,
        node_capacity,
    )
    tokens = routing.topk_idx.shape[1]
    x = {
        name: payloads.payload((ranks, tokens, *shape), dtype)
        for name, (shape, dtype) in ROWS.items()
    }
    # NaN in rows that were never sent.
    y = {
        name: payloads.poison_tail(
            payloads.numbers((ranks, routing.capacity, *shape), dtype),
            right.fields["num_recv"],
        )
        for name, (shape, dtype) in SUMS.items()
    }
    comm = communicator(backend, ranks)
    program = case_program(
        comm,
        routing.num_experts,
        routing.capacity,
        routing.expert_alignment,
        node_capacity,
    )
    plan, received, combined = program(routing.topk_idx, x, y)
    if comm.num_nodes > 1:
        most = right.tokens if node_capacity is None else node_capacity
        assert (plan.pop("node_demand") == right.node_demand).all()
        assert (plan.pop("node_overflow") == (right.node_demand > most)).all()
    payloads.assert_same_trees(plan, right.fields, "plan")
    for name, sent in x.items():
        payloads.assert_same_rows(received[name], right.dispatch(sent), name, sent)
    for name, terms in y.items():
        payloads.assert_same_rows(combined[name], right.combine(terms), name)
    return right


@functools.cache
def case_program(
    comm: jax_ep.Communicator,
    num_experts: int,
    capacity: int,
    expert_alignment: int = 1,
    node_capacity: int | None = None,
) -> Program:
    """(topk_idx, x, y) -> (plan fields, dispatch(x), combine(y))."""

    def body(comm, topk_idx, x, y):
        plan = jax_ep.make_plan(
            topk_idx,
            comm=comm,
            num_experts=num_experts,
            capacity=capacity,
            expert_alignment=expert_alignment,
            node_capacity=node_capacity,
        )
        fields = plan_fields(plan)
        if comm.num_nodes > 1:
            fields["node_demand"] = plan.node_demand
            fields["node_overflow"] = plan.node_overflow
        return (
            fields,
            jax_ep.dispatch(x, plan),
            jax_ep.combine(y, plan),
        )

    return Program(body, comm)


def run(body: Callable, comm: jax_ep.Communicator, *args: Any) -> Any:
    """Program(body, comm)(*args), for a program that runs once."""
    return Program(body, comm)(*args)
