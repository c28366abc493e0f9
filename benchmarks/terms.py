"""Where the time goes: what an operation is made of, each term measured apart.

On GPUs: an empty kernel; two handshakes of a kernel that does nothing else; the
operation itself with one short row, less those two; a plain copy of the bytes,
less its launch; and what is left. On a CPU: the operation with one short row;
memcpy; memset of what is left empty; and what is left.
"""

from __future__ import annotations

import dataclasses

from session import Session
from workloads import Workload

_NAMES = ("plan", "dispatch", "plan + dispatch", "combine")
_TERMS = (
    "plan",
    "launch",
    "handshakes",
    "one row",
    "copy",
    "zero fill",
    "tail",
)
_SMALL_BATCH = 128


def run(session: Session) -> None:
    """Prints the table and records it, for a small batch and for the run's own."""
    num_sms = session.num_sms[0]
    report = session.report
    least = dataclasses.replace(session.workload, num_tokens=1, hidden=16)
    single = [name for name in _NAMES if "+" not in name]
    fixed = session.times_us(least, num_sms, single)
    rows = []
    for tokens in sorted({_SMALL_BATCH, session.workload.num_tokens}):
        point = dataclasses.replace(session.workload, num_tokens=tokens)
        session.limits_of(point)
        times = session.times_us(point, num_sms, _NAMES)
        for name in _NAMES:
            if name in times and _last(name) in fixed:
                terms = split(session, point, name, times, fixed)
                rows.append((point, name, times[name], terms))
    if not rows:
        return
    report.say("\nWhere the time goes, us (tail: what the terms do not explain)")
    found = dict.fromkeys(term for row in rows for term in row[3])
    names = [name for name in _TERMS if name in found]
    report.head({"operation": 24, **dict.fromkeys(names, 11), "together": 11})
    for point, name, us, terms in rows:
        cells = [f"{terms[n]:.1f}" if n in terms else "" for n in names]
        report.row([f"{name}, T={point.num_tokens}", *cells, f"{us:.1f}"])
        report.record(
            "terms",
            operation=name,
            num_sms=num_sms,
            us=round(us, 3),
            terms={n: round(t, 3) for n, t in terms.items()},
            workload=point.as_dict(),
        )


def split(
    session: Session,
    point: Workload,
    name: str,
    times: dict[str, float],
    fixed: dict[str, float],
) -> dict[str, float]:
    """Terms of operation `name`, whose sum is times[name].

    Args:
      session: knows the ceilings.
      point: what was measured.
      times: of the operations there.
      fixed: of the same with one short row.
    """
    limits = session.limits_of(point)
    last = _last(name)
    terms: dict[str, float] = {}
    if last != name:
        terms["plan"] = times.get("plan", 0.0)
    if session.on_gpu:
        terms["launch"] = limits.launch_us
        terms["handshakes"] = limits.latency_us - limits.launch_us
        terms["one row"] = fixed[last] - limits.latency_us
    else:
        terms["one row"] = fixed[last]
    copy_us = limits.of(session.num_sms[0]).get(last)
    if copy_us is not None:
        terms["copy"] = copy_us - limits.launch_us
    if last == "dispatch" and not session.on_gpu:
        terms["zero fill"] = limits.fill_us
    terms["tail"] = times[name] - sum(terms.values())
    return terms


def _last(name: str) -> str:
    """The operation that a sequence ends with; before it comes the plan."""
    return name.split("+")[-1].strip()
