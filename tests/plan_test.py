"""make_plan against the oracle; every_case_test.py has the routing cases."""

import cases
import harness
import jax
import numpy as np
import oracle
import payloads
import pytest

import jax_ep

# Two ranks, three experts (rank 1 owns expert 2 only), three tokens, worked by
# hand: rank 0 gets tokens 0 and 1 of rank 0 and token 1 of rank 1.
_IDS = [[[0, 2], [1, 1], [-1, 2]], [[2, 2], [0, 1], [3, -5]]]
_FOUR_SLOTS = {
    "num_recv": [3, 3],
    "num_demand": [3, 3],
    "overflow": [False, False],
    "recv_counts": [[2, 1], [2, 1]],
    "recv_topk_idx": [
        [[0, -1], [1, 1], [0, 1], [-1, -1]],
        [[-1, 0], [-1, 0], [0, 0], [-1, -1]],
    ],
    "recv_src": [[0, 1, 4, -1], [0, 2, 3, -1]],
    "expert_counts": [[2, 3], [4, 0]],
    "group_sizes": [[4, 4], [4, 0]],
}
_TWO_SLOTS = {
    "num_recv": [2, 2],
    "num_demand": [3, 3],
    "overflow": [True, True],
    "recv_counts": [[2, 0], [2, 0]],
    "recv_topk_idx": [[[0, -1], [1, 1]], [[-1, 0], [-1, 0]]],
    "recv_src": [[0, 1], [0, 2]],
    "expert_counts": [[1, 2], [2, 0]],
    "group_sizes": [[4, 4], [4, 0]],
}


@pytest.mark.parametrize(("capacity", "fields"), [(4, _FOUR_SLOTS), (2, _TWO_SLOTS)])
@harness.on_each_backend
def test_example_worked_by_hand(backend, capacity, fields):
    ids = np.array(_IDS, np.int32)
    fields = {
        name: np.array(value, bool if name == "overflow" else np.int32)
        for name, value in fields.items()
    }
    payloads.assert_same_trees(
        oracle.plan(ids, 3, capacity, 4).fields, fields, "oracle"
    )

    def body(comm, topk_idx):
        return harness.plan_fields(
            jax_ep.make_plan(
                topk_idx,
                comm=comm,
                num_experts=3,
                capacity=capacity,
                expert_alignment=4,
            )
        )

    comm = harness.communicator(backend, 2)
    payloads.assert_same_trees(harness.run(body, comm, ids), fields, "plan")


@pytest.mark.parametrize("tokens", [0, 5])
@harness.on_each_backend
def test_default_capacity_holds_every_row(backend, tokens):
    plans = []

    def body(comm, topk_idx):
        plan = jax_ep.make_plan(topk_idx, comm=comm, num_experts=4)
        plans.append(plan)
        return harness.plan_fields(plan)

    ids = np.zeros((2, tokens, 3), np.int32)
    comm = harness.communicator(backend, 2)
    fields = harness.run(body, comm, ids)
    capacity = max(1, 2 * tokens)
    payloads.assert_same_trees(fields, oracle.plan(ids, 4, capacity).fields, "plan")
    plan = plans[0]
    assert (plan.num_experts, plan.num_tokens, plan.top_k) == (4, tokens, 3)
    assert (plan.capacity, plan.expert_alignment) == (capacity, 1)
    assert plan.comm is comm


# Values that would come out as legal ids were they narrowed without care.
_STRAYS = (-1, -(2**31), 2**31 - 1, 2**32 - 1, 2**32 + 1, -(2**32) + 2, 2**63)


def _ids_as(dtype, ranks):
    """Uniform ids below 90 with what `dtype` holds of the strays mixed in."""
    ids = cases.uniform(ranks, 13, 3, 90)
    info = np.iinfo(dtype)
    strays = [
        s for s in (*_STRAYS, 100, 127, 200, 255, 40000) if info.min <= s <= info.max
    ]
    pick = cases.mix(7, *cases.grid(*ids.shape))
    wide = ids.astype(dtype)
    for number, stray in enumerate(strays):
        wide[pick % np.uint64(20) == number] = stray
    return wide


def _assert_id_dtypes_work(backend, dtypes):
    comm = harness.communicator(backend, 2)

    def body(comm, tables):
        return {
            name: harness.plan_fields(jax_ep.make_plan(ids, comm=comm, num_experts=100))
            for name, ids in tables.items()
        }

    tables = {dtype: _ids_as(dtype, 2) for dtype in dtypes}
    found = harness.run(body, comm, tables)
    for dtype, ids in tables.items():
        right = oracle.plan(ids, 100, 26).fields
        payloads.assert_same_trees(found[dtype], right, dtype)


@harness.on_each_backend
def test_ids_of_narrow_and_unsigned_dtypes(backend):
    _assert_id_dtypes_work(
        backend, ("int8", "uint8", "int16", "uint16", "int32", "uint32")
    )


@harness.on_each_backend
def test_ids_of_64_bits(backend):
    with jax.enable_x64(True):
        _assert_id_dtypes_work(backend, ("int32", "int64", "uint64"))


@harness.on_each_backend
def test_ids_of_8_bits_for_more_experts_than_they_reach(backend):
    ids = np.arange(256, dtype=np.uint8).reshape(2, 32, 4)
    comm = harness.communicator(backend, 2)

    def body(comm, topk_idx):
        return harness.plan_fields(
            jax_ep.make_plan(topk_idx, comm=comm, num_experts=300)
        )

    right = oracle.plan(ids, 300, 64).fields
    payloads.assert_same_trees(harness.run(body, comm, ids), right, "plan")
