"""The program that runs the suite on GPUs: every test is in its plan, once, and what
goes wrong in a part is in its last line.
"""

import collections
import pathlib
import re
import subprocess
import sys

import gpu_parts
import pytest
import run_gpu

PROGRAMS = {
    "good": "def test_a(): pass\ndef test_b(): pass",
    "bad": "def test_a(): pass\ndef test_b(): assert 1 == 2, 'no'",
    "skips": (
        "import pytest\n@pytest.mark.parametrize('n', range(3))\n"
        "def test_a(n): pytest.skip('needs more')"
    ),
    "inside": "def test_a(record_property): record_property('passed_inside', 41)",
    "empty": "",
    "crash": "import os\ndef test_a(): pass\ndef test_b(): os.abort()",
    "exits": "import os\ndef test_a(): os._exit(0)",
}
SLOW = "import time\ndef test_a(): pass\ndef test_b(): time.sleep(100)"


def run(tmp_path, programs, cores=2, limit_s=100.0):
    """What becomes of each program, and the program's own exit status."""
    parts = []
    for name, text in programs.items():
        file = tmp_path / f"{name}_test.py"
        file.write_text(text)
        parts.append(gpu_parts.Part(name, (str(file), "-o", "addopts=")))
    outcomes = run_gpu.run(parts, tmp_path, cores, limit_s, "")
    status = run_gpu.conclude(outcomes, tmp_path, 1.0)
    return {one.part.name: one for one in outcomes}, status


def test_outcomes(tmp_path, capsys):
    found, status = run(tmp_path, PROGRAMS)
    printed = capsys.readouterr().out
    assert status == 1
    assert (found["good"].passed, found["good"].failed) == (2, 0)
    assert (found["bad"].passed, found["bad"].failed) == (1, 1)
    assert found["skips"].skipped == {"needs more": 3}
    assert found["skips"].failed == 0
    assert (found["inside"].passed, found["inside"].inside) == (1, 41)
    for name, problem in (
        ("empty", "pytest ended with status 5, no tests collected"),
        ("crash", "pytest was ended by SIGABRT"),
        ("exits", "no report; pytest ended with status 0"),
    ):
        assert (found[name].problem, found[name].failed) == (problem, 1)
        assert f"FAILED {name}: {problem}" in printed
    assert "SKIPPED [3] needs more" in printed
    assert "assert 1 == 2" in printed
    # The test that had passed before the crash counts.
    closing = "5 passed, 4 failed, 3 skipped in 1 s"
    assert printed.endswith(f"=== {closing} ===\n")
    assert (tmp_path / "summary.txt").read_text() == closing + "\n"
    assert "| inside | 1 | 41 | 0 | 0 |" in (tmp_path / "table.md").read_text()


def test_exit_status(tmp_path, capsys):
    good, idle = (run_gpu.Outcome(gpu_parts.Part(name, ())) for name in ("a", "b"))
    good.passed = 2
    idle.skipped["needs more"] = 3
    assert run_gpu.conclude([good, idle], tmp_path, 1.0) == 0
    assert "2 passed, 0 failed, 3 skipped" in capsys.readouterr().out
    # Skips alone are not enough.
    assert run_gpu.conclude([idle], tmp_path, 1.0) == 1


def test_limit(tmp_path, capsys):
    """What was under way, and what was not reached, is said."""
    programs = {f"slow{n}": SLOW for n in range(2)}
    found, status = run(tmp_path, programs, cores=1, limit_s=25.0)
    assert status == 1
    under_way = [one for one in found.values() if one.seconds]
    assert [one.passed for one in under_way] == [1]
    assert {one.problem for one in under_way} == {
        "stopped after 25 s in all, before its end"
    }
    assert found["slow1"].problem == "not reached in 25 s"
    assert "1 passed, 2 failed, 0 skipped" in capsys.readouterr().out


@pytest.mark.slow
def test_every_test_is_in_one_part():
    """But for those that need no GPU."""
    everything = {
        str(path.relative_to(run_gpu.ROOT))
        for path in gpu_parts.HERE.glob("*_test.py")
        if path.stem not in gpu_parts.LEFT_OUT
    }
    whole, parts = [], []
    for part in gpu_parts.plan():
        if part.arguments[0] in everything:
            whole.append(part.arguments)
        else:
            parts.append(part)
    named = collections.Counter(file for files in whole for file in files)
    assert set(named.values()) == {1}
    cut = everything - set(named)
    files = {argument.partition("::")[0] for p in parts for argument in p.arguments}
    assert {file for file in files if file.startswith("tests/")} == cut
    kinds = ("nodes", "processes", "ranks")
    assert cut == {f"tests/gpu_{kind}_test.py" for kind in kinds}
    collected = collections.Counter(_collect(*sorted(cut)))
    by_part = collections.Counter(_collect(*[a for p in parts for a in p.arguments]))
    assert by_part == collected


def _collect(*arguments):
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-c", "pyproject.toml", "-q"),
            *("-p", "no:cacheprovider", "--platform=cpu", "--collect-only"),
            *arguments,
        ],
        cwd=pathlib.Path(run_gpu.ROOT),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return re.findall(r"^tests/.*::.*$", done.stdout, re.M)
