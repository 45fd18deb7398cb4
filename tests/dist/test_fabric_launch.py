"""Programs that train by Fabric: a plain script starts its own ranks, and the example runs by itself and by torchrun."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.dist.processes import ROOT, run_program

PROGRAM_SECONDS = 50
"""For a whole program on a busy machine."""
EXAMPLE = [ROOT / "examples" / "fabric_gpt.py", "debug=fast", "trainer=cpu", "hydra.run.dir=run"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

SCRIPT = """
import os
import sys
import time
from pathlib import Path
import torch
from lightning.fabric import Fabric
import lightning_par

before = dict(os.environ)
fabric = Fabric(accelerator="cpu", devices=2, strategy="par_zero2")
fabric.launch()
fabric.launch()  # does nothing
second = Fabric(accelerator="cpu", devices=2, strategy="par_tp")
ranks = second.launch(lambda fabric: fabric.all_gather(torch.tensor(1)).numel())
assert ranks == 1 and second.world_size == 2  # one group of two, which share a batch
module = torch.nn.Linear(2, 2)
model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
loss = fabric.strategy.step(model, torch.ones(4, 2), lambda module, batch: module(batch).mean())
fabric.backward(loss)
optimizer.step()
Path(sys.argv[1], str(fabric.global_rank)).touch()
if fabric.global_rank == 0:
    assert os.environ == before
if sys.argv[2] == "fail":
    if fabric.global_rank == 1:
        raise ValueError("boom on purpose")
    time.sleep(600)
"""


@pytest.mark.parametrize("how", ["finish", "fail"])
def test_script_starts_its_ranks(tmp_path: Path, how: str) -> None:
    (folder := tmp_path / "ranks").mkdir()
    (script := tmp_path / "script.py").write_text(SCRIPT)
    code, _, errors = run_program([script, folder, how], tmp_path, PROGRAM_SECONDS)
    assert sorted(path.name for path in folder.iterdir()) == ["0", "1"], errors
    assert code == (1 if how == "fail" else 0), errors
    assert ("ValueError: boom on purpose" in errors and "ended with exit code 1" in errors) == (how == "fail")


@pytest.mark.parametrize(("strategy", "starter"), [("zero3", []), ("pp", TORCHRUN)])
def test_example(tmp_path: Path, strategy: str, starter: list[str]) -> None:
    cache = f"data.cache_dir={tmp_path / 'cache'}"
    text = tmp_path / "text.txt"
    text.write_text("All happy families are alike. " * 400)
    data = ["data=text", f"data.path={text}", cache]
    code, output, errors = run_program([*starter, *EXAMPLE, *data, f"strategy={strategy}"], tmp_path, PROGRAM_SECONDS)
    assert code == 0, errors
    assert output.count("'val loss'") == 1, output
    content = torch.load(tmp_path / "run" / "last.ckpt", weights_only=True)
    assert content["step"] == 3
    assert content["state_dict"].keys() == content["model"].keys()
