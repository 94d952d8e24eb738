"""Freed memory is kept for the next tensor."""

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys, torch
from ood_toolkit.cli.allocation import keep_freed_memory
kept = keep_freed_memory() if sys.argv[1] == "keep" else False
torch.set_num_threads(1)
for _ in range(3):
    torch.ones(20_000_000).add_(1)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    torch.ones(20_000_000).add_(1)
print(int(kept), resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(word: str) -> tuple[bool, int]:
    done = subprocess.run([sys.executable, "-c", PROGRAM, word], capture_output=True, text=True, check=True)
    kept, count = map(int, done.stdout.split())
    return bool(kept), count


def test_large_tensors_after_others_need_few_new_pages():
    kept, count = faults("keep")
    if not kept:
        pytest.skip("no glibc here")
    usual = faults("leave")[1]  # 80 MB five times: 100,000 pages, unless they are huge ones
    assert usual > 1000
    assert count < usual / 2
