"""Runs pytest in one process of several: all run the same tests in step.

launch.py starts it; arguments after the place go to pytest.
"""

import sys

import launch
import pytest

# What several processes can run: the rest puts global arrays of one process into its
# programs.
OPERATIONS = (
    *("tests/every_case_test.py", "tests/plan_test.py", "tests/dispatch_test.py"),
    *("tests/combine_test.py", "tests/plan_dispatch_test.py"),
)
REPEATED = ("tests/repetition_test.py",)
# What crosses processes in a layer: dispatch and combine around native code that
# does not, forward and backward.
EXPERTS = ("tests/permute_test.py", "tests/moe_test.py", "tests/fp8_test.py")
ACROSS = (
    "(test_every_case and 8 and not 128 and not plain) or dropped or dtype_and_row "
    "or float64 or overflow or choice_to_choice or scan_and_remat or trees or at_hand "
    "or arrive"
)
# Buffers over processes; every case, and many steps with idle ranks.
LOW_LATENCY = (
    "tests/low_latency_test.py",
    *("-k", "every_case or fp8 or share or outlive or pairs or idle"),
)

if __name__ == "__main__":
    arguments = launch.join()
    sys.exit(
        pytest.main(["-c", "pyproject.toml", "-p", "no:cacheprovider", *arguments])
    )
