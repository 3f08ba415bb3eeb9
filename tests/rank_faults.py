"""A rank that sums with the others until one of them fails, in test_distributed_faults.py.

rank_faults.py HOW WHO TIMEOUT
"""

from __future__ import annotations

import os
import signal
import sys
import time

import mlx.core as mx

from mlx_moe.distributed import join

mx.set_default_device(mx.cpu)
how, who, timeout = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])


def fail() -> None:
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "raise":
        raise ValueError("this rank has a problem")
    elif how == "sleep":  # alive, and somewhere else
        time.sleep(100)
    elif how == "leave":
        sys.exit(0)


ranks = join(timeout=timeout)
assert ranks is not None
for call in range(6):
    total = ranks.all_sum(mx.ones(1000), f"call {call}")
    assert total[0].item() == ranks.size
print("summed", flush=True)
if ranks.rank == who:
    fail()
while True:
    ranks.all_sum(mx.ones(1000), "the sum after")
