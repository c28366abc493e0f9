"""What rows carry in tests, and how rows are compared.

payload = f(rank, token, column), so a misplaced row can be named; comparisons
are of bytes, never within a tolerance.
"""

from __future__ import annotations

import cases
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np


def payload(shape: tuple[int, ...], dtype, seed: int = 0) -> np.ndarray:
    """[R, T, ...] of any dtype, every bit a hash of its place.

    All bit patterns occur, so NaN payloads, infinities, subnormal numbers and
    -0.0 travel too.
    """
    dtype = np.dtype(dtype)
    count = int(np.prod(shape))
    words = -(-count * dtype.itemsize // 8)
    raw = cases.mix(seed, np.arange(words)).view(np.uint8)
    raw = raw[: count * dtype.itemsize].reshape(*shape, dtype.itemsize)
    if dtype.kind == "b":
        return (raw[..., 0] & 1).astype(bool)
    bits = _bits(dtype)
    if bits >= 8:
        return raw.view(dtype)[..., 0]
    every = np.arange(2**bits, dtype=np.uint8)
    if dtype.name.startswith("int"):
        every = (every.astype(np.int64) - 2 ** (bits - 1)).astype(dtype)
    else:
        every = every.view(dtype)
    return every[raw[..., 0] % 2**bits]


def numbers(shape: tuple[int, ...], dtype, seed: int = 0) -> np.ndarray:
    """[R, C, ...] of a floating or complex dtype, finite, hard to sum.

    Signed, with magnitudes over 2**-9 .. 2**9 and few mantissa bits in half of
    them, so that ties occur and the order of a sum shows in its last bit.
    """
    dtype = np.dtype(dtype)
    if np.issubdtype(dtype, np.complexfloating):
        part = np.float64 if dtype.itemsize == 16 else np.float32
        return numbers((*shape, 2), part, seed).view(dtype)[..., 0]
    index = np.arange(int(np.prod(shape))).reshape(shape)

    def below(salt, limit):
        return (cases.mix(seed, salt, index) % np.uint64(limit)).astype(int)

    fine = cases.unit(seed, 1, index) * 2.0 - 1.0
    coarse = np.copysign(1.0 + below(2, 128) / 128.0, fine)
    value = np.where(below(3, 2) == 0, fine, coarse)
    return np.ldexp(value, below(4, 19) - 9).astype(dtype)


def poison(shape: tuple[int, ...], dtype) -> np.ndarray:
    """NaN where the dtype has it, else bytes of 0x7f (True for bool)."""
    dtype = np.dtype(dtype)
    if _bits(dtype) >= 8 and jnp.issubdtype(dtype, jnp.inexact):
        return np.full(shape, np.nan).astype(dtype)
    if _bits(dtype) < 8 or dtype.kind == "b":
        return np.full(shape, 1).astype(dtype)
    raw = np.full((*shape, dtype.itemsize), 0x7F, np.uint8)
    return raw.view(dtype)[..., 0]


def poison_tail(rows: np.ndarray, num_recv: np.ndarray) -> np.ndarray:
    """[R, C, ...] with NaN from row num_recv[rank] of every rank on."""
    rows = rows.copy()
    for rank, count in enumerate(num_recv):
        rows[rank, count:] = np.nan
    return rows


def assert_same_rows(got, want: np.ndarray, what: str, sent=None) -> None:
    """Asserts that [R, n, ...] arrays are equal byte by byte.

    Args:
      got: what the library returned.
      want: what the oracle returned.
      what: names the comparison.
      sent: [R, T, ...], the payload, to name a row that came to a wrong place.
    """
    got = np.asarray(got)
    assert got.dtype == want.dtype, what
    assert got.shape == want.shape, what
    if got.size == 0:
        return
    for rank in range(len(want)):
        mine, right = as_bytes(got[rank]), as_bytes(want[rank])
        wrong = np.nonzero((mine != right).any(-1))[0]
        if len(wrong) == 0:
            continue
        row = int(wrong[0])
        raise AssertionError(
            f"{what}: {len(wrong)} of {len(right)} rows of rank {rank} are "
            f"wrong; row {row} should hold {_owner(right[row], sent)}, holds "
            f"{_owner(mine[row], sent)}\n"
            f"want {want[rank, row].ravel()[:8]}\n"
            f"got  {got[rank, row].ravel()[:8]}"
        )


def assert_same_sums(got, want: np.ndarray, what: str) -> None:
    """As assert_same_rows, but any NaN equals any NaN."""
    got = np.asarray(got)
    assert got.shape == want.shape, what
    both = np.isnan(got) & np.isnan(want)
    zero = np.zeros((), want.dtype)
    assert_same_rows(np.where(both, zero, got), np.where(both, zero, want), what)


def assert_same_trees(got, want, what: str) -> None:
    """assert_same_rows for every leaf of two equal pytrees."""
    assert str(jax.tree.structure(got)) == str(jax.tree.structure(want)), what
    paths, _ = jax.tree.flatten_with_path(want)
    for (path, right), mine in zip(paths, jax.tree.leaves(got), strict=True):
        assert_same_rows(mine, right, f"{what}{jax.tree_util.keystr(path)}")


def as_bytes(array: np.ndarray) -> np.ndarray:
    """[n, ...] -> uint8[n, row bytes]; sub-byte values one to a byte."""
    array = np.ascontiguousarray(array)
    if array.dtype.name in ("int2", "int4"):
        array = array.astype(np.int8)
    rows = len(array)
    raw = array.reshape(rows, -1).view(np.uint8).reshape(rows, -1)
    bits = _bits(array.dtype)
    return raw & np.uint8(2**bits - 1) if bits < 8 else raw


def _owner(row: np.ndarray, sent: np.ndarray | None) -> str:
    if not row.any():
        return "zeros"
    if sent is not None:
        ranks, tokens = sent.shape[:2]
        rows = as_bytes(sent.reshape(ranks * tokens, *sent.shape[2:]))
        found = np.nonzero((rows == row).all(-1))[0]
        if len(found):
            return f"token {found[0] % tokens} of rank {found[0] // tokens}"
    return "none of the tokens" if sent is not None else "other bytes"


def _bits(dtype: np.dtype) -> int:
    for info in (ml_dtypes.iinfo, ml_dtypes.finfo):
        try:
            return info(dtype).bits
        except (ValueError, TypeError):
            continue
    return 8 * dtype.itemsize
