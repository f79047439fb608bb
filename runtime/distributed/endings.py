"""What a process that an exception ends tells the other ranks, and says itself where that was only a consequence."""

from __future__ import annotations

import atexit
import sys
import time
import weakref
from logging import getLogger
from typing import TYPE_CHECKING

from dmuon_tune.errors import said
from dmuon_tune.words import ranks_named

if TYPE_CHECKING:
    from .control import Control

TELLING_S = 0.25  # that the rank which failed first may still take to tell its reason

logger = getLogger("dmuon_tune.runtime")

_explained: list[BaseException] = []  # once, though a process may have had several controls


def tell_at_exit(control: Control) -> None:
    """When this process ends by an exception, let the ranks of ``control`` know it."""
    atexit.register(_end, weakref.ref(control))


def _end(reference: weakref.ref[Control]) -> None:
    control, error = reference(), getattr(sys, "last_value", None)  # which the interpreter keeps
    if control is None or error is None:
        return
    if not _is_loss(error):
        control.fail(said(error))
    elif not any(error is other for other in _explained):
        _explained.append(error)
        logger.error("this rank ended because %s", _reason(control))


def _is_loss(error: BaseException) -> bool:
    """Whether it is gloo's word for a rank that is gone, in a collective of the script's or of FSDP2's."""
    return isinstance(error, RuntimeError) and "gloo" in str(error) and "onnection" in str(error)


def _reason(control: Control) -> str:
    """What a rank has told, else which ones are gone: then the others hear that."""
    time.sleep(TELLING_S)
    told = control.failure()
    if not told:
        gone = control.gone()
        who = f"; gone: {ranks_named(gone)}" if gone else ""
        told = f"a connection was closed outside of the optimizer, after step {control.step}{who}"
        control.fail(told)
    return told
