"""``dmuon-tune doctor``: what this machine can run, and what to install for the rest."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
from pathlib import Path
from typing import Any

from dmuon_tune import __version__

from . import options
from .output import print_json, say, table

COMPILERS = ("g++", "c++", "clang++", "nvcc", "ptxas")


def register(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor", parents=[options.common()], help="say what can run here and what to install",
        description="Say what this machine can run, which backends are missing and what to install for them.",
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:<index> (default: auto)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    findings = _findings(args.device)
    if args.format == "json":
        print_json(findings)
    else:
        _print(findings)
    return 0 if any(backend["available"] for backend in findings["backends"]) else 1


def _findings(device_name: str) -> dict[str, Any]:
    import torch

    from dmuon_tune.backends import backends
    from dmuon_tune.backends.imports import import_failures
    from dmuon_tune.backends.probe import fingerprint
    from dmuon_tune.cache import Layers

    device = fingerprint(device_name)
    broken = import_failures(name for name, backend in backends().items() if backend.unavailable(device) is None)
    with Layers.open() as layers:
        described = layers.descriptions()
    return {
        "dmuon_tune": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": {**device.to_dict(), "kind": device.kind},
        "backends": [_backend(backend, device, broken) for _, backend in sorted(backends().items())],
        "compilers": {name: shutil.which(name) for name in COMPILERS},
        "caches": [
            {**layer, "writable": _writable(Path(layer["path"])) if layer["label"] == "user" else False}
            for layer in described
        ],
    }


def _backend(backend: Any, device: Any, broken: dict[str, str]) -> dict[str, Any]:
    reason = backend.unavailable(device) or broken.get(backend.name)
    toolchain = None
    if reason is None:
        toolchain = backend.toolchain(device).label()
    return {"name": backend.name, "available": reason is None, "toolchain": toolchain, "reason": reason}


def _writable(path: Path) -> bool:
    """Whether the file, or the nearest folder above it that exists, may be written."""
    if path.exists():
        return os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)
    return os.access(next(folder for folder in path.parents if folder.exists()), os.W_OK)


def _print(findings: dict[str, Any]) -> None:
    device = findings["device"]
    say(table(["item", "value"], [
        ["dmuon-tune", findings["dmuon_tune"]],
        ["python", findings["python"]],
        ["torch", findings["torch"]],
        ["device", device["name"]],
        ["arch", device["arch"]],
        ["processors", str(device["sm_count"])],
        ["l2_bytes", str(device["l2_bytes"])],
        ["smem_per_block_bytes", str(device["smem_per_block_bytes"])],
        *([name, where or "not found"] for name, where in findings["compilers"].items()),
    ]))
    say()
    say(table(["backend", "state", "detail"], [
        [backend["name"], "ok" if backend["available"] else "unavailable", backend["toolchain"] or backend["reason"]]
        for backend in findings["backends"]
    ]))
    say()
    say(table(["cache", "state", "entries", "writable", "path"], [
        [cache["label"], cache["state"], cache["entries"], "yes" if cache["writable"] else "no", cache["path"]]
        for cache in findings["caches"]
    ]))
