"""What one process of several does in gpu_processes_test.py: one function a test.

launch.py starts it; the arguments after the place are a function's name and its
options as JSON. The functions run on virtual CPU devices too.
"""

import concurrent.futures
import ctypes
import dataclasses
import gc
import itertools
import json
import os
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import launch
import low_latency_steps
import numpy as np
import on_device
from jax import lax
from process_program import (
    fails,
    leave,
    on_other_mesh,
    on_ranks,
    put,
    say,
    there_and_back,
)

import jax_ep
from jax_ep._operations import calls
from jax_ep._setup import bootstrap, fabric, gpu_memory
from jax_ep._setup import request as set_up

TOKENS = 16
# Of every communicator, in place of its own number.
NUM_SMS = None


def communicator(**options):
    backend = "cuda" if jax.default_backend() == "gpu" else "cpu"
    mesh = jax.make_mesh((jax.device_count(),), ("ep",))
    return jax_ep.Communicator(mesh, "ep", backend=backend, num_sms=NUM_SMS, **options)


def flush():
    """Writes what kernels printed: it stands in libc's buffer, not Python's."""
    ctypes.CDLL(None).fflush(None)


def inputs(comm, columns=24):
    """(ids, x): every token goes to its own rank and the next."""
    token = np.arange(comm.num_ranks * TOKENS)
    rank = token // TOKENS
    ids = np.stack([rank, (rank + 1) % comm.num_ranks], -1).astype(np.int32)
    x = (token[:, None] * 5 + np.arange(columns) % 7).astype(np.float32)
    return put(comm, ids), put(comm, x)


def assert_times(out, factor, x):
    for got, sent in zip(out.addressable_shards, x.addressable_shards):
        np.testing.assert_array_equal(got.data, factor * np.asarray(sent.data))


def compile_together(comm, body, *args):
    """Compiles; returns when all processes have, so that none is late."""
    program = on_ranks(comm, body).lower(*args).compile()
    bootstrap.distributed_client().wait_at_barrier("compiled", 60_000)
    return program


def place(hosts, domains):
    """Makes set-up see each process on the host and in the NVLink domain named."""
    me = jax.process_index()
    bootstrap.host_identity = lambda: {
        "boot_id": hosts[me],
        "host": "here",
        "uid": os.getuid(),
    }
    fabric.domain = lambda driver, ordinal: domains[me]


# Programs ------------------------------------------------------------------------


def exchanges(*, steps=12, rounds=2, megabytes=64, **options):
    """Exchanges of several shapes, checked where they are; memory grows meanwhile."""
    comm = communicator(timeout_s=60.0, **options)
    say(comm)
    ranks = comm.num_ranks
    shapes = [
        # With drops; bulk copies where the GPU has them.
        on_device.Traffic(ranks, 96, 4, 4 * ranks + 1, 520, capacity=70 * ranks),
        # Rows of an odd size, more of them than a ring holds.
        on_device.Traffic(ranks, 700, 3, 3 * ranks, 1001),
        on_device.Traffic(ranks, 1, 1, ranks, 8, dtype=jnp.float32),
        # Rows longer than a slot of staging memory.
        on_device.Traffic(ranks, 40, 2, ranks, 17_000, dtype=jnp.float32),
    ]
    shapes += [dataclasses.replace(shapes[i], in_one=True) for i in (0, 2, 3)]

    def body(first):
        def step(carry, i):
            wrong = [t.exchange(comm, first[0] + i).wrong for t in shapes]
            return carry + jnp.stack(wrong), None

        start = lax.pcast(jnp.zeros((len(shapes), 4), jnp.int32), "ep", to="varying")
        return lax.scan(step, start, jnp.arange(steps))[0][None]

    program = on_ranks(comm, body)
    wrong = np.zeros((len(shapes), 4), int)
    held = []
    for number in range(rounds):
        first = np.full(ranks, number * steps, np.int32)
        for shard in program(put(comm, first)).addressable_shards:
            wrong += np.asarray(shard.data)[0]
        # XLA takes more memory than set-up saw, unless it has all of it.
        held += [
            jax.device_put(np.zeros(megabytes << 20, np.uint8), device)
            for device in jax.local_devices()
        ]
    about = comm.describe()
    comm.close()
    found = {
        "wrong": wrong.tolist(),
        "paths": about["groups"][0]["paths"],
        "processes": about["groups"][0]["processes"],
        "megabytes": about["memory_bytes"] / 2**20,
    }
    say(json.dumps(found))


def low_latency(*, steps=300, tokens=40, hidden=7168):
    """Pairs one after the other in both layouts; then buffers come and go."""
    comm = communicator(timeout_s=30.0)
    ranks = comm.num_ranks
    found = {}
    for number, layout in enumerate(("expert", "rank")):
        with jax_ep.LowLatencyBuffer(
            comm, max_tokens=tokens + number, hidden=hidden, num_experts=3 * ranks
        ) as over:
            say(over)
            x, weights = low_latency_steps.inputs(ranks, tokens, hidden)

            def body(x, weights, over=over, layout=layout):
                wrong = low_latency_steps.chained(
                    over, layout, steps, x, weights, idle=True
                )
                return wrong[None]

            args = put(comm, x.reshape(-1, hidden)), put(comm, weights.reshape(-1, 4))
            wrong = on_ranks(comm, body)(*args)
            found[layout] = sum(
                int(np.asarray(shard.data)[0]) for shard in wrong.addressable_shards
            )
            found["bytes"] = over.size_bytes
    comm.close()
    say(json.dumps(found))


def silent_low_latency(*, op, layout, tokens=40, hidden=1024):
    """The last process does not come to `op` of the fourth pair."""
    comm = communicator(timeout_s=3.0)
    ranks = comm.num_ranks
    over = jax_ep.LowLatencyBuffer(
        comm, max_tokens=tokens, hidden=hidden, num_experts=3 * ranks
    )
    x, weights = low_latency_steps.inputs(ranks, tokens, hidden)

    def body(x, weights):
        return low_latency_steps.without_the_last(over, layout, op, x, weights)

    args = put(comm, x.reshape(-1, hidden)), put(comm, weights.reshape(-1, 4))
    program = compile_together(comm, body, *args)
    if jax.process_index() == jax.process_count() - 1:
        jax.block_until_ready(program(*args))
    else:
        assert fails(lambda: program(*args)) < 15
    flush()
    leave(together=True)


def late_process():
    """The last process comes 4 s late to a plan, its dispatch and combine."""
    set_up._WARN_AFTER_S = 1.5
    comm = communicator(timeout_s=60.0)
    ids, x = inputs(comm)
    step = compile_together(comm, there_and_back_body(comm), ids, x)
    assert_times(step(ids, x), 2, x)
    bootstrap.distributed_client().wait_at_barrier("ran", 60_000)
    if jax.process_index() == jax.process_count() - 1:
        time.sleep(4)
    say("calls")
    out = jax.block_until_ready(step(ids, x))
    say("has rows")
    assert_times(out, 2, x)
    comm.close()


def there_and_back_body(comm):
    def body(ids, x):
        plan = jax_ep.make_plan(ids, comm=comm, num_experts=comm.num_ranks)
        return jax_ep.combine(jax_ep.dispatch(x, plan), plan)

    return body


def let_go_while_a_call_waits():
    """The last program of a communicator goes while another's call waits.

    Process 0 waits for process 1, which comes when process 0 has let go. A destructor
    that waits for the GPU would keep both.
    """
    comm, other = communicator(timeout_s=60.0), communicator(timeout_s=60.0)
    ids, x = inputs(comm)
    step = compile_together(comm, there_and_back_body(comm), ids, x)
    others = on_ranks(other, there_and_back_body(other)).lower(ids, x).compile()
    for program in (step, others):
        assert_times(program(ids, x), 2, x)
    del program
    jax.clear_caches()
    other.close()
    client = bootstrap.distributed_client()
    client.wait_at_barrier("closed", 60_000)
    if jax.process_index() == 0:
        # CPUs may work on the thread that calls.
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            running = thread.submit(step, ids, x)
            time.sleep(1)
            del others
            gc.collect()
            client.key_value_set("let go", "yes")
            out = running.result()
    else:
        client.blocking_key_value_get("let go", 40_000)
        out = step(ids, x)
    assert_times(out, 2, x)
    # What was let go of is freed by now, or soon.
    comm.close()


def lifetime(steps=300, *, limit_gib):
    """Stops, work in flight at close(), and 20 communicators one after the other."""
    stopped_and_closed(steps)
    memory(limit_gib=limit_gib)


def stopped_and_closed(steps):
    comm = communicator(timeout_s=20.0)
    ids, x = inputs(comm)
    step = there_and_back(comm)
    assert_times(step(ids, x), 2, x)
    say("runs")
    for _ in range(steps):
        assert_times(step(ids, x), 2, x)
        time.sleep(0.01)
    out = x
    for _ in range(10):
        out = step(ids, out)
    comm.close()
    comm.close()
    assert_times(out, 1024, x)
    # The executable holds on to what it needs.
    assert_times(step(ids, x), 2, x)
    fails(lambda: there_and_back(comm)(ids, x), "the communicator is closed")


def memory(times=20, host_mib=40, *, limit_gib, **options):
    """Memory of GPU and host, and open files, are back where they were.

    But for `host_mib`. The process runs under a service that gives it `limit_gib` of
    each GPU: what is left of it is nobody else's business.
    """
    mapped = _watch_imports()

    def once():
        with communicator(timeout_s=20.0, **options):
            pass
        jax.clear_caches()
        gc.collect()

    gpus = [d for d in jax.local_devices() if d.platform == "gpu"]

    def held():
        time.sleep(0.2)
        ctypes.CDLL(None).malloc_trim(0)
        status = pathlib.Path("/proc/self/status").read_text()
        found = {
            "files": len(os.listdir("/proc/self/fd")),
            "host MiB": int(status.split("VmRSS:")[1].split()[0]) / 1024,
        }
        for device in gpus:
            free = _ask(device, "cuMemGetInfo")[0] / 2**30
            assert free < limit_gib, "no service limits this process"
            found[f"{device} MiB"] = (limit_gib - free) * 1024
            found[f"{device} maps"] = sum(_is_mapped(device, a) for a in set(mapped))
        return found

    for _ in range(3):
        once()
    before = held()
    start = time.monotonic()
    for _ in range(times):
        once()
    after = held()
    say("HELD", json.dumps(before), json.dumps(after))
    say(f"{(time.monotonic() - start) / times:.3f} s for each communicator")
    assert mapped or not gpus or "node_size" in options
    for name, now in after.items():
        slack = {"files": 1, "host MiB": host_mib}.get(name, 0)
        slack = 8 if name.startswith("cuda") and name.endswith("MiB") else slack
        assert now <= before[name] + slack, name


def _watch_imports():
    """Addresses of what other processes share: it is not counted here, but there."""
    mapped = []
    import_shared = gpu_memory.Holdings.import_shared

    def watched(self, shared, size, accessors):
        mapped.append(import_shared(self, shared, size, accessors))
        return mapped[-1]

    gpu_memory.Holdings.import_shared = watched
    return mapped


def _is_mapped(device, address):
    try:
        base, _ = _ask(device, "cuMemGetAddressRange", address)
    except RuntimeError:
        return False
    return int(base) == address


def _ask(device, function, *args):
    """What a function of the driver answers in a device's context."""
    driver = gpu_memory.driver()
    gpu = gpu_memory.call(driver.cuDeviceGet, device.local_hardware_id)
    context = gpu_memory.call(driver.cuDevicePrimaryCtxRetain, gpu)
    with gpu_memory.Current(driver, context):
        return gpu_memory.call(getattr(driver, function), *args)


# Several nodes


def between_nodes(*, node_size, steps=300, beside=False):
    """Exchanges with late ranks, and gradients; the routing differs in each step."""
    comm = communicator(timeout_s=60.0, node_size=node_size)
    say(comm)
    ranks = comm.num_ranks
    traffic = on_device.Traffic(ranks, 96, 4, 4 * ranks + 1, 520, capacity=70 * ranks)

    def step(numbers):
        i = numbers[0]
        found = traffic.exchange(comm, i)
        wrong = found.wrong.sum()
        # Of x: how many ranks have a row of each token.
        ids = (on_device.mix(i, lax.axis_index("ep"), jnp.arange(96)) % ranks).astype(
            jnp.int32
        )
        plan = jax_ep.make_plan(ids[:, None], comm=comm, num_experts=ranks)
        number = i.astype(jnp.float32)
        x = jnp.ones((96, 40), jnp.float32) * number
        out, pull = jax.vjp(
            lambda x: jax_ep.combine(3 * jax_ep.dispatch(x, plan), plan), x
        )
        wrong += on_device.wrong_rows(out, 3 * x)
        wrong += on_device.wrong_rows(pull(x)[0], 3 * x)
        if beside:
            total = lax.psum(jnp.ones(1 << 16) * number, "ep")
            wrong += (total != ranks * number).sum(dtype=jnp.int32)
        return wrong[None]

    program = on_ranks(comm, step)
    total = 0
    for number in range(steps):
        if jax.process_index() == number % jax.process_count():
            time.sleep(0.001 * (number * 7 % 5))
        out = program(put(comm, np.full(ranks, number, np.int32)))
        total += sum(int(np.asarray(s.data)[0]) for s in out.addressable_shards)
    say("wrong", total)
    comm.close()


def large_blocks(*, node_size, tokens=1024, columns=8192, steps=5):
    """Blocks that cross in several chunks: bfloat16 rows of 16 KiB."""
    comm = communicator(timeout_s=60.0, node_size=node_size)
    ranks = comm.num_ranks

    def step(number):
        rank = lax.axis_index("ep")
        token = jnp.arange(tokens, dtype=jnp.int32)
        ids = jnp.stack([token % ranks, (token + number[0]) % ranks], axis=1)
        plan = jax_ep.make_plan(ids, comm=comm, num_experts=ranks)
        column = jnp.arange(columns, dtype=jnp.int32)[None]
        x = (token[:, None] * 7 + column + rank * 31 + number[0]) % 128
        x = x.astype(jnp.bfloat16)
        rows = jax_ep.dispatch(x, plan)
        slot = jnp.arange(plan.capacity)
        source, token_there = jnp.divmod(plan.recv_src, tokens)
        want = token_there[:, None] * 7 + column
        want = (want + source[:, None] * 31 + number[0]) % 128
        want = jnp.where((slot < plan.num_recv)[:, None], want, 0)
        wrong = on_device.wrong_rows(rows, want.astype(jnp.bfloat16))
        destinations = jnp.where(ids[:, 0] == ids[:, 1], 1, 2)
        back = jax_ep.combine(rows, plan)
        return (
            wrong
            + on_device.wrong_rows(back, x * destinations[:, None].astype(x.dtype))
        )[None]

    program = on_ranks(comm, step)
    total = 0
    for number in range(steps):
        out = program(put(comm, np.full(ranks, number, np.int32)))
        total += sum(int(np.asarray(s.data)[0]) for s in out.addressable_shards)
    say("wrong", total)
    comm.close()


def killed_in_another_node(*, node_size, killed):
    comm = communicator(timeout_s=5.0, node_size=node_size)
    ids, x = inputs(comm, columns=1 << 12)

    def body(ids, x):
        plan = jax_ep.make_plan(ids, comm=comm, num_experts=comm.num_ranks)

        def again(_, x):
            return jax_ep.dispatch(x, plan)[:TOKENS]

        return lax.fori_loop(0, 10_000_000, again, x)

    program = compile_together(comm, body, ids, x)
    say("runs")
    assert fails(lambda: program(ids, x)) < 25
    flush()
    # Nobody's end is to be taken for the one that was killed.
    leave(together=True, without=[killed])


def killed_inside_a_dispatch():
    comm = communicator(timeout_s=3.0)
    ids, x = inputs(comm, columns=1 << 14)

    def body(ids, x):
        plan = jax_ep.make_plan(ids, comm=comm, num_experts=comm.num_ranks)

        def again(_, x):
            return jax_ep.dispatch(x, plan)[:TOKENS]

        return lax.fori_loop(0, 10_000_000, again, x)

    program = compile_together(comm, body, ids, x)
    say("runs")
    # Counted from here; the kill comes after two seconds.
    assert fails(lambda: program(ids, x)) < 25
    flush()
    leave(together=True, without=[jax.process_count() - 1])


def other_operation():
    """Rank 0 dispatches where the others combine."""
    comm = communicator(timeout_s=3.0)
    ids, x = inputs(comm)

    def body(ids, x):
        plan = jax_ep.make_plan(
            ids, comm=comm, num_experts=comm.num_ranks, capacity=TOKENS
        )
        return lax.cond(
            lax.axis_index("ep") == 0,
            lambda x: jax_ep.dispatch(x, plan),
            lambda x: jax_ep.combine(x, plan),
            x,
        )

    program = compile_together(comm, body, ids, x)
    assert fails(lambda: program(ids, x)) < 15
    flush()
    leave(together=True)


def other_mesh():
    """The program runs on a mesh on which the processes have changed places."""
    elsewhere, _ = on_other_mesh(communicator(timeout_s=3.0))
    assert fails(lambda: elsewhere()[0]) < 15
    flush()
    leave(together=True)


def plans_side_by_side(*, pairs, rounds, mode=None, one_slot=False):
    """Two plans that do not wait for each other, with others between them.

    Args:
      pairs: of dispatch and combine between the two: twice as many channels.
      rounds: runs, each with other experts.
      mode: how XLA runs a CUDA graph; "CONCURRENT": as branches.
      one_slot: gives both the same control slot, which no program of this size
        has: then they must not run at the same time.
    """
    tokens, top_k, columns = 2048, 8, 16
    comm = communicator(timeout_s=8.0)
    ranks = comm.num_ranks
    experts = 32 * ranks
    if one_slot:
        count = itertools.count(0, 128)
        calls._site_number = lambda ctx, comm, slot: next(count)

    def body(a, b, x):
        first = jax_ep.make_plan(a, comm=comm, num_experts=experts)
        if pairs:
            small = jax_ep.make_plan(a[:4], comm=comm, num_experts=experts)
            x = x[:4]
            for _ in range(pairs):
                x = jax_ep.combine(jax_ep.dispatch(x, small), small) / 4
        second = jax_ep.make_plan(b, comm=comm, num_experts=experts)
        found = [(p.recv_src, p.recv_topk_idx) for p in (first, second)]
        return *found, x

    def ids(seed):
        rng = np.random.default_rng(seed)
        return rng.permuted(
            np.tile(np.arange(experts, dtype=np.int32), (ranks * tokens, 1)), axis=1
        )[:, :top_k]

    def wanted(ids, rank):
        local = ids - rank * 32
        local = np.where((local >= 0) & (local < 32), local, -1)
        coming = np.flatnonzero((local >= 0).any(axis=1))
        src = np.full(ranks * tokens, -1, np.int32)
        topk_idx = np.full((ranks * tokens, top_k), -1, np.int32)
        src[: len(coming)], topk_idx[: len(coming)] = coming, local[coming]
        return src, topk_idx

    def args(number):
        x = np.ones((ranks * tokens, columns), np.float32)
        return [ids(2 * number), ids(2 * number + 1), x]

    lowered = on_ranks(comm, body).lower(*(put(comm, a) for a in args(0)))
    options = mode and {"xla_gpu_command_buffer_scheduling_mode": mode}
    program = lowered.compile(compiler_options=options)
    bootstrap.distributed_client().wait_at_barrier("compiled", 60_000)

    def run():
        wrong = 0
        for number in range(rounds):
            host = args(number)
            if one_slot and jax.process_index() == 1:
                # Rank 0 waits in the first plan; the second is launched beside it.
                time.sleep(0.05)
            *plans, _ = program(*(put(comm, a) for a in host))
            for experts_of, found in zip(host, plans):
                for place, out in enumerate(found):
                    for shard in out.addressable_shards:
                        rank = (shard.index[0].start or 0) // (ranks * tokens)
                        # array_equal() itself takes an error for a difference.
                        right = wanted(experts_of, rank)[place]
                        wrong += not np.array_equal(np.asarray(shard.data), right)
        return wrong

    if one_slot:
        assert fails(run) < 60
        flush()
        leave(together=True)
    say(json.dumps({"wrong": run()}))
    comm.close()


def other_shapes():
    """Processes whose programs differ in a size that no rank can see."""
    comm = communicator(timeout_s=3.0)
    ids, x = inputs(comm)
    columns = 8 + jax.process_index()

    def body(ids, x):
        plan = jax_ep.make_plan(ids, comm=comm, num_experts=comm.num_ranks)
        return jax_ep.dispatch(x[:, :columns], plan)

    program = compile_together(comm, body, ids, x)
    assert fails(lambda: program(ids, x)) < 15
    flush()
    leave(together=True)


if __name__ == "__main__":
    name, *rest = launch.join()
    options = json.loads(rest[0]) if rest else {}
    if where := options.pop("where", None):
        place(*where)
    NUM_SMS = options.pop("num_sms", None)
    globals()[name](**options)
    say("END")
    flush()
    sys.stdout.flush()
