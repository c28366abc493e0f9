"""Which control slot a call site of backend "cuda" gets: ControlSlots of cc/."""

from __future__ import annotations

import pytest

from jax_ep._data import native

_host = native.host()
PLAN, ROWS, FLIGHT, NONE = (
    _host.SlotKind.PLAN,
    _host.SlotKind.ROWS,
    _host.SlotKind.FLIGHT,
    _host.SlotKind.NONE,
)
# ControlLayout: plans have the first slots, flights the last one.
PLANS, SLOTS = 128, 1024
KINDS = {PLAN: (0, PLANS), ROWS: (PLANS, SLOTS - 1)}

on_each_kind = pytest.mark.parametrize("kind", (PLAN, ROWS), ids=("plan", "rows"))


class Process:
    """What one process takes; all processes get the same without a word."""

    def __init__(self):
        _host.ControlSlots.begin_program()
        self.slots = _host.ControlSlots()

    def slot(self, kind, number, channel):
        return self.slots.take(kind, number, channel)[0]


@on_each_kind
def test_sites_of_a_program_have_slots_of_their_own(kind):
    """Whatever channels they have: as many as there are slots of their kind."""
    begin, end = KINDS[kind]
    process = Process()
    taken = [process.slot(kind, n, channel=1 + 64 * n) for n in range(end - begin)]
    assert taken == list(range(begin, end))
    assert process.slot(kind, end - begin, channel=7) == begin


def test_channels_that_are_far_apart_do_not_meet():
    """Two plans with 63 other sites between them."""
    process = Process()
    first = process.slot(PLAN, 0, channel=2)
    for n in range(63):
        process.slot(ROWS, n, channel=3 + n)
    assert process.slot(PLAN, 1, channel=66) != first


@on_each_kind
def test_sites_that_share_a_number(kind):
    """A function that was lowered once and called twice: from the last slot down."""
    begin, end = KINDS[kind]
    process = Process()
    found = [process.slots.take(kind, n, 5 + n) for n in (0, 1, 0, 1, 0)]
    assert found == [
        (begin, 0),
        (begin + 1, 0),
        (end - 1, 1),
        (end - 2, 1),
        (end - 3, 2),
    ]


@on_each_kind
def test_number_of_another_module(kind):
    """An exported program inside another one counts from 0 as well."""
    process = Process()
    outer, inner = process.slot(kind, 0, channel=9), process.slot(kind, 0, channel=1)
    assert outer != inner


@on_each_kind
def test_counting_begins_anew_with_a_program(kind):
    process = Process()
    first = [process.slots.take(kind, n, 4) for n in (0, 0, 1)]
    _host.ControlSlots.begin_program()
    assert [process.slots.take(kind, n, 4) for n in (0, 0, 1)] == first


def test_processes_that_have_loaded_other_things_agree():
    busy, idle = Process(), Process()
    for n in range(300):
        busy.slot(PLAN, n, n)
    _host.ControlSlots.begin_program()
    sites = [(PLAN, 0, 2), (ROWS, 0, 3), (PLAN, 1, 66), (ROWS, 0, 3), (FLIGHT, 0, 4)]
    assert [busy.slots.take(*s) for s in sites] == [idle.slots.take(*s) for s in sites]


def test_flights_share_the_last_slot():
    """Their numbers are not looked at, and nobody else has it."""
    process = Process()
    assert {process.slot(FLIGHT, n, n) for n in range(5)} == {SLOTS - 1}
    rows = {process.slot(ROWS, n, n) for n in range(2 * SLOTS)}
    rows |= {process.slot(ROWS, 0, 0) for _ in range(2 * SLOTS)}
    assert rows == set(range(PLANS, SLOTS - 1))


def test_low_latency_takes_none():
    process = Process()
    for n in range(300):
        process.slots.take(NONE, 0, n)
    assert process.slot(PLAN, 0, 1) == 0
