"""What one of four processes on two hosts does in hosts_test.py: one function a test.

The arguments: the coordinator's address, how many processes, this one's number, a
function. Processes 0 and 1 are on one host, 2 and 3 on the other.
"""

import sys
import time
import warnings

import jax
import numpy as np
from gpu_process_program import assert_times, inputs
from process_program import fails, leave, say, there_and_back

import jax_ep

# JAX ends a process that has not heard of another for so long: soon where that is what
# is tried, and after every limit that other programs try.
HEARTBEAT_S = {"steps": 10}
OTHER_HEARTBEAT_S = 60
SET_UP_S = 4.0


def mesh(devices=None):
    devices = jax.devices() if devices is None else devices
    return jax.sharding.Mesh(np.array(devices), ("ep",))


def wait_for_the_test():
    """Tells the test that this process is ready; returns when it has done its part."""
    jax.devices()  # JAX's own set-up is not what is tried here
    say("ready")
    sys.stdin.readline()


def works():
    """Between hosts over JAX's collectives, inside each on native code."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        comm = jax_ep.Communicator(mesh(), "ep", timeout_s=30.0)
    say("WARNED", *(w.message for w in caught))
    say(comm)
    assert comm.backend == "xla"
    ids, x = inputs(comm)
    assert_times(there_and_back(comm)(ids, x), 2, x)
    fails(
        lambda: jax_ep.Communicator(mesh(), "ep", backend="cpu", timeout_s=30.0),
        "cannot reach process",
    )
    inside(comm)
    comm.close()


def inside(comm):
    """Two communicators at the same time, one on each host."""
    first = jax.process_index() // 2 * 2
    here = [d for d in jax.devices() if d.process_index in (first, first + 1)]
    with jax_ep.Communicator(mesh(here), "ep", backend="cpu", timeout_s=30.0) as both:
        say(both)
        ids, x = inputs(both)
        assert_times(there_and_back(both)(ids, x), 2, x)


def cut_in_set_up():
    wait_for_the_test()
    far = "process 2" if jax.process_index() < 2 else "process 0"
    seconds = fails(
        lambda: jax_ep.Communicator(mesh(), "ep", setup_timeout_s=SET_UP_S), far
    )
    assert seconds < SET_UP_S + 2
    leave(together=jax.process_index() < 2, without=(2, 3))


def coordinator_gone_in_set_up():
    wait_for_the_test()
    seconds = fails(
        lambda: jax_ep.Communicator(mesh(), "ep", setup_timeout_s=SET_UP_S), "process 0"
    )
    assert seconds < SET_UP_S + 2
    leave()


def steps():
    """Step after step, until JAX ends this process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        comm = jax_ep.Communicator(mesh(), "ep", timeout_s=30.0)
    ids, x = inputs(comm)
    step = there_and_back(comm)
    jax.block_until_ready(step(ids, x))
    say("ready")
    end = time.monotonic() + 60
    while time.monotonic() < end:
        jax.block_until_ready(step(ids, x))


if __name__ == "__main__":
    address, processes, process, name = sys.argv[1:]
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(
        address,
        int(processes),
        int(process),
        initialization_timeout=60,
        heartbeat_timeout_seconds=HEARTBEAT_S.get(name, OTHER_HEARTBEAT_S),
        shutdown_timeout_seconds=20,
    )
    globals()[name]()
    say("END")
