"""What each way of keeping states off the device costs, and the largest model it trains, on one device.

    python benchmarks/offload.py       on a GPU if there is one, else on the CPU, where host and device are one
    python benchmarks/offload.py --depth 24 --width 2048 --precision bf16-mixed --rounds 5
    python benchmarks/offload.py --largest --limit-gib 3

Every case is trained by a process of its own, in turn (A B C A B C ...); columns are medians over the rounds. ``off``
cases are this package's policies under the Trainer, ``fsdp2`` is torch's ``fully_shard`` with ``CPUOffloadPolicy`` in a
bare loop, ``deepspeed`` ZeRO-2 with its optimizer on the host, if that package is installed. *Idle* is the part of a
step in which no kernel ran, read off torch's profiler; it means nothing where the host is the device.

With ``--largest`` the depth grows until a case runs out of memory; ``--limit-gib`` bounds the memory that a process may
take for itself, which mapped files are no part of. Results go to the terminal, and as JSON to ``--out``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

VOCABULARY, LENGTH = 512, 128
GIB = 2**30
CASES = (
    "none",
    "off optimizer",
    "off optimizer, no overlap",
    "off optimizer, half",
    "off all",
    "off optimizer, disk",
    "fsdp2",
    "deepspeed",
)


class Decoder(nn.Module):
    """Tokens to logits through like blocks."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        heads = max(1, width // 64)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=x.device, dtype=x.dtype)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(x[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


class Module(pl.LightningModule):
    """Trains a decoder by AdamW."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.net = Decoder(options.depth, options.width)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Clock:
    """Times steps after the first two, and profiles the last."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.seconds: list[float] = []
        self.idle: float | None = None
        self._last = options.steps
        self._count = 0
        self._ended = 0.0
        self._profiler: Any = None

    def begin(self) -> None:
        """A step begins."""
        if self._count == self._last and torch.cuda.is_available():
            self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self._profiler.__enter__()

    def end(self) -> None:
        """A step has ended; it began when the one before did, so that what is put off counts."""
        ended = now()
        seconds, self._ended = ended - self._ended, ended
        self._count += 1
        if self._profiler is not None:
            self._profiler.__exit__(None, None, None)
            self.idle = 1 - busy_seconds(self._profiler) / seconds
            self._profiler = None
        elif self._count > 2:
            self.seconds.append(seconds)


def now() -> float:
    """Seconds, once the device has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def busy_seconds(profiler: Any) -> float:
    """Time in which at least one kernel ran; copies do not count."""
    events = [
        e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA and "Memcpy" not in e.name
    ]
    total, end = 0.0, 0.0
    for start, stop in sorted((e.time_range.start, e.time_range.end) for e in events):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total / 1e6


class Timed(pl.Callback):
    """Starts and stops the clock around batches; it looks at no parameter, so it is said to be the package's own."""

    __module__ = "lightning_par.benchmarks"

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def on_train_batch_start(self, *_: Any) -> None:
        """A step begins."""
        self._clock.begin()

    def on_train_batch_end(self, *_: Any) -> None:
        """It ends."""
        self._clock.end()


def train_by_strategy(options: argparse.Namespace, clock: Clock, policy: Any) -> None:
    """Train under this package's strategy."""
    from lightning_par import ZeROStrategy

    tokens = torch.randint(VOCABULARY, (options.batch * (options.steps + 1), LENGTH))
    trainer = pl.Trainer(
        accelerator="auto",
        devices=1,
        strategy=ZeROStrategy(stage=2, offload=policy, find_unused_parameters=False),
        precision=options.precision,
        max_epochs=1,
        callbacks=[Timed(clock)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(options), DataLoader(TensorDataset(tokens), options.batch))


def train_bare(options: argparse.Namespace, clock: Clock, step: Callable[[Tensor], None]) -> None:
    """Train in a bare loop."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for _ in range(options.steps + 1):
        tokens = torch.randint(VOCABULARY, (options.batch, LENGTH), device=device)
        clock.begin()
        step(tokens)
        clock.end()


def train_fsdp2(options: argparse.Namespace, clock: Clock) -> None:
    """Train under ``fully_shard`` with torch's own offload."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    on_gpu = start_group()
    mixed = (
        MixedPrecisionPolicy(torch.bfloat16, torch.float32) if "bf16" in options.precision else MixedPrecisionPolicy()
    )
    policy = {"offload_policy": CPUOffloadPolicy(pin_memory=on_gpu), "mp_policy": mixed}
    net = Decoder(options.depth, options.width)
    for block in net.blocks:
        fully_shard(block, **policy)
    fully_shard(net, **policy)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)

    def step(tokens: Tensor) -> None:
        optimizer.zero_grad()
        net(tokens).backward()
        optimizer.step()

    train_bare(options, clock, step)


def train_deepspeed(options: argparse.Namespace, clock: Clock) -> None:
    """Train under DeepSpeed's ZeRO-Offload."""
    import deepspeed

    start_group()
    config = {
        "train_micro_batch_size_per_gpu": options.batch,
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu", "pin_memory": torch.cuda.is_available()},
        },
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": not torch.cuda.is_available()}},
        "bf16": {"enabled": "bf16" in options.precision},
    }
    net = Decoder(options.depth, options.width)
    engine, *_ = deepspeed.initialize(model=net, config=config, model_parameters=net.parameters())

    def step(tokens: Tensor) -> None:
        engine.backward(engine(tokens))
        engine.step()

    train_bare(options, clock, step)


def start_group() -> bool:
    """A process group of one rank; whether it is on a GPU."""
    on_gpu = torch.cuda.is_available()
    rendezvous = Path(tempfile.mkdtemp()) / "store"
    torch.distributed.init_process_group(
        "nccl" if on_gpu else "gloo", init_method=f"file://{rendezvous}", rank=0, world_size=1
    )
    return on_gpu


def run_case(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train one case in this process, and say what it took."""
    from lightning_par import OffloadPolicy

    torch.manual_seed(0)
    clock = Clock(options)
    folder = tempfile.TemporaryDirectory(dir=options.disk)
    policies: dict[str, Any] = {
        "none": None,
        "off optimizer": OffloadPolicy(),
        "off optimizer, no overlap": OffloadPolicy(overlap=False),
        "off optimizer, half": OffloadPolicy(fraction=0.5),
        "off all": OffloadPolicy(parameters=True),
        "off optimizer, disk": OffloadPolicy(device="disk", path=folder.name),
    }
    if options.limit_gib:
        resource.setrlimit(resource.RLIMIT_DATA, (int(options.limit_gib * GIB),) * 2)
    if name in policies:
        train_by_strategy(options, clock, policies[name])
    else:
        {"fsdp2": train_fsdp2, "deepspeed": train_deepspeed}[name](options, clock)
    step = statistics.median(clock.seconds)
    return {
        "step_ms": 1000 * step,
        "tokens_per_second": options.batch * LENGTH / step,
        "device_peak_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
        "host_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "idle": clock.idle,
    }


def in_process(name: str, options: argparse.Namespace, **changes: Any) -> dict[str, Any] | None:
    """:func:`run_case` in a process of its own; ``None`` if it ran out of memory.

    Raises:
        RuntimeError: If it failed for another reason.
    """
    given = json.dumps({**vars(options), **changes})
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, __file__, "--case", name, "--given", given]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    if any(
        words in done.stderr for words in ("out of memory", "can't allocate memory", "MemoryError", "Cannot allocate")
    ):
        return None
    raise RuntimeError(f"{name} failed:\n{done.stderr[-2000:]}")


def largest(name: str, options: argparse.Namespace) -> int:
    """Parameters of the deepest model that trains, with depth in steps of a quarter."""
    depth, fits = 4, 0
    while depth <= options.max_depth and in_process(name, options, depth=depth, steps=3) is not None:
        fits, depth = depth, max(depth + 1, depth * 5 // 4)
    return sum(p.numel() for p in Decoder(fits, options.width).parameters()) if fits else 0


def table(results: dict[str, dict[str, Any]], options: argparse.Namespace) -> Table:
    """The results, with ratios to training without offload."""
    shown = Table(title=f"depth {options.depth}, width {options.width}, batch {options.batch} x {LENGTH} tokens")
    for title in ("case", "ms a step", "x none", "tokens/s", "device peak GiB", "host peak GiB", "idle", "largest (M)"):
        shown.add_column(title, justify="left" if title == "case" else "right")
    base = results["none"]["step_ms"] if "none" in results else None
    for name, result in results.items():
        ratio = f"{result['step_ms'] / base:.2f}" if base else ""
        device = result["device_peak_bytes"]
        shown.add_row(
            name,
            f"{result['step_ms']:.1f}",
            ratio,
            f"{result['tokens_per_second']:,.0f}",
            "-" if device is None else f"{device / GIB:.2f}",
            f"{result['host_peak_bytes'] / GIB:.2f}",
            "-" if result["idle"] is None else f"{result['idle']:.0%}",
            "-" if "largest" not in result else f"{result['largest'] / 1e6:.1f}",
        )
    return shown


def machine() -> dict[str, Any]:
    """Where and with what this ran."""
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "CPU",
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / GIB, 1),
        "torch": torch.__version__,
        "lightning": pl.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(["python", *sys.argv]),
    }


def main() -> None:
    """Run the cases in turn and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--disk", default=None, help="folder of the disk tier; by default the system's temporary one")
    parser.add_argument("--largest", action="store_true")
    parser.add_argument("--max-depth", type=int, default=400)
    parser.add_argument("--limit-gib", type=float, default=None)
    parser.add_argument("--out", default=None, help="JSON file")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--given", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(run_case(options.case, argparse.Namespace(**json.loads(options.given)))))
        return
    names = [name for name in options.cases if name != "deepspeed" or find_spec("deepspeed")]
    rounds = [{name: in_process(name, options) for name in names} for _ in range(options.rounds)]
    results = {name: median_of([one[name] for one in rounds if one[name]]) for name in names if rounds[0][name]}
    if options.largest:
        for name in results:
            results[name]["largest"] = largest(name, options)
    Console(width=120).print(table(results, options))
    if options.out:
        Path(options.out).write_text(json.dumps({"machine": machine(), "results": results}, indent=2) + "\n")


def median_of(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Column by column."""
    return {
        key: None if value is None else statistics.median(one[key] for one in results)
        for key, value in results[0].items()
    }


if __name__ == "__main__":
    main()
