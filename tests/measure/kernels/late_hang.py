"""Never returns in a race's timed rounds, and does not before."""

import time

from gram_variant import late


def fail():
    while True:
        time.sleep(1)


KERNEL = late(__name__, fail)
