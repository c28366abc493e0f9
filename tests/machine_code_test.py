"""Lines of low-latency buffers are stored and loaded whole, by the machine code."""

from __future__ import annotations

import functools
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sysconfig

import machine_code
import pytest
import sass

ROOT = pathlib.Path(__file__).parents[1]
LINE = re.compile(r"\bptx::(?:StoreLine|LoadLine)\(")
# How each kernel of the text below moves a line.
BAD = {
    "Apart": "lanes part at",
    "Inside": "lanes part at|lanes may have left",
    "Half": "lanes part at|varies among eight lanes",
    "Left": "lanes part at|lanes may have left",
    "Halves": "no line in one instruction",
}
GOOD = ("Together", "Eights")
KERNELS = r"""
#include "cc/ptx.cuh"

namespace ptx = jax_ep::ptx;

#define KERNEL(name) \
  __global__ void name(const uint64_t* words, uint4* lines, uint4* out)
#define LANE const int lane = threadIdx.x % 32
#define WORD ptx::LoadRelaxedSys(words + lane)
#define STORE ptx::StoreLine(lines + threadIdx.x, out[threadIdx.x])

KERNEL(Together) {
  LANE;
  while (!__all_sync(0xffffffff, WORD != 0)) {
  }
  out[threadIdx.x] = ptx::LoadLine(lines + threadIdx.x);
}
KERNEL(Eights) {
  LANE;
  if (lane / 8 != words[0]) STORE;
}
// Each lane waits alone; that they meet before the line is not enough.
KERNEL(Apart) {
  LANE;
  while (WORD == 0) {
  }
  __syncwarp();
  out[threadIdx.x] = ptx::LoadLine(lines + threadIdx.x);
}
KERNEL(Inside) {
  LANE;
  for (int i = 0; i < 100; ++i) {
    if (WORD == i) {
      STORE;
      break;
    }
  }
}
KERNEL(Half) {
  LANE;
  if (lane % 2 == 0) STORE;
}
KERNEL(Left) {
  LANE;
  if (words[lane] == 0) return;
  STORE;
}
KERNEL(Halves) {
  const uint4 v = out[threadIdx.x];
  auto* to = reinterpret_cast<uint64_t*>(lines + threadIdx.x);
  ptx::StoreRelaxedSys(to, uint64_t{v.y} << 32 | v.x);
  ptx::StoreRelaxedSys(to + 1, uint64_t{v.w} << 32 | v.z);
}
"""


def tool(name):
    """A program of the CUDA toolkit; pip puts it beside the packages."""
    packages = pathlib.Path(sysconfig.get_path("purelib")) / "nvidia"
    beside = sorted(packages.glob(f"*/bin/{name}"), reverse=True)
    found = str(beside[0]) if beside else shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not on this machine: pip install nvidia-cuda-{name}")
    return found


def cuobjdump(*arguments):
    # It calls nvdisasm.
    path = os.pathsep.join(
        [str(pathlib.Path(tool("nvdisasm")).parent), os.environ.get("PATH", "")]
    )
    return subprocess.run(
        [tool("cuobjdump"), *map(str, arguments)],
        env={**os.environ, "PATH": path},
        check=True,
        capture_output=True,
        text=True,
    ).stdout


@functools.cache
def moves_lines(path):
    """Whether a source file, or one that it includes, stores or loads lines."""
    text = path.read_text()
    if path.name != "ptx.cuh" and LINE.search(text):
        return True
    included = (ROOT / name for name in re.findall(r'#include "(cc/.*?)"', text))
    return any(moves_lines(one) for one in included)


def problems(code):
    """What may part the lanes of a line in one kernel."""
    kernel = machine_code.Kernel(code)
    if not kernel.lines():
        return ["no line in one instruction"]
    return [f"{fault.address:#x}: {fault.text}" for fault in kernel.faults()]


@pytest.mark.timeout(1200)
def test_lanes_of_a_line_stay_together():
    """In every kernel that moves lines, for every architecture that was built."""
    native = importlib.util.find_spec("jax_ep._cuda")
    if native is None:
        pytest.skip("jax_ep._cuda was not built")
    files = [path for path in sorted(ROOT.glob("cc/**/*.cu")) if moves_lines(path)]
    # A kernel's name has its file's.
    file_of = re.compile("|".join(f"_{path.stem}_cu_" for path in files))
    usage = cuobjdump("-res-usage", native.origin)
    names = {n for n in re.findall(r"Function (\S+?):", usage) if file_of.search(n)}
    assert {file_of.search(name)[0] for name in names} == {
        f"_{path.stem}_cu_" for path in files
    }
    seen = set()
    wrong = []
    text = cuobjdump("-sass", "-fun", ",".join(sorted(names)), native.origin)
    for architecture, name, code in sass.kernels(text):
        assert name in names
        seen.add((architecture, name))
        wrong += [f"{architecture} {name} {problem}" for problem in problems(code)]
        stores = [one.base for one in code if one.is_line]
        assert {"LDG", "STG"} <= set(stores), f"{architecture} {name}: {set(stores)}"
    built = {architecture for architecture, _ in seen}
    assert seen == {(a, name) for a in built for name in names}
    assert built, "no machine code"
    assert not wrong, "lines may come apart:\n" + "\n".join(wrong)


@pytest.mark.timeout(1200)
def test_kernels_that_part_are_found(tmp_path):
    """Kernels with each kind of fault, and two without."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("nvcc is not on this machine")
    source, compiled = tmp_path / "kernels.cu", tmp_path / "kernels.cubin"
    source.write_text(KERNELS)
    found = {}
    for architecture in ("sm_80", "sm_90a", "sm_100a"):
        subprocess.run(
            [
                *(nvcc, "-std=c++20", f"-I{ROOT}", f"-arch={architecture}", "-cubin"),
                *(str(source), "-o", str(compiled)),
            ],
            check=True,
            capture_output=True,
        )
        for _, name, code in sass.kernels(cuobjdump("-sass", compiled)):
            kind = re.search("|".join((*GOOD, *sorted(BAD, key=len)[::-1])), name)[0]
            found[architecture, kind] = problems(code)
    assert len(found) == 3 * len((*GOOD, *BAD))
    for (architecture, kind), texts in found.items():
        if kind in GOOD:
            assert not texts, (architecture, kind, texts)
        else:
            assert any(re.search(BAD[kind], text) for text in texts), (
                architecture,
                kind,
                texts,
            )
