"""Prints the table of docs/scaling.md: bytes and times between nodes, on paper.

Nothing is measured here. A token's K experts are taken to be drawn without
replacement, from all nodes or, node-limited, from at most `LIMIT` of them.

    python benchmarks/node_model.py
"""

from __future__ import annotations

import math

T, H, K, EXPERTS = 4096, 7168, 8, 512
ROW = 2 * H  # bytes of a bfloat16 row
GPUS = 8  # of a node
LIMIT = 4  # nodes a token may go to, where it is limited
WIRE = 50e9  # bytes/s of a GPU's network card: 400 Gb/s
NVLINK = 350e9  # bytes/s of a GPU's stores to peers, measured on H200
TRANSFER = 15e-6  # seconds that a chunk costs beside its bytes: a guess
SLACK = 1.25  # node_capacity over the mean, where it is chosen
MIN_CHUNK, MAX_CHUNKS = 4 << 20, 8  # as jax_ep/_operations/node_exchanges.py


def hit(parts: int, choices: float = K) -> float:
    """How likely one of `parts` equal parts of the experts gets a token."""
    return 1 - math.exp(
        sum(
            math.log1p(-(EXPERTS // parts) / (EXPERTS - i)) for i in range(int(choices))
        )
    )


def chunks(block_bytes: float) -> int:
    """Chunks that a block is cut into."""
    return int(min(max(1, block_bytes // MIN_CHUNK), MAX_CHUNKS))


def times(nodes: int, to_node: float, capacity: float) -> tuple[float, float, float]:
    """(MB that need to cross, MB that cross, us of dispatch or combine) of a GPU.

    Args:
      nodes: N.
      to_node: how likely a token goes to one given other node.
      capacity: node_capacity / T.
    """
    needed = (nodes - 1) * T * to_node * ROW
    block = capacity * T * ROW
    crosses = (nodes - 1) * block
    count = chunks(block) * (nodes - 1)
    wire = crosses / WIRE + count * TRANSFER
    # Inside the node: each row to the ranks that need it, of which one in GPUS is
    # the rail's own. The first or last chunk has nothing beside it.
    ranks = nodes * GPUS
    inside = T * ranks * hit(ranks) * (GPUS - 1) / GPUS * ROW / NVLINK
    seconds = max(wire, inside) + min(wire, inside) / count
    return needed / 1e6, crosses / 1e6, seconds * 1e6


def main() -> None:
    """Prints the table."""
    print(
        "| nodes x GPUs | to a node | MB needed | MB, T | us, T | MB, 1.25 | us, 1.25 "
        "| limited: to a node | MB, 1.25 | us, 1.25 |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for nodes in (2, 4, 8, 16, 32, 64):
        free = hit(nodes)
        limited = min(free, LIMIT / nodes)
        needed, full, slow = times(nodes, free, 1.0)
        _, tight, quick = times(nodes, free, min(1.0, SLACK * free))
        _, least, best = times(nodes, limited, min(1.0, SLACK * limited))
        print(
            f"| {nodes} x {GPUS} | {free:.2f} | {needed:.0f} | {full:.0f} | {slow:.0f} "
            f"| {tight:.0f} | {quick:.0f} | {limited:.2f} | {least:.0f} | {best:.0f} |"
        )


if __name__ == "__main__":
    main()
