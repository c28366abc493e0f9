"""What the programs of this folder share: a mesh, and two functions compared."""

import importlib.util

import jax
import jax.numpy as jnp


def installed(package, distribution):
    """Whether a package is there; says so where it is not."""
    if importlib.util.find_spec(package) is not None:
        return True
    print(f"{package} is not installed, so nothing was compared: pip install ", end="")
    print(distribution)
    return False


def make_mesh(axis_type, **axes):
    """All GPUs, or virtual CPU devices, on the mesh with the axes given."""
    jax.config.update("jax_num_cpu_devices", 4)
    types = (axis_type,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=types)


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape) * shape[-1] ** -0.5


def differences(theirs, ours, *args):
    """Prints how far results and gradients are apart, the largest of each array.

    theirs, ours: args -> (y, others); gradients are of sum(y ** 2), in all args.
    """
    results = []
    for function in (theirs, ours):

        def loss(args, function=function):
            y, others = function(*args)
            return (y.astype(jnp.float32) ** 2).sum(), (y, others)

        (_, outputs), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(args)
        results.append({"results": outputs, "gradients": gradients})
    pairs = zip(*map(jax.tree.leaves_with_path, results), strict=True)
    worst = 0.0
    for (path, a), (_, b) in pairs:
        scale = max(float(jnp.abs(a).max()), 1e-30)
        worst = max(worst, apart := float(jnp.abs(a - b).max()) / scale)
        print(f"{jax.tree_util.keystr(path):30} {a.shape!s:16} {apart:.1e}")
    return worst
