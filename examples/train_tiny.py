"""Trains the tiny model with the tuned Muon and with AdamW from the same start, and prints loss and step time."""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Callable

import torch
from tiny_model import TinyModel, batch, loss_floor

from dmuon_tune.runtime import Muon

TEXTS, LINES = 32, 4  # a batch: 32 texts of 4 lines


def train(
    make_optimizer: Callable[[TinyModel], torch.optim.Optimizer], steps: int, device: str
) -> tuple[torch.optim.Optimizer, list[float], float, float]:
    """(Optimizer, loss of every step, median ms a whole step, median ms in the optimizer)."""
    torch.manual_seed(0)
    model = TinyModel().to(device)
    optimizer = make_optimizer(model)
    losses, step_ms, optimizer_ms = [], [], []
    for step in range(steps):
        text = batch(TEXTS, LINES, seed=step).to(device)
        begin = time.perf_counter()
        loss = model.loss(text)
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.item())  # waits for the device
        before = time.perf_counter()
        optimizer.step()
        if device != "cpu":
            torch.cuda.synchronize()
        end = time.perf_counter()
        step_ms.append((end - begin) * 1e3)
        optimizer_ms.append((end - before) * 1e3)
    return optimizer, losses, statistics.median(step_ms), statistics.median(optimizer_ms)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=150)
    args = parser.parse_args()
    if args.steps < 1:
        parser.error("--steps must be at least 1")
    torch.set_num_threads(1)  # matrices this small gain nothing from more, and lose where cores are shared
    # The best of 0.003, 0.006, 0.01 and 0.02 for AdamW, of 0.02 and 0.05 for Muon, by the last loss.
    runs = {
        "AdamW": train(lambda model: torch.optim.AdamW(model.parameters(), lr=0.01), args.steps, args.device),
        "Muon": train(lambda model: Muon(model, lr=0.02, adamw_lr=0.003), args.steps, args.device),
    }
    muon = runs["Muon"][0]
    assert isinstance(muon, Muon)
    for plan in muon.plan():
        products = {(row["problem"], row["origin"], row["kernel"]) for row in plan.rows()}
        origins = Counter(f"{origin} ({kernel.partition('.')[2]})" for _, origin, kernel in products)
        found = ", ".join(f"{count} {origin}" for origin, count in sorted(origins.items()))
        print(f"Muon's products on {plan.fingerprint.name}: {found}")
    print(f"loss in nats a byte; no model can go below {loss_floor(LINES):.3f}")
    print(f"{'step':>9}" + "".join(f"{name:>10}" for name in runs))
    for step in sorted({*range(0, args.steps, max(1, args.steps // 10)), args.steps - 1}):
        print(f"{step:>9}" + "".join(f"{losses[step]:>10.3f}" for _, losses, _, _ in runs.values()))
    for row, index in (("step ms", 2), ("of it opt", 3)):
        print(f"{row:>9}" + "".join(f"{run[index]:>10.2f}" for run in runs.values()))


if __name__ == "__main__":
    main()
