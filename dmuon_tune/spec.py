"""The two kinds of spec: an op (what is computed, on which tensors) and a kernel of it (how, in one DSL)."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import reprlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache, wraps
from logging import getLogger
from typing import Any, Literal

from . import space
from .device import DeviceFingerprint
from .errors import raised
from .problem import Problem

logger = getLogger(__name__)


@dataclass(frozen=True)
class Argument:
    """One argument of an op's launch: a tensor with its stored shape, or a ``scalar``.

    Its ``role`` says what a launch does with it: an ``input`` is read, an ``output`` written, an ``inout`` one updated
    in place. What ``scratch`` holds means nothing, before and after. ``zeros`` are zero before the first launch that
    gets them and again after each: counters at which blocks wait for each other.

    A ``shared`` tensor is one for the whole batch and has no batch axis. Of a ``separate`` one each matrix, contiguous,
    lies at an address of its own: the launch gets these addresses, an int64 tensor (batch,) on the same device.
    """

    name: str
    role: Literal["input", "output", "inout", "scratch", "zeros", "scalar"]
    shape: tuple[int, ...] = ()
    dtype: str = ""
    shared: bool = False
    separate: bool = False


@dataclass(frozen=True)
class OpSpec:
    """What an op computes. A launch is called with exactly ``arguments(problem)``, positionally, in that order.

    Tensors are contiguous, on the problem's device, with a leading batch axis; outputs never alias inputs; scalars are
    Python floats. ``reference`` takes the same inputs and scalars (no output) and returns in float64 what is written: a
    tensor, or of several (``inout`` and ``output``, in order) a tuple. ``make_inputs(problem, device, seed)`` returns
    the ``input`` and ``inout`` tensors in order, each with its batch axis. ``flops`` counts a symmetric result once;
    ``bytes_moved`` reads each input and writes each output once, and counts no scratch. ``tolerance`` is the accepted
    error where it is not that of a single product, one for all problems or by problem. Which products a matrix's
    orthogonalization needs is :func:`dmuon_tune.recipe.chain`'s to say.
    """

    name: str
    summary: str
    arguments: Callable[[Problem], tuple[Argument, ...]]
    reference: Callable[..., Any]
    make_inputs: Callable[[Problem, str, int], tuple[Any, ...]]
    flops: Callable[[Problem], int]
    bytes_moved: Callable[[Problem], int]
    symmetric_output: bool = False
    tolerance: float | Callable[[Problem], float] | None = None


def never_illegal(problem: Problem, config: Any, device: DeviceFingerprint) -> str | None:
    return None


@dataclass(frozen=True)
class KernelSpec:
    """One kernel of an op in one DSL.

    ``refusal(problem, device)`` says in words a user can act on why the kernel does not serve a problem, or None.
    ``illegality(problem, config, device)`` says why a configuration cannot run, or None: the search and the runtime
    both ask it through :meth:`is_legal`, and what is illegal is not compiled. ``build(problem, config, device)``
    returns the DSL's program, which the backend of that name compiles; it is the only place that imports the DSL.
    ``heuristic`` picks the untuned configuration by shape, ``seeds`` those that the search measures before it learns,
    the likeliest first. ``sources`` are the modules whose code the kernel is made of; they make its digest.
    ``variant`` tells apart several kernels of one op in one DSL; ``library`` without one is the vendor library itself.

    Neither a search nor a training is stopped by what raises in ``refusal``, ``illegality``, ``heuristic``, ``seeds``
    or Config, or is no answer: it leaves out what it was asked about, and the kernel's first such fault is warned of. A
    Config that has no default is refused as the module is loaded.
    """

    op: str
    backend: str
    Config: type
    refusal: Callable[[Problem, DeviceFingerprint], str | None]
    build: Callable[[Problem, Any, DeviceFingerprint], Any]
    sources: tuple[str, ...]
    illegality: Callable[[Problem, Any, DeviceFingerprint], str | None] = never_illegal
    heuristic: Callable[[Problem, DeviceFingerprint], Any] | None = field(default=None)
    seeds: Callable[[Problem, DeviceFingerprint], Sequence[Any]] | None = field(default=None, kw_only=True)
    variant: str = ""

    def __post_init__(self) -> None:
        for what in _ASKED:
            ask = getattr(self, what)
            if callable(ask):
                object.__setattr__(self, what, _guarded(self, what, getattr(ask, "asked", ask)))

    @cached_property
    def name(self) -> str:
        return ".".join(part for part in (self.op, self.backend, self.variant) if part)

    def serves(self, problem: Problem, device: DeviceFingerprint) -> bool:
        return problem.op == self.op and self.refusal(problem, device) is None

    def is_legal(self, problem: Problem, config: Any, device: DeviceFingerprint) -> bool:
        return self.serves(problem, device) and self.illegality(problem, config, device) is None

    def legal_space(self, problem: Problem, device: DeviceFingerprint) -> list[Any]:
        """Every legal configuration, in the space's order; empty where the kernel refuses the problem."""
        return list(_legal_space(self, problem, device))

    def why_none(self, problem: Problem, device: DeviceFingerprint) -> str:
        """Where no configuration is legal, why: the kernel's refusal, or what keeps the default from it."""
        why = self.refusal(problem, device) or self.illegality(problem, self.Config(), device)
        return why or "no configuration is legal"

    def untuned(self, problem: Problem, device: DeviceFingerprint) -> Any | None:
        """The configuration used without a tuned one: the heuristic's, the default, or the first legal one; None where
        the kernel refuses the problem, or has no legal one."""
        if not self.serves(problem, device):
            return None
        candidates = [self.heuristic(problem, device)] if self.heuristic else []
        candidates.append(self.Config())
        for config in candidates:
            if config is not None and self.is_legal(problem, config, device):
                return config
        return next(iter(self.legal_space(problem, device)), None)

    def digest(self) -> str:
        """SHA-256 of the code of ``sources``: comments, docstrings and blank lines do not change it."""
        return digest_of(self.sources)


_WORDS = "None or why not in words"
_ASKED = {  # what a kernel is asked → (what it answers, what a fault leads to)
    "refusal": (_WORDS, "it is left out"),
    "illegality": (_WORDS, "the configurations that it fails at are left out"),
    "heuristic": ("a Config", "its default stands in"),
    "seeds": ("Configs", "the search begins without them"),
}


def _guarded(spec: KernelSpec, what: str, ask: Callable[..., Any]) -> Callable[..., Any]:
    """``ask``, kept as ``asked``, whose faults are warned of once and become an answer: of no use, or a refusal."""
    wanted, result = _ASKED[what]
    module = getattr(ask, "__module__", "")
    is_warned = False

    @wraps(ask)
    def guarded(*arguments: Any) -> Any:
        nonlocal is_warned
        try:
            answer = tuple(ask(*arguments)) if what == "seeds" else ask(*arguments)
            if _is_answer(spec, what, answer):
                return answer
            fault = f"{what} returned {reprlib.repr(answer)}, not {wanted}"
        except _AsksProblem:
            raise
        except (Exception, SystemExit) as error:
            fault = f"{what} raised {raised(error, module)}"
        if not is_warned:
            is_warned = True
            _warn(spec, module, fault, result)
        return {"heuristic": None, "seeds": ()}.get(what, fault)

    vars(guarded)["asked"] = ask
    return guarded


def _is_answer(spec: KernelSpec, what: str, answer: Any) -> bool:
    if what in ("refusal", "illegality"):
        return answer is None or isinstance(answer, str) and answer != ""
    return all(isinstance(config, spec.Config) for config in (answer if what == "seeds" else (answer,)))


def _warn(spec: KernelSpec, module: str, fault: str, result: str) -> None:
    logger.warning("kernel %s of module %s: %s; %s", spec.name, module, fault, result)


@lru_cache(256)
def _legal_space(spec: KernelSpec, problem: Problem, device: DeviceFingerprint) -> tuple[Any, ...]:
    if not spec.serves(problem, device):
        return ()
    candidates = _space(spec, device)
    return tuple(config for config in candidates if spec.illegality(problem, config, device) is None)


@lru_cache(64)
def _space(spec: KernelSpec, device: DeviceFingerprint) -> tuple[Any, ...]:
    """What of a kernel's space may be legal on a device; empty where its Config cannot be made."""
    try:
        return _candidates(spec.Config, getattr(spec.illegality, "asked", spec.illegality), device)
    except (Exception, SystemExit) as error:
        module = spec.Config.__module__
        _warn(spec, module, f"Config raised {raised(error, module)}", "it is left out")
        return ()


class _AnyProblem:
    """Stands for every problem: whoever asks it anything depends on the problem."""

    def __getattribute__(self, name: str) -> Any:
        raise _AsksProblem

    def __eq__(self, other: object) -> bool:
        raise _AsksProblem

    def __hash__(self) -> int:
        raise _AsksProblem


class _AsksProblem(Exception):
    """An answer depends on the problem."""


@lru_cache(64)
def _candidates(
    config_type: type, illegality: Callable[[Any, Any, DeviceFingerprint], str | None], device: DeviceFingerprint
) -> tuple[Any, ...]:
    """The space, in its order, without what is illegal on this device whatever the problem is: most of a large one."""
    problem = _AnyProblem()

    def may_be_legal(config: Any) -> bool:
        try:
            return illegality(problem, config, device) is None
        except (Exception, SystemExit):  # _AsksProblem, or a fault, which is said of a problem
            return True

    return tuple(filter(may_be_legal, space.each_of(config_type)))


def digest_of(modules: Iterable[str]) -> str:
    """SHA-256 of modules' names and code: comments, docstrings and blank lines do not change it."""
    sha = hashlib.sha256()
    for module in modules:
        sha.update(module.encode() + b"\0" + _code_of(module).encode() + b"\0")
    return sha.hexdigest()


_QUOTED = (  # plain characters in runs up to what is special: choosing for each character takes half as long again
    r'"{3}[^\\"]*(?:(?:\\.|"(?!""))[^\\"]*)*"{3}', r"'{3}[^\\']*(?:(?:\\.|'(?!''))[^\\']*)*'{3}",
    r'"[^"\\\n]*(?:\\.[^"\\\n]*)*"', r"'[^'\\\n]*(?:\\.[^'\\\n]*)*'",
)
# the look ahead finds the places that may begin one; a string's prefix is left to the code before it
_STRING_OR_COMMENT = re.compile(rf"(?=[\"'#])(?:{'|'.join(_QUOTED)}|#[^\n]*)", re.DOTALL)


def _code_of(module: str) -> str:
    found = importlib.util.find_spec(module)
    if found is None or found.origin is None:
        raise ModuleNotFoundError(f"kernel source {module} not found")
    written = os.stat(found.origin)
    return _code_in(found.origin, written.st_mtime_ns, written.st_size)


@cache
def _code_in(path: str, modified_ns: int, size: int) -> str:
    """A file's code, read once for each version of it: a plan asks for every kernel of every problem."""
    with open(path, encoding="utf-8") as file:
        return code_text(file.read())


def code_text(source: str) -> str:
    """What of a Python source is code: the same text whatever its comments, docstrings, blank lines and spaces at the
    lines' ends are, by every version of Python."""
    parts, depth, end = [], 0, 0
    for found in _STRING_OR_COMMENT.finditer(source):
        before, text = source[end : found.start()], found[0]
        end = found.end()
        parts.append(before)
        depth += sum(map(before.count, "([{")) - sum(map(before.count, ")]}"))
        is_alone = not depth and _begins_line(before, found.start()) and source[end : end + 1] in ("\n", "")
        if not is_alone and not text.startswith("#"):  # a string alone is a docstring; one with a prefix never is alone
            parts.append(text.replace("\n", "\0"))  # none of what it says is a blank line
    parts.append(source[end:])
    lines = map(str.rstrip, "".join(parts).split("\n"))
    return "\n".join(filter(None, lines)).strip()


def _begins_line(before: str, at: int) -> bool:
    """Whether a string after this code is a statement's first token: with a line's end behind it, its only one."""
    line = before.rstrip(" \t")
    return at == 0 or line.endswith("\n") and not line.endswith("\\\n")
