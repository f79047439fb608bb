"""Does not fail in a race's timed rounds, unlike those beside it."""

from gram_variant import late

KERNEL = late(__name__, lambda: None)
