"""Draws what the benchmarks wrote with --json.

    python benchmarks/plot.py out/run.jsonl [more.jsonl ...] --output out/run.png

Time against tokens a rank with the floor drawn in, bars of our operations
beside the others, and whole layers with what of their time is rows and products.
A file may hold records of several runs: where two measured the same, the later one
counts; runs in several processes are left out. One figure for each kind of device,
and for points that differ in nothing but T those of the run that came last.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import NullLocator

Record = Mapping[str, Any]

_OPERATIONS = ("plan", "dispatch", "combine")
_NATIVE = ("cuda", "cpu")
_COLORS = {"plan": "#6a51a3", "dispatch": "#2171b5", "combine": "#238b45"}
_OURS, _REFERENCE, _OTHERS = "#2171b5", "#9ecae1", "#969696"
# Lines of the table layers that others are held against.
_MOVING, _DENSE = "experts of no cost", "floor: dense products"
# What makes two workloads the same line of a figure.
_SHAPE = ("hidden", "top_k", "num_experts", "num_ranks", "routing", "dtype")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("records", nargs="+", help="JSON lines")
    parser.add_argument("--output", default="benchmark.png", metavar="PATH")
    options = parser.parse_args()
    for path in draw(options.records, options.output):
        print(path)


def draw(sources: Sequence[str], output: str) -> list[pathlib.Path]:
    """Draws all records of the files `sources`; returns the pictures' paths.

    With records of several kinds of device, the second and further pictures get a
    number behind the name.
    """
    groups = by_device(read(sources))
    shown = {name: records for name, records in groups.items() if _drawable(records)}
    if not shown:
        raise SystemExit("no record of a table or of a sweep to draw")
    paths = []
    for number, (device, records) in enumerate(shown.items()):
        path = pathlib.Path(output)
        if number:
            path = path.with_stem(f"{path.stem}-{number + 1}")
        path.parent.mkdir(parents=True, exist_ok=True)
        _figure(device, records).savefig(path, dpi=140)
        plt.close("all")
        paths.append(path)
    return paths


def read(sources: Iterable[str]) -> list[dict[str, Any]]:
    """The records of all files, each with what its run says about itself."""
    records = []
    for source in sources:
        run: dict[str, Any] = {}
        for line in pathlib.Path(source).read_text().splitlines():
            record = json.loads(line)
            if record.get("layout", "1 process") != "1 process":
                continue
            if record["record"] == "run":
                run = record
            records.append({**record, "run": run})
    return records


def by_device(records: Sequence[Record]) -> dict[str, list[Record]]:
    groups: dict[str, list[Record]] = {}
    for record in records:
        run = record["run"]
        device = f"{run.get('num_devices', '?')} x {run.get('device', 'unknown')}"
        groups.setdefault(device, []).append(record)
    return groups


def times_by_tokens(records: Sequence[Record]) -> dict[str, dict[int, Record]]:
    """Operation -> T -> its record, for the workload that the last record has.

    Records are those of our native backend, from sweeps and tables.
    """
    kept: dict[str, dict[int, Record]] = {}
    points = [r for r in records if _is_point(r)]
    # A sweep changes other sizes too: its line is that of the most frequent shape
    # of the last run.
    last = [r for r in points if r["run"] == points[-1]["run"]] if points else []
    shapes = [_shape(r) for r in last]
    if not shapes:
        return {}
    shape = max(reversed(shapes), key=shapes.count)
    for record in points:
        if _shape(record) == shape:
            tokens = record["workload"]["num_tokens"]
            of_tokens = kept.setdefault(record["operation"], {})
            of_tokens[tokens] = record
    return {name: dict(sorted(kept[name].items())) for name in kept}


def bars(records: Sequence[Record]) -> list[Record]:
    """The lines of the last table, once each."""
    lines = [r for r in records if r["record"] == "operation"]
    if not lines:
        return []
    last = lines[-1]["workload"]
    kept = {
        (r["operation"], r["backend"], r["num_sms"]): r
        for r in lines
        if r["workload"] == last
    }
    return list(kept.values())


def layers(records: Sequence[Record]) -> dict[str, dict[str, Record]]:
    """Pass -> layer -> its record, of the last table of layers."""
    lines = [r for r in records if r["record"] == "layer"]
    found: dict[str, dict[str, Record]] = {}
    for record in lines:
        same = ("workload", "inner", "run")
        if all(record[name] == lines[-1][name] for name in same):
            found.setdefault(record["what"], {})[record["layer"]] = record
    return found


def _is_point(record: Record) -> bool:
    return (
        record["record"] in ("sweep", "operation")
        and record["operation"] in _OPERATIONS
        and record["backend"] in _NATIVE
    )


def _shape(record: Record) -> tuple:
    workload = record["workload"]
    return (*(workload[name] for name in _SHAPE), record["num_sms"])


def _curves(records: Sequence[Record]) -> dict[str, dict[int, Record]]:
    """What has more than one T."""
    lines = times_by_tokens(records)
    return {name: points for name, points in lines.items() if len(points) > 1}


def _drawable(records: Sequence[Record]) -> bool:
    return bool(_curves(records) or bars(records) or layers(records))


def _figure(device: str, records: Sequence[Record]) -> plt.Figure:
    lines, table, whole = _curves(records), bars(records), layers(records)
    rows = bool(lines) + bool(table) + bool(whole)
    figure = plt.figure(figsize=(12, 4.6 * rows), layout="constrained")
    parts = figure.subfigures(rows, 1, squeeze=False)[:, 0]
    at = 0
    if lines:
        _draw_lines(parts[at], device, lines)
        at += 1
    if table:
        _draw_bars(parts[at], device, table)
        at += 1
    if whole:
        _draw_layers(parts[at], device, whole)
    return figure


def _title(device: str, record: Record) -> str:
    w, run = record["workload"], record["run"]
    sms = f", {record['num_sms']} SMs" if record.get("num_sms") else ""
    return (
        f"{device}, jax {run.get('jax', '?')}{sms}: H={w['hidden']} K={w['top_k']} "
        f"E={w['num_experts']} R={w['num_ranks']} {w['routing']} {w['dtype']}"
    )


def _draw_lines(part, device: str, lines: Mapping[str, Mapping[int, Record]]) -> None:
    """One panel for each operation: time and floor against T."""
    shown = [name for name in _OPERATIONS if name in lines]
    panels = part.subplots(1, len(shown), squeeze=False)[0]
    part.suptitle(_title(device, next(iter(lines[shown[0]].values()))))
    for panel, name in zip(panels, shown, strict=True):
        points = lines[name]
        panel.plot(
            list(points),
            [r["us"] for r in points.values()],
            "o-",
            color=_COLORS[name],
            label=f"jax_ep {name}",
        )
        floors = {t: _floor(r) for t, r in points.items() if _floor(r)}
        if floors:
            panel.plot(
                list(floors),
                list(floors.values()),
                "--",
                color="black",
                label="floor: max(latency, bytes / copy rate)",
            )
        panel.set(xscale="log", yscale="log", title=name)
        panel.set_xlabel("tokens a rank")
        panel.set_ylabel("microseconds")
        panel.set_xticks(list(points), [str(t) for t in points], rotation=45)
        panel.xaxis.set_minor_locator(NullLocator())
        panel.grid(alpha=0.3)
        panel.legend(fontsize="small")


def _floor(record: Record) -> float | None:
    return record.get("floor_us") or record.get("ceiling_us")


def _draw_bars(part, device: str, table: Sequence[Record]) -> None:
    """Ours beside the others; a line where the plain copy stands."""
    groups = [
        ("to the experts", ("dispatch",), ("all_", "ragged")),
        ("and back", ("combine",), ("psum",)),
    ]
    panels = part.subplots(1, len(groups), squeeze=False)[0]
    part.suptitle(f"{_title(device, table[0])}, T={table[0]['workload']['num_tokens']}")
    for panel, (title, ours, theirs) in zip(panels, groups, strict=True):
        chosen = [r for r in table if r["operation"] in ours]
        chosen += [r for r in table if r["operation"].startswith(theirs)]
        names = [_bar_name(r) for r in chosen]
        us = [r["us"] for r in chosen]
        drawn = panel.barh(names, us, color=[_bar_color(r) for r in chosen])
        panel.bar_label(drawn, [f"{t:,.0f}" for t in us], padding=3, fontsize="small")
        ceilings = [r["ceiling_us"] for r in chosen if r.get("ceiling_us")]
        if ceilings:
            panel.axvline(
                ceilings[0], color="black", linestyle="--", label="plain copy"
            )
            panel.legend(fontsize="small")
        panel.invert_yaxis()
        panel.set(title=title, xlabel="microseconds")
        if us and max(us) > 20 * min(us):
            panel.set_xscale("log")
        panel.margins(x=0.2)
        panel.grid(alpha=0.3, axis="x")


def _draw_layers(part, device: str, whole: Mapping[str, Mapping[str, Record]]) -> None:
    """A panel for each pass: of every layer rows, dense products, and the rest."""
    panels = part.subplots(1, len(whole), squeeze=False)[0]
    some = next(iter(next(iter(whole.values())).values()))
    tokens, inner = some["workload"]["num_tokens"], some["inner"]
    part.suptitle(f"{_title(device, some)}, T={tokens}, inner {inner}: whole layers")
    for panel, (what, by_layer) in zip(panels, whole.items(), strict=True):
        us = {name: record["us"] for name, record in by_layer.items()}
        moving, dense = us.pop(_MOVING, 0.0), us.pop(_DENSE, 0.0)
        us = {n: t for n, t in us.items() if not n.startswith("floor:")}
        names, totals = list(us), list(us.values())
        start = [0.0] * len(names)
        for label, color, sizes in (
            ("rows to experts and home", _OURS, [moving] * len(names)),
            ("dense products", _REFERENCE, [dense] * len(names)),
            ("above both", _OTHERS, [max(t - moving - dense, 0) for t in totals]),
        ):
            drawn = panel.barh(names, sizes, left=start, color=color, label=label)
            start = [a + b for a, b in zip(start, sizes, strict=True)]
        panel.bar_label(drawn, [f"{t:,.0f}" for t in totals], padding=3)
        panel.invert_yaxis()
        panel.set(title=what, xlabel="microseconds")
        panel.margins(x=0.2)
        panel.grid(alpha=0.3, axis="x")
        panel.legend(fontsize="small")


def _bar_name(record: Record) -> str:
    if record["backend"] == "jax":
        return record["operation"]
    sms = f", {record['num_sms']} SMs" if record["num_sms"] else ""
    return f"jax_ep {record['operation']} ({record['backend']}{sms})"


def _bar_color(record: Record) -> str:
    if record["backend"] in _NATIVE:
        return _OURS
    return _REFERENCE if record["backend"] == "xla" else _OTHERS


if __name__ == "__main__":
    main()
