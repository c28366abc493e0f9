"""Limits that Python checks are those that the native code was compiled with."""

import pathlib
import re

import pytest

from jax_ep._data import limits

CC = pathlib.Path(__file__).parents[1] / "cc"
NAMES = [name for name in vars(limits) if name.startswith("MAX_")]


def in_sources(name):
    """Values of a constant at namespace scope of some header."""
    pattern = re.compile(rf"^inline constexpr int(?:32_t)? {name} = (\d+);", re.M)
    headers = (path.read_text() for path in CC.rglob("*.h"))
    return [int(value) for text in headers for value in pattern.findall(text)]


@pytest.mark.parametrize("name", NAMES)
def test_limit(name):
    native = "k" + name.title().replace("_", "")
    assert in_sources(native) == [getattr(limits, name)]
