"""Draws captioned clips of coloured shapes that move: what the demo model learns from, and what it is asked for.

  python end_to_end/demo/clips.py FOLDER --count 2000 --height 128 --width 128 --num_frames 25 --seed 0

writes FOLDER/000000.mp4 … and captions.jsonl, which `encode_dataset` and `train dataset_type=video` read. Clip i depends
on the seed and on i alone, not on how many there are. 46 clips of that size a second of CPU time (measured, one core).

The grammar, in which every scene has one caption:

  scene       = things [ "and" things ] "over a" pattern tone "background"
  things      = ("a" | "two" | "three") colour shape motion       (verb and noun in the plural; "and" only joins singles)
  colour      = red | yellow | green | cyan | blue | purple
  shape       = circle | square | triangle | star
  motion      = moves left | moves right | moves up | moves down | grows | shrinks | bounces
  pattern     = plain | striped | checkered
  tone        = white | grey | black | beige | slate

Moving is at constant speed, growing at a constant rate; what bounces falls from rest, meets the ground at half time and
rises to where it began. All positions, sizes and times are in units of the picture and of the clip, so one scene drawn in
any size and length shows the same. For each colour and shape one motion is held out: no scene for training shows it.

Dimensions: T frames, H W rows and columns of pixels.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import re
from collections.abc import Sequence

import av
import numpy as np
from av.video.reformatter import ColorPrimaries, ColorRange, Colorspace, ColorTrc

# Hues 45 degrees apart or more, all strongly saturated, so that a blurred edge still has the hue of its inside.
COLOURS = {
  "red": (222, 30, 40),
  "yellow": (245, 215, 30),
  "green": (30, 170, 60),
  "cyan": (20, 200, 215),
  "blue": (35, 75, 225),
  "purple": (180, 50, 215),
}
SHAPES = ("circle", "square", "triangle", "star")
MOTIONS = ("moves left", "moves right", "moves up", "moves down", "grows", "shrinks", "bounces")
PATTERNS = ("plain", "striped", "checkered")
# The tone and the second tone of its pattern. Nearly without saturation, unlike every colour above.
TONES = {
  "white": ((240, 240, 240), (208, 208, 208)),
  "grey": ((150, 150, 150), (120, 120, 120)),
  "black": ((18, 18, 18), (52, 52, 52)),
  "beige": ((222, 210, 188), (196, 184, 162)),
  "slate": ((66, 76, 94), (94, 104, 122)),
}
Window = tuple[int, int, int, int]  # top, left, height and width in pixels
NUMBERS = {"a": 1, "two": 2, "three": 3}
DEFAULT_PROMPT = "a yellow square grows over a striped slate background"
HELD_OUT_FILE = pathlib.Path(__file__).with_name("held_out_prompts.txt")

CELL = 1 / 8  # width of a stripe, side of a square of the checkered pattern; of the picture's shorter side
MARGIN = 0.02  # around every thing, of the picture
HORIZONTAL, VERTICAL = ("moves left", "moves right"), ("moves up", "moves down", "bounces")
IN_PLACE = ("grows", "shrinks")
# Diameters as fractions of the picture's shorter side, by how many things there are; of growing things the largest.
SIZES = {1: (0.36, 0.48), 2: (0.23, 0.27), 3: (0.23, 0.27)}
GROWN_SIZES = {1: (0.52, 0.68), 2: (0.38, 0.44), 3: (0.27, 0.29)}
# The VAE begins with smaller things: more edges in a small picture.
SMALL_SIZES = {1: (0.25, 0.40), 2: (0.18, 0.25), 3: (0.18, 0.25)}
SMALL_GROWN_SIZES = {1: (0.44, 0.60), 2: (0.34, 0.42), 3: (0.27, 0.29)}
TRAVEL = (0.35, 0.60)  # of the picture's width or height, over the clip
GROWTH = (2.0, 2.5)  # largest diameter by smallest
STAR_INNER = 0.5  # radius of a star's inner corners by that of its tips


@dataclasses.dataclass(frozen=True)
class Group:
  """Things of one kind, as a caption names them."""

  count: int
  colour: str
  shape: str
  motion: str

  @property
  def combination(self) -> tuple[str, str, str]:
    return self.colour, self.shape, self.motion

  def __str__(self) -> str:
    if self.count == 1:
      return f"a {self.colour} {self.shape} {self.motion}"
    number = next(word for word, count in NUMBERS.items() if count == self.count)
    return f"{number} {self.colour} {self.shape}s {_plural_verb(self.motion)}"


@dataclasses.dataclass(frozen=True)
class Description:
  """What a caption says; `str` gives the caption."""

  groups: tuple[Group, ...]
  pattern: str
  tone: str

  def __str__(self) -> str:
    return f"{' and '.join(map(str, self.groups))} over a {self.pattern} {self.tone} background"


@dataclasses.dataclass(frozen=True)
class Thing:
  """One shape and its path.

  x, y: its centre at the clip's start, as fractions of the picture's width and height, from the top left.
  size: its diameter at the start, as a fraction of the picture's shorter side.
  change: how far it travels, as a fraction of width or height (bounces: from the top to the ground); of growing and
    shrinking, the last diameter by the first.
  """

  colour: str
  shape: str
  motion: str
  x: float
  y: float
  size: float
  change: float

  def path(self, time_T: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x, y and size, each [T], at moments of the clip from 0, its first frame, to 1, its last."""
    along_T = {
      "moves left": -time_T,
      "moves right": time_T,
      "moves up": -time_T,
      "moves down": time_T,
      "bounces": np.where(time_T < 0.5, (2 * time_T) ** 2, (2 - 2 * time_T) ** 2),
    }.get(self.motion, 0 * time_T)
    still_T = np.zeros_like(time_T)
    x_T = self.x + (self.change * along_T if self.motion in HORIZONTAL else still_T)
    y_T = self.y + (self.change * along_T if self.motion in VERTICAL else still_T)
    size_T = self.size * (1 + (self.change - 1) * time_T if self.motion in IN_PLACE else 1 + still_T)
    return x_T, y_T, size_T


@dataclasses.dataclass(frozen=True)
class Scene:
  """A clip in units of the picture: what `draw` draws in any size and length."""

  description: Description
  things: tuple[Thing, ...]

  @property
  def caption(self) -> str:
    return str(self.description)


# --- grammar


def _plural_verb(motion: str) -> str:
  verb, _, rest = motion.partition(" ")
  return f"{verb[:-1]} {rest}".strip()


def parse(caption: str) -> Description:
  """What a caption of the grammar says.

  Raises:
    ValueError: it is not of the grammar.
  """
  verbs = [form for motion in MOTIONS for form in (motion, _plural_verb(motion))]
  motions = {form: motion for motion in MOTIONS for form in (motion, _plural_verb(motion))}
  things = rf"({'|'.join(NUMBERS)}) ({'|'.join(COLOURS)}) ({'|'.join(SHAPES)})s? ({'|'.join(verbs)})"
  whole = rf"{things}(?: and {things})? over a ({'|'.join(PATTERNS)}) ({'|'.join(TONES)}) background"
  match = re.fullmatch(whole, caption.strip())
  if match:
    words = match.groups()
    groups = tuple(Group(NUMBERS[number], colour, shape, motions[verb])
                   for number, colour, shape, verb in (words[:4], words[4:8]) if number)
    description = Description(groups, words[8], words[9])
    if str(description) == caption.strip() and (len(groups) == 1 or all(group.count == 1 for group in groups)):
      return description
  raise ValueError(f"{caption!r} is not a caption of the demo's grammar, such as {DEFAULT_PROMPT!r}")


def held_out_combinations() -> list[tuple[str, str, str]]:
  """24 combinations of colour, shape and motion that no training scene shows: for each colour and shape, one motion.

  Each colour is in 4 of them, each shape in 6, each motion in 3 or 4; neighbours differ in colour, shape and motion.
  """
  colours, combinations = list(COLOURS), []
  for i in range(len(colours) * len(SHAPES)):
    colour, shape = i % len(colours), (i + i // 12) % len(SHAPES)  # every pair once
    combinations.append((colours[colour], SHAPES[shape], MOTIONS[(colour + 2 * shape) % len(MOTIONS)]))
  return combinations


def held_out_prompts() -> list[str]:
  """24 prompts, one for each held-out combination: 18 of one thing, 6 of two; every background occurs."""
  backgrounds = [(pattern, tone) for tone in TONES for pattern in PATTERNS]
  prompts = []
  for i, combination in enumerate(held_out_combinations()):
    pattern, tone = backgrounds[i * 4 % len(backgrounds)]
    prompts.append(str(Description((Group(2 if i % 4 == 3 else 1, *combination),), pattern, tone)))
  return prompts


# --- scenes


def sample_description(rng: np.random.Generator, split: str = "train") -> Description:
  """60 % one thing, 20 % two or three of a kind, 20 % two of different colours.

  Args:
    split: train shows no held-out combination, held_out shows them alone.
  """
  held_out = set(held_out_combinations())

  def group(count: int, colours: Sequence[str]) -> Group:
    while True:
      combination = tuple(str(rng.choice(words)) for words in (colours, SHAPES, MOTIONS))
      if (combination in held_out) == (split == "held_out"):
        return Group(count, *combination)

  kind = rng.random()
  if kind < 0.6:
    groups = (group(1, list(COLOURS)),)
  elif kind < 0.8:
    groups = (group(int(rng.integers(2, 4)), list(COLOURS)),)
  else:
    first = group(1, list(COLOURS))
    groups = (first, group(1, [colour for colour in COLOURS if colour != first.colour]))
  return Description(groups, str(rng.choice(PATTERNS)), str(rng.choice(list(TONES))))


def make_scene(description: Description, rng: np.random.Generator, small: bool = False) -> Scene:
  """Places the things of a description: inside the picture, apart from one another at every moment."""
  sizes, grown_sizes = (SMALL_SIZES, SMALL_GROWN_SIZES) if small else (SIZES, GROWN_SIZES)
  groups = [group for group in description.groups for _ in range(group.count)]
  boxes = _lanes([group.motion for group in groups], rng)
  things, drawn = [], {}
  for group, box in zip(groups, boxes, strict=True):
    if group not in drawn:  # things of a kind share size and speed
      grows = group.motion in IN_PLACE
      size = rng.uniform(*(grown_sizes if grows else sizes)[len(groups)])
      room = box[2] - box[0] if group.motion in HORIZONTAL else box[3] - box[1]
      farthest = min(TRAVEL[1], room - 2 * MARGIN - size)
      drawn[group] = size, rng.uniform(*GROWTH) if grows else rng.uniform(TRAVEL[0], farthest)
    things.append(_place(group, box, *drawn[group], rng))
  return Scene(description, tuple(things))


def sample_scene(seed: int, index: int, split: str = "train", small: bool = False) -> Scene:
  """Scene `index` of a split; depends on nothing else."""
  rng = np.random.default_rng([seed, index, ("train", "held_out").index(split)])
  return make_scene(sample_description(rng, split), rng, small)


def prompt_scene(prompt: str, seed: int = 0) -> Scene:
  """A scene that a prompt of the grammar describes."""
  return make_scene(parse(prompt), np.random.default_rng([seed, *prompt.encode()]))


def _lanes(motions: Sequence[str], rng: np.random.Generator) -> list[tuple[float, float, float, float]]:
  """A part of the picture for each thing, (left, top, right, bottom): long in the direction of its motion."""
  n = len(motions)
  across, down = any(m in HORIZONTAL for m in motions), any(m in VERTICAL for m in motions)
  # One moves across and the other up or down: a narrow lane for one, the rest, still long enough, for the other.
  as_rows = across if across != down else rng.random() < 0.5
  shares = [1 / n] * n
  if across and down:
    along = HORIZONTAL if as_rows else VERTICAL
    shares = [0.34 if motion in along else 0.66 for motion in motions]
  order = rng.permutation(n)
  boxes, begin = [(0.0, 0.0, 1.0, 1.0)] * n, 0.0
  for i in order:
    end = begin + shares[i]
    boxes[i] = (0.0, begin, 1.0, end) if as_rows else (begin, 0.0, end, 1.0)
    begin = end
  return boxes


def _place(group: Group, box, size: float, change: float, rng: np.random.Generator) -> Thing:
  """Puts a thing where its whole path, at its largest, lies inside the box."""
  reach = size / 2 + MARGIN
  left, top, right, bottom = box[0] + reach, box[1] + reach, box[2] - reach, box[3] - reach
  motion = group.motion
  left += change if motion == "moves left" else 0
  right -= change if motion == "moves right" else 0
  top += change if motion == "moves up" else 0
  bottom -= change if motion in ("moves down", "bounces") else 0
  x, y = rng.uniform(left, right), rng.uniform(top, bottom)
  if motion == "grows":
    size /= change
  elif motion == "shrinks":
    change = 1 / change
  return Thing(group.colour, group.shape, motion, x, y, size, change)


# --- drawing


def draw(scene: Scene, num_frames: int, height: int, width: int, window: Window | None = None) -> np.ndarray:
  """The clip of a scene, or a window of it: uint8 [T, H, W, 3], edges softened over one pixel."""
  top, left, down, across = window or (0, 0, height, width)
  frames_THW3 = np.empty((num_frames, down, across, 3), np.uint8)
  frames_THW3[:] = np.rint(_background(scene.description, height, width)[top : top + down, left : left + across])
  unit = min(height, width)
  time_T = np.linspace(0, 1, num_frames) if num_frames > 1 else np.zeros(1)
  for thing in scene.things:
    colour = np.array(COLOURS[thing.colour], np.float32)
    for frame_HW3, x, y, size in zip(frames_THW3, *thing.path(time_T), strict=True):
      x, y, radius = x * width - left, y * height - top, size * unit / 2
      rows = slice(max(0, int(y - radius) - 1), max(0, min(down, int(y + radius) + 3)))
      columns = slice(max(0, int(x - radius) - 1), max(0, min(across, int(x + radius) + 3)))
      across_W = np.arange(columns.start, columns.stop, dtype=np.float32) + np.float32(0.5 - x)
      down_H = np.arange(rows.start, rows.stop, dtype=np.float32) + np.float32(0.5 - y)
      outside_HW = signed_distance(thing.shape, across_W[None, :], down_H[:, None], radius)
      cover_HW1 = np.clip(0.5 - outside_HW, 0, 1)[..., None]
      window_HW3 = frame_HW3[rows, columns]
      window_HW3[:] = np.rint(window_HW3 + cover_HW1 * (colour - window_HW3))
  return frames_THW3


def sample_window(scene: Scene, rng: np.random.Generator, height: int, width: int, side: int) -> Window:
  """A square part of the picture, as near to where some thing is at some moment as its edges allow."""
  thing, moment = scene.things[rng.integers(len(scene.things))], rng.uniform(size=1)
  x, y, size = (float(value[0]) for value in thing.path(moment))
  spread = size * min(height, width) / 2
  top, left = (int(np.clip(place + rng.uniform(-spread, spread) - side / 2, 0, room - side))
               for place, room in ((y * height, height), (x * width, width)))
  return top, left, side, side


def _background(description: Description, height: int, width: int) -> np.ndarray:
  """float32 [H, W, 3]: always the same for one pattern and tone, from the top left corner on."""
  first, second = (np.array(colour, np.float32) for colour in TONES[description.tone])
  cell = CELL * min(height, width)

  def second_share(pixels: int) -> np.ndarray:
    """How much of each pixel along one side lies in the second of two alternating cells."""
    place = (np.arange(pixels, dtype=np.float32) + 0.5) / cell % 2
    return np.clip(0.5 + cell * (0.5 - np.abs(place - 1.5)), 0, 1)

  down_H1, across_1W = second_share(height)[:, None], second_share(width)[None, :]
  share_HW = {
    "plain": 0 * down_H1 * across_1W,
    "striped": 0 * down_H1 + across_1W,
    "checkered": down_H1 + across_1W - 2 * down_H1 * across_1W,
  }[description.pattern]
  return first + share_HW[..., None] * (second - first)


def signed_distance(shape: str, x: np.ndarray, y: np.ndarray, radius: float) -> np.ndarray:
  """Distance to a shape's outline, negative inside, near the outline in pixels; x to the right, y down from its centre.

  A shape fits into a square of side 2 radius; a square has about the area of the circle; triangles and stars stand
  upright.
  """
  if shape == "circle":
    return np.sqrt(x * x + y * y) - np.float32(radius)
  if shape == "square":
    return np.maximum(np.abs(x), np.abs(y)) - np.float32(0.9 * radius)
  if shape == "triangle":  # equilateral, its base as wide as the circle
    y = y - np.float32(0.289 * radius)  # from the middle of its height to its centroid
    slope = np.float32(np.sqrt(3) / 2) * np.abs(x) - np.float32(0.5) * y
    return np.maximum(slope, y) - np.float32(radius / np.sqrt(3))
  if shape == "star":
    outer = np.float32(1.04 * radius)  # as wide as the circle
    x, up = np.abs(x), np.float32(0.0955) * outer - y
    # Mirrored at the lines through the inner corners, seen from the centre, until only half of the upper tip is left.
    for degrees in (108, 36):
      cos, sin = np.float32(np.cos(np.deg2rad(degrees))), np.float32(np.sin(np.deg2rad(degrees)))
      beyond = np.maximum(x * cos - up * sin, 0)
      x, up = x - 2 * cos * beyond, up + 2 * sin * beyond
    edge_x, edge_up = STAR_INNER * np.sin(np.deg2rad(36)), STAR_INNER * np.cos(np.deg2rad(36)) - 1  # tip to inner corner
    length = np.hypot(edge_x, edge_up)
    return np.float32(-edge_up / length) * np.abs(x) + np.float32(edge_x / length) * (up - outer)
  raise ValueError(f"shape={shape!r}: must be one of {', '.join(SHAPES)}")


# --- files


def write_clip(path: pathlib.Path, frames_THW3: np.ndarray, fps: float) -> None:
  """Writes an mp4 with full-resolution colour, visually lossless: H.264, yuv444p, BT.709."""
  _, height, width, _ = frames_THW3.shape
  with av.open(str(path), "w", format="mp4") as container:
    stream = container.add_stream("libx264", rate=fps, options={"crf": "8", "preset": "ultrafast"})
    stream.height, stream.width, stream.pix_fmt = height, width, "yuv444p"
    context = stream.codec_context
    context.thread_count = 1  # short clips: threads cost more than they bring
    context.color_range, context.colorspace = ColorRange.MPEG, 1  # 1: tagged as BT.709
    context.color_primaries, context.color_trc = ColorPrimaries.BT709, ColorTrc.BT709
    for index, frame_HW3 in enumerate(frames_THW3):
      frame = av.VideoFrame.from_ndarray(frame_HW3, format="rgb24")
      frame = frame.reformat(format="yuv444p", dst_colorspace=Colorspace.ITU709, src_color_range=ColorRange.JPEG,
                             dst_color_range=ColorRange.MPEG, threads=1)
      frame.pts = index
      container.mux(stream.encode(frame))
    container.mux(stream.encode(None))


def write_folder(folder: pathlib.Path, count: int, height: int, width: int, num_frames: int, fps: int, seed: int,
                 split: str, small: bool = False, window: int | None = None) -> None:
  """Writes clips 0 … count - 1 of a split, and last captions.jsonl: a folder that has it is whole.

  Args:
    small: smaller things.
    window: None, or the side in pixels of a part of each clip to write in place of all of it; for training a VAE.
  """
  folder.mkdir(parents=True, exist_ok=True)
  lines = []
  for index in range(count):
    scene = sample_scene(seed, index, split, small)
    name = f"{index:06d}.mp4"
    part = window and sample_window(scene, np.random.default_rng([seed, index, 2]), height, width, window)
    write_clip(folder / name, draw(scene, num_frames, height, width, part), fps)
    lines.append(json.dumps({"file": name, "caption": scene.caption}) + "\n")
  (folder / "captions.jsonl").write_text("".join(lines))


def main(argv: Sequence[str] | None = None) -> None:
  parser = argparse.ArgumentParser(description="Draws captioned clips of coloured shapes that move.")
  parser.add_argument("folder", type=pathlib.Path)
  parser.add_argument("--count", type=int, default=2000)
  parser.add_argument("--height", type=int, default=128)
  parser.add_argument("--width", type=int, default=128)
  parser.add_argument("--num_frames", type=int, default=25)
  parser.add_argument("--fps", type=int, default=16)
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--small", action="store_true", help="draw smaller things")
  parser.add_argument("--window", type=int, help="side of a part of each clip, in pixels, to write in place of all of it")
  parser.add_argument("--split", choices=("train", "held_out"), default="train")
  arguments = vars(parser.parse_args(argv))
  for key in ("count", "height", "width", "num_frames", "fps"):
    if arguments[key] < 1:
      parser.error(f"--{key}={arguments[key]}: must be at least 1")
  smaller = min(arguments["height"], arguments["width"])
  if arguments["window"] is not None and not 1 <= arguments["window"] <= smaller:
    parser.error(f"--window={arguments['window']}: must be from 1 to {smaller}, the clip's smaller side")
  write_folder(**arguments)


if __name__ == "__main__":
  main()
