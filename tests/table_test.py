"""The table of operations beside what the native modules register, and itself."""

import importlib.util
import pathlib
import re

import pytest

import jax_ep
from jax_ep._data import native
from jax_ep._operations import operation

PACKAGE = pathlib.Path(jax_ep.__file__).parent


@pytest.mark.parametrize(
    ("backend", "module"), [("cpu", native.host), ("cuda", native.cuda)]
)
def test_targets_are_those_that_the_module_registers(backend, module):
    if backend == "cuda" and importlib.util.find_spec("jax_ep._cuda") is None:
        pytest.skip("built without nvcc")
    targets = [
        op.native.target
        for op in operation.TABLE.values()
        if op.native is not None and backend in op.native.backends
    ]
    assert sorted(targets) == sorted(module().handlers())


def test_transposes_go_both_ways():
    """And the one that adds rows is the one that says so."""
    pairs = [(op, op.transpose) for op in operation.TABLE.values() if op.transpose]
    assert len(pairs) == 6
    for op, transpose in pairs:
        other = operation.TABLE[transpose]
        assert other.transpose == op.name
        assert other.routing == op.routing
        assert (op.summed_by is None) != (other.summed_by is None)


def test_native_calls_take_operands_that_there_are():
    for op in operation.TABLE.values():
        if op.native is not None and op.native.routing is not None:
            assert set(op.native.routing) <= set(op.routing)


def test_one_file_knows_the_interpreters():
    knows = re.compile(r"^\s*(from|import) jax\.interpreters", re.MULTILINE)
    found = [path for path in PACKAGE.rglob("*.py") if knows.search(path.read_text())]
    assert found == [PACKAGE / "_operations/operation.py"]
