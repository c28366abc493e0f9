"""Measures grouped products of experts beside dense products of the same rows.

    python benchmarks/grouped_products.py
    python benchmarks/grouped_products.py --hidden 4096 --inner 1536 --groups 16

One Hopper GPU. Rows are routed uniformly and every group is rounded up to 128 rows
(64 with few tokens); rates and shares count real rows. `share` is the time of the
dense product over ours, the two measured in turns, as a GPU that is hot is slower.
With few tokens it is the time to read the matrices of experts that have rows, at
the rate of a plain copy. Results are checked against float32 before they are timed.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep._operations import mosaic_products as products

TOP_K = 8
SIZES = {"Qwen3-30B-A3B": (2048, 768, 64), "DeepSeek-V3": (7168, 2048, 32)}
FEW = (1, 16, 128)
ROUNDS = 7
BURST_S = 15e-3
# So few microseconds are less than a call from Python takes.
LINKS = 10


def glu(gate, up):
    return jax.nn.silu(gate) * up


@dataclasses.dataclass
class Layer:
    """The operands of a layer's products."""

    hidden: int
    inner: int
    groups: int
    tokens: int
    alignment: int

    def __post_init__(self):
        rng = np.random.default_rng(0)
        even = np.full(self.groups, 1 / self.groups)
        counts = rng.multinomial(self.tokens * TOP_K, even)
        sizes = -(-counts // self.alignment) * self.alignment
        self.sizes = sizes.astype(np.int32)
        self.real = int(counts.sum())
        shapes = {
            "x": (sizes.sum(), self.hidden),
            "ct": (sizes.sum(), self.hidden),
            "gate": (sizes.sum(), self.inner),
            "up": (sizes.sum(), self.inner),
            "w_gate": (self.groups, self.hidden, self.inner),
            "w_up": (self.groups, self.hidden, self.inner),
            "w_down": (self.groups, self.inner, self.hidden),
        }
        draw = jax.jit(
            lambda key, shape: (
                jax.random.normal(key, shape, jnp.bfloat16)
                * (shape[1] ** -0.5 if len(shape) == 3 else 1)
            ),
            static_argnums=1,
        )
        self.arrays: dict[str, jax.Array] = {
            name: draw(jax.random.key(i), tuple(map(int, shape)))
            for i, (name, shape) in enumerate(shapes.items())
        }
        self.arrays["sizes"] = jnp.asarray(self.sizes)

    @property
    def matrix_bytes(self) -> int:
        """Of one matrix of every expert that has rows."""
        return 2 * self.hidden * self.inner * int((self.sizes > 0).sum())


@dataclasses.dataclass
class Product:
    """One grouped product.

    `function` takes the layer's arrays and the alignment; `reference` the same
    arrays for the rows of one group, in float32; `matrices` is how many
    [hidden, inner] matrices an expert's rows go through; `turned` whether the
    dense product is by a transposed matrix, `by_rows` whether it contracts rows.
    """

    name: str
    function: Callable[..., Any]
    reference: Callable[..., Any]
    matrices: int
    turned: bool = False
    by_rows: bool = False


def dot(a, b):
    return jnp.dot(a, b, preferred_element_type=jnp.float32)


def gated_reference(a):
    gate, up = dot(a["x"], a["w_gate"]), dot(a["x"], a["w_up"])
    return glu(gate, up), gate, up


def backward_reference(a):
    gate, up = (a[name].astype(jnp.float32) for name in ("gate", "up"))
    hidden, back = jax.vjp(glu, gate, up)
    return (*back(dot(a["ct"], a["w_down"].T)), hidden)


FORWARD = [
    Product(
        "gate, up, activation",
        lambda a, alignment: products.gated(
            a["x"],
            a["w_gate"],
            a["w_up"],
            a["sizes"],
            combine=glu,
            group_alignment=alignment,
        ),
        lambda a: gated_reference(a)[:1],
        2,
    ),
    Product(
        "down",
        lambda a, alignment: products.rows(
            a["gate"], a["w_down"], a["sizes"], group_alignment=alignment
        ),
        lambda a: dot(a["gate"], a["w_down"]),
        1,
    ),
]
OTHERS = [
    Product(
        "gate, up, activation, all kept",
        lambda a, alignment: products.gated(
            a["x"],
            a["w_gate"],
            a["w_up"],
            a["sizes"],
            combine=glu,
            keep=True,
            group_alignment=alignment,
        ),
        gated_reference,
        2,
    ),
    Product(
        "one matrix of gate",
        lambda a, alignment: products.rows(
            a["x"], a["w_gate"], a["sizes"], group_alignment=alignment
        ),
        lambda a: dot(a["x"], a["w_gate"]),
        1,
    ),
    Product(
        "down's gradient by rows",
        lambda a, alignment: products.rows(
            a["ct"],
            a["w_down"],
            a["sizes"],
            transpose_rhs=True,
            group_alignment=alignment,
        ),
        lambda a: dot(a["ct"], a["w_down"].T),
        1,
        turned=True,
    ),
    Product(
        "the same and through the activation",
        lambda a, alignment: products.gated_backward(
            a["ct"],
            a["w_down"],
            a["gate"],
            a["up"],
            a["sizes"],
            combine=glu,
            group_alignment=alignment,
        ),
        backward_reference,
        1,
        turned=True,
    ),
    Product(
        "gate's and up's gradient by rows",
        lambda a, alignment: products.sum_of_rows(
            [(a["gate"], a["w_gate"]), (a["up"], a["w_up"])],
            a["sizes"],
            transpose_rhs=True,
            group_alignment=alignment,
        ),
        lambda a: dot(a["gate"], a["w_gate"].T) + dot(a["up"], a["w_up"].T),
        2,
        turned=True,
    ),
    Product(
        "gate's gradient by weights",
        lambda a, alignment: products.weights(
            a["x"], a["gate"], a["sizes"], group_alignment=alignment
        ),
        lambda a: dot(a["x"].T, a["gate"]),
        1,
        by_rows=True,
    ),
    Product(
        "down's gradient by weights",
        lambda a, alignment: products.weights(
            a["gate"], a["ct"], a["sizes"], group_alignment=alignment
        ),
        lambda a: dot(a["gate"].T, a["ct"]),
        1,
        by_rows=True,
    ),
]


def burst(run: Callable[[], Any], times: int) -> float:
    out = None
    start = time.perf_counter()
    for _ in range(times):
        out = run()
    jax.block_until_ready(out)
    return (time.perf_counter() - start) / times * 1e6


def in_turns(runs: Sequence[Callable[[], Any]]) -> list[float]:
    """Medians in us of bursts that take turns."""
    lengths = []
    for run in runs:
        jax.block_until_ready(run())
        lengths.append(max(3, int(BURST_S / (burst(run, 2) * 1e-6))))
    times = [[burst(run, n) for run, n in zip(runs, lengths)] for _ in range(ROUNDS)]
    return [statistics.median(column) for column in zip(*times)]


def largest_error(layer: Layer, product: Product, found: Any) -> float:
    """Over three groups, relative, by norm."""
    ends = np.cumsum(layer.sizes)
    errors = []
    live = np.flatnonzero(layer.sizes)
    for group in {live[0], live[len(live) // 2], live[-1]}:
        rows = slice(ends[group] - layer.sizes[group], ends[group])
        own = {
            name: a[group] if name.startswith("w_") else a[rows]
            for name, a in layer.arrays.items()
            if name != "sizes"
        }
        wanted = jax.tree.leaves(product.reference(own))
        for got, want in zip(jax.tree.leaves(found), wanted, strict=True):
            got = got[group if product.by_rows else rows].astype(jnp.float32)
            errors.append(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))
    return float(jnp.max(jnp.stack(errors)))


def dense(layer: Layer, product: Product) -> tuple[Callable[..., Any], tuple]:
    """The product of as many real rows by one matrix, and its operands."""
    a, rows = layer.arrays, layer.real
    if product.by_rows:
        return jax.jit(lambda x, y: x.T @ y), (a["x"][:rows], a["gate"][:rows])
    matrix = a["w_gate"][:2] if product.matrices == 2 else a["w_gate"][:1]
    matrix = jnp.concatenate(matrix, axis=1)  # [hidden, matrices * inner]
    down = product.name.startswith("down")
    wide = jnp.concatenate([a["gate"], a["up"]], axis=1)[:rows, : matrix.shape[1]]
    if product.turned and product.matrices == 1:  # to inner
        return jax.jit(lambda x, w: x @ w.T), (a["ct"][:rows], matrix.T.copy())
    if product.turned:
        return jax.jit(lambda x, w: x @ w.T), (wide, matrix)
    if down:
        return jax.jit(lambda x, w: x @ w), (wide, matrix.T.copy())
    return jax.jit(lambda x, w: x @ w), (a["x"][:rows], matrix)


def compiled(
    pool, layer: Layer, chosen: Sequence[Product], links: int = 1
) -> list[Any]:
    """Each product `links` times in one program, one after the other."""

    def compile_(product):
        def function(a):
            out = None
            for _ in range(links):
                out = product.function(a, layer.alignment)
                never = jax.tree.leaves(out)[0].reshape(-1)[0] > 1e30
                a = a | {"sizes": a["sizes"] + never}
            return out

        return jax.jit(function).lower(layer.arrays).compile()

    return [pool.submit(compile_, product) for product in chosen]


def many_rows(pool, name: str, size: tuple[int, int, int], tokens: int) -> None:
    layer = Layer(*size, tokens, 128)
    print(
        f"\n{name}: hidden {layer.hidden}, inner {layer.inner}, {layer.groups} groups,"
        f" {layer.real} rows, {layer.sizes.sum()} with pads"
    )
    print(f"{'product':38} {'us':>7} {'TFLOP/s':>8} {'dense us':>9} {'share':>6} error")
    chosen = FORWARD + OTHERS
    forward: list[tuple[float, float]] = []
    for product, job in zip(chosen, compiled(pool, layer, chosen)):
        run, (plain, operands) = job.result(), dense(layer, product)
        error = largest_error(layer, product, run(layer.arrays))
        ours, theirs = in_turns([lambda: run(layer.arrays), lambda: plain(*operands)])  # noqa: B023
        work = 2 * layer.real * layer.hidden * layer.inner * product.matrices
        print(
            f"{product.name:38} {ours:7.0f} {work / ours / 1e6:8.0f} {theirs:9.0f}"
            f" {theirs / ours:6.3f} {error:.1e}",
            flush=True,
        )
        if product in FORWARD:
            forward.append((ours, theirs))
    ours, theirs = (sum(times) for times in zip(*forward))
    print(f"{'forward':38} {ours:7.0f} {'':8} {theirs:9.0f} {theirs / ours:6.3f}")


def few_rows(pool, name: str, size: tuple[int, int, int], rate: float) -> None:
    print(f"\n{name}, few tokens; copy {rate / 1e6:.2f} TB/s")
    print(
        f"{'T':>4} {'experts':>7} {'product':24} {'us':>7} {'read us':>8} {'share':>6}"
    )
    layers = [Layer(*size, tokens, 64) for tokens in FEW]
    jobs = [compiled(pool, layer, FORWARD, LINKS) for layer in layers]
    for layer, runs in zip(layers, jobs):
        for product, job in zip(FORWARD, runs):
            run = job.result()
            error = largest_error(layer, product, run(layer.arrays))
            if not error < 0.01:
                raise AssertionError(f"{product.name}: error {error}")
            [ours] = in_turns([lambda: run(layer.arrays)])  # noqa: B023
            ours /= LINKS
            read = layer.matrix_bytes * product.matrices / rate
            print(
                f"{layer.tokens:4} {(layer.sizes > 0).sum():7} {product.name:24}"
                f" {ours:7.1f} {read:8.1f} {read / ours:6.3f}",
                flush=True,
            )


def copy_rate() -> float:
    """Bytes read and written a microsecond."""
    array = jnp.arange(1 << 29, dtype=jnp.int32)
    flip = jax.jit(lambda x: ~x)
    [us] = in_turns([lambda: flip(array)])
    return 2 * array.nbytes / us


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    add = parser.add_argument
    add("--hidden", type=int, help="with --inner and --groups: these sizes alone")
    add("--inner", type=int)
    add("--groups", type=int)
    add("--tokens", type=int, default=4096, help="each goes to 8 experts")
    add("--no-few", action="store_true", help="no products of few tokens")
    options = parser.parse_args()
    sizes = SIZES
    if options.hidden:
        sizes = {"given sizes": (options.hidden, options.inner, options.groups)}
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, bfloat16")
    with concurrent.futures.ThreadPoolExecutor() as pool:
        rate = copy_rate()
        for name, size in sizes.items():
            many_rows(pool, name, size, options.tokens)
        for name, size in sizes.items():
            if not options.no_few:
                few_rows(pool, name, size, rate)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
