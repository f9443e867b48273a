"""Train DFlash drafters for speculative decoding.

The package is imported before torch by every entrypoint, so this is where GNU OpenMP is told how long
a waiting thread may spin. By default it spins for milliseconds, and two processes of two threads on
two cores then take 7 times as long as one; not at all (OMP_WAIT_POLICY=PASSIVE) makes decoding a third
slower on an idle machine. This count keeps 95 % of the speed there and doubles it when cores are
shared (measured: docs/log.md).
"""

import os

# Who started this process, asked before torch takes seconds to load: later it may be gone (dflash.ranks).
PARENT = os.getppid()

if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
