"""Its compiler dies of a segmentation fault."""

import os
import signal

from gram_variant import variant


def build(*_):
    os.kill(os.getpid(), signal.SIGSEGV)


KERNEL = variant(__name__, build=build)
