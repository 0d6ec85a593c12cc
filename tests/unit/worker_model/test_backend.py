"""How the kernels for the CPU are set up."""

from __future__ import annotations

import subprocess
import sys

import pytest

from maniple_kernels.backend import has_cpu_kernels

# The imports take long enough for every thread to be there before the first is done.
_ASK_AT_ONCE = """
import threading
from maniple_kernels.backend import has_cpu_kernels
meeting = threading.Barrier(6)
def ask():
    meeting.wait()
    assert has_cpu_kernels()
threads = [threading.Thread(target=ask) for _ in range(6)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
from numba.core.caching import IndexDataCacheFile
own = IndexDataCacheFile.save
assert own.__name__ == "locked_save"
(save,) = [cell.cell_contents for cell in own.__closure__]
assert save.__name__ == "save", "who saves would wait for itself"
"""


@pytest.mark.skipif(not has_cpu_kernels(), reason="no OpenMP here")
def test_threads_that_ask_at_once_set_up_once() -> None:
    done = subprocess.run([sys.executable, "-c", _ASK_AT_ONCE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
