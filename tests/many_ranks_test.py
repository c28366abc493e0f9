"""Kernels with 64, 65, 72 and 96 ranks on one GPU, half of it direct, half staged."""

from __future__ import annotations

import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[1]
KERNELS = (
    "few_tokens/few_combine",
    "plan/plan",
    "plan/pushed_plan",
    "rows/combine",
    "rows/dispatch",
)


@pytest.mark.gpu(count=1)
@pytest.mark.timeout(900)
def test_more_ranks_than_a_word_has_bits(tmp_path):
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("nvcc is not on this machine")
    program = tmp_path / "many_ranks"
    sources = [ROOT / "tests/many_ranks.cu"]
    sources += [ROOT / f"cc/{name}.cu" for name in KERNELS]
    flags = ("-O3", "-std=c++20", f"-I{ROOT}", "-arch=native", "-o", str(program))
    subprocess.run([nvcc, *flags, *map(str, sources)], check=True)
    done = subprocess.run([program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(": right\n") == 5 * 2 * 2
