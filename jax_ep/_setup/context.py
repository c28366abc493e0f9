"""The communicator of a mesh, made once: for code that knows axes and no mesh."""

from __future__ import annotations

import inspect
import threading
from typing import Any

import jax

from jax_ep._setup.communicator import Communicator
from jax_ep._setup.request import Request

# Open ones by what they were asked for.
_made: dict[Request, Communicator] = {}
# Threads of a process that ask for the same at a time get the same.
_lock = threading.RLock()


def communicator(
    axis_name: str | tuple[str, ...],
    mesh: jax.sharding.Mesh | None = None,
    **options: Any,
) -> Communicator:
    """The communicator over `axis_name`, made at the first call and then the same one.

    For model code, which is traced under a mesh and given none: it can be called
    anywhere, also while JAX traces, inside and outside of `jax.shard_map`. It lives
    until its close(), or as long as the process; the first call after close() makes a
    new one. Programs that were compiled with a closed one keep working.

    The first call is collective, as `Communicator` is: over processes all of them make
    their first calls in the same order. They do where all trace the same program.

    JAX traces a function once for all meshes of a shape, and the communicator found
    then is in the program. Run under another mesh of this shape it is refused on the
    native backends.

    Args:
      axis_name: as in `Communicator`.
      mesh: None takes the mesh of `jax.set_mesh(mesh)` or `with mesh:`.
      **options: those of `Communicator`. What is left out has its default: other
        options are another communicator.

    Returns:
      An open Communicator, the same object for the same mesh, axes and options.

    Raises:
      TypeError, ValueError: a bad argument, or no mesh in the context.
      RuntimeError: as `Communicator` raises it.
    """
    unknown = options.keys() - _OPTIONS.keys()
    if unknown:
        raise TypeError(
            f"jax_ep.communicator: the options are {list(_OPTIONS)}, found "
            f"{sorted(unknown)}"
        )
    if mesh is None:
        mesh = _mesh_of_context()
    request = Request.of(mesh, axis_name, **(_OPTIONS | options))
    with _lock:
        made = _made.get(request)
        if made is None or made.closed:
            # What set-up computes is no part of the program that is being traced.
            with jax.ensure_compile_time_eval():
                made = Communicator(mesh, axis_name, **options)
            _made[request] = made
        return made


# Those of Communicator, and their defaults.
_OPTIONS = {
    name: parameter.default
    for name, parameter in inspect.signature(Communicator).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY
}


def _mesh_of_context() -> jax.sharding.Mesh:
    """The mesh with devices that the caller runs under.

    JAX's public `get_mesh` gives it to nobody who traces, and no mesh of `with mesh:`.
    """
    try:
        from jax._src import mesh as jax_mesh

        found = (
            jax_mesh.get_concrete_mesh(),
            jax_mesh.thread_resources.env.physical_mesh,
        )
    except (ImportError, AttributeError) as error:
        raise RuntimeError(
            f"jax_ep.communicator: jax {jax.__version__} has no "
            "jax._src.mesh.get_concrete_mesh or thread_resources any more; give mesh=, "
            "or install a jax that this jax_ep knows, or a newer jax_ep"
        ) from error
    for mesh in found:
        if mesh is not None and not mesh.empty:
            return mesh
    raise ValueError(
        "jax_ep.communicator: there is no mesh with devices in the context; call the "
        "program under jax.set_mesh(mesh), or give mesh="
    )
