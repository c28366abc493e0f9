"""Levanter's grug `moe_mlp`, by jax_ep.

    moe_mlp = functools.partial(levanter_moe.moe_mlp, comm=comm)

takes the arguments of levanter.grug.grug_moe.moe_mlp and gives its results. `comm` is
of the axis "expert" of the mesh, over all of which tokens are split.

    python examples/replacing/levanter_moe.py    # compares both, with marin-levanter
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep


class DispatchCounts(NamedTuple):
    """The fields of Levanter's MoeDispatchCounts."""

    sender_dropped: jax.Array
    receiver_dropped: jax.Array
    padding_skipped: jax.Array

    @property
    def dropped(self):
        return self.sender_dropped + self.receiver_dropped


def moe_mlp(
    x,  # [T, H]
    selected_experts,  # [T, K]
    combine_weights,  # [T, K]
    w_up_gate,  # [E, H, 2 * I], gate before up
    w_down,  # [E, I, H]
    *,
    comm,
    token_valid=None,  # bool [T]
    activation=jax.nn.silu,
    capacity_factor=1.25,
    report_capacity_overflow=False,
    **_,  # mesh and implementation: comm says both
):
    limit = functools.partial(rows_of_a_rank, capacity_factor, len(w_down), comm)
    layer = functools.partial(jax_ep.sharded_moe, comm=comm, num_experts=len(w_down))
    inputs = x, selected_experts, combine_weights, (w_up_gate, w_down)
    options = {"valid": token_valid, "expert_limit": limit}
    y, stats = layer(*inputs, experts(activation), **options)
    return (y, counts(stats, inputs[1], token_valid)) if report_capacity_overflow else y


def rows_of_a_rank(factor, num_experts, comm, pairs):
    """What a rank's experts take of the valid choices of its group."""
    share = jnp.ceil(factor * pairs.astype(jnp.float32) / comm.num_ranks)
    share = share.astype(jnp.int32)
    return jnp.maximum(share, num_experts // comm.num_ranks)


def experts(activation):
    """One rank's experts: gated MLPs with one matrix for gate and up."""
    activation = getattr(activation, "to_jax_fn", lambda: activation)()

    def mlps(params, rows, group_sizes, group_alignment):
        w_gate, w_up = jnp.split(params[0], 2, axis=-1)
        options = {"activation": activation, "group_alignment": group_alignment}
        return jax_ep.gated_mlp(rows, group_sizes, w_gate, w_up, params[1], **options)

    return mlps


def counts(stats, selected_experts, token_valid):
    """What reached no expert, as Levanter counts it."""
    padding = jnp.int32(0)
    if token_valid is not None:
        padding = (~token_valid).sum(dtype=jnp.int32) * selected_experts.shape[1]
    return DispatchCounts(jnp.int32(0), stats.dropped_pairs, padding)


def main():
    import compare

    if not compare.installed("levanter", "marin-levanter"):
        return None
    from levanter.grug import grug_moe

    mesh = compare.make_mesh(AxisType.Explicit, data=2, expert=2)
    tokens, experts_in_all, hidden, inner = 64, 8, 16, 12
    args = [
        compare.normal(1, tokens, hidden),
        jax.nn.softmax(compare.normal(2, tokens, 3)),
        compare.normal(3, experts_in_all, hidden, 2 * inner),
        compare.normal(4, experts_in_all, inner, hidden),
    ]
    ids = jax.random.randint(jax.random.key(5), (tokens, 3), 0, experts_in_all)
    split = NamedSharding(mesh, P("expert")), NamedSharding(mesh, P(("data", "expert")))
    args = [jax.device_put(a, split[i < 2]) for i, a in enumerate(args)]
    ids, valid = jax.device_put((ids, jnp.arange(tokens) % 5 > 0), split[1])

    def run(function):
        def layer(x, weights, w_up_gate, w_down):
            options = {"capacity_factor": 0.9, "report_capacity_overflow": True}
            options |= {"token_valid": valid}
            return function(x, ids, weights, w_up_gate, w_down, **options)

        return layer

    comm = jax_ep.Communicator(mesh, "expert")
    ours = functools.partial(moe_mlp, comm=comm)
    with jax.set_mesh(mesh):
        theirs = functools.partial(grug_moe.moe_mlp, implementation="ring")
        return compare.differences(run(theirs), run(ours), *args)


if __name__ == "__main__":
    main()
