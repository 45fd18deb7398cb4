"""Train the example GPT in a loop of your own, under any layout; the options are those of ``examples/train.py``.

``python examples/fabric_gpt.py strategy=zero3``, or ``torchrun --nproc-per-node 2 examples/fabric_gpt.py strategy=pp``.
"""

import sys
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone runs as it is, installed or not

import torch
from hydra.utils import instantiate
from lightning.fabric import Fabric
from torch.nn.functional import cross_entropy

from examples.gpt.config import register
from lightning_par.config import hydra_main, resolve
from lightning_par.launch import LaunchSettings, world_size

register()


@hydra_main(config_path="../conf", config_name="train")
def main(config) -> float:
    plain = resolve(config)
    ranks, trainer = LaunchSettings.from_mapping(plain["launch"]), plain["trainer"]
    name = plain["strategy"]["_target_"].rpartition(".")[2]  # the same names as for the Trainer
    strategy = instantiate(plain["strategy"], _target_=f"lightning_par.fabric.{name}")
    resources = {"accelerator": ranks.accelerator, "devices": world_size(ranks) // ranks.nnodes}
    fabric = Fabric(strategy=strategy, num_nodes=ranks.nnodes, precision=trainer["precision"], **resources)
    return fabric.launch(train, plain, **trainer)  # starts the ranks, unless torchrun has


def loss_of(module: torch.nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """What a step computes. Under a pipeline every stage calls it on each micro-batch, and leaves early."""
    tokens, targets = batch
    return cross_entropy(module(tokens).flatten(0, 1).float(), targets.flatten())


def train(fabric: Fabric, config: dict, *, max_steps: int, accumulate_grad_batches: int, **options) -> float:
    fabric.seed_everything(config["seed"], verbose=False)
    data, module = instantiate(config["data"]), instantiate(config["model"])
    module.configure_model()
    optimizer, schedule = module.make_optimizer(max_steps)
    model, optimizer = fabric.setup(module, optimizer)  # `schedule` goes on driving it
    with fabric.rank_zero_first():
        data.prepare_data()
    train_loader, val_loader = fabric.setup_dataloaders(data.train_dataloader(), data.val_dataloader())
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "step": 0}
    if config["ckpt_path"] is not None:
        fabric.load(config["ckpt_path"], state, strict=False)  # by this loop or a Trainer, under any layout
    while True:
        for number, batch in enumerate(train_loader, start=1):
            is_last = number % accumulate_grad_batches == 0
            with fabric.no_backward_sync(model, enabled=not is_last):
                loss = fabric.strategy.step(model, batch, loss_of)
                fabric.backward(loss / accumulate_grad_batches)
            if not is_last:
                continue
            fabric.clip_gradients(model, optimizer, max_norm=options["gradient_clip_val"])
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            state["step"] += 1
            if state["step"] % options["val_check_interval"] == 0 or state["step"] >= max_steps:
                model.eval()
                with torch.no_grad():
                    batches = islice(val_loader, options["limit_val_batches"])
                    losses = torch.stack([fabric.strategy.step(model, batch, loss_of) for batch in batches])
                model.train()
                means = fabric.all_reduce({"train loss": loss.detach(), "val loss": losses.mean()})
                fabric.print(state["step"], {name: round(float(mean), 4) for name, mean in means.items()}, flush=True)
                fabric.save(Path(config["output_dir"], "last.ckpt"), state)
            if state["step"] >= max_steps:
                return float(means["val loss"])


if __name__ == "__main__":
    main()
