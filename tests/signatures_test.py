"""Public signatures are those of signatures.txt: a change to one is meant and seen.

After a change that is meant: python tests/signatures_test.py > tests/signatures.txt
"""

import inspect
import pathlib

import jax_ep

SNAPSHOT = pathlib.Path(__file__).with_name("signatures.txt")


def described(function):
    """Its parameters, one a line; functions as defaults by name."""
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name.startswith("_"):
            continue
        if inspect.isroutine(parameter.default) or hasattr(parameter.default, "lower"):
            name = getattr(parameter.default, "__name__", None)
            parameter = parameter.replace(default=name or parameter.default)
        star = "" if parameter.kind != parameter.KEYWORD_ONLY else "keyword "
        yield f"    {star}{parameter}"


def members(cls):
    """Public methods and properties that the class or a base of jax_ep defines."""
    for name in sorted(dir(cls)):
        owner = next(c for c in cls.__mro__ if name in vars(c) or c is object)
        if name.startswith("_") or not owner.__module__.startswith("jax_ep"):
            continue
        member = inspect.getattr_static(cls, name)
        if inspect.isfunction(member):
            yield f"  {name}()"
            yield from described(member)
        else:
            yield f"  {name}"


def snapshot():
    """All public names, with parameters or members."""
    lines = []
    for name in sorted(jax_ep.__all__):
        public = getattr(jax_ep, name)
        lines += [f"{name}()", *described(public)]
        if inspect.isclass(public):
            lines += members(public)
    return "\n".join(lines) + "\n"


def test_signatures():
    assert snapshot() == SNAPSHOT.read_text(), (
        "public signatures have changed; if that is meant: "
        "python tests/signatures_test.py > tests/signatures.txt"
    )


if __name__ == "__main__":
    print(snapshot(), end="")
