"""The two ways in which JAX knows a mesh that nobody passes on."""

from __future__ import annotations

import contextlib
import warnings

import jax

NAMES = ("none", "set_mesh", "with_mesh")


@contextlib.contextmanager
def under(name, mesh):
    """`jax.set_mesh(mesh)`, or `with mesh:`, of which some versions of JAX warn."""
    with contextlib.ExitStack() as stack:
        if name == "set_mesh":
            stack.enter_context(jax.set_mesh(mesh))
        if name == "with_mesh":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                stack.enter_context(mesh)
        yield
