"""The memory of a low-latency buffer on GPUs, read and written over by tests.

What stands where is cc/layout/low_latency.h's. Nobody may use the buffer meanwhile: a
test fetches the results of all ranks first.
"""

from __future__ import annotations

from unittest import mock

import numpy as np

import jax_ep
from jax_ep._setup import gpu_memory

KINDS = ("dispatch", "combine")
# 32-bit words of the header, and in it of the state of each kind of operation, which
# begins with these.
HEADER = 4096 // 4
STATE = 128 // 4
EPOCH, BUSY = 0, 2
# Words of a line, the last of them its epoch.
LINE = 128 // 4


class Memory:
    """A buffer of one group in this process, and its memory.

    Attributes:
      buffer: the buffer.
    """

    def __init__(self, comm: jax_ep.Communicator, **sizes):
        """Makes it; `sizes` as LowLatencyBuffer takes them."""
        made = []
        allocate = gpu_memory.Holdings.allocate

        def noted(self, ordinal, size):
            address = allocate(self, ordinal, size)
            made.append((self, ordinal, address))
            return address

        with mock.patch.object(gpu_memory.Holdings, "allocate", noted):
            self.buffer = jax_ep.LowLatencyBuffer(comm, **sizes)
        assert len(made) == comm.num_ranks
        self._made = made

    @property
    def num_words(self) -> int:
        """Of a rank's memory."""
        return self.buffer.size_bytes // 4

    @property
    def num_row_words(self) -> int:
        """Of those behind the header that are lines of rows; then come words."""
        over = self.buffer
        units = -(-over.hidden * over.dtype.itemsize // 16)
        row_bytes = 2048 * -(-units // 96)
        return 4 * over.comm.num_ranks * over.max_tokens * row_bytes // 4

    def read(self, rank: int) -> np.ndarray:
        """uint32[num_words]."""
        holdings, ordinal, address = self._made[rank]
        found = holdings.read(ordinal, address, self.num_words * 4)
        return np.frombuffer(found, np.uint32)

    def write(self, rank: int, words: np.ndarray, first: int = 0) -> None:
        """uint32[...] from word `first` on."""
        assert words.dtype == np.uint32
        assert first + words.size <= self.num_words
        holdings, ordinal, address = self._made[rank]
        holdings.write(ordinal, address + 4 * first, np.ascontiguousarray(words))

    def renew(self, windows: list[np.ndarray], epoch: int = 0) -> None:
        """As it is when it is made, but for what stands behind the header.

        Args:
          windows: of each rank, uint32[num_words - HEADER].
          epoch: of the last operation of either kind.
        """
        header = np.zeros(HEADER, np.uint32)
        for number in range(len(KINDS)):
            header[number * STATE + EPOCH] = epoch
        for rank, words in enumerate(windows):
            self.write(rank, np.concatenate([header, words]))

    def windows(self) -> list[np.ndarray]:
        """Of each rank, what stands behind the header."""
        return [self.read(r)[HEADER:] for r in range(len(self._made))]

    def epochs(self) -> np.ndarray:
        """uint32[R, 2]: of the last operations, dispatch and combine."""
        at = np.arange(len(KINDS)) * STATE + EPOCH
        return np.stack([self.read(r)[at] for r in range(len(self._made))])

    def places_of_epochs(self, windows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Views of where one rank's windows have epochs: of lines, and of words."""
        lines, words = np.split(windows, [self.num_row_words])
        return lines.reshape(-1, LINE)[:, -1], words.reshape(-1, 2)[:, 1]
