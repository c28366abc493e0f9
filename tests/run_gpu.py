"""Runs everything that the GPUs of this machine can run: `make test-gpu`.

    python3 tests/run_gpu.py --out out/gpu
    python3 tests/run_gpu.py --list
    python3 tests/run_gpu.py --parts 'ranks-8.*' --limit-s 300

The suite is cut into parts, each a pytest of its own, several of them at a time: as
many as the machine has cores for. jax_ep is the one that this Python imports: an
installed wheel, or the sources where they are installed in place.

The end is pytest's: failures with their text, skips with their reasons, and one line
that sums all up. A table for docs/gpu_results.md, every part's log and JUnit file are
in the folder --out. The exit status is 0 where every part ran to its end and nothing
failed.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree
from collections.abc import Iterator, Sequence

from gpu_parts import Part, plan

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent

# Of a machine's memory each takes what it needs, and XLA compiles without trying
# out. NVLink multicast may put GPUs that others share out of service.
ENVIRONMENT = {
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "NCCL_NVLS_ENABLE": "0",
    "PYTHONUNBUFFERED": "1",
}
XLA_FLAGS = "--xla_gpu_autotune_level=0"
TEXT_OF_A_FAILURE = 1500
TEXT_OF_ALL = 8000


# Running ---------------------------------------------------------------------------


@dataclasses.dataclass
class Outcome:
    """What became of a part.

    Attributes:
      problem: why its counts are not all, in words; a failure of its own.
      inside: tests of suites that ran in step in several processes.
    """

    part: Part
    seconds: float = 0.0
    passed: int = 0
    failures: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    skipped: collections.Counter[str] = dataclasses.field(
        default_factory=collections.Counter
    )
    inside: int = 0
    problem: str | None = None

    @property
    def failed(self) -> int:
        """Failures, and one for the part where it did not come to its end."""
        return len(self.failures) + (self.problem is not None)


class Running:
    """A part that runs."""

    def __init__(self, part: Part, out: pathlib.Path, platform: str):
        """Starts it."""
        self.part = part
        self.report = out / f"{part.name}.xml"
        self.log = out / f"{part.name}.log"
        self.report.unlink(missing_ok=True)
        flags = f"{XLA_FLAGS} {os.environ.get('XLA_FLAGS', '')}".strip()
        settings = {**ENVIRONMENT, "XLA_FLAGS": flags} if platform == "cuda" else {}
        self._start = time.monotonic()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "pytest", "-c", "pyproject.toml", "-v"),
                    *("-p", "no:cacheprovider", f"--junitxml={self.report}"),
                    *([f"--platform={platform}"] if platform else []),
                    *part.arguments,
                ],
                cwd=ROOT,
                env=os.environ | settings,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # All that it starts is found by the session.
                start_new_session=True,
            )

    def stop(self) -> None:
        """Ends it: pytest may close what its tests have started."""
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()

    def outcome(self, stopped: str | None = None) -> Outcome:
        """Reads what it left; ends what it left running."""
        status = self.process.wait()
        seconds = time.monotonic() - self._start
        for process in _session(self.process.pid):
            os.kill(process, signal.SIGKILL)
        outcome = Outcome(self.part, seconds)
        try:
            _read_report(self.report, outcome)
        except (OSError, xml.etree.ElementTree.ParseError):
            outcome.problem = f"no report; {_status(status)}"
        if stopped:
            outcome.problem = stopped
        elif status not in (0, 1) or (status == 1 and not outcome.failures):
            outcome.problem = _status(status)
        elif outcome.passed + outcome.failed + outcome.skipped.total() == 0:
            outcome.problem = "no tests ran"
        if outcome.problem:
            # The test that was under way has an entry in the report, without a word.
            text = self.log.read_text(errors="replace")
            outcome.passed = len(re.findall(r" PASSED +\[", text))
        return outcome


def _status(status: int) -> str:
    if status < 0:
        return f"pytest was ended by {signal.Signals(-status).name}"
    meanings = {2: ", interrupted", 4: ", wrong arguments", 5: ", no tests collected"}
    return f"pytest ended with status {status}{meanings.get(status, '')}"


def _session(session: int) -> Iterator[int]:
    """Processes of a session."""
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session:
            yield int(folder.name)


def _read_report(report: pathlib.Path, outcome: Outcome) -> None:
    for case in xml.etree.ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname', '')}::{case.get('name', '')}"
        bad = [*case.findall("failure"), *case.findall("error")]
        skip = case.find("skipped")
        for element in bad:
            outcome.failures.append((name, element.text or element.get("message", "")))
        if not bad and skip is not None:
            outcome.skipped[skip.get("message", "")] += 1
        elif not bad:
            outcome.passed += 1
        for told in case.iter("property"):
            if told.get("name") == "passed_inside":
                outcome.inside += int(told.get("value", "0"))


def run(
    parts: Sequence[Part], out: pathlib.Path, cores: int, limit_s: float, platform: str
) -> list[Outcome]:
    """Runs all, as many at a time as there are cores for."""
    start = time.monotonic()
    waiting, running, outcomes = list(parts), [], []

    def finish(one: Running, stopped: str | None = None) -> None:
        running.remove(one)
        outcome = one.outcome(stopped)
        outcomes.append(outcome)
        print(
            f"[{time.monotonic() - start:4.0f} s] {outcome.part.name}: "
            f"{_counts(outcome)} in {outcome.seconds:.0f} s; "
            f"{len(running)} running, {len(waiting)} waiting, "
            f"load {os.getloadavg()[0]:.0f}",
            flush=True,
        )

    try:
        while waiting or running:
            if time.monotonic() - start > limit_s:
                break
            for one in [one for one in running if one.process.poll() is not None]:
                finish(one)
            free = cores - sum(one.part.processes for one in running)
            fit = (p for p in waiting if p.processes <= free or not running)
            part = next(fit, None)
            if part is not None:
                waiting.remove(part)
                running.append(Running(part, out, platform))
            else:
                time.sleep(0.2)
    finally:
        for one in running:
            one.process.send_signal(signal.SIGINT)
        for one in list(running):
            one.stop()
            finish(one, f"stopped after {limit_s:.0f} s in all, before its end")
    for part in waiting:
        reason = f"not reached in {limit_s:.0f} s"
        outcomes.append(Outcome(part, problem=reason))
    return outcomes


# The end ---------------------------------------------------------------------------


def _counts(outcome: Outcome) -> str:
    found = f"{outcome.passed} passed"
    if outcome.failures:
        found += f", {len(outcome.failures)} failed"
    if outcome.skipped:
        found += f", {outcome.skipped.total()} skipped"
    return found + (f", {outcome.problem}" if outcome.problem else "")


def table(outcomes: Sequence[Outcome]) -> str:
    """For docs/gpu_results.md."""
    lines = [
        "| part | passed | of them in step | failed | skipped | s |",
        "|---|---|---|---|---|---|",
    ]
    for one in outcomes:
        failed = f"{one.failed}" + (f" ({one.problem})" if one.problem else "")
        lines.append(
            f"| {one.part.name} | {one.passed} | {one.inside or ''} | {failed} | "
            f"{one.skipped.total()} | {one.seconds:.0f} |"
        )
    return "\n".join(lines)


def _print_failures(outcomes: Sequence[Outcome], out: pathlib.Path) -> None:
    texts = []
    for one in outcomes:
        for name, text in one.failures:
            texts.append(f"--- {one.part.name}: {name}\n{text[-TEXT_OF_A_FAILURE:]}")
        log = out / f"{one.part.name}.log"
        if one.problem and log.exists() and one.seconds:
            text = log.read_text(errors="replace")[-TEXT_OF_A_FAILURE:]
            texts.append(f"--- {one.part.name}: {one.problem}\n{text}")
    if texts:
        print("=== failures, shortened; all of it is in the logs")
    left = TEXT_OF_ALL
    for text in texts:
        if left < 0:
            print(text.splitlines()[0])
            continue
        print(text)
        left -= len(text)


def _print_skips(outcomes: Sequence[Outcome]) -> None:
    reasons: collections.Counter[str] = collections.Counter()
    for one in outcomes:
        reasons.update(one.skipped)
    if reasons:
        print("=== skipped")
    for reason, count in reasons.most_common():
        print(f"SKIPPED [{count}] {reason[:200]}")


def conclude(outcomes: Sequence[Outcome], out: pathlib.Path, seconds: float) -> int:
    """Prints the end; returns the exit status."""
    outcomes = sorted(outcomes, key=lambda one: one.part.name)
    summary = table(outcomes)
    (out / "table.md").write_text(summary + "\n")
    print(summary)
    _print_skips(outcomes)
    _print_failures(outcomes, out)
    for one in outcomes:
        if one.problem:
            print(f"FAILED {one.part.name}: {one.problem}")
        for name, _ in one.failures:
            print(f"FAILED {one.part.name}: {name}")
    passed = sum(one.passed for one in outcomes)
    failed = sum(one.failed for one in outcomes)
    skipped = sum(one.skipped.total() for one in outcomes)
    closing = f"{passed} passed, {failed} failed, {skipped} skipped in {seconds:.0f} s"
    (out / "summary.txt").write_text(closing + "\n")
    print(f"=== {closing} ===", flush=True)
    return 0 if passed and not failed else 1


def _about(platform: str) -> str:
    """What runs here; SystemExit where jax_ep or a GPU is missing."""
    modules = "jax_ep._host" + (", jax_ep._cuda" if platform == "cuda" else "")
    program = f"""
import jax, jax_ep, {modules}
jax.config.update("jax_platforms", {platform!r})
found = jax.devices()
print(f"jax {{jax.__version__}}, {{len(found)}} x {{found[0].device_kind}}, "
      f"jax_ep of {{jax_ep.__path__[0]}}")
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{sys.executable} cannot run the suite:\n{done.stderr[-2000:]}")
    return done.stdout.strip()


def main(argv: list[str] | None = None) -> int:
    """Runs it all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--parts", action="append", help="only those that match, in this order")
    add("--list", action="store_true", help="print the parts, run nothing")
    add("--out", type=pathlib.Path, default=ROOT / "out" / "gpu", help="for logs")
    add("--limit-s", type=float, default=900.0, help="seconds for everything")
    add("--cores", type=int, default=os.cpu_count() or 1, help="processes at a time")
    add("--platform", choices=("cuda", "cpu"), default="cuda", help="cpu: to try it")
    arguments = parser.parse_args(argv)
    wanted = arguments.parts or [".*"]
    found = [p for w in wanted for p in plan() if re.fullmatch(w, p.name)]
    parts = list(dict.fromkeys(found))
    if not parts:
        sys.exit(f"no part matches {' or '.join(wanted)}; --list shows all")
    if arguments.list:
        for part in parts:
            print(f"{part.name:32} {part.processes} {' '.join(part.arguments)}")
        return 0
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    print(_about(arguments.platform), flush=True)
    start = time.monotonic()
    outcomes = run(parts, out, arguments.cores, arguments.limit_s, arguments.platform)
    return conclude(outcomes, out, time.monotonic() - start)


if __name__ == "__main__":
    sys.exit(main())
