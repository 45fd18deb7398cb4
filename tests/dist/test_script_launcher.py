"""Plain scripts with `Trainer(devices=2, strategy="par_...")`: their own ranks, their ends, and Hydra jobs of them."""

from __future__ import annotations

import csv
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.dist.processes import LEAVE_SECONDS, Program, run_program
from tests.dist.script_parts import FAILED_AT

pytestmark = pytest.mark.timeout(60)

PROGRAM_SECONDS = 50
"""For a whole program on a busy machine."""


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def marks(folder: Path) -> dict[str, list[str]]:
    """Mark -> world size, process number and port."""
    return {path.name: path.read_text().split() for path in sorted(folder.iterdir()) if path.name != FAILED_AT}


ONE_AFTER_ANOTHER = """
import os
import sys
import time
from pathlib import Path
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from tests.dist.script_parts import Mark, make_trainer, model

folder = sys.argv[1]
before = dict(os.environ)
trainer = make_trainer("par_dp", 2, Mark(folder, "dp2"))
module = model()
trainer.fit(module)
trainer.test(module, verbose=False)
make_trainer("par_zero2", 2, Mark(folder, "zero2")).fit(model())
try:
    make_trainer("par_dp", 1, Mark(folder, "never")).fit(model())
except MisconfigurationException as error:
    print(f"refused: {error}")
if trainer.global_rank == 0:
    assert os.environ == before | {"MARKED": "zero2"}
else:
    time.sleep(2)
    Path(folder, "late").touch()
"""


def test_trainers_of_one_script_share_its_ranks(tmp_path: Path) -> None:
    (folder := tmp_path / "marks").mkdir()
    script = write(tmp_path / "script.py", ONE_AFTER_ANOTHER)
    code, output, errors = run_program([script, folder], tmp_path, PROGRAM_SECONDS)
    assert code == 0, errors
    left = marks(folder)
    assert left.pop("late") == []  # rank 0 has waited for it
    assert sorted(left) == [f"{name}-{rank}" for name in ("dp2-fit", "dp2-test", "zero2-fit") for rank in (0, 1)]
    assert {world_size for world_size, _, _ in left.values()} == {"2"}
    for rank in (0, 1):  # the same processes all along
        assert len({left[f"{name}-{rank}"][1] for name in ("dp2-fit", "dp2-test", "zero2-fit")}) == 1
    assert (
        output.count("refused: This Trainer or Fabric has devices=1 and num_nodes=1, but the first one of this script") == 2
    )


FAILING = """
import sys
from tests.dist.script_parts import Fail, make_trainer, model

folder, how, rank = sys.argv[1:]
make_trainer("par_zero2", 2, Fail(folder, how, int(rank), others_are_stuck=True)).fit(model())
"""


def test_failing_rank_ends_the_script(tmp_path: Path) -> None:
    """Whether it raises in a child or is killed in the parent, while the other rank is stuck and deaf."""
    script = write(tmp_path / "script.py", FAILING)

    def run(how: str, rank: int) -> tuple[int, str]:
        (folder := tmp_path / how).mkdir()
        code, _, errors = run_program([script, folder, how, str(rank)], tmp_path, PROGRAM_SECONDS)
        assert time.time() - float((folder / FAILED_AT).read_text()) < LEAVE_SECONDS
        return code, errors

    with ThreadPoolExecutor() as both:
        (code, errors), (killed_code, _) = both.map(run, ("raise", "kill"), (1, 0))
    assert code == 1
    assert killed_code == -signal.SIGKILL
    for text in ("ValueError: boom on purpose", "rank 1 of 2 (", "dp_shard=1", "ended with exit code 1"):
        assert text in errors
    assert 'raise ValueError("boom on purpose")' in errors


SLEEPING = """
import time
from lightning.pytorch import Callback
from tests.dist.script_parts import make_trainer, model

class Sleep(Callback):
    def on_train_batch_start(self, *args):
        print("rank is up", flush=True)
        time.sleep(600)

make_trainer("par_dp", 2, Sleep()).fit(model())
"""


def test_interrupt_ends_the_script(tmp_path: Path) -> None:
    program = Program.start([write(tmp_path / "script.py", SLEEPING)], tmp_path)
    program.wait_for("rank is up", times=2)
    start = time.monotonic()
    program.process.send_signal(signal.SIGINT)
    program.finish(LEAVE_SECONDS)
    program.assert_all_gone()
    assert time.monotonic() - start < LEAVE_SECONDS
    assert program.process.returncode != 0


LEAVING = """
import os
import sys
import time

how = sys.argv[1]
if "LIGHTNING_PAR_PARENT_PROCESS" in os.environ:
    time.sleep(1)
    print("child is up", flush=True)
    if how in ("interrupt", "raise"):
        time.sleep(600)
    raise SystemExit(3)

from tests.dist.processes import spare_lightning

spare_lightning()
from lightning_par.strategies import script_children

children = script_children.Children((), (2, 1), {"NODE_RANK": "0"})
children.start()
if how == "next job":
    children.finish_before_next_job()
if how == "raise":
    script_children.GRACE_SECONDS = 2
    raise ValueError("boom")
"""


def test_how_a_script_leaves_while_a_child_still_runs(tmp_path: Path) -> None:
    script = write(tmp_path / "script.py", LEAVING)
    expected = {
        "fail": (1, "rank 1, process"),
        "next job": (1, "After the end of the earlier job, rank 1, process"),
        "raise": (1, "ValueError: boom"),
        "interrupt": (128 + signal.SIGINT, ""),
    }
    programs = {how: Program.start([script, how], tmp_path) for how in expected}
    programs["interrupt"].wait_for("child is up")
    programs["interrupt"].process.send_signal(signal.SIGINT)
    for how, program in programs.items():
        _, errors = program.finish(LEAVE_SECONDS)
        program.assert_all_gone()
        code, message = expected[how]
        assert (how, program.process.returncode) == (how, code), errors
        assert message in errors


HYDRA_APP = """
import hydra
from hydra.core.hydra_config import HydraConfig
from tests.dist.script_parts import Fail, Mark, make_trainer, model

@hydra.main(version_base="1.3", config_path=".", config_name="app")
def main(cfg):
    output = HydraConfig.get().runtime.output_dir
    assert cfg.output == output and cfg.note == "a=b, [c] 'd'"
    callbacks = [Mark(output, f"job{cfg.job}")]
    if cfg.job == 1:
        callbacks.append(Fail(output, "kill", 1))
    trainer = make_trainer(cfg.strategy, cfg.devices[cfg.job], *callbacks)
    trainer.fit(model())
    make_trainer("par_dp", cfg.devices[cfg.job], Mark(output, "second")).fit(model())
    return float(trainer.world_size)

if __name__ == "__main__":
    main()
"""

HYDRA_CONFIG = """
job: 0
devices: [2, 2, 1]
strategy: par_zero2
note: none
output: ${hydra:runtime.output_dir}
hydra:
  callbacks:
    sweep_report: {_target_: lightning_par.report.SweepReport}
"""


def test_sweep_starts_fresh_ranks_for_each_job(tmp_path: Path) -> None:
    write(tmp_path / "app.py", HYDRA_APP)
    write(tmp_path / "app.yaml", HYDRA_CONFIG)
    subdir = "hydra.sweep.subdir='job=${job}, [x] it\\'s'"
    command = ["app.py", "-m", "job=0,1,2", "note='a=b, [c] \\'d\\''", "hydra.sweep.dir=sweep", subdir]
    code, _, errors = run_program(command, tmp_path, PROGRAM_SECONDS)
    assert code == 1, errors  # one job fails on purpose
    with (tmp_path / "sweep" / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["status"], row["objective"]) for row in rows] == [
        ("completed", "2.0"),
        ("failed", ""),
        ("completed", "1.0"),
    ], errors
    assert "was killed by SIGKILL" in rows[1]["error"]
    ports = set()
    for job, size in enumerate([2, 2, 1]):
        directory = tmp_path / "sweep" / f"job={job}, [x] it's"
        left = {path.name: path.read_text().split() for path in directory.glob("*-fit-*")}
        names = [f"job{job}"] if job == 1 else [f"job{job}", "second"]
        assert sorted(left) == sorted(f"{name}-fit-{rank}" for name in names for rank in range(size))
        assert {world_size for world_size, _, _ in left.values()} == {str(size)}
        job_ports = {port for _, _, port in left.values()}
        assert len(job_ports) == 1
        ports |= job_ports
    assert len(ports) == 3
    assert not (tmp_path / "outputs").exists()  # no rank made a directory of its own
