"""XLA's flags of a test run on CPUs: programs that compile quickly.

Most of the suite's time was XLA's compiler. With these flags its code generator
takes a third of the time; what comes before it, and native code that programs
call, is the same. Programs that tests start as users do have XLA's defaults, and
so has all with `pytest --optimize`.
"""

import os

import jax

_QUICK = [
    "--xla_backend_optimization_level=0",
    # One core is all that a worker of pytest has.
    "--xla_cpu_parallel_codegen_split_count=1",
]
# Newer ones refuse it.
if jax.__version_info__ < (0, 11):
    _QUICK.append("--xla_cpu_use_fusion_emitters=false")


def compile_quickly() -> None:
    """Sets the flags, before JAX is first used, for child processes too."""
    # XLA takes the last of several values: the user's.
    os.environ["XLA_FLAGS"] = " ".join([*_QUICK, of_user()])


def of_user() -> str:
    """XLA_FLAGS without those of `compile_quickly`."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    return " ".join(flag for flag in flags if flag not in _QUICK)
