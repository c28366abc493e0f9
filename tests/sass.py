"""Machine code as `cuobjdump -sass` prints it: what instructions write and read.

Registers, predicates and words of the stack are numbered; a set of them is a mask.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

_FUNCTION = re.compile(r"Function : (\S+)")
_ARCHITECTURE = re.compile(r"^arch = (\S+)", re.MULTILINE)
_LINE = re.compile(
    r"/\*([0-9a-f]{4,})\*/\s+(?:@(!?)(U?P\w+)\s+)?([A-Z][A-Z0-9_.]*)\s*(.*?)\s*;"
)
_NAME = re.compile(r"(?<![\w.])(R|P)(\d+)\b((?:\.\w+)*)")
_TARGET = re.compile(r"0x([0-9a-f]+)$")
# Of the names those below are registers; then come predicates, then words of the
# stack, where the compiler keeps what registers have no room for.
PREDICATES, _STACK, _STACK_WORDS = 256, 264, 1024
ALL_REGISTERS = (1 << PREDICATES) - 1
ALL_STACK = (1 << _STACK_WORDS) - 1 << _STACK
_ON_STACK = re.compile(r"\[R1(?:\+0x([0-9a-f]+))?\]$")

# Loads whose lanes get one value from one address.
_LOADS = ("LDG", "LDS", "LD", "LDC")
# Instructions without a result.
_NO_RESULT = (
    *("ST", "STG", "STS", "STL", "RED", "REDG", "BAR", "MEMBAR", "ERRBAR", "CGAERRBAR"),
    *("CCTL", "CCTLL", "BRA", "EXIT", "BSSY", "BSYNC", "BREAK", "NOP", "WARPSYNC"),
    *("ENDCOLLECTIVE", "YIELD", "BPT", "CALL", "RET", "LDGSTS", "LDGDEPBAR", "DEPBAR"),
    *("FENCE", "UBLKCP", "UBLKPF", "NANOSLEEP", "PREEXIT", "ACQBULK", "KILL"),
    *("UTMALDG", "UTMASTG", "UTMACMDFLUSH", "BRX", "JMP", "JMX", "RPCMOV"),
)


@dataclasses.dataclass
class Instruction:
    """One of a kernel's; sets of names are masks."""

    address: int
    negated: bool
    guard: str
    opcode: str
    operands: list[str]

    def __post_init__(self):
        """Finds what it writes and reads."""
        self.base = self.opcode.split(".")[0]
        parts = self.opcode.split(".")[1:]
        self.is_line = (
            self.base in ("LDG", "STG", "LD", "ST")
            and "128" in parts
            and "STRONG" in parts
            and "SYS" in parts
        )
        self.guard_mask = _names(self.guard)
        # The predicate and how it has to be, as one number.
        self.condition = None
        if self.guard_mask:
            self.condition = 2 * int(self.guard[1:]) + self.negated
        # Of the product's factors each is one register.
        self._narrow_until_last = "WIDE" in parts
        writes = self._num_results()
        self.writes = self._mask(self.operands[:writes], result=True)
        self.reads = self._mask(self.operands[writes:], result=False)
        if self.base == "STL":
            self.writes, self.reads = (
                self._on_stack(0),
                self._mask(self.operands[1:], result=True),
            )
        elif self.base == "LDL":
            self.reads = self._on_stack(1)
        target = _TARGET.search(self.operands[-1]) if self.operands else None
        self.target = int(target[1], 16) if target else None

    def _num_results(self) -> int:
        """How many operands, from the first on, are results."""
        if self.base in _NO_RESULT or self.base.startswith("U"):
            return 0
        if self.base == "R2P":
            return 1
        kinds = "".join(_kind(operand) for operand in self.operands)
        if self.base.endswith("SETP") or self.base == "PLOP3":
            pattern = "p{1,2}"
        elif self.base == "FCHK":
            pattern = "p"
        elif self.base == "VOTE":
            pattern = "rp?|p"
        else:
            # Carries stand before or behind what they are carries of.
            pattern = "p*rp*" if self.base in _CARRIES else "p*r?"
        found = re.match(pattern, kinds)
        return len(found[0]) if found else 0

    def _on_stack(self, index) -> int:
        """The words of the stack that it accesses; all if nobody knows."""
        found = _ON_STACK.match(self.operands[index])
        if not found:
            return ALL_STACK
        width = self._width(self.opcode.split(".")[1:], result=True)
        return (1 << width) - 1 << _STACK + int(found[1] or "0", 16) // 4

    def _mask(self, operands, *, result) -> int:
        mask = 0
        parts = self.opcode.split(".")[1:]
        for i, operand in enumerate(operands):
            for kind, number, suffix in _NAME.findall(operand):
                width = 1
                if kind == "R" and not (
                    self._narrow_until_last and i < 2 and not result
                ):
                    width = self._width(parts, result=result)
                    if ".64" in suffix:
                        width = max(width, 2)
                first = int(number) + (PREDICATES if kind == "P" else 0)
                mask |= ((1 << width) - 1) << first
        if self.base == "R2P" and result:
            mask |= ~ALL_REGISTERS & ((1 << PREDICATES + 8) - 1)
        if self.base == "P2R" and not result:
            chosen = int(self.operands[-1], 16) if "0x" in self.operands[-1] else 0x7F
            mask |= (chosen & 0x7F) << PREDICATES
        return mask

    def _width(self, parts, *, result) -> int:
        if self.base in _LOADS or self.base in ("LDL", "STL", "ATOM", "ATOMG", "ATOMS"):
            if not result:
                return 1
            return max([1, *(int(p) // 32 for p in parts if p in _WIDTHS)])
        if self.base == "CS2R":
            return 1 if "32" in parts else 2
        if self.base == "SHF":  # both words are named
            return 1
        wide = {"WIDE", "64", "F64", "S64", "U64"} & set(parts)
        return 2 if wide or re.match("D[A-Z]", self.base) else 1

    def number(self, index) -> int | None:
        """An operand that is a number."""
        text = self.operands[index] if index < len(self.operands) else ""
        return (
            int(text, 16) & 0xFFFFFFFF if re.fullmatch("-?0x[0-9a-f]+", text) else None
        )


_WIDTHS = ("64", "96", "128", "256")
_CARRIES = ("IADD3", "IADD", "LEA", "IMAD", "VIADD", "UIADD3", "LOP3", "IADD2")


def _names(text) -> int:
    """The predicate, if it is one of a lane's own."""
    found = re.fullmatch(r"P(\d)", text or "")
    return 1 << PREDICATES + int(found[1]) if found else 0


def _kind(operand) -> str:
    if re.fullmatch(r"P(T|\d)", operand):
        return "p"
    return "r" if re.fullmatch(r"R(Z|\d+)", operand) else "-"


def kernels(text: str) -> Iterator[tuple[str, str, list[Instruction]]]:
    """(architecture, name, instructions) of each kernel that was printed."""
    architecture, name, code = "", "", []
    for line in text.splitlines():
        if found := _ARCHITECTURE.match(line):
            if code:
                yield architecture, name, code
            architecture, code = found[1], []
        elif found := _FUNCTION.search(line):
            if code:
                yield architecture, name, code
            name, code = found[1], []
        elif found := _LINE.search(line):
            address, negated, guard, opcode, operands = found.groups()
            text = re.sub(r"`\(.*?\)", "0x0", operands)
            code.append(
                Instruction(
                    int(address, 16),
                    bool(negated),
                    guard or "",
                    opcode,
                    [one.strip() for one in re.split(r",(?![^\[]*\])", text) if one],
                )
            )
    if code:
        yield architecture, name, code
