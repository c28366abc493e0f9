"""On a GPU a whole layer, forward and backward, is one CUDA graph."""

from __future__ import annotations

import re
import textwrap

import jax
import pytest
import xla_flags
from processes import run_script

pytestmark = [
    pytest.mark.gpu(count=1),
    pytest.mark.skipif(
        jax.__version_info__ < (0, 11), reason="kernels are for jax 0.11 and newer"
    ),
]

PROGRAM = textwrap.dedent(
    """
    import functools

    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import AxisType
    from jax.sharding import PartitionSpec as P

    import jax_ep

    T, H, I, E, K = 256, 256, 192, 8, 2
    mesh = jax.make_mesh((1,), ("ep",), (AxisType.Auto,), devices=jax.devices()[:1])
    comm = jax_ep.Communicator(mesh, "ep", backend="cuda")

    def layer(x, ids, weights, w_gate, w_up, w_down):
        mlps = functools.partial(
            jax_ep.gated_mlp, w_gate=w_gate, w_up=w_up, w_down=w_down
        )
        return jax_ep.moe(x, ids, weights, mlps, comm=comm, num_experts=E)

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
    def layer_and_gradients(x, ids, weights, *matrices):
        out, pull = jax.vjp(
            lambda x, *rest: layer(x, ids, *rest), x, weights, *matrices
        )
        return out, pull(out)

    keys = jax.random.split(jax.random.key(0), 5)
    shapes = (T, H), (E, H, I), (E, H, I), (E, I, H)
    x, *matrices = [
        jax.random.normal(key, shape, jnp.bfloat16) * shape[-1] ** -0.5
        for key, shape in zip(keys, shapes)
    ]
    ids = jax.random.randint(keys[4], (T, K), 0, E, jnp.int32)
    weights = jnp.full((T, K), 1 / K)
    first = layer_and_gradients(x, ids, weights, *matrices)
    for _ in range(3):  # later calls replay the graph
        again = layer_and_gradients(x, ids, weights, *matrices)
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(again)):
        assert np.isfinite(np.asarray(a, np.float32)).all()
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    """
)


def test_a_layer_with_gradients_is_one_graph(tmp_path):
    """Nothing before, between or behind that XLA launches by itself."""
    flags = (
        f"{xla_flags.of_user()} --xla_dump_to={tmp_path} --xla_dump_hlo_as_text "
        "--xla_dump_hlo_module_re=.*layer_and_gradients.*"
    )
    done = run_script("-W", "error", "-c", PROGRAM, timeout=400, XLA_FLAGS=flags)
    assert done.returncode == 0, done.stderr
    dumps = list(tmp_path.glob("*thunk_sequence_after_thunk_passes*.txt"))
    assert len(dumps) == 1, sorted(p.name for p in tmp_path.iterdir())
    text = dumps[0].read_text()
    # "<number>: <kind> ...", further in for what a command buffer holds.
    outermost = re.findall(r"^\d+: (\w+)", text, re.MULTILINE)
    assert outermost == ["kCommandBuffer"], text
    assert len(re.findall(r"^\s+\d+: kCustomCall", text, re.MULTILINE)) >= 7, text
