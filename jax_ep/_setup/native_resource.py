"""What processes set up together and give back together."""

from __future__ import annotations

import dataclasses
import os
import weakref
from collections.abc import Callable
from typing import Any, NoReturn, Self

from jax_ep._data import native
from jax_ep._setup import bootstrap


@dataclasses.dataclass(frozen=True)
class Memory:
    """What a native module holds for a communicator.

    Attributes:
      release: gives it back.
      memory_bytes: of it, made by this process.
      exported: ids of devices into whose memory other processes store directly.
    """

    release: Callable[[], Any]
    memory_bytes: int
    exported: frozenset[int] = frozenset()


class NativeResource:
    """Something native, given back by close() or when the last reference goes.

    Attributes:
      closed: whether close() was called.
    """

    # The other processes; None where there is one.
    _peers: bootstrap.Processes | None

    def _hold(self, release: Callable[[], Any]) -> None:
        """From now on `release` gives it back, once, in this process."""
        self._pid = os.getpid()
        self._finalizer = weakref.finalize(self, _release_here, release, self._pid)
        # At exit the process takes everything with it.
        self._finalizer.atexit = False

    # Two that give back the same would leave one of them without it.
    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"jax_ep.{type(self).__name__}: it holds memory of this process and its "
            "devices and cannot be pickled; leave it out of what is saved or sent, "
            "and make one in each process that needs it"
        )

    @property
    def closed(self) -> bool:
        """Whether close() was called."""
        return not self._finalizer.alive

    def close(self) -> None:
        """Gives everything back. Collective and idempotent.

        Waits until every process has come here. Safe with executables still
        alive and running: each holds on to what it needs, and what the last
        holder let go of is freed soon after. On GPUs memory is freed when no
        kernel runs any more: where no executable holds on, close() waits for
        that, and the memory is back when it returns.

        Raises:
          RuntimeError: a process did not come within the communicator's
            setup_timeout_s. What this one holds is given back all the same.
        """
        if self.closed:
            return
        try:
            if self._peers is not None and os.getpid() == self._pid:
                self._peers.barrier("close")
        finally:
            self._finalizer()
        if os.getpid() == self._pid:
            native.wait_for_releases()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        # After an error the other processes may never come to close().
        if kind is None:
            self.close()
        else:
            self._finalizer()


def _release_here(release: Callable[[], Any], pid: int) -> None:
    # What a forked child inherits is its parent's.
    if os.getpid() == pid:
        release()
