"""comm.describe() and print(comm) in one process; process_program.py has more."""

import harness
import jax

import jax_ep

PATHS = {"cpu": "in-process", "cuda": "direct", "xla": "xla"}


@harness.on_each_backend
def test_one_group(backend):
    comm = harness.communicator(backend, 2)
    about = comm.describe()
    (group,) = about["groups"]
    ids = [device.id for device in comm.mesh.devices.flat]
    assert group == {
        "devices": ids,
        "processes": [0, 0],
        "paths": [[PATHS[backend]] * 2] * 2,
    }
    assert (about["backend"], about["num_ranks"]) == (backend, 2)
    assert (about["axis_name"], about["closed"]) == ("ep", False)
    assert (about["memory_bytes"] > 0) == (backend == "cuda")
    assert f"backend={backend!r}" in str(comm)
    assert PATHS[backend] in str(comm)


@harness.on_each_backend
def test_two_groups_and_after_close(backend):
    harness.mesh(4)
    mesh = jax.make_mesh((2, 2), ("ep", "data"), devices=jax.devices()[:4])
    with jax_ep.Communicator(mesh, "ep", backend=backend) as comm:
        groups = comm.describe()["groups"]
    order = mesh.devices.T
    assert [g["devices"] for g in groups] == [[d.id for d in row] for row in order]
    about = comm.describe()
    assert (about["closed"], about["memory_bytes"]) == (True, 0)
    assert "closed" in str(comm)
