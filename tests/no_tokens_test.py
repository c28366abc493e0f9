"""The cases without tokens where XLA crashes on them unless it is told how not to.

On other versions of jax they run where they stand.
"""

import os
import pathlib
import re

import pytest
from conftest import CRASHES_WITHOUT_TOKENS, SAFE_WITHOUT_TOKENS
from processes import run_script

HERE = pathlib.Path(__file__).resolve().parent
FILES = (
    *("every_case", "plan_dispatch", "permute", "dispatch_permute", "moe"),
    "replicated",
)


@pytest.mark.skipif(not CRASHES_WITHOUT_TOKENS, reason="this XLA takes them")
@pytest.mark.timeout(600)
def test_without_hlo_sharding_v3(platform):
    flags = f"{os.environ.get('XLA_FLAGS', '')} {SAFE_WITHOUT_TOKENS}"
    done = run_script(
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "no_tokens"),
        f"--platform={platform}",
        *(str(HERE / f"{name}_test.py") for name in FILES),
        timeout=500,
        XLA_FLAGS=flags,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= len(FILES)
