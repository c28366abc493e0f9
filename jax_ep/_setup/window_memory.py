"""Memory of low-latency buffers: windows on every rank that all ranks reach."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jax_ep._setup import bootstrap, gpu_memory, reach
from jax_ep._setup.gpu_memory import call
from jax_ep._setup.links import Links
from jax_ep._setup.peer_memory import Offers, SetUp, close_files
from jax_ep._setup.reach import CaughtError, Groups
from jax_ep._setup.topology import MeshPlaces


def free_bytes(groups: Groups) -> int:
    """Free memory of the GPU of this process that has the least."""
    driver = gpu_memory.driver()
    least = 1 << 62
    for ordinal in {d.local_hardware_id for d in reach.local(groups)}:
        device = call(driver.cuDeviceGet, ordinal)
        context = call(driver.cuDevicePrimaryCtxRetain, device)
        with gpu_memory.Current(driver, context):
            free, _ = call(driver.cuMemGetInfo)
        least = min(least, int(free))
    return least


def set_up_windows(
    identity: int,
    groups: Groups,
    size: int,
    *,
    mesh_places: MeshPlaces,
    num_sms: int | None,
    timeout_s: float,
    warn_after_s: float,
    processes: bootstrap.Processes | None,
    links: Links | None,
) -> Callable[[], Any]:
    """Makes windows of `size` bytes on every rank. Collective.

    To the native side they are a communicator's control memory.

    Returns:
      What gives them back.

    Raises:
      CannotWork: memory cannot be shared.
      RuntimeError: a call of the driver failed.
    """
    set_up = _WindowSetUp(groups, mesh_places, size, num_sms, processes, links)
    try:
        set_up.run(None)
        return set_up.hand_over(identity, timeout_s, warn_after_s).release
    except BaseException:
        set_up.holdings.release()
        raise


class _WindowSetUp(SetUp):
    """Control memory of another size, without arenas and staging memory."""

    def __init__(self, groups, mesh_places, size, num_sms, processes, links):
        super().__init__(groups, mesh_places, num_sms or 0, 0, processes, links)
        self.size: int = size
        if num_sms is None:
            # 32 of an H200's 132: no link to fill for long, but much to copy.
            default = min(self.module.num_sms(o, 0) for o in self.contexts)
            self.num_sms = max(1, default * 4 // 3)

    def run(self, num_channels: int | None) -> None:
        del num_channels
        if self.processes is None:
            self._allocate()
            self._place_ranks()
            return
        mine: Offers = {}
        try:
            with CaughtError() as told:
                self._allocate()
                self._share(0, mine)
            self._exchange(mine, told.problem)
        finally:
            close_files(mine)
        self._place_ranks()

    def _control_bytes(self) -> int:
        return self.size

    def _staging_size(self, num_channels: int) -> tuple[int, int]:
        del num_channels
        return 0, 0

    def _share_arenas(self, group, rank, device, mine) -> None:
        pass

    def _place(self, group: int, rank: int, device: jax.Device) -> Any:
        return self.module.Place(
            ordinal=device.local_hardware_id,
            rank=rank,
            mesh=self.mesh_places[device.id],
            control=[self.control[group, r] for r in range(self.num_ranks)],
            same_process=[],
            regions=0,
            exported=[],
        )
