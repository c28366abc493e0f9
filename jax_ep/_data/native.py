"""Loads the native modules and registers their handlers with XLA."""

from __future__ import annotations

import functools
import importlib
import pathlib
import re
import sys
import threading
import types
from collections.abc import Sequence
from importlib import machinery

import jax

# Platforms, by JAX's names, on which a native backend runs.
PLATFORMS = frozenset({"cpu", "cuda"})


# The folder jax_ep, where the native modules stand.
_PACKAGE = pathlib.Path(__file__).parents[1]


def host() -> types.ModuleType:
    """The host module, its handlers registered for platform "cpu"."""
    return _registered("_host", "cpu")


def cuda() -> types.ModuleType:
    """The CUDA module, its handlers registered for platform "CUDA".

    Raises:
      ImportError: jax_ep was built without nvcc, or for other FFI headers.
    """
    return _registered("_cuda", "CUDA")


def wait_for_releases() -> None:
    """Returns when the GPU memory that was let go of before has been freed."""
    module = sys.modules.get("jax_ep._cuda")
    if module is not None:
        module.wait_for_releases()


def plan_workspace_size(*, num_ranks: int, num_experts: int) -> int:
    """int32 elements of scratch that the plan asks XLA for."""
    return _load("_host").plan_workspace_size(num_ranks, num_experts)


def plan_dispatch_fits(
    *,
    num_ranks: int,
    num_tokens: int,
    top_k: int,
    num_experts: int,
    row_bytes: Sequence[int],
) -> bool:
    """Whether one launch plans and dispatches leaves of `row_bytes` a row."""
    return _load("_host").plan_dispatch_fits(
        num_ranks, num_tokens, top_k, num_experts, list(row_bytes)
    )


def dispatch_permute_workspace_size(*, num_ranks: int) -> int:
    """int32 elements of scratch that dispatch_permute asks XLA for."""
    return _load("_host").dispatch_permute_workspace_size(num_ranks)


def low_latency_bytes(
    *, num_ranks: int, max_tokens: int, hidden: int, element_bytes: int
) -> int:
    """Bytes of each rank's GPU that a low-latency buffer takes."""
    return _load("_host").low_latency_bytes(
        num_ranks, max_tokens, hidden, element_bytes
    )


def expert_rows_workspace_size(*, num_pairs: int, local_experts: int) -> int:
    """int32 elements of scratch that expert_rows asks XLA for."""
    return _load("_host").expert_rows_workspace_size(num_pairs, local_experts)


@functools.cache
def _load(name: str) -> types.ModuleType:
    try:
        module = importlib.import_module(f"jax_ep.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"jax_ep.{name}":
            raise
        here, installed = _PACKAGE, _installed_with(name)
        if installed is not None:
            raise ImportError(
                f"jax_ep: Python imported {here}, which has no native module {name}; "
                f"the jax_ep that is installed in {installed} has one. Start Python "
                f"in another folder than {here.parent} and take that out of "
                f"PYTHONPATH, or run pip install -e {here.parent}"
            ) from error
        needs = "nvcc (CUDA 12.8 or newer) on PATH" if name == "_cuda" else "CMake"
        raise ImportError(
            f"jax_ep: the native module {name} was not built; install jax_ep "
            f"again from its sources with {needs}: "
            "pip install --force-reinstall --no-deps ."
        ) from error
    check_ffi_version(name, module.ffi_version(), installed_ffi_version())
    return module


def _installed_with(name: str) -> pathlib.Path | None:
    """Another jax_ep on Python's path that has the native module."""
    for entry in map(pathlib.Path, sys.path):
        package = (entry / "jax_ep").absolute()
        if package == _PACKAGE:
            continue
        modules = (package / f"{name}{end}" for end in machinery.EXTENSION_SUFFIXES)
        if (package / "__init__.py").exists() and any(m.exists() for m in modules):
            return package
    return None


def installed_ffi_version() -> tuple[int, int]:
    """The FFI version of the installed jaxlib, read from its header."""
    header = pathlib.Path(jax.ffi.include_dir(), "xla/ffi/api/c_api.h").read_text()
    version = tuple(
        int(match.group(1))
        for part in ("MAJOR", "MINOR")
        if (match := re.search(rf"#define XLA_FFI_API_{part}\s+(\d+)", header))
    )
    if len(version) != 2:
        raise ImportError("jax_ep: no FFI version in jaxlib's xla/ffi/api/c_api.h")
    return version


def check_ffi_version(
    name: str, built: tuple[int, int], installed: tuple[int, int]
) -> None:
    """Refuses a module that XLA would refuse, before it takes JAX down.

    XLA runs modules built with older headers; one built with newer headers
    fails at the first JAX call and the whole backend is lost.
    """
    if built[0] != installed[0] or built[1] > installed[1]:
        raise ImportError(
            f"jax_ep: {name} was built with XLA FFI {built[0]}.{built[1]}, the "
            f"installed jaxlib has {installed[0]}.{installed[1]}; upgrade jax "
            "and jaxlib, or rebuild jax_ep's sources against this jaxlib: "
            "pip install --no-build-isolation --force-reinstall --no-deps ."
        )


_register_lock = threading.Lock()
_platforms_registered: set[str] = set()


def _registered(name: str, platform: str) -> types.ModuleType:
    module = _load(name)
    with _register_lock:
        if platform not in _platforms_registered:
            # XLA wants a backend before types, and types before their handlers.
            jax.devices()
            for type_name, info in module.types().items():
                jax.ffi.register_ffi_type(type_name, info, platform=platform)
            for target, handler in module.handlers().items():
                jax.ffi.register_ffi_target(target, handler, platform=platform)
            _platforms_registered.add(platform)
    return module
