"""Runs pytest in one process of several: all run the same tests in step.

launch.py starts it; arguments after the place go to pytest.
"""

import sys

import launch
import pytest

if __name__ == "__main__":
    arguments = launch.join()
    sys.exit(
        pytest.main(["-c", "pyproject.toml", "-p", "no:cacheprovider", *arguments])
    )
