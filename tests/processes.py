"""Python in a process of its own, for what would end or change this one."""

import os
import subprocess
import sys

import xla_flags

# This process may hold most of a GPU's memory already.
_SHARED_GPU = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def run_script(*args, timeout=200, **env):
    """Runs `python *args` with this process's paths; returns how it completed."""
    path = os.pathsep.join(p for p in sys.path if p)
    paths = {"PYTHONPATH": path, "XLA_FLAGS": xla_flags.of_user()}
    return subprocess.run(
        [sys.executable, *args],
        env=os.environ | paths | _SHARED_GPU | env,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
