"""The demo's evaluation on a tiny model of random weights: every part's figures, its files, and going on where it was."""

import json
import math
import pathlib
import sys

import av
import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "end_to_end"), str(ROOT / "end_to_end" / "demo")]
import evaluate  # noqa: E402
import make_random_wan_folder  # noqa: E402

TINY = ["height=64", "width=64", "num_frames=9", "num_inference_steps=3", "svg_num_sampled_queries=16"]
PROMPTS = ["a red circle moves left over a plain white background", "a blue square grows over a striped grey background"]


def numbers(value):
  """All numbers of a JSON value; None (equal clips) stands for none."""
  values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
  return [value] if isinstance(value, int | float) else [number for item in values for number in numbers(item)]


def picture(path):
  with av.open(str(path)) as container:
    return next(container.decode(video=0)).to_ndarray(format="rgb24")


@pytest.mark.slow
def test_every_part(tmp_path, monkeypatch, capsys):
  model, out = tmp_path / "model", tmp_path / "out"
  assert make_random_wan_folder.main([str(model), "model_name=wan-test"]) == 0
  (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
  monkeypatch.setattr(evaluate.clips, "HELD_OUT_FILE", tmp_path / "prompts.txt")
  monkeypatch.setattr(evaluate, "ROUNDS", 1)
  assert evaluate.main([str(model), str(out), *TINY]) == 0
  results = json.loads((out / "results.json").read_text())
  assert list(results) == list(evaluate.PARTS)
  assert all(math.isfinite(number) for number in numbers(results))

  judged = results["held_out"]
  assert judged["prompts"] == 2 and all(len(judged[name]["verdicts"]) == 2 for name in ("dense", "svg"))
  assert all(judged[name]["right"] == 0 for name in ("dense", "svg"))  # noise shows no prompt
  assert set(results["presets"]["mean"]) == {"noise_floor", *evaluate.PRESETS}
  assert set(results["routing"]["mean"]) == {"routed", *evaluate.FORCED}
  assert results["routing"]["by_prompt"]["routed"] == results["presets"]["by_prompt"]["aggressive"]
  assert results["speed"]["dense_seconds"] > 0 and 0 < results["speed"]["predicted_time_ratio"] <= 1

  def routes(variant):
    return np.load(out / "clips" / variant / "000.npz")["routes"]

  dense, found, inverted = routes("dense"), routes("aggressive"), routes("inverted")
  assert dense.shape == (3, 2, 2, 4) and (dense == -1).all()  # no head of a dense clip was routed
  assert set(np.unique(routes("spatial"))) == {-1, 0} and set(np.unique(routes("temporal"))) == {-1, 1}
  first = results["routes"]["sparse_steps"][0]
  layer = int(np.argmax(found[first].max((1, 2)) >= 0))  # up to here both have computed the same
  np.testing.assert_array_equal(inverted[first, layer], 1 - found[first, layer])
  assert results["routes"]["spatial"] + results["routes"]["temporal"] == (found >= 0).sum()

  # Pictures: a row of six frames a prompt; the clip's first frame is on top left, within its white border.
  frames = np.load(out / "clips/dense/000.npz")["frames"]
  sheet = picture(out / "dense.png")
  assert frames.shape == (9, 64, 64, 3) and sheet.shape == (2 * 68, 6 * 68, 3)
  np.testing.assert_array_equal(sheet[2:66, 2:66], frames[0])
  assert picture(out / "dense_and_svg.png").shape == (2 * 68, 6 * 68, 3)
  colours = {tuple(colour) for colour in picture(out / "routes.png").reshape(-1, 3).tolist()}
  assert colours <= {evaluate.SPATIAL, evaluate.TEMPORAL, evaluate.DENSE, (255, 255, 255)} and len(colours) >= 2
  assert (out / "svg" / "001.mp4").exists() and "routed is best" in (out / "table.txt").read_text()

  # Again: what exists stays; a part whose file is gone is made from the clips that are there.
  (out / "routes.json").unlink()
  monkeypatch.setattr(evaluate.Clips, "denoise", None)
  assert evaluate.main([str(model), str(out), *TINY, "--parts", "held_out,routes"]) == 0
  assert json.loads((out / "results.json").read_text()) == results
  capsys.readouterr()
  assert evaluate.main([str(model), str(out), *TINY, "seed=1"]) == 2
  assert "clips of other weights or settings" in capsys.readouterr().err


def test_equal_clips_have_no_decibels():
  class Same:
    prompts, some = PROMPTS, range(2)

    def clip(self, index, variant):
      return {"frames": np.full((5, 16, 16, 3), 100 + index * (variant == "b"), np.uint8)}

  mean = evaluate.against_dense(Same(), {"one": "a", "other": "b"})["mean"]
  assert mean["one"]["psnr_rgb_db"] is None and mean["one"]["equal_clips"] == 2 and mean["one"]["ssim_rgb"] == 1
  assert mean["other"]["psnr_rgb_db"] == pytest.approx(20 * math.log10(255)) and mean["other"]["equal_clips"] == 1


def test_unknown_part_is_refused(tmp_path, capsys):
  with pytest.raises(SystemExit) as exit:
    evaluate.main([str(tmp_path), str(tmp_path / "out"), "--parts", "sped"])
  assert exit.value.code == 2 and "there is no sped" in capsys.readouterr().err
