"""end_to_end/demo/losses.py: curves are recorded, and a repetition that goes elsewhere is noticed."""

import json
import pathlib
import sys

import pytest

DEMO = pathlib.Path(__file__).resolve().parents[2] / "end_to_end" / "demo"


@pytest.fixture
def losses(monkeypatch, tmp_path):
  monkeypatch.syspath_prepend(str(DEMO))
  import losses

  monkeypatch.setattr(losses, "RECORD", tmp_path / "losses.json")
  yield losses
  sys.modules.pop("losses")


def write(folder, values, first=1):
  folder.mkdir(parents=True)
  lines = [{"step": first + i, "loss": value} for i, value in enumerate(values)] + [{"step": 1, "eval_loss": 9.0}]
  (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_repetition_is_compared_as_far_as_it_got(losses, tmp_path, capsys):
  values = [2.0 - i / 100 for i in range(100)]
  write(tmp_path / "runs" / "stage", values)
  assert losses.main(["record", str(tmp_path / "runs")]) == 0
  recorded = json.loads((tmp_path / "losses.json").read_text())
  assert len(recorded["stage"]) == 5 and recorded["stage"][0] == pytest.approx(sum(values[:20]) / 20, abs=1e-5)
  write(tmp_path / "again" / "stage", values[:45])
  assert losses.main(["compare", str(tmp_path / "again")]) == 0
  assert "stage: 40 steps, means of 20 differ by 0.00% at most" in capsys.readouterr().out
  write(tmp_path / "wrong" / "stage", [*values[:20], *(1.2 * value for value in values[20:40])])
  assert losses.main(["compare", str(tmp_path / "wrong")]) == 1


def test_what_cannot_be_compared_is_said(losses, tmp_path, capsys):
  write(tmp_path / "runs" / "stage", [1.0] * 20, first=2)
  with pytest.raises(ValueError, match="every step from 1 on"):
    losses.main(["record", str(tmp_path / "runs")])
  with pytest.raises(SystemExit):
    losses.main(["record", str(tmp_path / "nothing")])
  assert "holds no run of at least 20 steps" in capsys.readouterr().err
