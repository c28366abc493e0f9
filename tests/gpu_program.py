"""Programs that gpu_test runs in processes of their own.

XLA's flags, the allocator's settings and a tool around the process come from
the test; --help lists the programs. The last line of JSON in the output is what
the program found. All run on virtual CPU devices too:

    NPROC=16 JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=2 \
        python gpu_program.py graphs --backend cpu --replays 100
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import gc
import json
import os
import random
import re
import threading
import time

import harness
import jax
import jax.numpy as jnp
import low_latency_memory
import low_latency_steps
import ml_dtypes
import numpy as np
import on_device
import oracle
import payloads
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep._data import native

SPEC = P("ep")
# Printed when an error has reached the program.
CAUGHT = "-- caught --"


def communicator(backend: str, ranks: int, **kwargs) -> jax_ep.Communicator:
    """Over the first `ranks` devices."""
    mesh = jax.make_mesh(
        (ranks,),
        ("ep",),
        axis_types=(AxisType.Auto,),
        devices=jax.devices()[:ranks],
    )
    return jax_ep.Communicator(mesh, "ep", backend=backend, **kwargs)


def handler_calls(comm: jax_ep.Communicator) -> int:
    """How often XLA has called a handler of the CUDA backend."""
    return native.cuda().num_handler_calls() if comm.backend == "cuda" else 0


def on_ranks(body, comm: jax_ep.Communicator):
    """`body(shards)` on every rank; all leaves are stacked, [R, ...]."""

    def shard(tree):
        tree = jax.tree.map(lambda a: a[0], tree)
        return jax.tree.map(lambda a: a[None], body(tree))

    return jax.shard_map(shard, mesh=comm.mesh, in_specs=(SPEC,), out_specs=SPEC)


def put(comm: jax_ep.Communicator, tree):
    """Stacked NumPy arrays on the ranks' devices, in memory of their own."""
    sharding = NamedSharding(comm.mesh, SPEC)
    return jax.tree.map(
        lambda a: jax.device_put(np.array(a), sharding, may_alias=False), tree
    )


def same_as_oracle(traffic, step: int, found: on_device.Exchange) -> None:
    """Compares one exchange with the NumPy oracle on the host, bit for bit."""
    ranks = np.arange(traffic.ranks)
    ids = traffic.ids(step, ranks, np).astype(np.int32)
    right = oracle.plan(ids, traffic.experts, traffic.slots)
    x = traffic.rows(step, ranks[:, None], np.arange(traffic.tokens), np)
    received = right.dispatch(x)
    y = received + ranks.astype(x.dtype)[:, None, None]
    for name, got, want in (
        ("source", found.source, right.fields["recv_src"]),
        ("received", found.received, received),
        ("combined", found.combined, right.combine(y)),
    ):
        payloads.assert_same_rows(got, want, f"step {step}: {name}", x)


# A program that runs over and over on the same memory: what a CUDA graph is for


def in_place(comm, traffic, chains: int = 1, **compiler_options):
    """(program, state): the program makes the next step's state of a state.

    It gives the state's memory back with the new state in it, so that no
    address changes from one run to the next and a graph needs no update. With
    several `chains` one step holds as many exchanges that do not depend on each
    other; chain c is at step * chains + c of the traffic.
    """

    def body(state):
        found = tuple(
            traffic.exchange(comm, state["step"] * chains + chain)
            for chain in range(chains)
        )
        wrong = sum(f.wrong for f in found)
        return {
            "step": state["step"] + 1,
            "wrong": state["wrong"] + wrong,
            "found": found,
        }

    mapped = on_ranks(body, comm)
    program = jax.jit(
        mapped,
        donate_argnums=0,
        keep_unused=True,
        compiler_options=compiler_options or None,
    )
    start = {
        "step": np.zeros(comm.num_ranks, np.int32),
        "wrong": np.zeros((comm.num_ranks, 4), np.int32),
        "found": (
            on_device.Exchange(
                source=_poison(comm, traffic.slots, dtype=np.int32),
                received=_poison(comm, traffic.slots, traffic.columns),
                combined=_poison(comm, traffic.tokens, traffic.columns),
                wrong=_poison(comm, 4, dtype=np.int32),
            ),
        )
        * chains,
    }
    return program, put(comm, start)


def _poison(comm, *shape, dtype=ml_dtypes.bfloat16):
    return payloads.poison((comm.num_ranks, *shape), dtype)


def addresses(tree) -> tuple[int, ...]:
    """Where the arrays of a tree are on all devices."""
    return tuple(
        shard.data.unsafe_buffer_pointer()
        for leaf in jax.tree.leaves(tree)
        for shard in leaf.addressable_shards
    )


def replays(comm, traffic, runs: int, chains: int = 1, **compiler_options):
    """The first call, then `runs` more; every 50th compared on the host too."""
    program, state = in_place(comm, traffic, chains, **compiler_options)
    before = handler_calls(comm)
    places = {addresses(state)}
    after_first = None
    for run in range(runs + 1):
        state = program(state)
        if run % 50:
            continue
        for chain, found in enumerate(state["found"]):
            same_as_oracle(traffic, run * chains + chain, found)
        places.add(addresses(state))
        if after_first is None:
            after_first = handler_calls(comm)
    jax.block_until_ready(state)
    assert np.asarray(state["step"]).tolist() == [runs + 1] * comm.num_ranks
    return {
        "wrong": _sum(state["wrong"]),
        "launches": runs,
        "calls of the first run": after_first - before,
        "calls of the others": handler_calls(comm) - after_first,
        "sets of addresses": len(places),
    }


def _sum(array) -> int:
    return int(np.asarray(array).astype(np.int64).sum())


def moving_memory(comm, traffic, runs: int):
    """One program whose buffers move all the time, kept results included."""
    program = jax.jit(on_ranks(lambda s: (traffic.exchange(comm, s["step"]),), comm))
    chance = random.Random(1)
    before = handler_calls(comm)
    kept, others, wrong = [], [], 0
    for run in range(runs):
        step = np.full(comm.num_ranks, run, np.int32)
        (found,) = program(put(comm, {"step": step}))
        kept.append((run, found))
        size = chance.choice((1, 3000, 100_000, 1_000_000))
        others.append(put(comm, np.zeros((comm.num_ranks, size), np.int32)))
        if len(kept) > 4:
            step, found = kept.pop(chance.randrange(len(kept)))
            wrong += _sum(found.wrong)
            if step % 10 == 0:
                same_as_oracle(traffic, step, found)
        if len(others) > 6:
            del others[chance.randrange(len(others))]
    wrong += sum(_sum(found.wrong) for _, found in kept)
    return {"wrong": wrong, "launches": runs, "calls": handler_calls(comm) - before}


def loop(comm, traffic, steps: int):
    """`steps` exchanges in one lax.scan: XLA captures the body of a loop."""

    def body(tree):
        def step(carry, i):
            return carry, traffic.exchange(comm, tree["first"] + i).wrong

        return lax.scan(step, None, jnp.arange(steps))[1]

    before = handler_calls(comm)
    first = put(comm, {"first": np.zeros(comm.num_ranks, np.int32)})
    wrong = jax.jit(on_ranks(body, comm))(first)
    return {
        "wrong": _sum(wrong),
        "launches": steps,
        "calls": handler_calls(comm) - before,
    }


def graphs(args):
    """First call, replays, moving memory, a loop, and two chains at a time."""
    comm = communicator(args.backend, args.ranks)
    traffic = on_device.Traffic(
        ranks=args.ranks,
        tokens=96,
        top_k=4,
        experts=4 * args.ranks + 1,
        columns=520,
        capacity=70 * args.ranks,  # drops in the steps where all go to rank 0
    )
    found = {"replays": replays(comm, traffic, args.replays)}
    in_one = dataclasses.replace(traffic, in_one=True)
    if not args.brief:
        found["in one"] = replays(comm, in_one, args.replays)
        found["in one, two chains"] = replays(
            comm,
            in_one,
            args.replays // 5,
            chains=2,
            xla_gpu_command_buffer_scheduling_mode="CONCURRENT",
        )
        found["moving memory"] = moving_memory(comm, traffic, 100)
        found["loop"] = loop(comm, traffic, 60)
        # As branches of one graph.
        found["two chains"] = replays(
            comm,
            traffic,
            args.replays // 5,
            chains=2,
            xla_gpu_command_buffer_scheduling_mode="CONCURRENT",
        )
    return found


def low_latency(args):
    """Pairs whose ids and tokens change with every run of one program."""
    comm = communicator(args.backend, args.ranks)
    over = jax_ep.LowLatencyBuffer(
        comm, max_tokens=40, hidden=7168, num_experts=4 * args.ranks
    )
    found = {}
    for layout in ("expert", "rank"):
        for mode in (None, "CONCURRENT"):
            options = {"xla_gpu_command_buffer_scheduling_mode": mode} if mode else None
            found[f"{layout} {mode}"] = _low_latency(args, over, layout, options)
    return found


def _low_latency(args, over, layout, options):
    x, weights = low_latency_steps.inputs(args.ranks, 33, 7168)

    def body(state):
        wrong = state["wrong"]
        for more in range(2):
            # The second pair's tokens wait for the first pair.
            tokens = jnp.where(wrong < 0, jnp.zeros_like(state["x"]), state["x"])
            wrong += low_latency_steps.wrong_rows(
                over, layout, state["step"] + more, tokens, state["weights"]
            )
        return {**state, "step": state["step"] + 2, "wrong": wrong}

    program = jax.jit(
        on_ranks(body, over.comm),
        donate_argnums=0,
        keep_unused=True,
        compiler_options=options,
    )
    zeros = np.zeros(args.ranks, np.int32)
    state = put(over.comm, {"step": zeros, "wrong": zeros, "x": x, "weights": weights})
    before = handler_calls(over.comm)
    state = jax.block_until_ready(program(state))
    first = handler_calls(over.comm)
    for _ in range(args.replays):
        state = program(state)
    return {
        "wrong": _sum(state["wrong"]),
        "launches": args.replays,
        "calls of the first run": first - before,
        "calls of the others": handler_calls(over.comm) - first,
    }


# Beside XLA's own collectives


def beside_collectives(args):
    """An exchange, a psum and an all_gather that do not depend on each other."""
    comm = communicator(args.backend, args.ranks)
    traffic = on_device.Traffic(
        ranks=args.ranks, tokens=256, top_k=4, experts=8 * args.ranks, columns=2048
    )
    numbers, gathered = 1 << 20, 1 << 16

    def values(step, rank, count):
        bits = on_device.mix(step, rank, jnp.arange(count))
        return on_device.small_integers(bits, jnp.float32)

    def step(step):
        rank = lax.axis_index("ep")
        total = lax.psum(values(step, rank, numbers), "ep")
        every = lax.all_gather(values(step + 1, rank, gathered), "ep")
        found = traffic.exchange(comm, step)
        right_total = sum(values(step, r, numbers) for r in range(args.ranks))
        right_every = jnp.stack(
            [values(step + 1, r, gathered) for r in range(args.ranks)]
        )
        return jnp.concatenate(
            [
                found.wrong,
                (total != right_total).sum(dtype=jnp.int32)[None],
                (every != right_every).sum(dtype=jnp.int32)[None],
            ]
        )

    def body(state):
        wrong = state["wrong"] + step(state["step"])
        return {"step": state["step"] + 1, "wrong": wrong}

    def scan(state):
        def one(carry, i):
            return carry, step(state["step"] + i)

        return lax.scan(one, None, jnp.arange(100))[1]

    state = put(
        comm,
        {
            "step": np.zeros(args.ranks, np.int32),
            "wrong": np.zeros((args.ranks, 6), np.int32),
        },
    )
    program = jax.jit(on_ranks(body, comm), donate_argnums=0).lower(state).compile()
    text = program.as_text()
    for _ in range(args.replays):
        state = program(state)
    found = {
        "wrong": np.asarray(state["wrong"]).sum(0).tolist(),
        "launches": _sum(state["step"]) // args.ranks,
        "collectives that start early": _start_early(text),
    }
    in_loop = jax.jit(on_ranks(scan, comm))(state)
    return found | {"wrong in a loop": _sum(in_loop)}


def _start_early(text: str) -> int:
    """Asynchronous collectives with one of our calls before their end."""
    waiting, found = 0, 0
    for line in text.splitlines():
        if "-start(" in line:
            waiting += 1
        elif "-done(" in line:
            waiting = 0
        elif 'custom_call_target="jax_ep_' in line and waiting:
            found, waiting = found + waiting, 0
    return found


# Rows that travel while other work is done


def overlap(args):
    """Flights beside psum, all_gather, psum_scatter and products, ranks late."""
    comm = communicator(args.backend, args.ranks)
    traffic = on_device.Traffic(
        ranks=args.ranks, tokens=256, top_k=4, experts=8 * args.ranks, columns=2048
    )
    numbers, gathered, size = 1 << 18, 1 << 14, 512

    def values(step, rank, place, count):
        bits = on_device.mix(step, rank, place, jnp.arange(count))
        return on_device.small_integers(bits, jnp.float32)

    def products(start, count):
        # The square of this matrix is the matrix.
        matrix = jnp.full((size, size), start * 0.0 + 1.0 / size)
        return lax.fori_loop(0, count, lambda _, m: m @ m, matrix)

    def late(x, step, place):
        rank = lax.axis_index("ep")
        count = (on_device.mix(step, rank, place) % np.uint32(12)).astype("int32")
        matrix = products(x.ravel()[0].astype(jnp.float32), count)
        return x + (matrix.max() > 2.0).astype(x.dtype)

    def beside(step, place):
        rank = lax.axis_index("ep")
        total = lax.psum(values(step, rank, place, numbers), "ep")
        every = lax.all_gather(values(step + 1, rank, place, gathered), "ep")
        part = lax.psum_scatter(
            values(step + 2, rank, place, args.ranks * gathered).reshape(
                args.ranks, gathered
            ),
            "ep",
        )
        matrix = products(step.astype(jnp.float32), 4)
        return total, every, part, matrix

    def wrong_beside(step, place, found):
        ranks = range(args.ranks)
        total, every, part, matrix = found
        mine = [
            values(step + 2, r, place, args.ranks * gathered).reshape(
                args.ranks, gathered
            )[lax.axis_index("ep")]
            for r in ranks
        ]
        right = (
            sum(values(step, r, place, numbers) for r in ranks),
            jnp.stack([values(step + 1, r, place, gathered) for r in ranks]),
            sum(mine),
            jnp.full((size, size), 1.0 / size),
        )
        pairs = zip((total, every, part, matrix), right, strict=True)
        return jnp.stack([(a != b).sum(dtype=jnp.int32) for a, b in pairs])

    def one(step):
        found = traffic.exchange(comm, step, late, beside)
        others = sum(wrong_beside(step, p, found.beside[p]) for p in (0, 1))
        return jnp.concatenate([found.wrong, others])

    def body(state):
        wrong = state["wrong"] + one(state["step"])
        return {"step": state["step"] + 1, "wrong": wrong}

    def scan(state):
        def again(carry, i):
            return carry, one(state["step"] + i)

        return lax.scan(again, None, jnp.arange(100))[1]

    state = put(
        comm,
        {
            "step": np.zeros(args.ranks, np.int32),
            "wrong": np.zeros((args.ranks, 8), np.int32),
        },
    )
    program = jax.jit(on_ranks(body, comm), donate_argnums=0).lower(state).compile()
    for _ in range(args.replays):
        state = program(state)
    in_loop = jax.jit(on_ranks(scan, comm))(state)
    return {
        "wrong": np.asarray(state["wrong"]).sum(0).tolist(),
        "launches": _sum(state["step"]) // args.ranks,
        "between start and done": _between(program.as_text()),
        "wrong in a loop": _sum(in_loop),
    }


def _between(text: str) -> dict[str, list[str]]:
    """What XLA enqueues while rows travel, by operation."""
    found: dict[str, list[str]] = {}
    travelling = ""
    for line in text.splitlines():
        if half := re.search(r'custom_call_target="jax_ep_(\w+)_(start|done)"', line):
            travelling = half[1] if half[2] == "start" else ""
        elif travelling:
            # By name: asynchronous ones are calls. Products stand in a loop.
            kinds = r"all-reduce|all-gather|reduce-scatter|while"
            if kind := re.search(rf"%({kinds})[\w.-]* = ", line):
                found.setdefault(travelling, []).append(kind[1])
    return found


# A rank that never calls


def missing_rank(args):
    """All ranks but the last call args.op; the error that reaches the user."""
    comm = communicator(args.backend, args.ranks, timeout_s=2.0)
    tokens, experts = 6, 2 * args.ranks

    def body(tree):
        x, ids = tree["x"], tree["ids"]

        def make_plan():
            return jax_ep.make_plan(ids, comm=comm, num_experts=experts)

        plan = None if args.op == "plan" else make_plan()

        def call(x):
            if args.op == "plan":
                return x + make_plan().num_recv.astype(x.dtype)
            if args.op == "dispatch":
                return x + jax_ep.dispatch(x, plan)[:tokens]
            return x + jax_ep.combine(jnp.tile(x, (args.ranks, 1)), plan)

        absent = lax.axis_index("ep") == args.ranks - 1
        return lax.cond(absent, lambda x: x, call, x)

    def shard(tree):
        tree = jax.tree.map(lambda a: a[0], tree)
        return body(tree)[None]

    mapped = jax.shard_map(
        shard, mesh=comm.mesh, in_specs=(SPEC,), out_specs=SPEC, check_vma=False
    )
    ids = np.arange(args.ranks * tokens).reshape(args.ranks, tokens, 1) % experts
    tree = put(
        comm,
        {
            "x": np.ones((args.ranks, tokens, 2), np.float32),
            "ids": ids.astype(np.int32),
        },
    )
    return _failing(comm, jax.jit(mapped).lower(tree).compile(), tree)


def let_go_in_a_callback(args):
    """A communicator's last program goes while the last rank is in a callback.

    Rank 0's kernel waits for it, and the callback wants the interpreter's lock.
    """
    comm, other = (communicator(args.backend, args.ranks, timeout_s=20.0) for _ in "12")
    experts = 2 * args.ranks
    entered = threading.Event()

    def sleep(x):
        entered.set()
        time.sleep(2)
        return np.asarray(x)

    def exchange(comm, tree):
        plan = jax_ep.make_plan(tree["ids"], comm=comm, num_experts=experts)
        return jax_ep.combine(jax_ep.dispatch(tree["x"], plan), plan)

    def late(tree):
        x = lax.cond(
            lax.axis_index("ep") == args.ranks - 1,
            lambda x: jax.pure_callback(sleep, x, x),
            lambda x: x,
            tree["x"],
        )
        return exchange(comm, tree | {"x": x})

    def program(body, comm):
        return jax.jit(
            jax.shard_map(
                lambda tree: body(jax.tree.map(lambda a: a[0], tree))[None],
                mesh=comm.mesh,
                in_specs=(SPEC,),
                out_specs=SPEC,
                check_vma=False,
            )
        )

    ids = np.arange(args.ranks * 6).reshape(args.ranks, 6, 1) % experts
    x = np.arange(args.ranks * 12, dtype=np.float32).reshape(args.ranks, 6, 2)
    tree = put(comm, {"x": x, "ids": ids.astype(np.int32)})
    waiting = program(late, comm).lower(tree).compile()
    last = program(lambda tree: exchange(other, tree), other).lower(tree).compile()
    jax.block_until_ready(last(tree))
    other.close()
    jax.clear_caches()
    out = waiting(tree)
    assert entered.wait(30)
    del last
    gc.collect()
    return {"wrong": int((np.asarray(out) != x).sum())}


def _failing(comm, program, tree):
    """Runs a program that traps: the error, and when it came."""
    start = time.monotonic()
    try:
        jax.block_until_ready(program(tree))
        raised, message = None, ""
    except Exception as error:
        raised, message = type(error).__name__, str(error)
    seconds = time.monotonic() - start
    _flush()
    print(CAUGHT, flush=True)
    if comm.backend == "cuda":
        _synchronize(comm.num_ranks)
    return {"raised": raised, "message": message, "seconds": seconds}


def low_latency_missing_rank(args):
    """All ranks but the last call args.op of the fourth pair, by args.layout."""
    comm = communicator(args.backend, args.ranks, timeout_s=3.0)
    over = jax_ep.LowLatencyBuffer(
        comm, max_tokens=40, hidden=1024, num_experts=3 * args.ranks
    )
    x, weights = low_latency_steps.inputs(args.ranks, 33, 1024)

    def body(tree):
        return low_latency_steps.without_the_last(
            over, args.layout, args.op, tree["x"], tree["weights"]
        )

    tree = put(comm, {"x": x, "weights": weights})
    return _failing(comm, jax.jit(on_ranks(body, comm)).lower(tree).compile(), tree)


def low_latency_under_way(args):
    """A dispatch for which on rank 0 another seems to have begun and not to go on."""
    comm = communicator("cuda", args.ranks, timeout_s=3.0)
    over = low_latency_memory.Memory(
        comm, max_tokens=40, hidden=1024, num_experts=3 * args.ranks
    )
    x, weights = low_latency_steps.inputs(args.ranks, 33, 1024)

    def body(tree):
        return low_latency_steps.chained(over.buffer, args.layout, 3, **tree)

    tree = put(comm, {"x": x, "weights": weights})
    program = jax.jit(on_ranks(body, comm)).lower(tree).compile()
    wrong = _sum(program(tree))
    kind = low_latency_memory.KINDS.index("dispatch")
    at = kind * low_latency_memory.STATE + low_latency_memory.BUSY
    over.write(0, np.ones(1, np.uint32), at)
    return {"wrong before": wrong, **_failing(comm, program, tree)}


def _flush():
    """Writes what kernels printed: it stands in libc's buffer, not Python's."""
    ctypes.CDLL(None).fflush(None)


def _synchronize(ranks: int):
    """Lets the driver hand over what it still holds; errors are expected."""
    from cuda.bindings import driver

    with contextlib.suppress(Exception):
        for ordinal in range(ranks):
            _, device = driver.cuDeviceGet(ordinal)
            _, context = driver.cuDevicePrimaryCtxRetain(device)
            driver.cuCtxPushCurrent(context)
            driver.cuCtxSynchronize()


# The allocators


def allocations(args):
    """Exchanges while memory that set-up never saw comes and goes."""
    comm = communicator(args.backend, args.ranks)
    traffic = on_device.Traffic(
        ranks=args.ranks, tokens=300, top_k=3, experts=3 * args.ranks, columns=1001
    )
    program = jax.jit(on_ranks(lambda s: traffic.exchange(comm, s["step"]), comm))
    held, wrong, launches = [], 0, 24
    # Grows past what one extension of a growing pool holds, frees, grows again.
    zeros = jax.jit(
        lambda: jnp.zeros((args.ranks, args.megabytes << 18), jnp.float32),
        out_shardings=NamedSharding(comm.mesh, SPEC),
    )
    for run in range(launches):
        step = put(comm, {"step": np.full(comm.num_ranks, run, np.int32)})
        found = program(step)
        wrong += _sum(found.wrong)
        if run % 6 == 0:
            same_as_oracle(traffic, run, found)
        held.append((found, zeros()))
        if run % 8 == 7:
            held.clear()
    return {"wrong": wrong, "launches": launches}


# Under a tool that checks memory


def every_dtype(args):
    """Plan, dispatch and combine with all dtypes and rows of odd sizes."""
    jax.config.update("jax_enable_x64", True)
    shapes = {
        "bool": (5,),
        "int8": (3,),
        "uint8": (17,),
        "int16": (3,),
        "int32": (1,),
        "int64": (3,),
        "float8_e4m3fn": (7,),
        "float8_e5m2": (33,),
        "bfloat16": (1503,),
        "float16": (2048,),
        "float32": (),
        "float64": (3,),
        "complex64": (3,),
        "complex128": (2,),
    }
    sums = ("bfloat16", "float16", "float32", "float64", "complex64", "complex128")
    ranks_done = []
    for ranks in sorted({1, args.ranks}):
        comm = communicator(args.backend, ranks, timeout_s=60.0)
        experts, capacity = 3 * ranks + 1, 9 * ranks
        ids = on_device.Traffic(ranks, 37, 3, experts, 1).ids(0, np.arange(ranks), np)
        ids = ids.astype(np.int32)
        right = oracle.plan(ids, experts, capacity)
        x = {
            name: payloads.payload((ranks, 37, *shape), jnp.dtype(name))
            for name, shape in shapes.items()
        }
        y = {
            name: payloads.poison_tail(
                payloads.numbers((ranks, capacity, *shapes[name]), jnp.dtype(name)),
                right.fields["num_recv"],
            )
            for name in sums
        }
        program = harness.case_program(comm, experts, capacity)
        plan, received, combined = program(ids, x, y)
        payloads.assert_same_trees(plan, right.fields, f"{ranks} ranks: plan")
        for name, sent in x.items():
            what = f"{ranks} ranks: received {name}"
            payloads.assert_same_rows(received[name], right.dispatch(sent), what, sent)
        for name, rows in y.items():
            what = f"{ranks} ranks: combined {name}"
            payloads.assert_same_sums(combined[name], right.combine(rows), what)
        ranks_done.append(ranks)
        print(f"right rows on {ranks} ranks", flush=True)
    return {"ranks": ranks_done}


PROGRAMS = {
    "graphs": graphs,
    "low_latency": low_latency,
    "beside_collectives": beside_collectives,
    "overlap": overlap,
    "let_go_in_a_callback": let_go_in_a_callback,
    "missing_rank": missing_rank,
    "low_latency_missing_rank": low_latency_missing_rank,
    "low_latency_under_way": low_latency_under_way,
    "allocations": allocations,
    "every_dtype": every_dtype,
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=PROGRAMS)
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--op", default="dispatch")
    parser.add_argument("--layout", default="expert")
    parser.add_argument("--replays", type=int, default=1000)
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--brief", action="store_true")
    args = parser.parse_args()
    found = PROGRAMS[args.name](args)
    _flush()
    print(json.dumps(found), flush=True)
    if "raised" in found:
        # The context of a GPU is gone, and XLA cannot be shut down.
        os._exit(0)


if __name__ == "__main__":
    main()
