"""How times grow with the number of ranks: measured, and a model beyond that."""

from __future__ import annotations

import dataclasses
import math

from session import Session
from workloads import Workload

_NAMES = ("plan", "dispatch", "combine")
_MOST_RANKS = 64


def run(session: Session) -> None:
    """Prints and records the times for 1, 2, 4, ... ranks, then the model."""
    report, num_sms = session.report, session.num_sms[0]
    counts = [2**i for i in range(7) if 2**i <= len(session.devices)]
    counts = sorted({*counts, len(session.devices)})
    report.say("\nScaling, measured: the same tokens a rank on more ranks, us")
    if not session.on_gpu:
        report.say("(virtual devices share cores and memory: all ranks' rows count)")
    columns = {"ranks": 8, "wire MB": 9, "all MB": 9, "plan": 10}
    columns |= {"dispatch": 10, "GB/s": 7, "combine": 10, "GB/s ": 7}
    lines = []
    for ranks in counts:
        point = dataclasses.replace(session.workload, num_ranks=ranks)
        lines.append((point, session.times_us(point, num_sms, _NAMES)))
    report.head(columns)
    for point, times in lines:
        cells = [f"{point.wire_bytes / 1e6:.1f}", f"{point.logical_bytes / 1e6:.1f}"]
        cells.append(f"{times['plan']:.1f}" if "plan" in times else "")
        for name in _NAMES[1:]:
            if name in times:
                # Rows that stay count where nothing else moves.
                size = point.wire_bytes or point.logical_bytes
                cells += [f"{times[name]:.1f}", f"{size / times[name] / 1e3:.1f}"]
            else:
                cells += ["", ""]
        report.row([str(point.num_ranks), *cells])
        report.record(
            "scaling",
            num_sms=num_sms,
            us={n: round(times[n], 3) for n in _NAMES if n in times},
            workload=point.as_dict(),
        )
    if session.on_gpu and len(session.devices) > 1:
        _model(session, *lines[-1])


def remote_rows(workload: Workload, num_ranks: int) -> float:
    """Expected rows that a token sends to other ranks, for uniform routing.

    Rank r with L experts gets the token unless all K distinct ones lie elsewhere:
    1 - C(E - L, K) / C(E, K).
    """
    return _ranks_reached(workload, num_ranks) * (1 - 1 / num_ranks)


def local_rows(workload: Workload, num_ranks: int) -> float:
    """Expected rows that a token leaves on its own rank (at most 1)."""
    return _ranks_reached(workload, num_ranks) / num_ranks


def _ranks_reached(workload: Workload, num_ranks: int) -> float:
    experts, top_k = workload.num_experts, workload.top_k
    each = -(-experts // num_ranks)
    reached = 0.0
    for rank in range(num_ranks):
        mine = min(max(experts - rank * each, 0), each)
        missed = math.comb(experts - mine, top_k) / math.comb(experts, top_k)
        reached += 1 - missed
    return reached


def predict_us(
    workload: Workload, num_ranks: int, fixed_us: float, wire_rate: float, local_rate
) -> float:
    """The model: fixed_us + the larger of wire and local bytes over their rates.

    Rates are bytes a microsecond and rank; local_rate may be None (not measured).
    """
    tokens = workload.num_tokens * workload.row_bytes
    wire_us = tokens * remote_rows(workload, num_ranks) / wire_rate
    local_us = 0.0
    if local_rate:
        local_us = tokens * local_rows(workload, num_ranks) / local_rate
    return fixed_us + max(wire_us, local_us)


def _model(session: Session, point: Workload, times: dict[str, float]) -> None:
    """R up to 64 in one NVLink domain, from this run's rates and counted bytes."""
    report, num_sms = session.report, session.num_sms[0]
    if point.routing != "uniform" or point.top_k > point.num_experts:
        return
    limits = session.limits_of(point)
    if not limits.of(num_sms) or any(n not in times for n in _NAMES):
        return
    fixed, rates, local = {}, {}, limits.local_rate.get(num_sms, {})
    for name in _NAMES[1:]:
        copy_us = limits.of(num_sms)[name]
        rates[name] = point.wire_bytes / copy_us
        fixed[name] = times[name] - copy_us
    gathered = session.others_us.get("all_gather")
    summed = session.others_us.get("psum_scatter")
    report.say(
        f"\nMODEL, not measured: {point.num_ranks} ranks to {_MOST_RANKS} in one "
        "NVLink domain, uniform routing, us.\n"
        f"Bytes that a rank sends on average, at this run's rates of a plain copy "
        f"({rates['dispatch'] / 1e3:.0f} and {rates['combine'] / 1e3:.0f} GB/s), and "
        f"what this run's\noperations took beyond it "
        f"({fixed['dispatch']:+.1f} and {fixed['combine']:+.1f} us); all_gather and "
        "psum_scatter by their own rates.\nLeft out: handshakes with more peers, "
        "uneven routing, contention in the switches."
    )
    columns = {"ranks": 8, "rows/token": 10, "wire MB": 9, "dispatch": 10}
    columns |= {"combine": 10, "all_gather": 11, "psum_scatter": 12}
    report.head(columns)
    ranks = point.num_ranks
    while ranks <= min(_MOST_RANKS, point.num_experts):
        rows = remote_rows(point, ranks)
        us = {
            name: predict_us(point, ranks, fixed[name], rates[name], local.get(name))
            for name in _NAMES[1:]
        }
        # Both send every token to every other rank.
        more = (ranks - 1) / (point.num_ranks - 1)
        if gathered:
            us["all_gather"] = gathered * more
        if summed:
            us["psum_scatter"] = summed * more
        size = rows * point.num_tokens * point.row_bytes
        cells = [f"{us[n]:.0f}" if n in us else "" for n in list(columns)[3:]]
        report.row([str(ranks), f"{rows:.2f}", f"{size / 1e6:.1f}", *cells])
        report.record(
            "model",
            num_ranks=ranks,
            rows_per_token=round(rows, 4),
            wire_bytes=round(size),
            us={n: round(t, 1) for n, t in us.items()},
            workload=point.as_dict(),
        )
        ranks *= 2
