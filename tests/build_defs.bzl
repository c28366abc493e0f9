"""Tests that pytest runs, for BUILD.bazel."""

load("@rules_python//python:defs.bzl", "py_test")

def pytest_test(name, src, data = [], deps = [], **kwargs):
    """A py_test that pytest runs, as `make test` does.

    Args:
      name: of the target.
      src: the test's file.
      data: files that it reads, beside pyproject.toml.
      deps: libraries beside pytest and :support.
      **kwargs: passed on to py_test.
    """
    py_test(
        name = name,
        srcs = [
            "pytest_main.py",
            src,
        ],
        args = ["$(location :" + src + ")"],
        data = data + ["//:pyproject.toml"],
        imports = ["."],
        main = "pytest_main.py",
        deps = deps + [
            ":support",
            "@pypi//pytest",
            "@pypi//pytest_timeout",
        ],
        **kwargs
    )
