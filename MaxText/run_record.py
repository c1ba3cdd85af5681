"""What a run says and leaves behind: messages and progress while it works, run.json when it ends.

One `Reporter` per command. Its three formats (`log_format`): 'text' for people on a terminal, 'quiet' (warnings and
errors only), and 'json', one object a line on stdout for machines. Progress of long work goes through
`Reporter.progress`, stages through `Reporter.stage`, which also measures their seconds and the peak of memory so far.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import resource
import sys
import time
from importlib import metadata
from typing import Any

PACKAGES = ("jax", "jaxlib", "libtpu", "flax", "orbax-checkpoint", "numpy", "sentencepiece", "av")


def seconds_in_words(seconds: float) -> str:
  """'8.3 s', '4:07 min' or '1:02 h'."""
  if seconds < 60:
    return f"{seconds:.1f} s"
  minutes, rest = divmod(round(seconds), 60)
  if minutes < 60:
    return f"{minutes}:{rest:02d} min"
  return f"{minutes // 60}:{minutes % 60:02d} h"


def peak_host_gib() -> float:
  """Largest resident size of this process so far, in GiB (Linux counts it in KiB, macOS in bytes)."""
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  return peak / (2**30 if sys.platform == "darwin" else 2**20)


def peak_device_gib() -> float | None:
  """Largest memory use of any local accelerator so far, in GiB; None where the backend does not count it (CPU)."""
  import jax

  stats = [device.memory_stats() for device in jax.local_devices()]
  peaks = [s["peak_bytes_in_use"] for s in stats if s and "peak_bytes_in_use" in s]
  return max(peaks) / 2**30 if peaks else None


class Reporter:
  """Prints messages and progress in one of three formats, and collects warnings and stage times for run.json."""

  def __init__(self, log_format: str = "text"):
    self.format = log_format
    self.warnings: list[str] = []
    self.stages: dict[str, dict[str, float]] = {}
    self._bar_open = False

  def _emit(self, event: str, **fields: Any) -> None:
    print(json.dumps({"event": event, "time": round(time.time(), 3), **fields}), flush=True)

  def _close_bar(self) -> None:
    if self._bar_open:
      print(file=sys.stderr, flush=True)
      self._bar_open = False

  def info(self, message: str) -> None:
    if self.format == "json":
      self._emit("info", message=message)
    elif self.format == "text":
      self._close_bar()
      print(message, flush=True)

  def warn(self, message: str) -> None:
    """Says it now and keeps it for the summary; each message once."""
    if message in self.warnings:
      return
    self.warnings.append(message)
    if self.format == "json":
      self._emit("warning", message=message)
    else:
      self._close_bar()
      print(f"warning: {message}", file=sys.stderr, flush=True)

  @contextlib.contextmanager
  def stage(self, name: str):
    """Times a stage; entered again, it adds up. Records the peak of memory at its end."""
    if self.format == "json":
      self._emit("stage_start", stage=name)
    start = time.perf_counter()
    try:
      yield
    finally:
      entry = self.stages.setdefault(name, {"seconds": 0.0})
      entry["seconds"] = round(entry["seconds"] + time.perf_counter() - start, 4)
      entry["peak_host_gib"] = round(peak_host_gib(), 3)
      device = peak_device_gib()
      if device is not None:
        entry["peak_device_gib"] = round(device, 3)
      self._close_bar()
      if self.format == "json":
        self._emit("stage_end", stage=name, **entry)

  def progress(
    self, what: str, done: int, total: int, seconds: float, left: float | None = None, unit: str = "step"
  ) -> None:
    """One unit of long work is done. seconds: of this unit; left: estimated seconds to the end."""
    if self.format == "json":
      self._emit(
        "progress",
        what=what,
        done=done,
        total=total,
        seconds=round(seconds, 4),
        seconds_left=None if left is None else round(left, 1),
      )
    elif self.format == "text":
      text = f"{what} {done}/{total}  {seconds_in_words(seconds)}/{unit}"
      text += f"  {seconds_in_words(left)} left" if left is not None and done < total else ""
      if sys.stderr.isatty():
        filled = round(24 * done / max(total, 1))
        print(f"\r\033[K[{'█' * filled}{'·' * (24 - filled)}] {text}", end="", file=sys.stderr, flush=True)
        self._bar_open = done < total
        if done == total:
          print(file=sys.stderr, flush=True)
      elif done == total or done == 1 or done % max(1, total // 20) == 0:  # a log file needs no line for every step
        print(text, file=sys.stderr, flush=True)


def versions() -> dict[str, str]:
  """Versions of Python and of the packages that decide the result."""
  found = {"python": platform.python_version()}
  for package in PACKAGES:
    with contextlib.suppress(metadata.PackageNotFoundError):
      found[package] = metadata.version(package)
  return found


def write_json(path: str, content: Any) -> None:
  """Writes JSON under a temporary name and renames it, so that no reader meets half a file."""
  temporary = f"{path}.{os.getpid()}.tmp"
  with open(temporary, "w", encoding="utf-8") as f:
    json.dump(content, f, indent=2, ensure_ascii=False)
    f.write("\n")
    f.flush()
    os.fsync(f.fileno())
  os.replace(temporary, path)


def attention_in_words(record: dict[str, Any]) -> str:
  """One line about what the last denoising attended to."""
  if record["kept_pair_fraction_of_sparse_layers"] is None:
    return f"attention: {record['attention']}, all pairs kept"
  counts = record["routing_counts"]
  return (
    f"attention: {record['attention']} kept {record['kept_pair_fraction']:.1%} of all query-key pairs "
    f"({record['kept_pair_fraction_of_sparse_layers']:.1%} in sparse layers); heads routed: "
    f"{counts['spatial']:,} spatial, {counts['temporal']:,} temporal"
  )


def quality_in_words(quality: dict[str, Any]) -> str:
  """PSNR and SSIM with their noise floor, and the speed-up."""

  def figures(values):
    psnr = "equal" if values["psnr_rgb_db"] is None else f"PSNR {values['psnr_rgb_db']:.2f} dB"
    return psnr + ("" if values["ssim_rgb"] is None else f", SSIM {values['ssim_rgb']:.4f}")

  return (
    f"{figures(quality['sparse_against_dense'])} (noise floor, dense against dense with other tiles: "
    f"{figures(quality['noise_floor'])}); denoising {quality['dense_seconds']:.2f} → {quality['sparse_seconds']:.2f} s, "
    f"{quality['speedup']:.2f}×"
  )


class RunRecord:
  """run.json of a decode run: written when it starts, after each video, and when it ends.

  Args:
    config, pipeline, reporter: of the run. run: its folder. requests: the videos, in the order of their files.
  """

  def __init__(self, config, pipeline, reporter: Reporter, run, requests):
    self.config, self.pipeline, self.reporter, self.run = config, pipeline, reporter, run
    self.start = time.perf_counter()
    earlier = {video["file"]: video for video in run.earlier.get("videos", [])}
    self.videos = [
      earlier.get(run.video(i).name)
      or {
        "file": run.video(i).name,
        "prompt": request.prompt,
        "seed": request.seed,
        "status": "finished" if run.finished(i) else "missing",
      }
      for i, request in enumerate(requests)
    ]
    self.batches: list[dict[str, Any]] = []

  def batch_done(self, indices) -> None:
    """Takes over the figures of the denoising that has just ended."""
    pipeline = self.pipeline
    timed = zip(pipeline.steps, pipeline.step_seconds, strict=True)
    steps = [{**step.as_record(), "seconds": round(seconds, 4)} for step, seconds in timed]
    self.batches.append(
      {"files": [self.run.video(i).name for i in indices], "steps": steps, "attention": pipeline.attention_record()}
    )

  def control_done(self, name: str) -> None:
    """Takes over the seconds of a dense control that has just ended."""
    self.batches[-1].setdefault("control_seconds", {})[name] = [round(s, 4) for s in self.pipeline.step_seconds]

  def quality(self, index: int, clips) -> None:
    """Figures of a sparse clip against its dense control, and of two dense runs that differ by rounding: the noise floor.

    clips: 'sparse', 'dense' and 'dense_again', uint8 [T, height, width, 3].
    """
    from MaxText.metrics import video_quality

    batch = self.batches[-1]
    sparse, dense = sum(step["seconds"] for step in batch["steps"]), sum(batch["control_seconds"]["dense"])
    self.videos[index]["quality"] = {
      "sparse_against_dense": video_quality.compare(clips["dense"], clips["sparse"]),
      "noise_floor": video_quality.compare(clips["dense"], clips["dense_again"]),
      "dense_file": self.run.video(index, "dense").name,
      "sparse_seconds": round(sparse, 4),
      "dense_seconds": round(dense, 4),
      "speedup": round(dense / sparse, 4),
    }

  def video_done(self, index: int) -> None:
    entry = self.videos[index]
    entry["status"] = "finished"
    if self.run.latents(index).exists():
      entry["latents"] = self.run.latents(index).name
    self.write("running")

  def write(self, status: str) -> None:
    pipeline = self.pipeline
    content = {
      "status": status,
      "random_weights": self.config.init_random_weights,
      "seconds": round(time.perf_counter() - self.start, 3),
      "compile_seconds": round(pipeline.compile_seconds, 3),
      "stages": self.reporter.stages,
      "peak_host_gib": round(peak_host_gib(), 3),
      "peak_device_gib": peak_device_gib(),
      "tokens": self.config.num_tokens,
      "token_grid": list(self.config.token_grid),
      "devices": pipeline.devices_record(),
      "videos": self.videos,
      "batches": [*self.run.earlier.get("batches", []), *self.batches],
      "warnings": self.reporter.warnings,
      "versions": versions(),
      "config": self.config.as_record(),
    }
    write_json(str(self.run.path / "run.json"), content)

  def summary(self) -> list[str]:
    """What a person wants to know at the end."""
    stages = ", ".join(f"{name} {seconds_in_words(stage['seconds'])}" for name, stage in self.reporter.stages.items())
    lines = [
      f"done in {seconds_in_words(time.perf_counter() - self.start)} ({stages}; of this compiling the steps "
      f"{seconds_in_words(self.pipeline.compile_seconds)}); peak host memory {peak_host_gib():.2f} GiB"
    ]
    device = peak_device_gib()
    if device is not None:
      lines[0] += f", peak device memory {device:.2f} GiB"
    if self.batches:
      lines.append(attention_in_words(self.batches[-1]["attention"]))
    for video in self.videos:
      if "quality" in video:
        lines.append(f"{video['file']} against dense: {quality_in_words(video['quality'])}")
    if self.config.init_random_weights:
      lines.append("the weights are random (init_random_weights=true): the video shows noise")
    lines.append(f"output: {self.run.path}")
    return lines
