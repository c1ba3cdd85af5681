"""The demo's judge: right about drawn clips, also blurred, noisy and compressed ones; refuses other prompts' clips."""

import io
import json
import pathlib
import sys

import av
import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "end_to_end" / "demo"))

import clips  # noqa: E402
import judge  # noqa: E402

HELD_OUT = clips.held_out_prompts()
PROMPT = "a red circle moves left over a plain grey background"


def draw(prompt: str, num_frames: int = 25, height: int = 128, width: int = 128) -> np.ndarray:
  return clips.draw(clips.prompt_scene(prompt), num_frames, height, width)


def to_uint8(video: np.ndarray) -> np.ndarray:
  return np.clip(np.rint(video), 0, 255).astype(np.uint8)


# --- damage


def blurred(video, sigma=2.0):
  radius = int(3 * sigma)
  weights = np.exp(-0.5 * (np.arange(-radius, radius + 1) / sigma) ** 2)
  weights /= weights.sum()
  video = video.astype(np.float32)
  for axis in (1, 2):
    size = video.shape[axis]
    padded = np.pad(video, [(radius, radius) if a == axis else (0, 0) for a in range(4)], mode="edge")
    video = sum(w * np.take(padded, range(i, i + size), axis) for i, w in enumerate(np.float32(weights)))
  return to_uint8(video)


def noisy(video):
  return to_uint8(video + np.random.default_rng(0).normal(0, 20, video.shape))


def halved_and_back(video):
  T, H, W, _ = video.shape
  return to_uint8(video.reshape(T, H // 2, 2, W // 2, 2, 3).mean((2, 4)).repeat(2, 1).repeat(2, 2))


def compressed(video):
  file = io.BytesIO()
  with av.open(file, "w", format="mp4") as container:
    stream = container.add_stream("libx264", rate=16, options={"crf": "30"})
    stream.height, stream.width, stream.pix_fmt = video.shape[1], video.shape[2], "yuv420p"
    for frame in video:
      container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
    container.mux(stream.encode(None))
  file.seek(0)
  with av.open(file) as container:
    return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def all_of_it(video):
  return compressed(noisy(blurred(video)))


def rates(prompts, damage=lambda video: video, **size) -> tuple[int, int]:
  """How many clips are right, and how many are accepted for the next prompt."""
  seen = [judge.observe(damage(draw(prompt, **size))) for prompt in prompts]
  parsed = [clips.parse(prompt) for prompt in prompts]
  right = sum(judge.compare(*pair).right for pair in zip(seen, parsed, strict=True))
  return right, sum(judge.compare(*pair).right for pair in zip(seen, parsed[1:] + parsed[:1], strict=True))


def test_held_out_prompts():
  right, mismatched = rates(HELD_OUT, num_frames=17)
  assert right == 24 and mismatched == 0


def test_scenes_of_training():
  right, mismatched = rates([clips.sample_scene(11, index).caption for index in range(40)], num_frames=9)
  assert right == 40 and mismatched == 0


# Measured: 24 right and 0 mismatched, each.
@pytest.mark.parametrize("damage", [blurred, noisy, halved_and_back, compressed, all_of_it])
def test_damaged_clips(damage):
  right, mismatched = rates(HELD_OUT, damage, num_frames=9)
  assert right >= 23 and mismatched == 0


@pytest.mark.parametrize("size", [(13, 64, 64), (9, 256, 256), (13, 96, 160), (13, 130, 90)])
def test_other_sizes(size):
  both = "a yellow star bounces and a blue circle moves left over a checkered grey background"
  for prompt in (PROMPT, both, HELD_OUT[3]):
    verdict = judge.judge(draw(prompt, *size), prompt)
    assert verdict.right, str(verdict)


# --- each part by itself


@pytest.mark.parametrize("other,wrong", [
  (PROMPT, ()),
  ("a purple circle moves left over a plain grey background", ("colour",)),
  ("a red square moves left over a plain grey background", ("shape",)),
  ("two red circles move left over a plain grey background", ("count",)),
  ("a red circle moves right over a plain grey background", ("motion",)),
  ("a red circle bounces over a plain grey background", ("motion",)),
  ("a red circle shrinks over a plain grey background", ("motion",)),
  ("a blue star moves left over a plain grey background", ("colour", "shape")),
  ("a red circle moves left and a blue circle moves left over a plain grey background",
   ("colour", "shape", "count", "motion")),
])
def test_what_is_wrong(other, wrong):
  verdict = judge.judge(draw(PROMPT, 13), other)
  assert tuple(part for part in ("colour", "shape", "count", "motion") if not getattr(verdict, part)) == wrong
  assert verdict.right == (not wrong)


def test_a_thing_too_many():
  both = "a red circle moves left and a blue circle moves left over a plain grey background"
  verdict = judge.judge(draw(both, 13), PROMPT)
  assert not verdict.colour and not verdict.count


def test_one_of_two_is_another_shape():
  scene = clips.prompt_scene("two red circles move left over a plain grey background")
  first, second = scene.things
  mixed = clips.Scene(scene.description, (first, clips.dataclasses.replace(second, shape="triangle")))
  verdict = judge.judge(clips.draw(mixed, 13, 128, 128), scene.caption)
  assert verdict.colour and verdict.count and verdict.motion and not verdict.shape


def test_backwards_and_still():
  video = draw(PROMPT, 13)
  assert judge.judge(video[::-1], PROMPT.replace("left", "right")).right
  still = judge.judge(np.repeat(video[:1], 13, axis=0), PROMPT)
  assert still.shape and not still.motion


@pytest.mark.parametrize("pixels", [
  np.zeros((9, 64, 64, 3), np.uint8),
  np.full((9, 64, 64, 3), (222, 30, 40), np.uint8),
  np.random.default_rng(0).integers(0, 256, (9, 64, 64, 3), dtype=np.uint8),
], ids=["black", "red", "noise"])
def test_nothing_to_see(pixels):
  verdict = judge.judge(pixels, PROMPT)
  assert not (verdict.colour or verdict.shape or verdict.count or verdict.motion)


def test_a_float_video_is_refused():
  with pytest.raises(ValueError, match=r"must be uint8 \[T, H, W, 3\]"):
    judge.judge(np.zeros((9, 64, 64, 3), np.float32), PROMPT)


def test_label_against_a_literal_mask():
  mask = np.array([[[1, 1, 0, 1], [0, 1, 0, 1], [1, 0, 0, 1], [1, 1, 1, 1]], [[0, 0, 0, 0], [0, 1, 1, 0], [1, 0, 0, 1],
                                                                              [1, 0, 0, 1]]], bool)
  expected = np.array([[[6, 6, 0, 16], [0, 6, 0, 16], [16, 0, 0, 16], [16, 16, 16, 16]],
                       [[0, 0, 0, 0], [0, 23, 23, 0], [29, 0, 0, 32], [29, 0, 0, 32]]])
  np.testing.assert_array_equal(judge.label(mask), expected)


# --- command


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
  folder = tmp_path_factory.mktemp("judged")
  prompts = [PROMPT, HELD_OUT[1], HELD_OUT[4]]
  (folder / "prompts.txt").write_text("\n".join(prompts) + "\n\n")
  for index, prompt in enumerate(prompts):
    clips.write_clip(folder / f"{index:03d}.mp4", draw(prompt, 9, 64, 64), fps=16)
  return folder


def test_command(folder, capsys):
  judge.main(["--prompts", str(folder / "prompts.txt"), str(folder)])
  lines = capsys.readouterr().out.splitlines()
  assert len(lines) == 4
  assert lines[0].startswith(f"{folder / '000.mp4'}: {PROMPT}: right: saw 1 red circle moves left (")
  assert lines[3] == "3 of 3 right (colour 3, shape 3, count 3, motion 3)"


def test_command_mismatched(folder, capsys):
  files = [str(folder / f"{index:03d}.mp4") for index in range(3)]
  judge.main(["--prompts", str(folder / "prompts.txt"), "--mismatched", "--json", *files])
  result = json.loads(capsys.readouterr().out)
  assert result["videos"] == 3 and result["right"] == 0 and result["mismatched"]
  assert result["verdicts"][0]["prompt"] == HELD_OUT[1] and not result["verdicts"][0]["motion"]


def test_command_refuses_another_number_of_prompts(folder, capsys):
  with pytest.raises(SystemExit) as exit_info:
    judge.main(["--prompts", str(folder / "prompts.txt"), str(folder / "000.mp4")])
  assert exit_info.value.code == 2
  assert "1 videos, but" in capsys.readouterr().err
