"""Sets up JAX once for all tests: 8 virtual CPU devices, or this host's GPUs.

pytest --platform=cpu|cuda; without it the tests run on GPUs where JAX finds
some and on the CPU where it does not.
"""

import os
import pathlib

import jax
import pytest
import xla_flags

NUM_CPU_DEVICES = 8
# XLA of jax 0.11 crashes where a shard_map has an input without elements beside
# others, whatever its body does; with this in XLA_FLAGS it does not.
# no_tokens_test.py runs those cases so.
SAFE_WITHOUT_TOKENS = "--xla_enable_hlo_sharding_v3=false"
CRASHES_WITHOUT_TOKENS = jax.__version__.startswith(
    "0.11."
) and SAFE_WITHOUT_TOKENS not in os.environ.get("XLA_FLAGS", "")


def pytest_addoption(parser):
    parser.addoption(
        "--platform",
        choices=("cpu", "cuda"),
        default=None,
        help="where the tests run (default: cuda where JAX finds a GPU)",
    )

    parser.addoption(
        "--optimize",
        action="store_true",
        help="XLA's own optimizations for CPUs, without which it compiles quickly",
    )

    parser.addoption(
        "--tiny-staging",
        action="store_true",
        help="1 channel of 2 slots between processes (process_suite.py)",
    )

    parser.addoption(
        "--node-size",
        type=int,
        default=None,
        help="ranks of a node: cuts communicators of native backends into nodes",
    )


def strict_promotion():
    """Nothing is promoted unasked, here and in child processes: as JAX tests JAX."""
    for name, value in (
        ("jax_numpy_rank_promotion", "raise"),
        ("jax_numpy_dtype_promotion", "strict"),
    ):
        jax.config.update(name, value)
        os.environ[name.upper()] = value


def pytest_configure(config):
    import oracle

    oracle.NODE_SIZE = config.getoption("--node-size")
    strict_promotion()
    if jax.distributed.is_initialized():
        # process_suite.py set JAX up; harness.py may only be imported then.
        import harness

        on_gpu = jax.default_backend() == "gpu"
        config.jax_ep_platform = "cuda" if on_gpu else "cpu"
        if config.getoption("--tiny-staging"):
            # GPUs stage between ranks, CPUs between processes.
            peers = (jax.device_count() if on_gpu else jax.process_count()) - 1
            harness.COMMUNICATOR_OPTIONS.update(
                num_channels=1, staging_bytes=2 * 1024 * peers
            )
        return
    wanted = config.getoption("--platform")
    # JAX cannot be asked yet: what it finds is the flags' first use.
    on_cpu = wanted == "cpu" or not (wanted or pathlib.Path("/dev/nvidiactl").exists())
    if on_cpu and not config.getoption("--optimize"):
        xla_flags.compile_quickly()
    jax.config.update("jax_num_cpu_devices", NUM_CPU_DEVICES)
    if wanted is not None:
        jax.config.update("jax_platforms", "cpu" if wanted == "cpu" else "cuda,cpu")
    config.jax_ep_platform = "cuda" if jax.default_backend() == "gpu" else "cpu"
    if wanted not in (None, config.jax_ep_platform):
        raise pytest.UsageError(f"--platform={wanted}, but JAX finds no such device")


def pytest_report_header(config):
    return (
        f"jax {jax.__version__}, {jax.device_count()} {config.jax_ep_platform} devices"
    )


def pytest_collection_modifyitems(config, items):
    # The longest file first: of several workers none is left alone with it.
    items.sort(key=lambda item: item.path.name != "processes_test.py")
    found = jax.device_count() if config.jax_ep_platform == "cuda" else 0
    for item in items:
        parameters = item.name.partition("[")[2]
        if CRASHES_WITHOUT_TOKENS and "no_tokens" in parameters:
            reason = f"jax 0.11's XLA crashes here without {SAFE_WITHOUT_TOKENS}"
            item.add_marker(pytest.mark.skip(reason=reason))
        marker = item.get_closest_marker("gpu")
        if marker is None:
            continue
        count = marker.kwargs.get("count", marker.args[0] if marker.args else 1)
        if count > found:
            reason = f"needs {count} NVIDIA GPUs; this run has {found}"
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def platform(request):
    """ "cpu" or "cuda": what the tests of this run use."""
    return request.config.jax_ep_platform
