"""Trains a GPT-2-shaped model on bytes with AdamW and with Muon, a sweep of learning rates each, and compares steps.

    python examples/train_bytes.py                 # GPT-2 small, 300 steps a run, on a GPU: some minutes
    python examples/train_bytes.py --layers 2 --width 64 --heads 4 --length 64 --batch 8 --steps 40 --device cpu

Losses are of held-out text, in nats a byte. Muon's embeddings, head, norms and biases are AdamW's, at the rate that was
best for AdamW. Each rate begins with 5 % of warm-up and falls in a line to a tenth. The last lines say in how many of
its own steps Muon was at AdamW's last loss, what a Muon run of 70 % of the steps ends at, and whether its run repeats
to the bit.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what a repeatable cuBLAS asks for

import torch
from byte_model import ByteModel, Shape, Text
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from dmuon_tune.runtime import Muon

WARM_UP, LAST_RATE = 0.05, 0.1
SHORTER = 0.7  # the part of the steps that Muon should need
CHECKS, HELD_OUT_BATCHES = 30, 4  # validations a run, batches of each
ADAMW_RATES, MUON_RATES = "6e-5,1.2e-4,2.5e-4,5e-4,1e-3", "0.01,0.02,0.04,0.08"

Make = Callable[[ByteModel], Optimizer]


@dataclass
class Run:
    """One run: held-out losses by step, the time of its optimizer, and a sum of its weights' bits."""

    optimizer: str
    rate: float
    steps: int
    losses: dict[int, float] = field(default_factory=dict)
    optimizer_ms: float = 0.0
    step_ms: float = 0.0
    fingerprint: int = 0

    @property
    def last_loss(self) -> float:
        return self.losses[self.steps]

    def first_step_at(self, loss: float) -> int | None:
        """The first validated step whose loss is this or less."""
        return next((step for step, value in self.losses.items() if value <= loss), None)


def rate_of(step: int, steps: int) -> float:
    """The part of its rate that a step runs at."""
    warm = max(1, round(WARM_UP * steps))
    return (step + 1) / warm if step < warm else 1 - (1 - LAST_RATE) * (step - warm) / max(1, steps - warm)


def train(run: Run, make: Make, shape: Shape, text: Text, batch: int, seed: int, device: str) -> Run:
    """Train one model from the seed's start on the seed's batches."""
    torch.manual_seed(seed)
    model = ByteModel(shape).to(device)
    optimizer = make(model)
    schedule = LambdaLR(optimizer, lambda step: rate_of(step, run.steps))
    every = max(1, run.steps // CHECKS)
    spent = 0.0
    synchronize = torch.cuda.synchronize if device != "cpu" else lambda: None
    begin = time.perf_counter()
    validating = 0.0
    for step in range(run.steps):
        optimizer.zero_grad()
        model.loss(text.batch(batch, shape.length, seed=10**6 * seed + step)).backward()
        synchronize()
        before = time.perf_counter()
        optimizer.step()
        synchronize()
        spent += time.perf_counter() - before
        schedule.step()
        if (step + 1) % every == 0 or step + 1 == run.steps:
            before = time.perf_counter()
            run.losses[step + 1] = validate(model, shape, text, batch)
            validating += time.perf_counter() - before
    run.step_ms = (time.perf_counter() - begin - validating) / run.steps * 1e3
    run.optimizer_ms = spent / run.steps * 1e3
    run.fingerprint = sum(int(p.detach().contiguous().view(torch.int32).long().sum()) for p in model.parameters())
    return run


@torch.no_grad()
def validate(model: ByteModel, shape: Shape, text: Text, batch: int) -> float:
    """The mean loss of the same held-out batches each time."""
    losses = [model.loss(text.batch(batch, shape.length, seed, held_out=True)) for seed in range(HELD_OUT_BATCHES)]
    return float(torch.stack(losses).mean())


def adamw(rate: float) -> Make:
    return lambda model: torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)


def muon(rate: float, adamw_rate: float, width: int) -> Make:
    """Q, K and V are matrices of their own."""
    splits = {"layers.*.qkv.weight": (width,) * 3}
    return lambda model: Muon(model, lr=rate, adamw_lr=adamw_rate, splits=splits)


def compare(args: argparse.Namespace) -> dict[str, object]:
    shape = Shape(args.layers, args.width, args.heads, args.length)
    text = Text(args.device)

    def trained(name: str, rate: float, make: Make, steps: int = args.steps) -> Run:
        run = train(Run(name, rate, steps), make, shape, text, args.batch, args.seed, args.device)
        print(f"{name:>6}  rate {rate:<7g} {steps:>4} steps  loss {run.last_loss:.4f}  step {run.step_ms:.1f} ms, "
              f"optimizer {run.optimizer_ms:.2f} ms", flush=True)
        return run

    def best(runs: list[Run]) -> Run:
        found = min(runs, key=lambda run: run.last_loss)
        if len(runs) > 1 and found in (runs[0], runs[-1]):
            print(f"{found.optimizer}'s best rate is at the edge of its sweep; widen it")
        return found

    by_adamw = [trained("AdamW", rate, adamw(rate)) for rate in args.adamw_rates]
    theirs = best(by_adamw)
    by_muon = [trained("Muon", rate, muon(rate, theirs.rate, args.width)) for rate in args.muon_rates]
    ours = best(by_muon)
    make = muon(ours.rate, theirs.rate, args.width)
    again, shorter = trained("Muon", ours.rate, make), trained("Muon", ours.rate, make, round(SHORTER * args.steps))
    at = ours.first_step_at(theirs.last_loss)
    repeats = (again.losses, again.fingerprint) == (ours.losses, ours.fingerprint)
    print(f"AdamW's best: {theirs.last_loss:.4f} at rate {theirs.rate:g} after {theirs.steps} steps")
    print(f"Muon's best: {ours.last_loss:.4f} at rate {ours.rate:g}; at AdamW's loss "
          + ("never" if at is None else f"by step {at}, {at / theirs.steps:.0%} of AdamW's"))
    print(f"Muon in {shorter.steps} steps, {SHORTER:.0%}: {shorter.last_loss:.4f}, "
          f"{'reaches' if shorter.last_loss <= theirs.last_loss else 'misses'} AdamW's loss")
    print(f"the same run again: {'equal to the bit' if repeats else 'DIFFERS'}")
    return {
        "runs": [asdict(run) for run in (*by_adamw, *by_muon, again, shorter)], "adamw_loss": theirs.last_loss,
        "muon_loss": ours.last_loss, "muon_at_adamws_loss": at, "shorter_loss": shorter.last_loss, "repeats": repeats,
    }


def rates(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    sizes = {"layers": 12, "width": 768, "heads": 12, "length": 1024, "batch": 32, "steps": 300}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--adamw-rates", type=rates, default=ADAMW_RATES, help=f"default: {ADAMW_RATES}")
    parser.add_argument("--muon-rates", type=rates, default=MUON_RATES, help=f"default: {MUON_RATES}")
    parser.add_argument("--json", type=Path, help="write every loss here")
    args = parser.parse_args()
    if min(getattr(args, name) for name in sizes) < 1 or args.width % args.heads:
        parser.error(f"{', '.join(sizes)} must be at least 1, and the heads divide the width")
    if args.device == "cpu":
        torch.set_num_threads(1)  # matrices for a CPU's time gain nothing from more, and lose where cores are shared
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    result = compare(args)
    if args.json:
        args.json.write_text(json.dumps({**vars(args), "json": str(args.json), **result}, indent=1))


if __name__ == "__main__":
    main()
