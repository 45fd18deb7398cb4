"""``python -m lightning_par.pipeline_parallel``: what it prints, draws and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_par.pipeline_parallel import SCHEDULES, build_grid, draw_timeline, schedule_named, simulate
from lightning_par.pipeline_parallel.__main__ import main

pytestmark = pytest.mark.unit


def test_prints_the_grid_and_the_figures_beside_the_formula(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--schedule", "1f1b", "--stages", "4", "--microbatches", "8"]) == 0
    printed = capsys.readouterr().out
    rows = {line.split()[0]: line.split()[1:] for line in printed.splitlines() if line.split()}
    assert rows["time"] == ["rank", "0", "rank", "1", "rank", "2", "rank", "3"]
    assert rows["3"] == ["0F3", "1F2", "2F1", "3F0"]
    assert rows["4"] == [".", ".", ".", "3B0"], "a rank that waits shows a dot"
    assert rows["7"] == [".", ".", "|", "3B1"], "a rank that goes on shows a bar"
    assert rows["31"] == ["0B7", ".", ".", "."]
    assert "48 messages received as sent" in printed
    assert rows["bubble"] == ["of", "a", "rank", "9,", "27.3%", "of", "the", "time", "9"]
    assert rows["peak"] == ["activations", "4", "3", "2", "1", "4"]
    assert max(map(len, printed.splitlines())) <= 80


def test_json_has_every_action(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--stages 2 --virtual 3 --costs 3,3,3 --communication 1 --json"
    main(["--schedule", "interleaved_zero_bubble", *options.split()])
    report = json.loads(capsys.readouterr().out)
    grid = build_grid(schedule_named("interleaved_zero_bubble"), 2, 8, 3)
    assert report["ranks"] == [[str(action) for action in actions] for actions in grid.ranks]
    assert report["num_microbatches"] == 8, "4p if not given"
    assert report["published_bubble_time"] == 1, "(p-1)(F+I-W)/v"
    assert report["bubble_time"][0] > 1, "messages take time, of which the formula knows nothing"


def test_formula_that_does_not_hold_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--schedule", "zbv", "--costs", "1,2,1"])
    assert "no published formula fits these numbers" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--schedule 1f2b", "schedule='1f2b' is unknown. Did you mean '1f1b'?"),
        ("--stages 4 --microbatches 3", "num_microbatches=3 does not fit"),
        ("--stages 0", "pipeline_parallel_size=0"),
        ("--stages four", "invalid int value: 'four'"),
        ("--virtual 2", "num_virtual_stages=2 does not fit"),
        ("--costs 1,1", "'1,1' must be three numbers"),
        ("--costs 1,a,1", "'1,a,1' must be three numbers"),
        ("--costs 1,-1,1", "backward_input=-1.0 must be a finite time"),
        ("--picture a.jpg", "picture='a.jpg' must end in .png or .svg"),
        ("--picture /nowhere/a.png", "there is no directory '/nowhere'"),
    ],
)
def test_bad_input_is_one_line_and_code_2(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments.split())
    printed = capsys.readouterr()
    assert stop.value.code == 2
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert message in printed.err
    assert printed.err.count("\n") == 1


def test_help_explains_every_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    printed = capsys.readouterr().out
    assert stop.value.code == 0
    for name, schedule in SCHEDULES.items():
        assert f"{name:<24} {schedule.summary}" in printed


@pytest.mark.parametrize(("suffix", "begins"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_picture(suffix: str, begins: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"schedule.{suffix}"
    main(["--schedule", "zbv", "--stages", "2", "--microbatches", "4", "--picture", str(path)])
    assert path.read_bytes().startswith(begins)


def test_picture_has_a_box_for_each_computation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = pytest.importorskip("matplotlib.figure")
    drawn = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, path: drawn.append(self))
    timeline = simulate(build_grid(schedule_named("interleaved_zero_bubble"), 2, 4, 2))
    draw_timeline(timeline, tmp_path / "a.svg", "two ranks")
    (axes,) = drawn[0].axes
    boxes = {(box.get_y() + box.get_height() / 2, box.get_x(), box.get_width()) for box in axes.patches}
    for rank, spans in enumerate(timeline.ranks):
        assert {(rank, span.start, span.end - span.start) for span in spans} <= boxes
    colours = {box.get_facecolor() for box in axes.patches}
    assert len(colours) == 3 * 2 + 1, "three kinds on two stages, and the bubble"
    assert sorted(text.get_text() for text in axes.texts) == sorted("0123" * 3 * 2 * 2)
    assert drawn[0].get_suptitle() == f"two ranks: bubble {timeline.bubble_share:.1%}"
