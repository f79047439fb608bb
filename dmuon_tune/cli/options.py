"""Options that several commands share, and the values they read from text."""

from __future__ import annotations

import argparse
import re

from dmuon_tune.problem import DTYPES

DTYPE_NAMES = {"fp16": "float16", "half": "float16", "bf16": "bfloat16", "fp32": "float32", "float": "float32"}
ALL_TRIALS = 10**9  # more than any kernels' spaces together
_UNIT_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def common() -> argparse.ArgumentParser:
    """``--format`` and ``--debug``: every command has them."""
    parser = argparse.ArgumentParser(add_help=False)
    group = parser.add_argument_group("output")
    group.add_argument("--format", choices=("table", "json"), default="table", help="what stdout gets (default: table)")
    group.add_argument("--debug", action="store_true", help="show a traceback with an error")
    return parser


def model() -> argparse.ArgumentParser:
    """What to tune for: exactly one of ``--preset``, ``--model``, ``--shapes``."""
    parser = argparse.ArgumentParser(add_help=False)
    group = parser.add_argument_group("matrices (one of the first three)")
    group.add_argument("--preset", metavar="NAME", help="a built-in model, such as qwen2.5-7b")
    group.add_argument(
        "--model", metavar="MODEL",
        help="a preset, config.json or its folder, .safetensors file or index, state dict, or module:function",
    )
    group.add_argument(
        "--shapes", "--shape", dest="shapes", metavar="SHAPES",
        help="rows x cols or batch x rows x cols, such as 8x2048x5464,1024x1024",
    )
    group.add_argument(
        "--include", metavar="PATTERN", action="append", default=[],
        help="also take parameters whose name matches, such as 'lm_head*' (repeatable)",
    )
    group.add_argument(
        "--exclude", metavar="PATTERN", action="append", default=[],
        help="leave out parameters whose name matches; wins over --include (repeatable)",
    )
    return parser


def device() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    group = parser.add_argument_group("device")
    group.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:<index> (default: auto)")
    group.add_argument(
        "--dtype", type=dtype, metavar="DTYPE",
        help=f"{', '.join(DTYPES)} (default: float16 on a GPU, float32 on a CPU)",
    )
    return parser


def cache() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument_group("cache").add_argument(
        "--cache", type=place, metavar="PATH",
        help="this cache file, or a server's URL, instead of the user cache (and instead of its layers)",
    )
    return parser


def again(args: argparse.Namespace) -> list[str]:
    """What of ``cache`` and ``device`` was given, for a command that is to work on the same; a server without what may
    be a password, which PGPASSWORD or ~/.pgpass hold."""
    cache = ["--cache", _without_password(args.cache)] if args.cache else []
    return [*cache, "--device", args.device] if re.fullmatch(r"cpu|cuda(:[0-9]+)?", args.device) else cache


def _without_password(text: str) -> str:
    from sqlalchemy import URL

    from dmuon_tune.cache.database import locate

    url = locate(text)
    if not isinstance(url, URL):
        return text
    return str(URL.create(url.drivername, url.username, host=url.host, port=url.port, database=url.database))


def place(text: str) -> str:
    """A file, folder or URL: an empty text, as of a shell's unset variable, is none, and not what leaving it out is."""
    if not text:
        raise argparse.ArgumentTypeError("the text is empty; name a place, or leave the option out")
    return text


def dtype(text: str) -> str:
    """A dtype by its name or short name."""
    name = DTYPE_NAMES.get(text.lower(), text.lower())
    if name not in DTYPES:
        raise argparse.ArgumentTypeError(f"unsupported dtype {text!r}; choose one of {', '.join(DTYPES)}")
    return name


def seconds(text: str, or_none: bool = False) -> float:
    """A duration in seconds from ``90s``, ``4m``, ``1h30m`` or plain seconds; ``or_none``: 0 is one, too."""
    number = r"[0-9]+(\.[0-9]+)?"
    if not re.fullmatch(rf"-?((?=.)({number}h)?({number}m)?({number}s)?|{number})", text):
        raise argparse.ArgumentTypeError(f"duration {text!r} is not understood; write 90s, 4m, 1h or 1h30m")
    parts = re.findall(r"([0-9.]+)([smh]?)", text)
    total = sum(float(number) * _UNIT_SECONDS[unit or "s"] for number, unit in parts)
    if text.startswith("-") or not (total or or_none) or total >= 366 * 24 * 3600:
        least = "0 or more" if or_none else "more than 0"
        raise argparse.ArgumentTypeError(f"duration {text!r} is out of range: {least}, less than a year")
    return total


def integer(text: str) -> int:
    """An integer of at most 18 digits."""
    if not re.fullmatch(r"-?[0-9]{1,18}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at most 18 digits")
    return int(text)


def positive(text: str) -> int:
    """An integer of at least 1."""
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer of at most nine digits")
    return int(text)


def trials(text: str) -> int:
    """How many configurations a problem: an integer of at least 1, or ``all``."""
    return ALL_TRIALS if text == "all" else positive(text)


def devices(text: str) -> tuple[str, ...]:
    """Comma-separated devices; a bare number is a GPU's index."""
    return tuple(f"cuda:{name}" if name.isdecimal() else name for name in names(text))


def names(text: str) -> tuple[str, ...]:
    """Comma-separated names."""
    found = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} names nothing; write names with commas between, as in --help")
    return found
