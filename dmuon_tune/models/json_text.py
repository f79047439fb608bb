"""Parses JSON strictly: an object, or one line that says what is wrong with it."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from dmuon_tune.errors import UsageError, said


def parse(text: bytes, where: str) -> dict[str, Any]:
    """The object that ``text`` (UTF-8) holds; UsageError, beginning with ``where``, for anything else.

    A name given twice, NaN, Infinity and nesting beyond the parser's depth are refused.
    """
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except RecursionError as error:
        raise UsageError(f"{where} is not usable JSON: nested too deeply") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{where} is not JSON: byte {error.start} is not UTF-8") from error
    except ValueError as error:
        raise UsageError(f"{where} is not JSON: {said(error).partition(': ')[2]}") from error
    if not isinstance(value, dict):
        raise UsageError(f"{where} is not a JSON object but a {type(value).__name__}")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise ValueError(f"the name {name!r} is given twice")
        values[name] = value
    return values


def _no_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON number")
