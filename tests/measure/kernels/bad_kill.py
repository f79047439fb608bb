"""Kills its process as the out-of-memory killer does."""

import os
import signal

from gram_variant import variant


def launch(x, r, alpha):
    print("last words", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


KERNEL = variant(__name__, launch)
