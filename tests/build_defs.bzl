"""Tests that pytest runs, for BUILD.bazel."""

load("@rules_python//python:defs.bzl", "py_test")

def pytest_tests(srcs, gpu, local, sizes, deps):
    """A py_test for each file, which pytest runs as `make test` does.

    Args:
      srcs: the tests' files.
      gpu: names of tests that need a GPU.
      local: names of tests that need the whole tree.
      sizes: of tests by name, where it is not "large".
      deps: of tests by name, beside pytest and :support.
    """
    for src in srcs:
        name = src[:-len(".py")]
        py_test(
            name = name,
            size = sizes.get(name, "large"),
            srcs = [
                "pytest_main.py",
                src,
            ],
            args = ["$(location :" + src + ")"],
            data = ["//:pyproject.toml"] + (srcs if name in local else []),
            imports = ["."],
            main = "pytest_main.py",
            tags = [
                tag
                for tag, names in [("gpu", gpu), ("local", local)]
                if name in names
            ],
            deps = deps.get(name, []) + [
                ":support",
                "@pypi//pytest",
                "@pypi//pytest_timeout",
            ],
        )
