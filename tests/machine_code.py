"""Whether lanes of a warp that store or load one line do so together.

Low-latency operations move rows in lines of 128 bytes, which are whole only if the
eight lanes of a line are in one instruction. The compiler does not promise that: it may
let lanes of a warp go on apart after any branch that they take differently. So this
follows all paths through a kernel's machine code and keeps for each register and
predicate how far the lanes of a warp agree on it:

    UNIFORM  all do
    OCTET    each eight neighbouring lanes do
    THREAD   it is the thread's number plus what all agree on, in multiples of 32
    VARYING  they may not

and whether lanes have parted: a branch on something that varies parts them until the
BSYNC of the innermost BSSY around it, or for good where there is none. What is written
meanwhile varies afterwards. WARPSYNC does not count, as it was seen to join lanes for
no longer than itself. A line is fine where no eight lanes have parted, and its
predicate is one that they agree on. What the analysis does not know, it takes for
varying, so it may refuse good code but takes no bad one, on two conditions: blocks have
one dimension, and lanes that load from one address by one instruction get one value.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import re
from collections.abc import Iterator

from sass import ALL_REGISTERS, ALL_STACK, PREDICATES, Instruction

UNIFORM, OCTET, THREAD, VARYING = range(4)

# Not a function of their operands: what another lane, or an earlier moment, has.
_UNKNOWN = ("LDSM", "ATOM", "ATOMG", "ATOMS", "MATCH", "S2R", "CS2R", "B2R")
_UNKNOWN += ("BMOV", "ELECT", "SYNCS", "QSPC")


@dataclasses.dataclass(frozen=True)
class State:
    """What is known before an instruction.

    Attributes:
      octet, thread, varying: names of these classes; the others are uniform.
      open: barriers of BSSY around, outermost first.
      apart: how many of these do not rejoin eight lanes that have parted, None
        where none have; octets_apart the same of octets.
      since: branches at which lanes have parted.
      given: by condition, names that are uniform where it is met.
      lane, number: names of THREAD that hold the lane, or the thread's number, itself:
        they do so whenever they were written.
      bits: of registers that are not uniform, which bits are; none of those left out.
        The compiler keeps predicates in them.
    """

    octet: int = 0
    thread: int = 0
    varying: int = 0
    open: tuple[str, ...] = ()
    apart: int | None = None
    octets_apart: int | None = None
    since: frozenset[int] = frozenset()
    given: tuple[int, ...] = (0,) * 16
    lane: int = 0
    number: int = 0
    bits: tuple[tuple[int, int], ...] = ()

    def join(self, other: State) -> State:
        """What is known where two paths meet."""
        if self == other:
            return self
        varying = self.varying | other.varying
        octet, thread = self.octet | other.octet, self.thread | other.thread
        varying |= octet & thread
        # Both may be, but not the same; what is not of one kind.
        same = ~(self.lane ^ other.lane) & ~(self.number ^ other.number)
        varying |= self.thread & other.thread & ~same
        depth = 0
        for a, b in zip(self.open, other.open, strict=False):
            if a != b:
                break
            depth += 1

        def least(a, b):
            found = [x for x in (a, b) if x is not None]
            return min([*found, depth]) if found else None

        return State(
            octet & ~varying,
            thread & ~varying,
            varying,
            self.open[:depth],
            least(self.apart, other.apart),
            least(self.octets_apart, other.octets_apart),
            self.since | other.since,
            self._join_given(other, varying | octet | thread),
            self.lane & other.lane,
            self.number & other.number,
            self._join_bits(other),
        )

    def bits_of(self, mask: int) -> int:
        """Uniform bits of a register."""
        if not mask & (self.octet | self.thread | self.varying):
            return 0xFFFFFFFF
        return dict(self.bits).get(mask, 0)

    def _join_bits(self, other: State) -> tuple[tuple[int, int], ...]:
        if self.bits == other.bits:
            return self.bits
        masks = sorted({mask for mask, _ in (*self.bits, *other.bits)})
        both = ((mask, self.bits_of(mask) & other.bits_of(mask)) for mask in masks)
        return tuple((mask, bits) for mask, bits in both if bits)

    def _join_given(self, other: State, known: int) -> tuple[int, ...]:
        if not any(self.given) and not any(other.given):
            return self.given
        mine = ~(self.varying | self.octet | self.thread)
        theirs = ~(other.varying | other.octet | other.thread)
        pairs = zip(self.given, other.given, strict=True)
        return tuple((a | mine) & (b | theirs) & known for a, b in pairs)

    def where(self, condition: int | None) -> State:
        """What is known where a condition is met."""
        if condition is None or not self.given[condition]:
            return self
        known = ~self.given[condition]
        return dataclasses.replace(
            self,
            octet=self.octet & known,
            thread=self.thread & known,
            varying=self.varying & known,
        )

    def class_of(self, mask: int) -> int:
        """The class of a function of these names."""
        if mask & (self.varying | self.thread):
            return VARYING
        return OCTET if mask & self.octet else UNIFORM

    def write(self, mask: int, kind: int, condition: int | None = None) -> State:
        """These names get this class; they are uniform where a condition is met."""
        given = self.given
        if any(given) or condition is not None:
            dead = {c for c in range(16) if mask >> PREDICATES + c // 2 & 1}
            given = tuple(
                0 if c in dead else g & ~mask | (mask if c == condition else 0)
                for c, g in enumerate(given)
            )
        return dataclasses.replace(
            self,
            given=given,
            lane=self.lane & ~mask,
            number=self.number & ~mask,
            bits=tuple(one for one in self.bits if not one[0] & mask),
            octet=self.octet & ~mask | (mask if kind == OCTET else 0),
            thread=self.thread & ~mask | (mask if kind == THREAD else 0),
            varying=self.varying & ~mask | (mask if kind == VARYING else 0),
        )

    def holds(self, mask: int) -> str:
        """Whether names hold the "lane" or the thread's "number" itself."""
        if mask & ~self.lane == 0:
            return "lane"
        return "number" if mask & ~self.number == 0 else ""

    def write_itself(self, mask: int, what: str) -> State:
        """A register gets the "lane" or the thread's "number"."""
        after = self.write(mask, THREAD)
        return dataclasses.replace(after, **{what: getattr(after, what) | mask})

    def with_bits(self, mask: int, bits: int) -> State:
        """A register whose other bits alone may not be uniform."""
        if not bits or not mask & (self.varying | self.thread | self.octet):
            return self
        return dataclasses.replace(self, bits=(*self.bits, (mask, bits)))

    def part(self, kind: int, address: int) -> State:
        """Lanes take a branch, or not, by a predicate of this class."""
        if kind == UNIFORM:
            return self
        name = "octets_apart" if kind == OCTET else "apart"
        if getattr(self, name) is not None:
            return self
        since = self.since | {address}
        return dataclasses.replace(self, since=since, **{name: len(self.open)})

    def rejoin(self, depth: int) -> State:
        """All that had come to the BSSY at this depth have come to its BSYNC."""

        def after(apart):
            return None if apart is None or apart > depth else apart

        apart, octets = after(self.apart), after(self.octets_apart)
        together = apart is None and octets is None
        return dataclasses.replace(
            self,
            open=self.open[:depth],
            apart=apart,
            octets_apart=octets,
            since=frozenset() if together else self.since,
        )


def _joined(old: int, new: int) -> int:
    if old == new:
        return old
    if {old, new} == {OCTET, THREAD}:
        return VARYING
    return max(old, new)


def _result(one: Instruction, state: State) -> int:
    """The class of what an instruction that is not guarded writes."""
    base, kind = one.base, state.class_of(one.reads)
    if base in ("VOTE", "REDUX") or (base == "MATCH" and "ALL" in one.opcode):
        return UNIFORM
    if base == "SHFL":
        lane = one.operands[-2]
        return state.class_of(_mask_of(lane)) if ".IDX" in one.opcode else VARYING
    if base == "S2R":
        name = one.operands[1]
        return UNIFORM if name.startswith(("SR_CTAID", "SR_NTID")) else VARYING
    if base == "CS2R" and one.operands[1] == "SRZ":
        return UNIFORM
    if base in _UNKNOWN:
        return VARYING
    if base == "LOP3" and one.operands[:2] == ["P" + one.operands[0][1:], "RZ"]:
        # Whether a register has any of some bits.
        number, tested = one.number(3), _mask_of(one.operands[2])
        is_test = number is not None and one.operands[4:] == ["RZ", "0xc0", "!PT"]
        if is_test and number & ~state.bits_of(tested) == 0:
            return UNIFORM
    threads = one.reads & state.thread
    if threads and not one.reads & (state.varying | state.octet):
        return _of_thread(one, state)
    return kind


def _bits(one: Instruction, state: State) -> int:
    """Which bits of what LOP3 makes of a register and a number are uniform."""
    if one.base != "LOP3" or not one.operands[0].startswith("R"):
        return 0
    mask, bits = one.number(2), state.bits_of(_mask_of(one.operands[1]))
    if mask is None or one.operands[3] != "RZ":
        return 0
    return {"0xc0": bits | ~mask & 0xFFFFFFFF, "0xfc": bits | mask}.get(
        one.operands[-2], 0
    )


def _itself(one: Instruction, state: State) -> str:
    """Whether the lane, or the thread's number, is what an instruction writes."""
    if one.base == "S2R":
        return {"SR_TID.X": "number", "SR_LANEID": "lane"}.get(one.operands[1], "")
    if one.reads == 0 or one.base not in ("MOV", "IMAD", "LDL", "STL", "LOP3"):
        return ""
    holds = state.holds(one.reads)
    if one.base == "LOP3":
        is_lane = one.number(2) == 0x1F and one.operands[3:5] == ["RZ", "0xc0"]
        return "lane" if is_lane and holds else ""
    if one.base == "IMAD" and ".MOV" not in one.opcode:
        return ""
    return holds


def _mask_of(operand: str) -> int:
    found = re.match(r"R(\d+)", operand)
    return 1 << int(found[1]) if found else 0


def _of_thread(one: Instruction, state: State) -> int:
    """The class of a function of the thread's number and of what is uniform."""
    base = one.base

    def is_thread(index):
        return bool(_mask_of(one.operands[index]) & state.thread)

    if base in ("MOV", "LDL", "STL") or one.opcode in ("IMAD.MOV.U32", "IMAD.MOV"):
        return THREAD
    if base == "SHF" and ".R." in one.opcode and is_thread(3):
        shift = one.number(2)
        # Without a high word; the number is not negative.
        if shift is not None and one.operands[1] == "RZ" and 3 <= shift < 32:
            return UNIFORM if shift >= 5 else OCTET
    if base == "LOP3" and one.operands[-2:-1] == ["0xc0"] and is_thread(1):
        mask = one.number(2)
        if mask is not None and one.operands[3] == "RZ":
            if mask & 0x1F == 0:
                return UNIFORM
            if mask & 0x1F == 0x1F:
                return THREAD
            return OCTET if mask & 7 == 0 else VARYING
    if base == "ISETP" and is_thread(2) and one.operands[-1] == "PT":
        number = one.number(3)
        comparison = one.opcode.split(".")[1]
        if number is not None and comparison in ("GE", "LT", "GT", "LE"):
            least = number + (comparison in ("GT", "LE"))
            return UNIFORM if least % 32 == 0 else OCTET if least % 8 == 0 else VARYING
    if base == "IADD3" or one.opcode == "IMAD.IADD":
        signs = sorted(
            operand.startswith("-")
            for i, operand in enumerate(one.operands[1:], 1)
            if _mask_of(operand.lstrip("-")) & state.thread
        )
        # The difference is a multiple of 32, and what lanes agree on.
        return UNIFORM if signs == [False, True] else VARYING
    if base == "VIADD" and is_thread(1):
        number = one.number(2)
        if number is not None and number % 32 == 0:
            return THREAD
    return VARYING


@dataclasses.dataclass(frozen=True)
class Fault:
    """An access of a line that its lanes may not make together."""

    address: int
    text: str


@dataclasses.dataclass(frozen=True)
class Function:
    """What kernels call."""

    writes: int
    returns: bool


class Kernel:
    """The paths through one kernel."""

    def __init__(self, code: list[Instruction]):
        """Finds where each instruction leads."""
        self.code = code
        self.index = {one.address: i for i, one in enumerate(code)}
        self.next: list[list[int]] = [[] for _ in code]
        self.functions: dict[int | None, Function | None] = {}
        self.ends: dict[tuple[int, int, int], State] = {}
        targets = {
            one.target
            for one in code
            if one.base == "CALL" and one.target in self.index
        }
        self.functions = {
            target: self._function(self.index[target]) for target in sorted(targets)
        }
        for i, one in enumerate(code):
            self.next[i] = self._successors(i, one)
        # Where a lane takes the way to a trap, none of the launch goes on.
        alive = self._lead_to_an_end()
        self.next = [[j for j in ways if j in alive] for ways in self.next]

    def lines(self) -> list[Instruction]:
        """Accesses of lines."""
        return [one for one in self.code if one.is_line]

    def faults(self) -> list[Fault]:
        """Accesses of lines that the lanes of a line may not make together."""
        if not self.lines():
            return []
        states, lost = self._follow(0, State())
        faults = []
        without = self._reached_from(lost)
        for i, one in enumerate(self.code):
            if not one.is_line or states[i] is None:
                continue
            state = states[i]
            branches = ", ".join(f"{a:x}" for a in sorted(state.since))
            if state.apart is not None:
                faults.append(Fault(one.address, f"lanes part at {branches}"))
            elif state.class_of(one.guard_mask) == VARYING:
                faults.append(
                    Fault(one.address, f"{one.guard} varies among eight lanes")
                )
            elif i in without:
                faults.append(
                    Fault(one.address, "lanes may have left the kernel before")
                )
        return faults

    def _end_of(self, call: Instruction, before: State) -> State:
        """What is known behind a function, called by lanes one by one."""
        if call.target not in self.index:
            return State()
        key = call.target, before.lane, before.number
        if key not in self.ends:
            itself = before.lane | before.number
            begin = State(
                thread=itself,
                varying=(ALL_REGISTERS | ALL_STACK) & ~itself,
                apart=0,
                lane=before.lane,
                number=before.number,
            )
            states, _ = self._follow(self.index[call.target], begin)
            ends = [
                state
                for one, state in zip(self.code, states, strict=True)
                if one.base == "RET" and state is not None
            ]
            self.ends[key] = functools.reduce(State.join, ends)
        return self.ends[key]

    def _lead_to_an_end(self) -> set[int]:
        """Instructions from which there is a way to an EXIT or RET."""
        before: list[list[int]] = [[] for _ in self.code]
        for i, ways in enumerate(self.next):
            for j in ways:
                before[j].append(i)
        todo = [i for i, one in enumerate(self.code) if one.base in ("EXIT", "RET")]
        alive = set(todo)
        while todo:
            for i in before[todo.pop()]:
                if i not in alive:
                    alive.add(i)
                    todo.append(i)
        return alive

    def _function(self, entry: int) -> Function | None:
        """What begins at `entry`; None where kernels go on there: it is no call."""
        seen: set[int] = set()
        todo, written, returns = [entry], 0, False
        while todo:
            at = todo.pop()
            if at in seen:
                continue
            seen.add(at)
            one = self.code[at]
            if one.is_line or one.base == "EXIT":
                return None
            written |= one.writes if one.base != "CALL" else ALL_REGISTERS
            returns |= one.base == "RET"
            todo += self._successors(at, one)
        return Function(written, returns)

    def _successors(self, i, one) -> list[int]:
        following = [i + 1] if i + 1 < len(self.code) else []
        guarded = one.guard not in ("", "PT", "UPT")
        if one.base in ("BRX", "JMX", "JMP"):
            raise ValueError(f"{one.opcode} at {one.address:x}: not understood")
        if one.base == "BRA":
            conditional = guarded or len(one.operands) > 1
            taken = [self.index[one.target]]
            return taken + following if conditional else taken
        if one.base in ("EXIT", "RET", "BPT"):
            return following if guarded else []
        if one.base == "CALL" and one.target in self.functions:
            function = self.functions[one.target]
            if function is None:  # a branch by another name
                return [self.index[one.target], *(following if guarded else [])]
            return following if guarded or function.returns else []
        return following

    def _reached_from(self, sources) -> set[int]:
        seen, todo = set(), [self.index[a] for a in sources]
        while todo:
            for following in self.next[todo.pop()]:
                if following not in seen:
                    seen.add(following)
                    todo.append(following)
        return seen

    def _follow(self, entry: int, begin: State):
        """The state before each instruction; branches behind which lanes are lost."""
        states: list[State | None] = [None] * len(self.code)
        states[entry] = begin
        lost: set[int] = set()
        todo = collections.deque([entry])
        queued = {entry}
        while todo:
            i = todo.popleft()
            queued.discard(i)
            state = states[i]
            while state is not None:
                one = self.code[i]
                if one.base == "EXIT":
                    lost |= self._lost_at(one, state)
                after = self._after(i, state)
                following = list(self._taken(i, one, state))
                state = None
                for j in following:
                    joined = after if states[j] is None else states[j].join(after)
                    if joined == states[j]:
                        continue
                    states[j] = joined
                    if j == i + 1 and state is None:
                        state = joined
                    elif j not in queued:
                        queued.add(j)
                        todo.append(j)
                i += 1
        return states, lost

    @staticmethod
    def _lost_at(one: Instruction, state: State) -> set[int]:
        """Branches before which there were lanes that some lanes then lack."""
        if state.class_of(one.guard_mask) == VARYING:
            return state.since | {one.address}
        return set(state.since) if state.apart is not None else set()

    def _taken(self, i, one, state) -> Iterator[int]:
        together = state.apart is None and state.octets_apart is None
        for j in self.next[i]:
            # The other way of BRA.DIV is for lanes that have parted.
            if j == i + 1 or one.opcode != "BRA.DIV" or not together:
                yield j

    def _after(self, i: int, state: State) -> State:
        one, base, ways = self.code[i], self.code[i].base, len(self.next[i])
        if base == "BSSY":
            name = one.operands[0]
            if name in state.open:
                state = _without(state, name)
            return dataclasses.replace(state, open=(*state.open, name))
        if base == "BSYNC":
            name = one.operands[0]
            return state.rejoin(state.open.index(name)) if name in state.open else state
        if base == "BMOV" and one.operands[0].startswith("B"):
            return _without(state, one.operands[0])
        if base == "BREAK":
            return _without(state, next(o for o in one.operands if o.startswith("B")))
        guard = state.class_of(one.guard_mask)
        if base == "BRA" and (ways < 2 or one.opcode in ("BRA.DIV", "BRA.CONV")):
            return state
        if base in ("BRA", "EXIT"):
            return state.part(max(guard, state.class_of(one.reads)), one.address)
        if base == "CALL":
            # Lanes may part in it, and return one by one.
            function = self.functions.get(
                one.target, Function(ALL_REGISTERS | ALL_STACK, returns=True)
            )
            if function is None:
                return state.part(guard, one.address) if ways > 1 else state
            written = function.writes
            before = state
            state = state.write(written, VARYING).part(VARYING, one.address)
            for what in ("lane", "number"):
                known = getattr(self._end_of(one, before), what) & written
                state = state.write_itself(known, what)
            return state
        if one.writes == 0:
            return state
        if one.writes == ALL_STACK:
            return state.write(ALL_STACK, VARYING)
        itself = _itself(one, state)
        if itself and not one.guard_mask:
            return state.write_itself(one.writes, itself)
        kind = _result(one, state.where(one.condition))
        bits = _bits(one, state) if state.apart is state.octets_apart is None else 0
        if base not in ("VOTE", "REDUX"):
            if state.apart is not None:
                kind = VARYING
            elif state.octets_apart is not None:
                kind = _joined(kind, OCTET)
        if not one.guard_mask:
            return state.write(one.writes, kind).with_bits(one.writes, bits)
        condition = one.condition if kind == guard == UNIFORM else None
        old = state.class_of(one.writes)
        if one.writes & state.thread and not one.writes & state.varying:
            old = THREAD
        kind = _joined(_joined(kind, guard), old)
        bits &= state.bits_of(one.writes) if guard == UNIFORM else 0
        condition = None if kind == UNIFORM else condition
        return state.write(one.writes, kind, condition).with_bits(one.writes, bits)


def _without(state: State, name: str) -> State:
    """A barrier that lanes leave rejoins nobody any more."""
    if name not in state.open:
        return state
    at = state.open.index(name)

    def bounded(apart):
        return None if apart is None else min(apart, at)

    return dataclasses.replace(
        state,
        open=state.open[:at],
        apart=bounded(state.apart),
        octets_apart=bounded(state.octets_apart),
    )
