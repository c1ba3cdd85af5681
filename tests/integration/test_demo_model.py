"""The model that ships with the project: small, and its videos show what their prompts say, dense and sparse."""

import json
import pathlib
import sys

import av
import numpy as np
import pytest

from MaxText import decode, pyconfig

ROOT = pathlib.Path(__file__).parents[2]
sys.path.append(str(ROOT / "end_to_end" / "demo"))
import clips  # noqa: E402
import judge  # noqa: E402

WEIGHTS = ROOT / "weights" / "wan-demo"


def test_size_and_prompt():
  assert sum(path.stat().st_size for path in WEIGHTS.rglob("*")) <= 32 * 2**20
  assert clips.DEFAULT_PROMPT == (WEIGHTS / "prompt.txt").read_text().strip()
  clips.parse(clips.DEFAULT_PROMPT)  # of the grammar


def test_words_it_does_not_know():
  def unknown(prompt):
    return pyconfig.initialize(["configs/video.yml", f"prompt={prompt}"], "decode").unknown_words()

  assert (WEIGHTS / "words.txt").read_text().split() == sorted({
    word for i in range(3000) for word in clips.sample_scene(0, i).caption.split()})
  assert unknown(clips.DEFAULT_PROMPT) == [] and unknown("Two cyan stars move up, over a plain grey background.") == []
  assert unknown("a dog runs over a beige beach, a Dog") == ["dog", "runs", "beach"]


@pytest.mark.parametrize(("prompt", "said"), [
  ("a dog grows", "not trained on 'dog': the video"),
  ("one of ever so many words", "not trained on 'one', 'of', 'ever', 'so', 'many' and more (6 words): the video"),
])
def test_warns_of_words_it_does_not_know(prompt, said, capsys):
  assert decode.main(["configs/video.yml", f"prompt={prompt}", "dry_run=true"]) == 0
  assert said in "".join(capsys.readouterr())


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["flash", "svg"])
def test_first_video_shows_its_prompt(tmp_path, attention):
  """The README's first command, with nothing but its attention."""
  arguments = ["configs/video.yml", f"attention={attention}", f"base_output_directory={tmp_path}", "run_name=first"]
  assert decode.main(arguments) == 0
  with av.open(str(tmp_path / "first" / "video.mp4")) as container:
    video_THW3 = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
  verdict = judge.judge(video_THW3, clips.DEFAULT_PROMPT)
  assert video_THW3.shape == (49, 256, 256, 3) and verdict.right, verdict
  record = json.loads((tmp_path / "first" / "run.json").read_text())
  assert record["config"]["load_parameters_path"]["source"] == "shipped with the project"
