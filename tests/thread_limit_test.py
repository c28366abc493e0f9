"""Where the system gives no more threads: an error, or a wait, never an abort."""

import json
import pathlib

import harness
import pytest
from processes import run_script

NO_THREAD = (
    "no thread could be started (Resource temporarily unavailable); raise the limit "
    "on processes and threads (ulimit -u, or the container's)"
)


@pytest.mark.skipif(harness.ON_GPU, reason="the program runs on the CPU")
def test_no_more_threads():
    """A limit on processes (RLIMIT_NPROC), set in a child that is not root's."""
    done = run_script(pathlib.Path(__file__).with_name("thread_limit_program.py"))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    if "skip" in found:
        pytest.skip(found["skip"])
    assert found["set-up"] == f"RuntimeError: jax_ep: {NO_THREAD}"
    assert found.get("GPU set-up", found["set-up"]) == found["set-up"]
    # Whichever of its threads is the first that cannot be had.
    assert found["exchange"] == [found["set-up"]] * 3
    assert found["files left"] == 0
    # A call ends in an error when its time is up, or goes on when it may.
    assert f" waited 1.5 s; {NO_THREAD}" in found["call"]
    assert "jax_ep plan (channel" in found["call"]
    assert found["wrong"] == found["wrong afterwards"] == 0
    assert f"has waited 0.5 s and will wait 60.0 s in all; {NO_THREAD}" in done.stderr
