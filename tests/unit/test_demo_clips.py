"""The demo's clips: the grammar, what is held out, where things are drawn, and the files."""

import pathlib
import sys
from collections import Counter

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "end_to_end" / "demo"))

import clips  # noqa: E402

from MaxText.input_pipeline import video_files  # noqa: E402

SCENES = 2000


@pytest.fixture(scope="module")
def scenes() -> list[clips.Scene]:
  return [clips.sample_scene(0, index) for index in range(SCENES)]


# --- grammar


@pytest.mark.parametrize("caption", [
  "a red circle moves left over a plain grey background",
  "two cyan stars grow over a checkered slate background",
  "three green squares bounce over a striped white background",
  "a red circle moves left and a blue square moves up over a plain beige background",
  "a yellow star bounces and a blue circle moves left over a checkered grey background",
])
def test_caption_and_description(caption):
  assert str(clips.parse(caption)) == caption
  assert clips.prompt_scene(caption).caption == caption


@pytest.mark.parametrize("prompt", [
  "", "a red circle", "a pink circle moves left over a plain grey background",
  "two red circle moves left over a plain grey background",
  "a red circles move left over a plain grey background",
  "two red circles move left and a blue square moves up over a plain grey background",
])
def test_other_words_are_refused(prompt):
  with pytest.raises(ValueError, match="is not a caption of the demo's grammar"):
    clips.parse(prompt)


def test_captions_of_scenes_parse_back(scenes):
  for scene in scenes:
    assert clips.parse(scene.caption) == scene.description


def test_mix(scenes):
  kinds = Counter(tuple(group.count for group in scene.description.groups) for scene in scenes)
  assert kinds[(1,)] == pytest.approx(0.6 * SCENES, rel=0.1)
  assert kinds[(2,)] + kinds[(3,)] == pytest.approx(0.2 * SCENES, rel=0.15)
  assert kinds[(1, 1)] == pytest.approx(0.2 * SCENES, rel=0.15)


# --- what is held out


def test_training_shows_nothing_held_out_and_everything_else(scenes):
  held_out = set(clips.held_out_combinations())
  shown = Counter(group.combination for scene in scenes for group in scene.description.groups)
  assert len(held_out) == 24
  assert not held_out & set(shown)
  assert len(shown) == len(clips.COLOURS) * len(clips.SHAPES) * len(clips.MOTIONS) - 24
  for part in range(3):  # every colour, shape and motion is common in training
    words = Counter()
    for combination, times in shown.items():
      words[combination[part]] += times
    assert min(words.values()) > 0.75 * np.mean(list(words.values()))


def test_held_out_split_shows_nothing_else():
  held_out = set(clips.held_out_combinations())
  for index in range(100):
    assert {group.combination for group in clips.sample_scene(0, index, "held_out").description.groups} <= held_out


def test_held_out_prompts():
  prompts = clips.held_out_prompts()
  groups = [group for prompt in prompts for group in clips.parse(prompt).groups]
  assert [group.combination for group in groups] == clips.held_out_combinations()
  assert Counter(group.count for group in groups) == {1: 18, 2: 6}
  assert clips.HELD_OUT_FILE.read_text().splitlines() == prompts


def test_default_prompt_is_not_held_out():
  held_out = clips.held_out_combinations()
  assert not any(group.combination in held_out for group in clips.parse(clips.DEFAULT_PROMPT).groups)


# --- drawing


def test_things_stay_inside_and_apart(scenes):
  time_T = np.linspace(0, 1, 13)
  for scene in scenes[:800]:
    paths = [thing.path(time_T) for thing in scene.things]
    for x_T, y_T, size_T in paths:
      for centre_T in (x_T, y_T):
        assert (centre_T - size_T / 2).min() > 0 and (centre_T + size_T / 2).max() < 1, scene
    for i, (x_T, y_T, size_T) in enumerate(paths):
      for other_x_T, other_y_T, other_size_T in paths[:i]:
        gap_T = np.maximum(abs(x_T - other_x_T), abs(y_T - other_y_T)) - (size_T + other_size_T) / 2
        assert gap_T.min() > 0.03, scene


def test_sizes_and_travel(scenes):
  for thing in (scene.things[0] for scene in scenes if len(scene.things) == 1):
    if thing.motion in clips.IN_PLACE:
      assert 2.0 <= max(thing.change, 1 / thing.change) <= 2.5
    else:
      assert 0.36 <= thing.size <= 0.48 and 0.35 <= thing.change <= 0.6


def test_what_bounces_comes_back():
  thing = clips.prompt_scene("a red circle bounces over a plain grey background").things[0]
  x_T, y_T, size_T = thing.path(np.linspace(0, 1, 9))
  np.testing.assert_allclose((y_T - y_T[0]) / thing.change, np.array([0, 1, 4, 9, 16, 9, 4, 1, 0]) / 16)
  assert np.ptp(x_T) == 0 and np.ptp(size_T) == 0


@pytest.mark.parametrize("shape,area", [
  ("circle", np.pi), ("square", 1.8**2), ("triangle", 3**0.5), ("star", 5 * 0.5 * np.sin(np.pi / 5) * 1.04**2),
])
def test_area_and_extent_of_shapes(shape, area):
  side_W = np.arange(200) + 0.5
  outside_HW = clips.signed_distance(shape, side_W[None] - 100, side_W[:, None] - 100, 80)
  inside_HW = outside_HW < 0
  assert inside_HW.sum() == pytest.approx(area * 80**2, rel=0.01)
  rows, columns = np.nonzero(inside_HW)
  assert 19 <= rows.min() and rows.max() <= 180 and 19 <= columns.min() and columns.max() <= 180
  np.testing.assert_array_equal(inside_HW, inside_HW[:, ::-1])
  # One pixel further out, the distance grows by one.
  slope_HW = np.hypot(*np.gradient(outside_HW))
  assert np.median(slope_HW[np.abs(outside_HW) < 3]) == pytest.approx(1, abs=0.02)


def test_colours_of_the_drawing():
  frames_THW3 = clips.draw(clips.prompt_scene("a red square moves left over a plain slate background"), 5, 64, 64)
  red = (frames_THW3 == (222, 30, 40)).all(-1).mean()
  slate = (frames_THW3 == (66, 76, 94)).all(-1).mean()
  assert red > 0.03 and slate > 0.7 and red + slate > 0.97  # the rest is the softened edge


@pytest.mark.parametrize("index", (0, 1, 7))
def test_same_scene_in_twice_the_size_and_length(index):
  scene = clips.sample_scene(1, index)
  small_THW3 = clips.draw(scene, 25, 128, 128).astype(np.float32)
  large_THW3 = clips.draw(scene, 49, 256, 256)[::2].reshape(25, 128, 2, 128, 2, 3).mean((2, 4), dtype=np.float32)
  difference = np.abs(small_THW3 - large_THW3)
  assert difference.mean() < 0.3  # of 255: the softened edges alone
  assert np.percentile(difference, 99) < 12


# --- files


@pytest.mark.parametrize("index", [0, 3])
def test_a_window_is_a_part_of_the_whole(index):
  scene = clips.sample_scene(5, index)
  windows = [clips.sample_window(scene, np.random.default_rng(i), 96, 128, 32) for i in range(20)]
  whole = clips.draw(scene, 5, 96, 128).astype(int)
  coloured = 0
  for top, left, height, width in windows:
    assert 0 <= top <= 96 - 32 and 0 <= left <= 128 - 32 and height == width == 32
    part = clips.draw(scene, 5, 96, 128, (top, left, height, width))
    assert np.abs(part - whole[:, top : top + height, left : left + width]).max() <= 1  # rounding at an edge
    coloured += np.ptp(part, axis=-1).max() > 100
  assert coloured > 15 and len(set(windows)) > 10  # most show a thing


def test_files_are_readable_and_do_not_depend_on_count(tmp_path):
  one = ["--height", "64", "--width", "96", "--num_frames", "9", "--seed", "3"]
  clips.main([str(tmp_path / "three"), "--count", "3", *one])
  clips.main([str(tmp_path / "one"), "--count", "1", *one])
  assert (tmp_path / "one/000000.mp4").read_bytes() == (tmp_path / "three/000000.mp4").read_bytes()
  videos, skipped = video_files.find_videos(str(tmp_path / "three"))
  assert len(videos) == 3 and not skipped
  for index, video in enumerate(videos):
    scene = clips.sample_scene(3, index)
    assert video.caption == scene.caption
    read_THW3 = video_files.read_clip(video.path, 64, 96, 9, 16)
    assert np.abs(read_THW3.astype(int) - clips.draw(scene, 9, 64, 96)).mean() < 2
