"""Train DFlash drafters for speculative decoding.

The package is imported before torch by every entrypoint, so this is where the thread library is told
not to spin: OpenMP threads that wait busily make two processes of two threads each on two cores 6 to
10 times slower than they need be, and gain an idle machine nothing (measured: docs/log.md).
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
