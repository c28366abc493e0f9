"""Runs of process_program.py and of the suite of several processes, on CPUs."""

from __future__ import annotations

import re

import launch


def run(name, tmp_path, *arguments, processes=2, killed=(), act=None, **options):
    """Runs one function of process_program.py; returns the logs."""
    with launch.Job(
        "process_program.py",
        processes,
        tmp_path,
        arguments=(name, *map(str, arguments)),
        **options,
    ) as job:
        if act is not None:
            act(job)
        logs = job.wait(killed=killed)
    for process, log in enumerate(logs):
        assert process in killed or log.endswith("END\n"), log
    return logs


def run_suite(*arguments, place, logs):
    """Runs pytest in step in (processes, devices); returns how many tests passed."""
    processes, devices = place
    with launch.Job(
        "process_suite.py",
        processes,
        logs,
        devices=devices,
        arguments=["-q", "--timeout=120", "-x", *arguments],
    ) as job:
        texts = job.wait(560)
    (passed,) = {re.search(r"(\d+) passed", text).group(1) for text in texts}
    return int(passed)
