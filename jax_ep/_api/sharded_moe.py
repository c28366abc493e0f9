"""A mixture-of-experts layer of global arrays, which opens the shard_map itself."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, NamedTuple, Unpack

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_ep._api.moe import moe_with_plan
from jax_ep._api.plan_options import (
    PlanKeywords,
    PlanOptions,
    Tokens,
    plan_options,
)
from jax_ep._api.planning import as_int32, make_plan
from jax_ep._data import checks
from jax_ep._data.plan import Plan
from jax_ep._data.ranks import named_axes
from jax_ep._operations.arrays import id_counts
from jax_ep._setup.communicator import Communicator
from jax_ep._setup.context import communicator


class MoeStats(NamedTuple):
    """What a layer did with the choices of all tokens, on all devices alike.

    A choice is a pair (token, k) that names an expert, of a token that is valid.

    Attributes:
      expert_counts: i32[E], choices of each expert, dropped ones included.
      dropped_pairs: i32[], choices that found no room and so contribute 0.
      overflow: bool[], whether there were any: a capacity was too small.
    """

    expert_counts: jax.Array
    dropped_pairs: jax.Array
    overflow: jax.Array


def sharded_moe(
    x: Any,
    topk_idx: jax.Array,
    topk_weights: jax.Array,
    params: Any,
    expert_fn: Callable[..., Any],
    *,
    comm: Communicator | None = None,
    expert_axis: str | tuple[str, ...] | None = None,
    num_experts: int,
    token_spec: PartitionSpec | None = None,
    param_specs: Any = None,
    valid: jax.Array | None = None,
    options: PlanOptions | None = None,
    quantize: Literal["fp8"] | None = None,
    **keywords: Unpack[PlanKeywords],
) -> tuple[Any, MoeStats]:
    """`moe` of global arrays: no shard_map around it.

    Call it where arrays are global, under jit or not, with Auto or Explicit mesh
    axes. Below, [...] are the axes of tokens: [T] or [batch, sequence], for example.
    Per token::

        y[token] = sum over k of
            topk_weights[token, k] * expert topk_idx[token, k] of x[token]

    Tokens that a device has are its own T of `moe`, in row-major order. Sizes are of
    those, as in `make_plan`.

    Args:
      x: [..., H], or a pytree of arrays `[..., *]`.
      topk_idx: int[..., K], the experts of each token; see `make_plan`.
      topk_weights: floating [..., K]; float32 is best.
      params: pytree of the experts' parameters. By default each array is `[E', *]` with
        expert e at e, and `E' = R * ceil(num_experts / R)`: E where R divides it.
      expert_fn: (params, rows [S, H], group_sizes i32[L]) -> [S, ...], one rank's
        experts: the function that `moe` takes, with this rank's part of params
        before its arguments. It runs inside shard_map with all mesh axes manual:
        where a further axis splits what experts sum over, it calls jax.lax.psum.
      comm: the communicator. Its mesh is that of the shard_map.
      expert_axis: in place of comm: the mesh axis, or axes, of its ranks. The
        communicator is then jax_ep.communicator(expert_axis).
      num_experts: E.
      token_spec: how tokens are split: a PartitionSpec of the axes of tokens, which
        names comm's axis. Other mesh axes that it leaves out see the same tokens.
        Default: the first axis over the whole mesh; of replicated tokens, over the
        axes that are not comm's.
      param_specs: PartitionSpecs for params, or for its subtrees. Default: the
        first axis over comm's axis.
      valid: bool[...]. Tokens where it is False are padding: they visit no expert,
        take no room, are counted nowhere, and get 0. Default: all are valid.
      options: as for `moe`, of a device's own tokens. An expert_limit that is an array
        is the same on all devices. token_spec leaves comm's axis out where tokens are
        replicated.
      quantize: as for `moe`.
      **keywords: as for `moe`.

    Returns:
      (y, stats): y is `[..., *]` for each array that expert_fn returned, split like
      the tokens, and stats a `MoeStats`, the same on all devices. Both are ready for
      a load-balance loss::

          share = stats.expert_counts / stats.expert_counts.sum()
          loss = num_experts * (share * mean_probability_of_each_expert).sum()

    Raises:
      TypeError, ValueError: a bad argument, with the rule and what was found.
      RuntimeError: the communicator is closed.

    Derivative: as of `moe`, in x, topk_weights and params. stats are integers and have
    none.
    """
    options = plan_options("sharded_moe", options, keywords)
    comm = _communicator(comm, expert_axis)
    topk_idx, topk_weights = jnp.asarray(topk_idx), jnp.asarray(topk_weights)
    x = jax.tree.map(jnp.asarray, x)
    token_spec = _checked_token_spec(comm, token_spec, topk_idx, options.tokens)
    shape = topk_idx.shape[:-1]
    valid = jnp.ones(shape, bool) if valid is None else jnp.asarray(valid)
    _check_tokens(x, topk_weights, valid, shape)
    if param_specs is None:
        param_specs = _experts_first(params, comm, num_experts)
    limit = options.expert_limit
    # Arrays enter shard_map as operands; from an integer sizes follow.
    traced = checks.as_integer(limit) is None and hasattr(limit, "dtype")
    limits = {"expert_limit": limit} if traced else {}

    def on_rank(tokens_of_rank, params, limits):
        shape = tokens_of_rank[-1].shape
        count = math.prod(shape)
        x, topk_idx, topk_weights, valid = jax.tree.map(
            lambda a: a.reshape(count, *a.shape[len(shape) :]), tokens_of_rank
        )
        if jnp.issubdtype(topk_idx.dtype, jnp.integer):  # else make_plan complains
            topk_idx = as_int32(topk_idx, num_experts)
            topk_idx = jnp.where(valid[:, None], topk_idx, -1)
        here = replace(options, **limits)
        plan = make_plan(topk_idx, comm=comm, num_experts=num_experts, options=here)
        experts = functools.partial(expert_fn, params)
        y = moe_with_plan(x, topk_weights, experts, plan, quantize=quantize)
        y = jax.tree.map(lambda a: a.reshape(*shape, *a.shape[1:]), y)
        return y, _stats(topk_idx, plan, _axes(token_spec))

    operands = ((x, topk_idx, topk_weights, valid), params, limits)
    specs = (token_spec, param_specs, PartitionSpec())
    return jax.shard_map(
        on_rank,
        mesh=comm.mesh,
        in_specs=specs,
        out_specs=(token_spec, PartitionSpec()),
    )(*_laid_out(operands, specs, comm.mesh))


def _stats(topk_idx: jax.Array, plan: Plan, axes: tuple[Any, ...]) -> MoeStats:
    """Of this rank's choices, summed over `axes`, those that split tokens.

    In one sum: XLA may run two at a time, in another order in each process.
    """
    chosen = id_counts(topk_idx, plan.num_experts)
    ranks = tuple(a for a in named_axes(plan.comm.axis_name) if a not in axes)
    copies = math.prod(plan.comm.mesh.shape[a] for a in ranks)
    totals = jnp.concatenate([chosen, plan.dropped_pairs[None]])
    totals = jax.lax.psum(totals, (*axes, *ranks))
    return MoeStats(totals[:-1] // copies, totals[-1], totals[-1] > 0)


def _axes(spec: Any) -> tuple[Any, ...]:
    """The mesh axes that a PartitionSpec, or one entry of it, names."""
    if spec is None:
        return ()
    if not isinstance(spec, (tuple, PartitionSpec)):
        return (spec,)
    return tuple(axis for entry in spec for axis in _axes(entry))


def _communicator(comm: Any, axis: Any) -> Communicator:
    """The one given, or that of the context's mesh over `axis`."""
    if (comm is None) == (axis is None):
        found = "neither" if comm is None else "both"
        raise TypeError(f"jax_ep.sharded_moe: give comm or expert_axis, found {found}")
    comm = communicator(axis) if comm is None else comm
    if not isinstance(comm, Communicator):
        raise TypeError(
            "jax_ep.sharded_moe: comm must be a jax_ep.Communicator, found "
            f"{type(comm).__name__}"
        )
    checks.check_open(comm, "sharded_moe")
    _check_global()
    return comm


def _check_global() -> None:
    mesh = jax.sharding.get_abstract_mesh()
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    manual = [name for name, kind in types if kind == AxisType.Manual]
    if manual:
        raise ValueError(
            "jax_ep.sharded_moe: call it where arrays are global, found it inside "
            f"jax.shard_map over {manual}; there jax_ep.moe is the layer of one rank"
        )


def _checked_token_spec(
    comm: Communicator,
    spec: PartitionSpec | None,
    topk_idx: jax.Array,
    tokens: Tokens,
) -> PartitionSpec:
    """How the axes of tokens are split, the default filled in."""
    mesh, ranks = comm.mesh, set(named_axes(comm.axis_name))
    if spec is None:
        axes = [a for a in mesh.axis_names if tokens == "split" or a not in ranks]
        spec = PartitionSpec(tuple(axes) or None)
    if not isinstance(spec, PartitionSpec):
        raise TypeError(
            "jax_ep.sharded_moe: token_spec must be a jax.sharding.PartitionSpec, "
            f"found {type(spec).__name__}"
        )
    if topk_idx.ndim < 2 or len(spec) > topk_idx.ndim - 1:
        raise ValueError(
            "jax_ep.sharded_moe: topk_idx must be [..., K] with an axis of tokens for "
            f"each entry of token_spec {spec}, found shape {topk_idx.shape}"
        )
    if tokens == "replicated" and ranks & set(_axes(spec)):
        raise ValueError(
            "jax_ep.sharded_moe: token_spec must leave the communicator's axis "
            f"{comm.axis_name!r} out where tokens are replicated, found {spec}"
        )
    if tokens == "split" and not ranks <= set(_axes(spec)):
        raise ValueError(
            "jax_ep.sharded_moe: token_spec must split tokens over the communicator's "
            f"axis {comm.axis_name!r}, found {spec}"
        )
    for size, entry in zip(topk_idx.shape, spec, strict=False):
        parts = math.prod(mesh.shape.get(axis, 1) for axis in _axes(entry))
        if size % parts:
            raise ValueError(
                f"jax_ep.sharded_moe: tokens {topk_idx.shape[:-1]} must divide evenly "
                f"as token_spec {spec} says, found {size} over {parts} devices; pad "
                "them and say with valid= which are tokens"
            )
    return spec


def _check_tokens(
    x: Any, topk_weights: jax.Array, valid: jax.Array, tokens: tuple[int, ...]
) -> None:
    leaves = jax.tree.leaves_with_path({"topk_weights": topk_weights, "x": x})
    for path, leaf in leaves:
        if leaf.shape[: len(tokens)] != tokens:
            raise ValueError(
                "jax_ep.sharded_moe: x and topk_weights must begin with the axes of "
                f"tokens {list(tokens)} of topk_idx, found {leaf.dtype}"
                f"{list(leaf.shape)} at {jax.tree_util.keystr(path)}"
            )
    if valid.dtype != bool or valid.shape != tokens:
        raise ValueError(
            f"jax_ep.sharded_moe: valid must be bool{list(tokens)}, one for each token "
            f"of topk_idx, found {valid.dtype}{list(valid.shape)}"
        )


def _experts_first(params: Any, comm: Communicator, num_experts: Any) -> PartitionSpec:
    """Experts split over the ranks, expert e at e."""
    num_experts = checks.check_small_integer("sharded_moe", "num_experts", num_experts)
    rows = comm.num_ranks * -(-num_experts // comm.num_ranks)
    for path, leaf in jax.tree.leaves_with_path(params):
        shape = jnp.shape(leaf)
        if shape[:1] != (rows,):
            raise ValueError(
                "jax_ep.sharded_moe: without param_specs each array of params must be "
                f"[{rows}, ...], R * ceil(num_experts / R) experts, found "
                f"{list(shape)} at {jax.tree_util.keystr(path)}"
            )
    return PartitionSpec(comm.axis_name)


def _laid_out(tree: Any, specs: Any, mesh: jax.sharding.Mesh) -> Any:
    """`tree` split as `specs` says, over the axes where shard_map asks for that."""
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    explicit = {name for name, kind in types if kind == AxisType.Explicit}
    if not explicit:
        return tree

    def entry(axes):
        return tuple(axis for axis in _axes(axes) if axis in explicit) or None

    def lay_out(spec, subtree):
        sharding = NamedSharding(mesh, PartitionSpec(*map(entry, spec)))
        return jax.tree.map(lambda a: jax.sharding.reshard(a, sharding), subtree)

    return jax.tree.map(
        lay_out, specs, tree, is_leaf=lambda a: isinstance(a, PartitionSpec)
    )
