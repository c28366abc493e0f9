"""Low-latency operations over memory that holds anything but their own epochs.

Nothing in a window is ever cleared: what stands there tells by its epoch alone that it
belongs to an operation. So whatever older epochs have left must not matter, nor what
rows, ids and weights look like.
"""

from __future__ import annotations

import dataclasses
import functools

import cases
import harness
import low_latency_memory
import low_latency_oracle
import low_latency_steps
import ml_dtypes
import numpy as np
import payloads
import pytest

import jax_ep

pytestmark = pytest.mark.gpu(count=2)

MAX_TOKENS, HIDDEN = 40, 7168
# Small numbers, as epochs of a buffer's first operations are.
SOON = 64
LAST = 2**32 - 1


@dataclasses.dataclass(frozen=True)
class Step:
    """A dispatch and its combine.

    Attributes:
      rule: of cases.
      idle: a rank that has no tokens for others, if any.
    """

    tokens: int
    top_k: int
    layout: str
    quantize: str | None
    rule: str
    idle: int | None = None

    def ids(self, ranks):
        ids = getattr(cases, self.rule)(ranks, self.tokens, self.top_k, 3 * ranks)
        ids = np.array(ids, np.int32)
        if self.idle is not None:
            ids[self.idle] = -1
        return ids


# The two windows of each kind see both layouts, plain rows and FP8, all tokens and few.
STEPS = (
    Step(40, 4, "expert", None, "uniform"),
    Step(40, 8, "rank", "fp8", "holes"),
    Step(37, 8, "expert", "fp8", "duplicates"),
    Step(40, 2, "rank", None, "uniform", idle=0),
    Step(1, 22, "expert", None, "holes"),
    Step(3, 3, "rank", "fp8", "round_robin"),
    Step(24, 3, "rank", None, "holes"),
    Step(40, 6, "expert", "fp8", "uniform", idle=1),
)


def num_ranks():
    return harness.few_ranks()


@functools.cache
def memory():
    """Of one buffer, for all tests here."""
    return low_latency_memory.Memory(
        harness.communicator("cuda", num_ranks()),
        max_tokens=MAX_TOKENS,
        hidden=HIDDEN,
        num_experts=3 * num_ranks(),
    )


@functools.cache
def program(over):
    """Arguments by step -> (rows, who, out) of each, one after the other."""

    def body(comm, args):
        results, after = [], None
        for step, (ids, x, weights, y) in zip(STEPS, args, strict=True):
            by_expert = step.layout == "expert"
            rows, who, handle = jax_ep.low_latency_dispatch(
                x,
                ids,
                buffer=over,
                layout=step.layout,
                quantize=step.quantize,
                topk_weights=None if by_expert else weights,
                after=after,
            )
            after = jax_ep.low_latency_combine(
                y, weights if by_expert else None, handle, after=rows
            )
            results.append((rows, who, after))
        return results

    return harness.Program(body, over.comm)


def sent_bits(shape, rows, seed):
    """uint8[..., bytes of a row]: anything, or numbers that look like epochs."""
    if rows == "any":
        return payloads.payload(shape, np.uint8, seed)
    *others, size = shape
    words = cases.mix(seed, *cases.grid(*others, size // 4)) % np.uint64(SOON)
    return words.astype(np.uint32).view(np.uint8)


@dataclasses.dataclass(frozen=True)
class Case:
    """A step with what it is given, of all ranks, and its right result.

    Attributes:
      args: (ids, x, weights, y).
      right: the oracle.
      rows: what comes, (rows,) or (q, scales).
      used: the rows that something came to.
      out: the sums.
    """

    args: tuple
    right: low_latency_oracle.Oracle
    rows: list
    used: np.ndarray
    out: np.ndarray


@functools.cache
def cases_of(ranks, rows):
    """A Case for each step."""
    return [case_of(ranks, rows, *numbered) for numbered in enumerate(STEPS)]


def case_of(ranks, rows, seed, step):
    ids = step.ids(ranks)
    right = low_latency_oracle.oracle(ids, 3 * ranks, MAX_TOKENS)
    used = low_latency_oracle.used_rows(right, step.layout)
    shape = (ranks, step.tokens, HIDDEN)
    if step.quantize:
        x, *sent = low_latency_steps.in_fp8(sent_bits(shape, rows, seed), seed)
    else:
        bits = sent_bits((*shape[:2], 2 * HIDDEN), rows, seed)
        x = bits.view(ml_dtypes.bfloat16)
        sent = [x]
    y = low_latency_oracle.numbers_of(right, step.layout, HIDDEN, x.dtype)
    if rows != "any" and step.layout == "rank":
        # These travel as they are.
        bits = sent_bits((*used.shape, 2 * HIDDEN), rows, seed + 100)
        y[used] = bits.view(ml_dtypes.bfloat16)[used]
    weights = payloads.numbers(ids.shape, np.float32, seed)
    return Case(
        args=(ids, x, weights, y),
        right=right,
        rows=[right.dispatch(sent, step.layout, 0)[used] for sent in sent],
        used=used,
        out=right.combine(y, weights, step.layout),
    )


def flushed(sums):
    """Without sums of subnormal numbers, which not every processor has."""
    tiny = np.abs(sums.astype(np.float32)) < np.float32(2.0**-120)
    return np.where(tiny, np.zeros((), sums.dtype), sums)


def check(over, rows):
    """Runs all steps and compares everything."""
    expected = cases_of(over.comm.num_ranks, rows)
    results = program(over)([case.args for case in expected])
    for number, (step, case, found) in enumerate(
        zip(STEPS, expected, results, strict=True)
    ):
        got, who, out = found
        what = f"step {number}, {step}"
        for mine, want in zip(got if step.quantize else (got,), case.rows, strict=True):
            wrong = payloads.as_bytes(mine[case.used]) != payloads.as_bytes(want)
            places = np.argwhere(case.used)[wrong.any(-1)]
            assert len(places) == 0, f"{what}: {len(places)} rows, as {places[0]}"
        weights = None if step.layout == "expert" else case.args[2]
        low_latency_oracle.assert_who(who, case.right, step.layout, weights)
        want = case.out
        if rows != "any":
            out, want = flushed(out), flushed(want)
        payloads.assert_same_sums(out, want, f"{what}: sums")


# What windows hold before the first operation, of one rank: uint32[n] --------------


def hashed(count, seed):
    """uint32[n], anything."""
    return (cases.mix(seed, np.arange(count)) >> np.uint64(32)).astype(np.uint32)


def zeros(over, count, seed):
    """As it is made."""
    return np.zeros(count, np.uint32)


def random(over, count, seed):
    """Anything that is no epoch here, wherever epochs may stand."""
    low, high = 2**20, 2**32 - 2**20
    return (low + hashed(count, seed) % np.uint32(high - low)).astype(np.uint32)


def no_epochs(over, count, seed):
    """Anything with epoch 0, that of memory that nobody has written."""
    words = hashed(count, seed)
    for places in over.places_of_epochs(words):
        places[:] = 0
    return words


def old_epochs(over, count, seed):
    """What looks like epochs to come everywhere but where epochs of long ago stand."""
    words = hashed(count, seed) % np.uint32(SOON)
    for number, places in enumerate(over.places_of_epochs(words)):
        back = hashed(places.size, seed + 1 + number)
        # Of the last nine operations before the count begins again, and older.
        older = np.where(back % 3 == 0, back >> np.uint32(2), back % np.uint32(9))
        places[:] = np.uint32(LAST) - older
    return words


BEFORE = {
    "zeros": (zeros, 0),
    "random": (random, 0),
    "no_epochs": (no_epochs, 0),
    "old_epochs": (old_epochs, 0),
    # The count begins again while the steps run.
    "zeros_and_the_count_begins_again": (zeros, LAST - 3),
    "random_and_the_count_begins_again": (random, LAST - 4),
}


def next_epoch(epoch, operations):
    """Some operations later; the count leaves out 0 and then 1."""
    for _ in range(operations):
        epoch = 2 if epoch == LAST else epoch + 1
    return epoch


def renew(over, before, seed=0):
    """A buffer as if just made, but for what its windows hold."""
    fill, epoch = BEFORE[before]
    count = over.num_words - low_latency_memory.HEADER
    windows = [
        fill(over, count, 1000 * seed + rank)
        for rank in range(over.buffer.comm.num_ranks)
    ]
    over.renew(windows, epoch)
    for found, written in zip(over.windows(), windows, strict=True):
        np.testing.assert_array_equal(found, written)
    return epoch


@pytest.mark.parametrize("rows", ["any", "epochs_to_come"])
@pytest.mark.parametrize("before", BEFORE)
def test_whatever_stood_there(before, rows):
    over = memory()
    for seed in range(3 if before == "random" else 1):
        epoch = renew(over, before, seed)
        for runs in (1, 2):
            check(over.buffer, rows)
            want = next_epoch(epoch, runs * len(STEPS))
            assert (over.epochs() == want).all(), f"want {want}: {over.epochs()}"


@pytest.mark.parametrize("rows", ["any", "epochs_to_come"])
@pytest.mark.parametrize("runs", [1, 2])
def test_what_operations_of_another_buffer_left(runs, rows):
    """Their epochs end where the count does; here it begins."""
    over = memory()
    nothing = np.zeros(over.num_words - low_latency_memory.HEADER, np.uint32)
    over.renew([nothing] * over.buffer.comm.num_ranks, LAST - runs * len(STEPS))
    for _ in range(runs):
        check(over.buffer, "any")
    assert (over.epochs() == LAST).all()
    over.renew(over.windows())
    check(over.buffer, rows)
    assert (over.epochs() == len(STEPS)).all()


def test_where_epochs_stand():
    """In one place of every line and word, whatever the rows look like."""
    over = memory()
    renew(over, "zeros")
    check(over.buffer, "any")
    for windows in over.windows():
        for places in over.places_of_epochs(windows):
            found = set(np.unique(places).tolist())
            assert found >= {len(STEPS) - 1, len(STEPS)}, found
            assert found <= set(range(len(STEPS) + 1)), found
