"""Does not compile, and says why on stdout and stderr."""

import os
import sys

from gram_variant import variant


def build(*_):
    print("compiler says: line 7")
    os.write(2, b"written to fd 2\n")
    sys.exit(3)


KERNEL = variant(__name__, build=build)
