"""Copies of the busiest experts on other ranks, placed by what was counted.

    python examples/redundant_experts.py    # on all GPUs, or on 8 virtual CPU devices

A router that prefers some experts keeps their ranks busy while the others wait. This
program counts the load of each expert for some steps, gives every rank room for one
more expert, and places copies so that ranks are equally busy. Then it trains on: a
token goes to one of the copies of its expert, and the gradients of copies are summed,
so that copies stay equal. jax_ep sees physical experts only; the table of copies is
two plain arrays.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep

jax.config.update("jax_num_cpu_devices", 8)

T, K, H, WIDTH = 256, 2, 32, 64  # tokens of a rank, choices, widths
STEPS, RATE = 20, 0.5


def place(load: np.ndarray, ranks: int, room: int) -> np.ndarray:
    """Logical expert of each physical one, [ranks * room], by load [E].

    The expert with the most load for each of its copies gets the next copy; then copies
    go, the busiest first, to the least busy rank that has room and not the same expert.
    """
    copies = np.ones(len(load), int)
    for _ in range(ranks * room - len(load)):
        most = np.where(copies < ranks, load / copies, -1)
        copies[most.argmax()] += 1
    share = load / copies
    placed: list[list[int]] = [[] for _ in range(ranks)]
    for expert in np.repeat(np.argsort(-share), copies[np.argsort(-share)]):
        free = [held for held in placed if len(held) < room]
        others = [held for held in free if expert not in held] or free
        min(others, key=lambda held: share[held].sum()).append(int(expert))
    return np.array(placed).reshape(-1)


def table_of_copies(logical: np.ndarray, experts: int) -> tuple[np.ndarray, np.ndarray]:
    """Physical experts of each logical one, [E, most copies], and how many they are."""
    copies = [np.flatnonzero(logical == expert) for expert in range(experts)]
    count = np.array([len(held) for held in copies])
    return np.array([np.resize(held, count.max()) for held in copies]), count


def to_physical(topk_idx, table, count):
    """A copy of each chosen expert; tokens take turns."""
    turn = jnp.arange(topk_idx.size).reshape(topk_idx.shape)
    return table[topk_idx, turn % count[topk_idx]]


class Training:
    """A layer that learns what fixed random targets say, with experts placed anyhow.

    Attributes:
      logical: the logical expert of each physical one.
    """

    def __init__(self, comm: jax_ep.Communicator, logical: np.ndarray, experts: int):
        self.comm = comm
        self.logical = logical
        self.experts = experts
        self.table, self.count = table_of_copies(logical, experts)
        specs = P("ep"), P("ep"), P("ep"), P()
        self.layer = jax.shard_map(
            self._rank, mesh=comm.mesh, in_specs=specs, out_specs=(P(), P("ep"))
        )
        self.step = jax.jit(self._step)

    def _rank(self, x, target, params, router):
        scores, topk_idx = jax.lax.top_k(jax.nn.softmax(x @ router), K)
        physical = to_physical(topk_idx, jnp.array(self.table), jnp.array(self.count))
        plan = jax_ep.make_plan(physical, comm=self.comm, num_experts=len(self.logical))

        def expert_fn(rows, group_sizes):
            return jax_ep.gated_mlp(rows, group_sizes, **params)

        weights = scores / scores.sum(-1, keepdims=True)
        y = x + jax_ep.moe_with_plan(x, weights, expert_fn, plan)
        loss = jax.lax.pmean(((y - target) ** 2).mean(), "ep")
        return loss, plan.expert_counts  # of this rank's physical experts

    def _step(self, x, target, params, router):
        def loss(params):
            return self.layer(x, target, params, router)

        (value, counts), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        gradients = jax.tree.map(self._of_copies, gradients)
        params = jax.tree.map(lambda p, g: p - RATE * g, params, gradients)
        return value, counts, params

    def _of_copies(self, gradient):
        """The sum over the copies of an expert, for each of them."""
        total = jax.ops.segment_sum(gradient, self.logical, self.experts)
        total = total[self.logical]
        split = NamedSharding(self.comm.mesh, P("ep"))
        return jax.lax.with_sharding_constraint(total, split)

    def put(self, params):
        """Physical parameters of logical ones."""
        split = NamedSharding(self.comm.mesh, P("ep"))
        return jax.tree.map(
            lambda a: jax.device_put(np.asarray(a)[self.logical], split), params
        )

    def run(self, x, target, params, router):
        """STEPS steps: losses, rows of each physical expert, logical parameters."""
        physical, losses = self.put(params), []
        counts = np.zeros(len(self.logical), int)
        for _ in range(STEPS):
            loss, load, physical = self.step(x, target, physical, router)
            losses.append(float(loss))
            counts += np.asarray(load)
        first = self.table[:, 0]
        for a in map(np.asarray, jax.tree.leaves(physical)):
            np.testing.assert_array_equal(a, a[first][self.logical])  # copies are equal
        return losses, counts, jax.tree.map(lambda a: np.asarray(a)[first], physical)


def busiest(counts: np.ndarray, ranks: int) -> float:
    """Rows of the busiest rank, in those of the average one."""
    of_rank = counts.reshape(ranks, -1).sum(1)
    return of_rank.max() / of_rank.mean()


def main() -> dict[str, float]:
    # The sums over copies are left to the compiler, as axes of this kind allow.
    mesh = jax.make_mesh(
        (jax.device_count(),), ("ep",), axis_types=(jax.sharding.AxisType.Auto,)
    )
    comm = jax_ep.Communicator(mesh, "ep")
    ranks = comm.num_ranks
    experts = 4 * ranks
    keys = jax.random.split(jax.random.key(0), 7)
    shapes = {
        "w_gate": (experts, H, WIDTH),
        "w_up": (experts, H, WIDTH),
        "w_down": (experts, WIDTH, H),
    }
    params = {
        name: jax.random.normal(key, shape) * shape[1] ** -0.5
        for key, (name, shape) in zip(keys, shapes.items())
    }
    split = NamedSharding(mesh, P("ep"))
    x = jax.device_put(1 + jax.random.normal(keys[3], (ranks * T, H)), split)
    target = jax.device_put(jax.random.normal(keys[4], x.shape), split)
    # What tokens have in common makes some experts popular with all of them.
    router = jax.random.normal(keys[5], (H, experts)) * H**-0.5

    plain = Training(comm, np.arange(experts), experts)
    before, counts, params = plain.run(x, target, params, router)
    found = {"before": busiest(counts, ranks)}
    logical = place(counts, ranks, experts // ranks + 1)
    after, counts, params = Training(comm, logical, experts).run(
        x, target, params, router
    )
    found |= {"after": busiest(counts, ranks), "loss": after[-1]}
    print(f"{experts} experts on {ranks} ranks, then {len(logical)} with copies")
    ratios = f"{found['before']:.2f}, with copies {found['after']:.2f}"
    print(f"rows of the busiest rank, in those of the average one: {ratios}")
    print(f"loss {before[0]:.4f} to {before[-1]:.4f}, then to {after[-1]:.4f}")
    comm.close()
    return found


if __name__ == "__main__":
    main()
