"""Train DFlash drafters for speculative decoding.

The package is imported before torch by every entrypoint, so this is where environment variables are
set that torch reads once; a value that is set already stays.
"""

import os

# Who started this process, asked before torch takes seconds to load: later it may be gone (dflash.ranks).
PARENT = os.getppid()

# How long a waiting thread of GNU OpenMP may spin. By default it spins for milliseconds, and two
# processes of two threads on two cores then take 7 times as long as one; not at all
# (OMP_WAIT_POLICY=PASSIVE) makes decoding a third slower on an idle machine. This count keeps 95 % of the
# speed there and doubles it when cores are shared (measured: docs/log.md).
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

# On Hopper torch takes cuDNN's attention first, which builds a plan for every new pair of lengths: tens of
# milliseconds of the host in every cycle of decoding, where the number of keys always changes (torch's
# sdp_utils.cpp, check_prefer_cudnn_attention; cudnn/MHA.cpp). Last in order it still serves what no other
# fused kernel takes.
os.environ.setdefault("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
