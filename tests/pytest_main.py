"""Runs pytest as a program: the main file of every test under Bazel."""

import sys

import pytest

if __name__ == "__main__":
    sys.exit(pytest.main(["-c", "pyproject.toml", *sys.argv[1:]]))
