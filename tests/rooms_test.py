"""Imports of the package run one way: see "Where things are" in docs/design.md."""

from __future__ import annotations

import ast
import pathlib

import pytest

import jax_ep

PACKAGE = pathlib.Path(jax_ep.__file__).parent
# What each folder may import, and __init__.py and doctor.py, which have none.
BELOW = {
    "_data": set(),
    "_setup": {"_data"},
    "_operations": {"_data"},
    "_api": {"_data", "_setup", "_operations"},
    "": {"_data", "_setup", "_operations", "_api"},
}


def _imports() -> dict[str, set[str]]:
    """Modules of the package by what imports them, "_data.plan" for example."""
    found: dict[str, set[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        names = found.setdefault(".".join(parts), set())
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert not any(a.name.startswith("jax_ep.") for a in node.names), path
            if not isinstance(node, ast.ImportFrom):
                continue
            assert node.level == 0, f"{path}: relative imports hide where they go"
            package, *rest = (node.module or "").split(".")
            if package == "jax_ep" and len(rest) == 1:
                names.update(f"{rest[0]}.{alias.name}" for alias in node.names)
            elif package == "jax_ep" and rest:
                names.add(".".join(rest))
            elif package == "jax_ep":
                # The package's version; at run time, inside a function.
                assert parts == ("_setup", "communicator"), path
    return found


IMPORTS = _imports()


@pytest.mark.parametrize("room", BELOW)
def test_only_what_is_below(room):
    mine = {n: i for n, i in IMPORTS.items() if n.rpartition(".")[0] == room}
    assert mine
    for module, imported in mine.items():
        for other in imported:
            folder = other.partition(".")[0]
            assert folder == room or folder in BELOW[room], f"{module} -> {other}"


def test_no_circle():
    done: set[str] = set()

    def visit(module, path):
        assert module not in path, " -> ".join([*path, module])
        if module not in done:
            for other in sorted(IMPORTS.get(module, ())):
                visit(other, [*path, module])
            done.add(module)

    for module in IMPORTS:
        visit(module, [])


def test_all_is_private_but_what_init_and_doctor_have():
    public = {p.name for p in PACKAGE.iterdir() if not p.name.startswith(("_", "."))}
    assert public - {"py.typed", "BUILD.bazel"} == {"doctor.py"}
