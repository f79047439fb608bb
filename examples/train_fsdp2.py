"""Trains the byte model with FSDP2 and Muon, on GPUs or on a CPU; a checkpoint goes on with any number of ranks.

    torchrun --nproc-per-node 4 examples/train_fsdp2.py --checkpoints run --steps 40
    torchrun --nproc-per-node 2 examples/train_fsdp2.py --checkpoints run --steps 60 --dedicated  # goes on from 40
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from byte_model import ByteModel, Shape, Text
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dmuon_tune.runtime import Muon, dedicate


class Training:
    """What a checkpoint holds: the weights, the optimizer's state and the number of steps done."""

    def __init__(self, model: ByteModel, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer, self.step = model, optimizer, 0

    def state_dict(self) -> dict[str, Any]:
        weights, state = get_state_dict(self.model, self.optimizer)
        return {"model": weights, "optimizer": state, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.step = state["step"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, size in (("layers", 4), ("width", 128), ("heads", 4), ("length", 128), ("batch", 16), ("steps", 40)):
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--dedicated", action="store_true", help="owners keep their matrices whole between steps")
    parser.add_argument("--checkpoints", type=Path, help="a folder; one of its own is written after the last step")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    if args.batch % size:  # it is the whole world's: losses depend on the number of ranks by rounding alone
        parser.error(f"--batch {args.batch} cannot be shared by {size} ranks")
    torch.manual_seed(0)  # every rank begins with the same weights, of which it keeps its shards
    model = ByteModel(Shape(args.layers, args.width, args.heads, args.length)).to(device)
    splits = {"*.qkv.weight": (args.width,) * 3}
    owned = dedicate(model, init_device_mesh(device, (size,)), splits=splits) if args.dedicated else None
    for part in (*model.layers, model):
        fully_shard(part, ignored_params=owned)
    optimizer = Muon(model, lr=0.02, adamw_lr=2e-3, splits=splits)
    training, text = Training(model, optimizer), Text(device)
    if done := [int(path.parent.name) for path in args.checkpoints.glob("*/.metadata")] if args.checkpoints else []:
        dcp.load({"training": training}, checkpoint_id=args.checkpoints / str(max(done)))
    while training.step < args.steps:
        optimizer.zero_grad()
        (loss := model.loss(text.batch(args.batch, args.length, training.step).chunk(size)[rank])).backward()
        optimizer.step()
        training.step += 1
        dist.all_reduce(mean := loss.detach() / size)
        if rank == 0:
            print(f"step {training.step:>4}  loss {mean.item():.4f}", flush=True)
    if args.checkpoints and training.step not in done:
        dcp.save({"training": training}, checkpoint_id=args.checkpoints / str(training.step))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
