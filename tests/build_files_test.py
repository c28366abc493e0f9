"""The BUILD.bazel files tell the truth: every source file is in one, every file
and target that they name is there. Bazel itself is not needed for that.
"""

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGES = ("cc", "xla_ffi", "jax_ep", "tests", "examples", "benchmarks")
SUFFIXES = (".py", ".pyi", ".h", ".cuh", ".cc", ".cu")
# Labels that Bazel itself gives a meaning.
_OF_BAZEL = ("//visibility:", "//conditions:", "//:__")


def _strings(tree):
    """All string constants in the calls of a file, without its load statements."""
    for statement in tree.body:
        call = getattr(statement, "value", None)
        if not isinstance(call, ast.Call) or getattr(call.func, "id", "") == "load":
            continue
        for node in ast.walk(call):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def _matched(package):
    """Files that a pattern of the package's globs matches, relative to it."""
    return {
        str(path.relative_to(package))
        for pattern in _strings(TREES[package])
        if "*" in pattern
        for path in package.glob(pattern)
    }


def _target_names(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            for keyword in node.keywords:
                if keyword.arg == "name" and isinstance(keyword.value, ast.Constant):
                    yield keyword.value.value


BUILD_FILES = [ROOT / "BUILD.bazel"]
for _package in PACKAGES:
    BUILD_FILES += sorted((ROOT / _package).rglob("BUILD.bazel"))
TREES = {path.parent: ast.parse(path.read_text()) for path in BUILD_FILES}


def test_every_source_file_is_in_the_build_file_above_it():
    missing = []
    for directory in PACKAGES:
        for path in sorted((ROOT / directory).rglob("*")):
            if path.suffix not in SUFFIXES or "__pycache__" in path.parts:
                continue
            package = next((p for p in path.parents if p in TREES), None)
            name = str(path.relative_to(package)) if package else None
            named = {*_strings(TREES[package]), *_matched(package)} if package else ()
            if name not in named:
                missing.append(str(path.relative_to(ROOT)))
    assert not missing, "in no BUILD.bazel: " + ", ".join(missing)


@pytest.mark.parametrize("package", TREES, ids=lambda p: p.name)
def test_every_file_named_exists(package):
    named = {s for s in _strings(TREES[package]) if s.endswith(SUFFIXES)}
    named = {s for s in named if not s.startswith(("//", "@", ":"))}
    gone = sorted(s for s in named if not any(package.glob(s)))
    assert not gone, (
        f"{package.name}/BUILD.bazel names files that are not there: {gone}"
    )


@pytest.mark.parametrize("package", TREES, ids=lambda p: p.name)
def test_every_label_names_a_target(package):
    unknown = []
    for label in _strings(TREES[package]):
        if not label.startswith(("//", ":")) or label.startswith(_OF_BAZEL):
            continue
        directory, _, name = label.removeprefix("//").partition(":")
        where = ROOT / directory if label.startswith("//") else package
        known = _target_names(TREES[where]) if where in TREES else ()
        name = name or where.name
        if name not in known and not (where / name).is_file():
            unknown.append(label)
    assert not unknown, f"{package.name}/BUILD.bazel: no such target: {unknown}"


def test_tests_with_options_exist():
    named = {s for s in _strings(TREES[ROOT / "tests"]) if re.fullmatch(r"\w+_test", s)}
    assert len(named) > 20
    gone = sorted(n for n in named if not (ROOT / f"tests/{n}.py").exists())
    assert not gone, f"tests/BUILD.bazel: no such test: {gone}"


def test_one_version_everywhere():
    pyproject = (ROOT / "pyproject.toml").read_text()
    (version,) = re.findall(r'^version = "(.*)"$', pyproject, re.MULTILINE)
    for name in ("MODULE.bazel", "BUILD.bazel"):
        found = re.findall(r'^    version = "(.*)",$', (ROOT / name).read_text(), re.M)
        assert found == [version], name


def test_no_test_module_imports_another():
    """What several share is in modules that are no tests."""
    for path in sorted((ROOT / "tests").glob("*_test.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            tests = [n for n in names if (ROOT / f"tests/{n}.py").exists()]
            assert not any(name.endswith("_test") for name in tests), (path, tests)
