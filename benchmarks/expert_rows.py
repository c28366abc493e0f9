"""The table local: from received rows to experts, and back."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from inputs import Inputs
from layer_tables import Tables
from timing import Chain, first, link
from workloads import Workload, workload_a, workload_cpu

import jax_ep
from jax_ep._operations import experts, xla_backend
from jax_ep._operations.operation import bind


def table(run: Tables, comm: jax_ep.Communicator) -> None:
    """Measures and prints it: microseconds, and bytes over them."""
    w = run.workload(workload_a if run.on_gpu else workload_cpu)
    alignment = run.options.alignment
    local = Local(run.mesh, w, comm, alignment)
    run.report.say(
        f"\nlocal: {w}: {local.rows} rows, {local.pairs} expert rows on the "
        f"busiest rank, alignment {alignment}, S = {local.places}"
    )
    run.report.say(
        "GB/s: bytes read + written, 1 GB = 10^9; of copy: a copy of as many bytes"
    )
    local.check()
    columns = {"operation": 32, "us": 10, "p95": 10, "MB": 9, "GB/s": 9}
    run.report.head(columns | {"of copy": 8})
    lines = local.lines()
    chains = {name: chain for name, (chain, _) in lines.items()}
    sizes = {name: size for name, (_, size) in lines.items()}
    copy_rate = None
    # A GPU reads and writes about 3 TB/s.
    for name, stats in run.measured(chains, lambda name: 10 + sizes[name] / 3e6):
        rate = sizes[name] / stats.median / 1e3
        if name == "copy":
            copy_rate = rate
        share = rate / copy_rate if copy_rate else None
        run.report.row(
            [
                name,
                f"{stats.median:.1f}",
                f"{stats.p95:.1f}",
                f"{sizes[name] / 1e6:.1f}",
                f"{rate:.0f}",
                "" if share is None else f"{share:.2f}",
            ]
        )
        run.record(
            "local",
            w,
            stats,
            operation=name,
            bytes=sizes[name],
            share_of_copy=share,
        )


def pairs_per_rank(w: Workload) -> list[int]:
    """(token, k) pairs of each rank's experts."""
    local = w.topk_idx.reshape(-1, w.top_k) // w.local_experts
    return [int((local == r).sum()) for r in range(w.num_ranks)]


def fitting_places(w: Workload, alignment: int) -> int:
    """S that fits every group's pads, with nothing left over but for them."""
    most = max(pairs_per_rank(w)) + w.local_experts * (alignment - 1)
    return -(-most // alignment) * alignment


def aligned_plan(
    topk_idx: jax.Array,
    comm: jax_ep.Communicator,
    w: Workload,
    alignment: int,
    places: int,
) -> jax_ep.Plan:
    """A plan whose expert rows have `places` on each rank."""
    return jax_ep.make_plan(
        topk_idx,
        comm=comm,
        num_experts=w.num_experts,
        capacity=w.num_slots,
        expert_alignment=alignment,
        expert_capacity=places,
    )


class Local:
    """expert_rows, permute, unpermute, row_dots of one workload as chains.

    What is linked along a chain is the integer array that an operation reads;
    rows stay as they are (see operations.py).
    """

    def __init__(self, mesh, w: Workload, comm: jax_ep.Communicator, alignment: int):
        self.mesh = mesh
        self.comm = comm
        self.inputs = Inputs(mesh, w)
        self.w = w
        self.alignment = alignment
        per_rank = pairs_per_rank(w)
        busiest = int(np.argmax(per_rank))
        self.pairs = per_rank[busiest]
        self.rows = int(w.counts[:, busiest].sum())
        self.places = fitting_places(w, alignment)
        prepare = self.inputs.per_rank(self._prepare)
        prepared = prepare(self.inputs.topk_idx)
        self.recv_topk_idx, self.expert_rows, self.ranges = prepared
        self.x = self.inputs.rows
        self.y = self.inputs.random(7, self.places)
        self.weights = self.inputs.put(
            np.random.default_rng(1)
            .random((w.num_ranks * w.num_slots, w.top_k))
            .astype(np.float32)
        )

    def _plan(self, topk_idx):
        return aligned_plan(topk_idx, self.comm, self.w, self.alignment, self.places)

    def _prepare(self, topk_idx):
        plan = self._plan(topk_idx)
        return plan.recv_topk_idx, *experts.expert_rows(plan)

    def _params(self):
        return {"backend": self.comm.backend, "expert_capacity": self.places}

    def _bind(self, name, routing, weights, leaves):
        return experts.bind_weighted(name, routing, weights, leaves, **self._params())

    def check(self) -> None:
        """permute and unpermute against plain JAX, bit for bit."""

        def wrong(expert_rows, ranges, x, y):
            routing = (expert_rows, ranges)
            (rows,) = self._bind("ep_permute", routing, None, [x])
            (sums,) = self._bind("ep_unpermute", routing, None, [y])
            (right,) = xla_backend.permute(
                expert_rows, None, x, expert_capacity=self.places
            )
            bad = (rows != right).any(1).sum()
            (right,) = xla_backend.unpermute(expert_rows, None, y)
            return jnp.stack([bad, (sums != right).any(1).sum()])[None]

        bad = np.asarray(
            self.inputs.per_rank(wrong)(self.expert_rows, self.ranges, self.x, self.y)
        ).sum(0)
        if bad.any():
            raise AssertionError(f"permute, unpermute: {bad.tolist()} rows are wrong")

    def _chain(self, name, move, *context) -> Chain:
        """move(expert_rows, *context), its expert_rows linked to its result."""

        def start(expert_rows, *context):
            return (first(expert_rows), context), expert_rows

        return Chain(
            name,
            (self.expert_rows, *context),
            start,
            lambda fixed, expert_rows: move(expert_rows, *fixed[1]),
            lambda fixed, carried, result: link(
                carried, fixed[0], *jax.tree.leaves(result)
            ),
            linked=self.expert_rows,
        )

    def _rows_chain(self, name, primitive, weights, leaf) -> Chain:
        if weights is None:
            return self._chain(
                name,
                lambda e, ranges, x: self._bind(primitive, (e, ranges), None, [x]),
                self.ranges,
                leaf,
            )
        return self._chain(
            name,
            lambda e, ranges, w, x: self._bind(primitive, (e, ranges), w, [x]),
            self.ranges,
            weights,
            leaf,
        )

    def _copy(self, size: int) -> Chain:
        """Writes as many bytes as it reads, `size` in all."""
        rows = max(1, size // 2 // self.w.row_bytes)
        x = self.inputs.bits(self.inputs.random(9, rows))

        def relink(value, x, result):
            return link(x, value, result)

        return Chain(
            "copy",
            (x,),
            lambda x: (first(x), x),
            lambda _, x: x ^ jnp.array(1, x.dtype),
            relink,
            linked=x,
            opaque=False,
        )

    def lines(self) -> dict[str, tuple[Chain, int]]:
        """(chain, bytes read and written on the busiest rank) by name."""
        row = self.w.row_bytes
        slots, index = self.w.num_slots, self.w.num_slots * self.w.top_k * 4
        permuted = (self.rows + self.places) * row + index
        summed = (self.pairs + slots) * row + index

        def numbered(context, carried):
            plan = dataclasses.replace(self._plan(context[1]), recv_topk_idx=carried)
            return experts.expert_rows(plan)

        numbering = Chain(
            "expert_rows",
            (self.recv_topk_idx, self.inputs.topk_idx),
            lambda idx, topk_idx: ((first(idx), topk_idx), idx),
            numbered,
            lambda fixed, carried, result: link(carried, fixed[0], *result),
            linked=self.recv_topk_idx,
        )

        def dots(expert_rows, ranges, x, y):
            return bind("ep_row_dots", expert_rows, ranges, x, y, **self._params())

        rows = self._rows_chain
        return {
            "copy": (self._copy(permuted), permuted // 2 // row * row * 2),
            "expert_rows": (numbering, 2 * index),
            "permute": (rows("permute", "ep_permute", None, self.x), permuted),
            "unpermute": (rows("unpermute", "ep_unpermute", None, self.y), summed),
            "unpermute, weighted": (
                rows("unpermute", "ep_unpermute", self.weights, self.y),
                summed + index,
            ),
            "its backward: permute, weighted": (
                rows("permute", "ep_permute", self.weights, self.x),
                permuted + index,
            ),
            "its backward: row_dots": (
                self._chain("row_dots", dots, self.ranges, self.x, self.y),
                (self.rows + self.pairs) * row + 2 * index,
            ),
        }
