"""Says from pixels alone whether a clip shows the colour, shape, count and motion that its prompt names.

  python end_to_end/demo/judge.py --prompts end_to_end/demo/held_out_prompts.txt RUN_FOLDER

judges RUN_FOLDER/000.mp4 against the first prompt, and so on; --mismatched judges every clip against the next prompt
instead, which it should refuse. No clip is compared with a drawn one, and the prompt plays no part in what is seen:
`observe` describes a clip, `judge` compares the description with the prompt.

How a clip is seen: backgrounds of the demo's grammar have next to no saturation, so things are connected regions of
chroma unlike the background's. A region's colour is the named colour of the nearest hue; its shape the one whose drawn
outline, at its centre and of its area, differs least, summed over the frames; its motion what changed most over the clip:
place, size, or place and back. The limits allow for blurred edges, wobble and hues somewhat off.

Dimensions: T frames, H W rows and columns of pixels (after shrinking), N regions of a clip.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import itertools
import json
import pathlib
import sys
from collections.abc import Sequence

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import clips  # noqa: E402

from MaxText.video_io import read_video  # noqa: E402

WORK_SIDE = 128  # clips are shrunk by a whole factor until the shorter side is less than twice this
COVER = 0.4  # of a named colour's chroma: where a region begins
LEAST_CHROMA = 60  # of 255, away from the background: what a colour has at least where the background has its hue
SMALLEST = 0.0015  # area of a region, by the shorter side's square; the smallest thing that is drawn has 0.0045
FRAGMENT = 0.3  # regions smaller than this, by the largest of their colour in the frame, are not counted
STAIN = 0.15  # of a region's chroma: less is taken for background when its shape is measured
BORDER, MOST_BLURS = 5, 5  # pixels around a region that its shape is compared in; blurs of 3 x 3 that an outline may have
SHAPE_FRAMES = 13  # of a clip, at most, in which shapes are measured; places and sizes are measured in all
WORST_MISFIT = 0.3  # a shape that fits no better is unclear; drawn clips have 0.05, blurred and noisy ones up to 0.2
PRESENT = 0.5  # of the frames: a colour seen in fewer is not a thing
STEADY = 0.6  # of the frames must show the same number of things
# Changes over the clip that count as a whole one: the middle of what is drawn. Places in pictures, sizes in octaves.
WHOLE_TRAVEL, WHOLE_GROWTH = 0.45, 1.17
LEAST, OTHERS = 0.4, 0.6  # the least share of a whole change, and how much the next largest may be of the largest
# Area by radius squared, and how far below its middle a shape's centre of mass lies, by radius; of clips.signed_distance.
AREAS = {"circle": np.pi, "square": 3.24, "triangle": 3**0.5, "star": 5 * clips.STAR_INNER * np.sin(np.pi / 5) * 1.04**2}
SINKING = {"circle": 0.0, "square": 0.0, "triangle": 0.289, "star": 0.0955 * 1.04}


@dataclasses.dataclass(frozen=True)
class Seen:
  """Things of one colour in a clip. shapes, motions: one for each thing, None where unclear."""

  colour: str
  count: int
  shapes: tuple[str | None, ...]
  motions: tuple[str | None, ...]
  measured: str

  def __str__(self) -> str:
    def words(names):
      return "/".join(sorted({name or "unclear" for name in names})) or "unclear"

    return f"{self.count} {self.colour} {words(self.shapes)} {words(self.motions)} ({self.measured})"


@dataclasses.dataclass(frozen=True)
class Verdict:
  """What is right about a clip, and what was seen, in words."""

  colour: bool
  shape: bool
  count: bool
  motion: bool
  seen: str

  @property
  def right(self) -> bool:
    return self.colour and self.shape and self.count and self.motion

  def __str__(self) -> str:
    wrong = [name for name in ("colour", "shape", "count", "motion") if not getattr(self, name)]
    return f"{'right' if self.right else 'wrong ' + ', '.join(wrong)}: saw {self.seen}"


@dataclasses.dataclass(frozen=True)
class Region:
  """A thing in one frame. x, y: its centre, in pictures. size: square root of its area, by the shorter side.

  misfits: by shape, the area in which its drawn outline differs, by the region's area; empty where not measured.
  """

  colour: str
  x: float
  y: float
  size: float
  misfits: dict[str, float]


def judge(video: np.ndarray, prompt: str) -> Verdict:
  """Whether a clip shows what a prompt of the grammar names.

  Args:
    video: uint8 [T, H, W, 3].
  Raises:
    ValueError: the prompt is not of the grammar; the video is not uint8 [T, H, W, 3] of at least 5 frames.
  """
  return compare(observe(video), clips.parse(prompt))


def compare(seen: Sequence[Seen], description: clips.Description) -> Verdict:
  """A description of a clip against that of a prompt; where no thing has the right colour, it takes what is left."""
  left = {thing.colour: thing for thing in seen}
  matched = {group: left.pop(group.colour) for group in description.groups if group.colour in left}
  colour = len(matched) == len(description.groups) and not left
  for group in description.groups:
    if group not in matched and left:
      matched[group] = left.pop(next(iter(left)))
  pairs = [(group, matched.get(group)) for group in description.groups]
  return Verdict(
    colour=colour,
    shape=all(thing and thing.shapes and set(thing.shapes) == {group.shape} for group, thing in pairs),
    count=not left and all(thing and thing.count == group.count for group, thing in pairs),
    motion=all(thing and thing.motions and set(thing.motions) == {group.motion} for group, thing in pairs),
    seen=", ".join(map(str, seen)) or "nothing",
  )


def observe(video: np.ndarray) -> list[Seen]:
  """Describes a clip, uint8 [T, H, W, 3]: one entry for each colour, the largest things first."""
  if video.dtype != np.uint8 or video.ndim != 4 or video.shape[-1] != 3 or len(video) < 5:
    raise ValueError(f"video is {video.dtype} {video.shape}; must be uint8 [T, H, W, 3] of at least 5 frames")
  frames = find_regions(video)
  seen = []
  for colour in clips.COLOURS:
    of_colour = [_whole(region for region in frame if region.colour == colour) for frame in frames]
    if np.mean([bool(regions) for regions in of_colour]) >= PRESENT:
      size = np.median([regions[0].size for regions in of_colour if regions])
      seen.append((size, _describe(colour, of_colour)))
  return [thing for _, thing in sorted(seen, key=lambda pair: -pair[0])]


def _whole(regions) -> list[Region]:
  """Regions of one colour in one frame without fragments, the largest first."""
  regions = sorted(regions, key=lambda region: -region.size)
  return [region for region in regions if region.size**2 >= FRAGMENT * regions[0].size ** 2]


def _describe(colour: str, frames: Sequence[list[Region]]) -> Seen:
  counts = collections.Counter(len(regions) for regions in frames if regions)
  count, times = counts.most_common(1)[0]
  if times < STEADY * len(frames):
    return Seen(colour, 0, (), (), f"no steady number: {dict(sorted(counts.items()))} things by frames")
  # Times from 0, the first frame, to 1, the last, and the regions of each thing at those times.
  time_T = np.array([t for t, regions in enumerate(frames) if len(regions) == count]) / (len(frames) - 1)
  tracks = _follow([regions for regions in frames if len(regions) == count])
  shapes, motions, measured = [], [], []
  for track in tracks:
    shape, shape_words = _shape(track)
    motion, motion_words = _motion(time_T, track)
    shapes.append(shape)
    motions.append(motion)
    measured.append(f"{shape_words}; {motion_words}")
  return Seen(colour, count, tuple(shapes), tuple(motions), " | ".join(measured))


def _follow(frames: Sequence[list[Region]]) -> list[list[Region]]:
  """The same number of regions in every frame, as one list for each thing: every step takes the shortest way."""
  tracks = [[region] for region in frames[0]]
  for regions in frames[1:]:
    def way(order):
      return sum((track[-1].x - r.x) ** 2 + (track[-1].y - r.y) ** 2 for track, r in zip(tracks, order, strict=True))

    best = min(itertools.permutations(regions), key=way) if len(regions) <= 5 else regions
    for track, region in zip(tracks, best, strict=True):
      track.append(region)
  return tracks


# --- motion and shape of one thing


def _motion(time_T: np.ndarray, track: Sequence[Region]) -> tuple[str | None, str]:
  """What changed most, if it stands out; and the measurements in words."""
  x_T, y_T = np.array([r.x for r in track]), np.array([r.y for r in track])
  octaves_T = np.log2([r.size for r in track])
  if time_T[-1] - time_T[0] < 0.7:
    return None, "seen for less than 0.7 of the clip"
  across, down, growth = (np.polyfit(time_T, values_T, 1)[0] for values_T in (x_T, y_T, octaves_T))
  # One stray frame makes no bounce; in a short clip the lowest place may be seen in one frame alone.
  smooth_T = np.median([y_T[:-2], y_T[1:-1], y_T[2:]], axis=0) if len(y_T) >= 17 else y_T
  fallen_T = smooth_T - np.minimum.accumulate(smooth_T)
  risen_T = smooth_T - np.minimum.accumulate(smooth_T[::-1])[::-1]
  back = float(np.max(np.minimum(fallen_T, risen_T)))
  shares = {
    "moves right" if across > 0 else "moves left": abs(across) / WHOLE_TRAVEL,
    "moves down" if down > 0 else "moves up": abs(down) / WHOLE_TRAVEL,
    "grows" if growth > 0 else "shrinks": abs(growth) / WHOLE_GROWTH,
    "bounces": back / WHOLE_TRAVEL,
  }
  (motion, most), (_, second) = sorted(shares.items(), key=lambda item: -item[1])[:2]
  words = f"x {across:+.2f}, y {down:+.2f}, down and back {back:.2f} of the picture, size x{2**growth:.2f}"
  return motion if most >= LEAST and second <= OTHERS * most else None, words


def _shape(track: Sequence[Region]) -> tuple[str | None, str]:
  """The shape that fits best over the measured frames, the larger the thing the more its frame counts."""
  track = [region for region in track if region.misfits]
  if not track:
    return None, "seen in too few frames"
  weights_T = np.array([region.size**2 for region in track])
  misfits = {shape: float(np.average([region.misfits[shape] for region in track], weights=weights_T))
             for shape in clips.SHAPES}
  best, second = sorted(misfits, key=misfits.get)[:2]
  words = f"{best} off by {misfits[best]:.2f}, {second} by {misfits[second]:.2f}"
  return best if misfits[best] <= WORST_MISFIT else None, words


# --- regions


def find_regions(video: np.ndarray) -> list[list[Region]]:
  """The saturated regions of each frame of a uint8 [T, H, W, 3] clip."""
  frames_THW3 = _shrunk(video)
  num_frames, height, width, _ = frames_THW3.shape
  unit = min(height, width)
  chroma_THW = _chroma(frames_THW3)
  ground = np.median(chroma_THW.real) + 1j * np.median(chroma_THW.imag)
  chroma_THW = _box_blur(chroma_THW - np.complex64(ground))
  strength_THW = np.abs(chroma_THW)
  # Chroma of the named colours over this background: what is blended at an edge points from one to the other.
  named_K = (_chroma(np.array(list(clips.COLOURS.values()))) - ground).astype(np.complex64)
  reach_K = np.maximum(np.abs(named_K), LEAST_CHROMA)
  hues_K = named_K / reach_K
  likely = np.flatnonzero(strength_THW >= COVER * reach_K.min())  # few pixels: the rest is quick
  nearest = _nearest(chroma_THW.ravel()[likely], hues_K)
  inside = likely[strength_THW.ravel()[likely] >= COVER * reach_K[nearest]]
  mask_THW = np.zeros(strength_THW.shape, bool)
  mask_THW.ravel()[inside] = True
  labels_THW = label(mask_THW)

  frames: list[list[Region]] = [[] for _ in range(num_frames)]
  by_label = np.argsort(labels_THW.ravel()[inside], kind="stable")
  edges = np.flatnonzero(np.diff(labels_THW.ravel()[inside][by_label])) + 1
  for pixels in np.split(inside[by_label], edges):
    if len(pixels) < SMALLEST * unit**2:
      continue
    t, rows, columns = np.unravel_index(pixels, mask_THW.shape)
    window = (t[0], slice(max(0, rows.min() - BORDER), rows.max() + 1 + BORDER),
              slice(max(0, columns.min() - BORDER), columns.max() + 1 + BORDER))
    others_HW = mask_THW[window] & (labels_THW[window] != labels_THW[t[0], rows[0], columns[0]])
    # Of the region's own chroma, so that a pale thing has a shape as well; faint stains are left out.
    cover_HW = strength_THW[window] / np.percentile(strength_THW.ravel()[pixels], 75)
    cover_HW = np.where(others_HW | (cover_HW < STAIN), 0, np.minimum(cover_HW, 1))
    colour = list(clips.COLOURS)[_nearest(chroma_THW.ravel()[pixels].sum(keepdims=True), hues_K)[0]]
    with_shape = t[0] % -(-num_frames // SHAPE_FRAMES) == 0
    frames[t[0]].append(_region(colour, cover_HW, window[1].start, window[2].start, height, width, with_shape))
  return frames


def _nearest(chroma_N: np.ndarray, hues_K: np.ndarray) -> np.ndarray:
  """Index of the colour with the nearest hue."""
  return np.argmax((chroma_N[:, None] * hues_K.conj()).real, axis=1)


def _region(colour: str, cover_HW: np.ndarray, top: int, left: int, height: int, width: int, with_shape: bool) -> Region:
  """Measures a thing from how much of each pixel of its window it covers."""
  area = float(cover_HW.sum())
  y = float(cover_HW.sum(1) @ np.arange(cover_HW.shape[0])) / area + 0.5
  x = float(cover_HW.sum(0) @ np.arange(cover_HW.shape[1])) / area + 0.5
  misfits = _misfits(cover_HW, x, y, area) if with_shape else {}
  return Region(colour, (left + x) / width, (top + y) / height, area**0.5 / min(height, width), misfits)


def _misfits(cover_HW: np.ndarray, x: float, y: float, area: float) -> dict[str, float]:
  """By shape: how far it is from one drawn at this centre of mass and of this area, with edges as soft as fit best."""
  across_1W = (np.arange(cover_HW.shape[1], dtype=np.float32) + np.float32(0.5 - x))[None]
  down_H1 = (np.arange(cover_HW.shape[0], dtype=np.float32) + np.float32(0.5 - y))[:, None]
  drawn_KHW = np.empty((len(clips.SHAPES), *cover_HW.shape), np.float32)
  for k, shape in enumerate(clips.SHAPES):
    radius = (area / AREAS[shape]) ** 0.5
    outside_HW = clips.signed_distance(shape, across_1W, down_H1 + np.float32(SINKING[shape] * radius), radius)
    drawn_KHW[k] = np.clip(0.5 - outside_HW, 0, 1)
  misfits_K = np.abs(drawn_KHW - cover_HW).sum((1, 2))
  for _ in range(MOST_BLURS):
    drawn_KHW = _box_blur(drawn_KHW)
    misfits_K = np.minimum(misfits_K, np.abs(drawn_KHW - cover_HW).sum((1, 2)))
  return dict(zip(clips.SHAPES, (misfits_K / area).tolist(), strict=True))


def _shrunk(video: np.ndarray) -> np.ndarray:
  """Averages squares of pixels: as much noise less, and as much less work. float32."""
  num_frames, height, width, _ = video.shape
  by = max(1, min(height, width) // WORK_SIDE)
  height, width = height // by, width // by
  squares = video[:, : height * by, : width * by].reshape(num_frames, height, by, width, by, 3)
  return squares.mean((2, 4), dtype=np.float32)


def _chroma(rgb: np.ndarray) -> np.ndarray:
  """[..., 3] to complex [...]: hue as the angle, saturation times brightness as the modulus; 0 for greys."""
  red, green, blue = np.moveaxis(np.asarray(rgb, np.float32), -1, 0)
  return red - (green + blue) / 2 + np.complex64(1j * 3**0.5 / 2) * (green - blue)


def _box_blur(values_THW: np.ndarray) -> np.ndarray:
  """Mean of 3 x 3 neighbours; edges repeated."""
  rows_THW = values_THW.copy()
  rows_THW[:, 1:] += values_THW[:, :-1]
  rows_THW[:, :-1] += values_THW[:, 1:]
  rows_THW[:, [0, -1]] += values_THW[:, [0, -1]]
  mean_THW = rows_THW.copy()
  mean_THW[..., 1:] += rows_THW[..., :-1]
  mean_THW[..., :-1] += rows_THW[..., 1:]
  mean_THW[..., [0, -1]] += rows_THW[..., [0, -1]]
  return mean_THW / 9


def label(mask_THW: np.ndarray) -> np.ndarray:
  """Numbers the connected regions of every frame (4 neighbours): 0 outside, else 1 + the largest flat index inside."""
  numbers_THW = np.full(mask_THW.shape, -1)
  inside = np.flatnonzero(mask_THW)
  numbers_THW.ravel()[inside] = labels = np.arange(len(inside))
  joins = []
  for here, there in ((np.s_[:, 1:], np.s_[:, :-1]), (np.s_[:, :, 1:], np.s_[:, :, :-1])):
    both = mask_THW[here] & mask_THW[there]
    joins.append((numbers_THW[here][both], numbers_THW[there][both]))
  while True:
    before = labels.copy()
    for a, b in joins:  # no pixel occurs twice in a, nor in b
      labels[a] = np.maximum(labels[a], labels[b])
      labels[b] = np.maximum(labels[a], labels[b])
    labels = labels[labels]  # jump on: a pixel takes the label of the pixel that its label names
    if np.array_equal(labels, before):
      break
  labels_THW = np.zeros(mask_THW.shape, int)
  labels_THW.ravel()[inside] = inside[labels] + 1
  return labels_THW


# --- command


def main(argv: Sequence[str] | None = None) -> None:
  parser = argparse.ArgumentParser(description="Judges clips against the prompts they were made from.")
  parser.add_argument("videos", nargs="+", type=pathlib.Path, help="mp4 files in the prompts' order, or their folder")
  parser.add_argument("--prompts", required=True, type=pathlib.Path, help="text file, a prompt a line")
  parser.add_argument("--mismatched", action="store_true", help="judge every clip against the next clip's prompt")
  parser.add_argument("--json", action="store_true")
  arguments = parser.parse_args(argv)
  videos = [file for path in arguments.videos for file in (sorted(path.glob("*.mp4")) if path.is_dir() else [path])]
  prompts = [line.strip() for line in arguments.prompts.read_text().splitlines() if line.strip()]
  if len(videos) != len(prompts):
    parser.error(f"{len(videos)} videos, but {arguments.prompts} has {len(prompts)} prompts")
  if arguments.mismatched:
    prompts = prompts[1:] + prompts[:1]
  rows = []
  for video, prompt in zip(videos, prompts, strict=True):
    verdict = judge(read_video(video), prompt)
    rows.append({"file": str(video), "prompt": prompt, "right": verdict.right, **dataclasses.asdict(verdict)})
    if not arguments.json:
      print(f"{video}: {prompt}: {verdict}", flush=True)
  totals = {name: sum(row[name] for row in rows) for name in ("right", "colour", "shape", "count", "motion")}
  if arguments.json:
    print(json.dumps({"videos": len(rows), "mismatched": arguments.mismatched, **totals, "verdicts": rows}, indent=2))
  else:
    about = "accepted for another prompt" if arguments.mismatched else "right"
    parts = ", ".join(f"{name} {totals[name]}" for name in ("colour", "shape", "count", "motion"))
    print(f"{totals['right']} of {len(rows)} {about} ({parts})")


if __name__ == "__main__":
  main()
