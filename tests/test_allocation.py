"""Freed memory is kept for the next tensor, by glibc's own account; page faults would tell of the machine too."""

import os
import subprocess
import sys

import pytest

MB = 1_000_000
PROGRAM = """
import ctypes, sys, torch
from ood_toolkit.cli.allocation import keep_freed_memory

class Account(ctypes.Structure):
    names = "heap free_chunks fast_chunks mappings mapped peak fast_bytes used free trimmable"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]

account = getattr(ctypes.CDLL(None), "mallinfo2", None)
if account is None or (sys.argv[1] == "keep" and not keep_freed_memory()):
    sys.exit("no account")
account.restype = Account
torch.set_num_threads(1)
before = account()
first = torch.ones(20_000_000)
held = account()
del first
freed = account()
second = torch.ones(18_000_000)
again = account()
taken = again.heap - freed.heap + again.mapped - freed.mapped
print(held.mapped - before.mapped, freed.free - before.free, taken)
"""


def account(word: str) -> tuple[int, ...]:
    """Bytes that a tensor of 80 MB has mapped, that are free in the heap after it, and that one of 72 MB then takes."""
    tuned = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")
    env = {name: value for name, value in os.environ.items() if not name.startswith(tuned)}
    done = subprocess.run([sys.executable, "-c", PROGRAM, word], env=env, capture_output=True, text=True, check=False)
    if "no account" in done.stderr:
        pytest.skip("no glibc that keeps accounts")
    assert done.returncode == 0, done.stderr
    return tuple(map(int, done.stdout.split()))


def test_a_large_tensor_takes_the_memory_that_another_has_freed():
    mapped, free, taken = account("keep")
    assert mapped < MB
    assert free > 72 * MB
    assert taken < MB


def test_by_default_every_large_tensor_is_mapped_anew():
    mapped, free, taken = account("leave")
    assert mapped >= 80 * MB
    assert free < MB
    assert taken >= 72 * MB
