"""Importing jax_ep: cheap, silent, and refused with a reason where it must be."""

from __future__ import annotations

import importlib
import inspect
import os
import pathlib
import shutil
import sys
import textwrap

import harness
import jax
import pytest
from processes import run_script

import jax_ep
from jax_ep._data import native

LOADED = """
    import sys

    def cuda_modules():
        return sorted(
            name for name in sys.modules
            if name.split(".")[0] == "cuda" or name == "jax_ep._cuda"
        )
"""


def run_python(code):
    code = textwrap.dedent(LOADED) + textwrap.dedent(code)
    return run_script("-c", code, PYTHONWARNINGS="error")


def test_import_touches_nothing():
    """No JAX backend, no CUDA module, no native module, no output."""
    done = run_python(
        """
    import jax_ep
    from jax.extend import backend
    from jax._src import xla_bridge
    assert not xla_bridge.backends_are_initialized()
    assert not cuda_modules(), cuda_modules()
    assert "jax_ep._host" not in sys.modules
        """
    )
    assert done.returncode == 0, done.stderr
    assert not done.stdout
    assert not done.stderr


@pytest.mark.skipif(harness.ON_GPU, reason="for a machine without GPUs")
def test_use_on_a_cpu_never_touches_cuda():
    done = run_python(
        """
    import jax
    jax.config.update("jax_platforms", "cpu")
    import jax_ep
    mesh = jax.make_mesh((1,), ("ep",))
    assert jax_ep.Communicator(mesh, "ep", backend="xla").backend == "xla"
    assert "jax_ep._host" not in sys.modules
    assert jax_ep.Communicator(mesh, "ep").backend == "cpu"
    assert "jax_ep._host" in sys.modules
    try:
        jax_ep.Communicator(mesh, "ep", backend="cuda")
    except RuntimeError:
        pass
    assert not cuda_modules(), cuda_modules()
        """
    )
    assert done.returncode == 0, done.stderr


def test_public_names():
    assert set(jax_ep.__all__) >= {
        "Communicator",
        "Plan",
        "combine",
        "dispatch",
        "make_plan",
    }
    for name in jax_ep.__all__:
        assert inspect.getdoc(getattr(jax_ep, name)), name
    package = pathlib.Path(jax_ep.__file__).parent
    assert (package / "py.typed").exists()


class TestFfiVersion:
    """XLA refuses newer modules at the first JAX call and loses the backend."""

    @pytest.mark.parametrize(
        ("built", "installed"), (((0, 3), (0, 3)), ((0, 3), (0, 4)), ((1, 0), (1, 9)))
    )
    def test_accepted(self, built, installed):
        native.check_ffi_version("_host", built, installed)

    @pytest.mark.parametrize(
        ("built", "installed"), (((0, 3), (0, 2)), ((0, 3), (1, 0)), ((1, 0), (0, 9)))
    )
    def test_refused(self, built, installed):
        with pytest.raises(ImportError) as info:
            native.check_ffi_version("_host", built, installed)
        assert str(info.value) == (
            f"jax_ep: _host was built with XLA FFI {built[0]}.{built[1]}, the "
            f"installed jaxlib has {installed[0]}.{installed[1]}; upgrade jax and "
            "jaxlib, or rebuild jax_ep's sources against this jaxlib: pip install "
            "--no-build-isolation --force-reinstall --no-deps ."
        )

    def test_of_the_installed_header(self):
        major, minor = native.installed_ffi_version()
        assert (major, minor) >= (0, 3)
        header = pathlib.Path(jax.ffi.include_dir(), "xla/ffi/api/c_api.h")
        assert f"#define XLA_FFI_API_MINOR {minor}\n" in header.read_text()

    def test_is_compared_when_a_module_loads(self, monkeypatch):
        monkeypatch.setattr(native, "installed_ffi_version", lambda: (0, 1))
        with pytest.raises(ImportError, match=r"installed jaxlib has 0\.1; upgrade"):
            native._load.__wrapped__("_host")

    def test_header_without_version(self, monkeypatch, tmp_path):
        header = tmp_path / "xla/ffi/api/c_api.h"
        header.parent.mkdir(parents=True)
        header.write_text("#define XLA_FFI_API_MAJOR 0\n")
        monkeypatch.setattr(jax.ffi, "include_dir", lambda: str(tmp_path))
        with pytest.raises(ImportError) as info:
            native.installed_ffi_version()
        assert str(info.value) == (
            "jax_ep: no FFI version in jaxlib's xla/ffi/api/c_api.h"
        )


class TestShadowed:
    """Python from a source tree stands before an installed wheel."""

    SETUP = """
        import jax
        jax.config.update("jax_platforms", "cpu")
        import jax_ep
        mesh = jax.make_mesh((1,), ("ep",))
        try:
            print(jax_ep.Communicator(mesh, "ep", backend="cpu").backend)
        except RuntimeError as error:
            print(error)
        """

    def run(self, *paths):
        """With `paths` first, and without what an editable install hooks in."""
        paths = os.pathsep.join(map(str, [*paths, *sys.path[1:]]))
        done = run_script(
            "-S", "-P", "-c", textwrap.dedent(self.SETUP), PYTHONPATH=paths
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def test_says_which_is_which(self, tmp_path):
        sources = pathlib.Path(jax_ep.__file__).parent
        module = pathlib.Path(importlib.import_module("jax_ep._host").__file__)
        checkout, site = tmp_path / "checkout", tmp_path / "site"
        for folder in (checkout, site):
            (folder / "jax_ep").mkdir(parents=True)
            for path in sources.rglob("*.py"):
                copy = folder / "jax_ep" / path.relative_to(sources)
                copy.parent.mkdir(exist_ok=True)
                shutil.copy(path, copy)
        shutil.copy(module, site / "jax_ep")
        assert self.run(site) == "cpu"
        assert self.run(checkout, site) == (
            "jax_ep.Communicator: backend 'cpu' cannot work here: jax_ep: Python "
            f"imported {checkout}/jax_ep, which has no native module _host; the jax_ep "
            f"that is installed in {site}/jax_ep has one. Start Python in another "
            f"folder than {checkout} and take that out of PYTHONPATH, or run "
            f"pip install -e {checkout}"
        )


@pytest.mark.parametrize(
    ("name", "needs"),
    (("_host", "CMake"), ("_cuda", "nvcc (CUDA 12.8 or newer) on PATH")),
)
def test_module_that_was_not_built(name, needs, monkeypatch):
    def import_module(wanted):
        raise ModuleNotFoundError(f"No module named {wanted!r}", name=wanted)

    monkeypatch.setattr(importlib, "import_module", import_module)
    with pytest.raises(ImportError) as info:
        native._load.__wrapped__(name)
    assert str(info.value) == (
        f"jax_ep: the native module {name} was not built; install jax_ep again "
        f"from its sources with {needs}: pip install --force-reinstall --no-deps ."
    )
