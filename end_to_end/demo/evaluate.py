"""Measures a trained demo model: are its videos right, what does sparse attention change, how much time does it save?

  python end_to_end/demo/evaluate.py MODEL_FOLDER OUT [--parts held_out,speed] [key=value …]

Every key=value goes to the configuration of every run. Parts, each with a JSON file of its own in OUT:

  held_out  all prompts of held_out_prompts.txt, dense and svg (aggressive): the judge's verdicts, also of every clip
            against the next prompt; the mp4 files, and contact sheets with a row a prompt
  presets   every third of these prompts: each preset against dense, and the noise floor, dense against dense with other
            tiles; dense_and_svg.png has for each prompt a row of dense and below it one of svg (aggressive)
  routing   the same prompts, aggressive, against dense: heads routed as they are meant to be, or all as spatial, all as
            temporal, or each as what it was not found to be
  speed     denoising seconds, dense and svg (aggressive) in turn, against Amdahl's law: of the share of attention, timed
            alone, only the executed tiles remain. For this part the machine should do nothing else
  routes    routes.png, how each head of each layer was routed at each sparse step of the first prompt, and the counts

A killed run goes on where it was: OUT/clips keeps the exact pixels of every clip, which parts share, and a part whose
JSON file exists is not done again. results.json and table.txt hold all parts that are done. Prompt i has seed + i in all
variants of attention.

Dimensions: T frames, H W pixels; L layers, B samples (with guidance two: prompt and negative prompt), N heads.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from fractions import Fraction

import av
import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]

import clips  # noqa: E402
import judge  # noqa: E402
from svg_saves_on_cpu import attention_seconds  # noqa: E402

from MaxText import pyconfig  # noqa: E402
from MaxText.attention.svg import SvgAttention  # noqa: E402
from MaxText.config_types import ConfigError  # noqa: E402
from MaxText.diffusion.pipeline import Request, VideoPipeline  # noqa: E402
from MaxText.diffusion.run_record import attention_record  # noqa: E402
from MaxText.metrics import video_quality  # noqa: E402
from MaxText.reporter import Reporter, seconds_in_words, write_json  # noqa: E402
from MaxText.video_io import to_uint8, write_video  # noqa: E402

PRESETS = ("conservative", "moderate", "aggressive")
FORCED = ("spatial", "temporal", "inverted")
SIDES = {"dense": "dense", "svg": "aggressive"}  # name in results → variant
EVERY = 3  # presets and routing take every third held-out prompt: 8 of 24
ROUNDS = 3  # of dense and svg in turn
SHEET_FRAMES, SHEET_SIDE, CELL = 6, 128, 16  # pictures a row, about their side in pixels; side of a head's cell
SPATIAL, TEMPORAL, DENSE = (35, 75, 225), (245, 160, 30), (225, 225, 225)  # colours of the map of routes
JUDGED = ("right", "colour", "shape", "count", "motion")


@dataclasses.dataclass(frozen=True)
class InvertedAttention(SvgAttention):
  """Makes every head what it was not found to be: how bad is it to be wrong?"""

  def route(self, *args):
    return ~super().route(*args)


class ForcedPipeline(VideoPipeline):
  """A pipeline that routes heads as `forced` says, whatever they are."""

  forced = "inverted"

  @functools.cache  # noqa: B019 - a pipeline lives as long as its command
  def svg_attention(self, half_width: int) -> SvgAttention:
    found = super().svg_attention(half_width)
    inverted = self.forced == "inverted"
    return InvertedAttention(**vars(found)) if inverted else dataclasses.replace(found, routing=self.forced)


class Clips:
  """The prompts' clips in every variant of attention, each made once and kept in a folder; one copy of the weights.

  Variants: 'dense', 'dense_again' (other tiles), the presets, and the forced routings (with the aggressive preset).
  """

  def __init__(self, model: pathlib.Path, folder: pathlib.Path, settings: Sequence[str]):
    self.folder, self.reporter = folder, Reporter("text")
    self.expected, self.seconds = 0, []  # clips still to make, for the progress; seconds of those made since
    self.prompts = clips.HELD_OUT_FILE.read_text().split("\n")[:-1]
    self.some = range(0, len(self.prompts), EVERY)
    self.arguments = [f"load_parameters_path={model}", f"prompt={self.prompts[0]}", "attention=svg", *settings]
    self.main = self.pipeline("aggressive")

  @functools.cache  # noqa: B019 - as long as its command
  def pipeline(self, variant: str) -> VideoPipeline:
    """Of a preset or a forced routing."""
    schedule = f"svg_schedule={variant if variant in PRESETS else 'aggressive'}"
    config = pyconfig.initialize([str(HERE.parents[1] / "configs/video.yml"), *self.arguments, schedule], "decode")
    with pyconfig.input_errors():
      pipeline = (ForcedPipeline if variant in FORCED else VideoPipeline)(config)
    if variant in FORCED:
      pipeline.forced = variant
    if variant != "aggressive":
      pipeline.experts = self.main.experts
    return pipeline

  @functools.cached_property
  def text(self) -> dict[str, np.ndarray]:
    return self.main.encode_prompts(self.prompts)

  def denoise(self, index: int, variant: str) -> tuple[VideoPipeline, np.ndarray]:
    """Denoises one video; returns the pipeline, which has its routes and seconds, and the latents [1, F, H, W, C]."""
    dense = variant.startswith("dense")
    pipeline = self.main if dense else self.pipeline(variant)
    control = pipeline.dense_control(other_tiles=variant == "dense_again") if dense else None
    request = Request(self.prompts[index], pipeline.config.seed + index)
    *_, (_, latents_BFHWC) = pipeline.denoise([request], self.text, control=control)
    return pipeline, np.asarray(latents_BFHWC)

  def path(self, index: int, variant: str) -> pathlib.Path:
    return self.folder / variant / f"{index:03d}.npz"

  def clip(self, index: int, variant: str) -> Mapping[str, np.ndarray]:
    """Its `frames`, uint8 [T, H, W, 3], and its `routes` as `route_numbers` gives them."""
    path = self.path(index, variant)
    if not path.exists():
      start = time.perf_counter()
      pipeline, latents_BFHWC = self.denoise(index, variant)
      frames_THW3 = np.concatenate([to_uint8(frames[0]) for frames in self.main.frames(latents_BFHWC)])
      path.parent.mkdir(parents=True, exist_ok=True)
      part = path.with_suffix(".part.npz")  # numpy insists on the last suffix
      np.savez_compressed(part, frames=frames_THW3, routes=route_numbers(pipeline))
      part.rename(path)
      self.seconds.append(time.perf_counter() - start)
      left = statistics.fmean(self.seconds) * (self.expected - len(self.seconds))
      self.reporter.progress(
        f"{variant} {index:03d}, clip", len(self.seconds), self.expected, self.seconds[-1], left, unit="clip")
    return np.load(path)


def route_numbers(pipeline) -> np.ndarray:
  """Of the last denoising, int8 [steps, L, B, N]: 0 a spatial head, 1 a temporal one, -1 dense."""
  config, guided = pipeline.config, any(step.guided for step in pipeline.steps)
  numbers = np.full((len(pipeline.steps), config.num_layers, 1 + guided, config.num_heads), -1, np.int8)
  for step, temporal_LBN in zip(pipeline.steps, pipeline.routes, strict=True):
    if temporal_LBN is not None:
      layers = slice(step.sparse.layer_start, step.sparse.layer_end)
      numbers[step.index, layers] = temporal_LBN[layers]
  return numbers


# --- parts: each returns what its JSON file holds


def held_out(made: Clips, out: pathlib.Path) -> dict:
  result, config = {"prompts": len(made.prompts)}, made.main.config
  for name, variant in SIDES.items():
    (out / name).mkdir(exist_ok=True)
    rows, verdicts = [], []
    for i, prompt in enumerate(made.prompts):
      frames_THW3 = made.clip(i, variant)["frames"]
      write_video(out / name / f"{i:03d}.mp4", frames_THW3, config.height, config.width, config.fps)
      rows.append(sheet_row(frames_THW3))
      verdict = judge.judge(frames_THW3, prompt)
      mismatched = judge.judge(frames_THW3, made.prompts[(i + 1) % len(made.prompts)])
      verdicts.append({"prompt": prompt, "right": verdict.right, **dataclasses.asdict(verdict),
                       "accepted_for_next_prompt": mismatched.right})
    write_png(out / f"{name}.png", np.concatenate(rows))
    totals = {key: sum(verdict[key] for verdict in verdicts) for key in (*JUDGED, "accepted_for_next_prompt")}
    result[name] = {**totals, "verdicts": verdicts}
  return result


def presets(made: Clips, out: pathlib.Path) -> dict:
  rows = [sheet_row(made.clip(i, variant)["frames"]) for i in made.some for variant in SIDES.values()]
  write_png(out / "dense_and_svg.png", np.concatenate(rows))
  return against_dense(made, {"noise_floor": "dense_again", **{name: name for name in PRESETS}})


def routing(made: Clips, out: pathlib.Path) -> dict:
  result = against_dense(made, {"routed": "aggressive", **{name: name for name in FORCED}})
  db = {name: mean["psnr_rgb_db"] or float("inf") for name, mean in result["mean"].items()}  # None: equal
  return {**result, "routed_is_best": all(db["routed"] > db[name] for name in FORCED)}


def against_dense(made: Clips, variants: dict[str, str]) -> dict:
  """By name: the figures of each prompt, and their means; PSNR over the clips that differ at all (None: none does)."""

  def compared(i, variant):
    return video_quality.compare(*(made.clip(i, side)["frames"] for side in ("dense", variant)))

  def mean(rows):
    columns = {key: [row[key] for row in rows if row[key] is not None] for key in rows[0]}
    return {**{key: statistics.fmean(values) if values else None for key, values in columns.items()},
            "equal_clips": sum(row["psnr_rgb_db"] is None for row in rows)}

  figures = {name: [compared(i, variant) for i in made.some] for name, variant in variants.items()}
  return {"prompts": [made.prompts[i] for i in made.some], "mean": {name: mean(rows) for name, rows in figures.items()},
          "by_prompt": figures}


def speed(made: Clips, out: pathlib.Path) -> dict:
  seconds, attention = {"dense": [], "svg": []}, []
  for done in range(1, ROUNDS + 1):
    start = time.perf_counter()
    attention += attention_seconds(made.main)
    for name, variant in SIDES.items():
      seconds[name].append(sum(made.denoise(0, variant)[0].step_seconds))
    took = time.perf_counter() - start
    made.reporter.progress("timing, round", done, ROUNDS, took, took * (ROUNDS - done), unit="round")
  executed = attention_record(made.main)["executed_tile_fraction"]  # of all steps and layers; svg came last
  dense, svg, one = map(statistics.median, (seconds["dense"], seconds["svg"], attention))
  share = len(made.main.steps) * made.main.config.num_layers * one / dense
  predicted, measured = 1 - share * (1 - executed), svg / dense
  return {
    "tokens": made.main.config.num_tokens, "steps": len(made.main.steps), "dense_seconds": dense, "svg_seconds": svg,
    "one_attention_seconds": one, "attention_share": share, "executed_tile_fraction": executed,
    "predicted_time_ratio": predicted, "measured_time_ratio": measured,
    "error_percent": 100 * (measured / predicted - 1), "all_seconds": {**seconds, "attention": attention},
  }


def routes(made: Clips, out: pathlib.Path) -> dict:
  numbers = made.clip(0, "aggressive")["routes"]
  sparse = [step for step, kinds in enumerate(numbers) if (kinds >= 0).any()]
  if sparse:
    write_png(out / "routes.png", route_map(numbers[sparse]))

  def counts(kinds):
    return {"spatial": int((kinds == 0).sum()), "temporal": int((kinds == 1).sum())}

  return {
    "prompt": made.prompts[0], **counts(numbers), "sparse_steps": sparse,
    "by_step": [counts(numbers[step]) for step in sparse],
    "by_layer": [counts(numbers[:, layer]) for layer in range(numbers.shape[1])],
    "routes": numbers.tolist(),
    "caption": f"routes.png: a panel a sparse step (steps {', '.join(map(str, sparse))}, from 0); rows: layers, the "
    "first on top; columns: heads, for the prompt and after the gap for the negative prompt. Blue: spatial, orange: "
    "temporal, grey: dense",
  }


# --- pictures


def sheet_row(frames_THW3: np.ndarray) -> np.ndarray:
  """Some frames side by side, first and last included, shrunk by a whole factor; uint8 [H, W, 3]."""
  chosen_THW3 = frames_THW3[np.linspace(0, len(frames_THW3) - 1, SHEET_FRAMES).round().astype(int)]
  by = max(1, min(chosen_THW3.shape[1:3]) // SHEET_SIDE)
  height, width = (side // by for side in chosen_THW3.shape[1:3])
  squares = chosen_THW3[:, : height * by, : width * by].reshape(-1, height, by, width, by, 3)
  small_THW3 = np.rint(squares.mean((2, 4), dtype=np.float32)).astype(np.uint8)
  return np.concatenate([framed(picture_HW3, 2) for picture_HW3 in small_THW3], axis=1)


def framed(picture_HW3: np.ndarray, gap: int) -> np.ndarray:
  return np.pad(picture_HW3, ((gap, gap), (gap, gap), (0, 0)), constant_values=255)


def route_map(numbers: np.ndarray) -> np.ndarray:
  """Panels of routes side by side, from int8 [steps, L, B, N]; uint8 [H, W, 3]."""

  def grid(colours_LN3):
    pixels_HW3 = colours_LN3.repeat(CELL, axis=0).repeat(CELL, axis=1)
    pixels_HW3[::CELL] = pixels_HW3[:, ::CELL] = 255  # lines between the cells
    return framed(pixels_HW3, CELL // 4)

  colours_sBLN3 = np.array([SPATIAL, TEMPORAL, DENSE], np.uint8)[np.moveaxis(numbers, 2, 1)]  # -1 is the last
  panels = [np.concatenate([grid(half) for half in step], axis=1) for step in colours_sBLN3]
  return np.concatenate([framed(panel, CELL // 2) for panel in panels], axis=1)


def write_png(path: pathlib.Path, picture_HW3: np.ndarray) -> None:
  codec = av.CodecContext.create("png", "w")
  codec.height, codec.width, codec.pix_fmt, codec.time_base = *picture_HW3.shape[:2], "rgb24", Fraction(1)
  frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture_HW3), format="rgb24")
  path.write_bytes(b"".join(map(bytes, [*codec.encode(frame), *codec.encode(None)])))


# --- command

# Part → its function, the variants it needs, and of which prompts.
PARTS = {
  "held_out": (held_out, ("dense", "aggressive"), lambda made: range(len(made.prompts))),
  "presets": (presets, ("dense", "dense_again", *PRESETS), lambda made: made.some),
  "routing": (routing, ("dense", "aggressive", *FORCED), lambda made: made.some),
  "speed": (speed, (), lambda made: ()),
  "routes": (routes, ("aggressive",), lambda made: (0,)),
}


def table(results: dict) -> str:
  """All parts that are done, for people."""
  lines = []
  if part := results.get("held_out"):
    head = "".join(f"{key:>8}" for key in JUDGED)
    lines += [f"held-out prompts, of {part['prompts']}", f"  {'':12}{head}  accepted for the next prompt"]
    lines += [f"  {name:12}" + "".join(f"{part[name][key]:8}" for key in JUDGED)
              + f"{part[name]['accepted_for_next_prompt']:8}" for name in ("dense", "svg")]
  for name in ("presets", "routing"):
    if part := results.get(name):
      lines += [f"{name}, against dense, mean of {len(part['prompts'])}",
                f"  {'':12} PSNR RGB    PSNR YUV    SSIM RGB  equal clips"]
      lines += [f"  {row:12}{decibels(mean['psnr_rgb_db'])}{decibels(mean['psnr_yuv_db'])}{mean['ssim_rgb']:12.4f}"
                f"{mean['equal_clips']:13}" for row, mean in part["mean"].items()]
      lines += [f"  routed is best: {part['routed_is_best']}"] if name == "routing" else []
  if part := results.get("speed"):
    lines += [f"speed, {part['tokens']:,} tokens, {part['steps']} steps, medians of {ROUNDS} rounds",
              f"  denoising {part['dense_seconds']:.2f} s dense, {part['svg_seconds']:.2f} s svg; attention is "
              f"{part['attention_share']:.1%} of dense, {part['executed_tile_fraction']:.1%} of its tiles run with svg",
              f"  time ratio predicted {part['predicted_time_ratio']:.3f}, measured {part['measured_time_ratio']:.3f} "
              f"({part['error_percent']:+.1f} %)"]
  if part := results.get("routes"):
    layers = ", ".join(f"{layer['spatial']}/{layer['temporal']}" for layer in part["by_layer"])
    lines += [f"routes of {part['prompt']!r}: {part['spatial']} spatial, {part['temporal']} temporal; by layer {layers}",
              f"  {part['caption']}"]
  return "\n".join(lines)


def decibels(value: float | None) -> str:
  return f"{'equal':>9}   " if value is None else f"{value:9.2f} dB"


def check_same_run(out: pathlib.Path, model: pathlib.Path, settings: Sequence[str]) -> None:
  """Raises ConfigError where the folder holds clips of other weights or settings, which must not be mixed."""
  weights = [[str(f), f.stat().st_size, f.stat().st_mtime] for f in sorted(model.rglob("*.safetensors"))]
  this, record = {"weights": weights, "settings": sorted(settings)}, out / "run.json"
  if record.exists() and json.loads(record.read_text()) != this:
    raise ConfigError(f"{out} holds clips of other weights or settings ({record}); choose another folder")
  out.mkdir(parents=True, exist_ok=True)
  write_json(str(record), this)


@pyconfig.run_main
def main(argv: list[str]) -> None:
  parser = argparse.ArgumentParser(description="Measures a demo model.")
  parser.add_argument("model", type=pathlib.Path, help="folder of weights")
  parser.add_argument("out", type=pathlib.Path)
  parser.add_argument("--parts", default=",".join(PARTS), help="some of %(default)s")
  parser.add_argument("settings", nargs="*", metavar="key=value")
  arguments = parser.parse_intermixed_args(argv)
  wanted = arguments.parts.split(",")
  if unknown := sorted(set(wanted) - set(PARTS)):
    parser.error(f"--parts={arguments.parts}: there is no {', '.join(unknown)}; all: {','.join(PARTS)}")
  out, start = arguments.out, time.perf_counter()
  made = Clips(arguments.model.absolute(), out / "clips", arguments.settings)
  check_same_run(out, arguments.model.absolute(), arguments.settings)
  todo = [part for part in PARTS if part in wanted and not (out / f"{part}.json").exists()]
  needed = {(i, variant) for part in todo for variant in PARTS[part][1] for i in PARTS[part][2](made)}
  made.expected = sum(not made.path(*clip).exists() for clip in needed)
  for variant in {variant for _, variant in needed} - {"dense", "dense_again"}:
    made.pipeline(variant)  # loads nothing yet: what is wrong with the settings shows now, not after an hour
  made.reporter.info(f"parts: {', '.join(todo) or 'all done'}; {made.expected} clips to make, {len(needed)} needed")
  for part in todo:
    write_json(str(out / f"{part}.json"), PARTS[part][0](made, out))
    made.reporter.info(f"{part} done, {seconds_in_words(time.perf_counter() - start)} since the start")
  results = {part: json.loads((out / f"{part}.json").read_text()) for part in PARTS if (out / f"{part}.json").exists()}
  write_json(str(out / "results.json"), results)
  (out / "table.txt").write_text(table(results) + "\n")
  print(table(results))


if __name__ == "__main__":
  sys.exit(main())
