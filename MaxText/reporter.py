"""What a command says while it works: messages, warnings, progress, stages with their seconds and memory.

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
from collections.abc import Callable
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
    self.start = time.perf_counter()
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

  def share(self, what: str, every: float = 2.0) -> Callable[[int, int], None]:
    """Returns a callback (bytes done, bytes in all) that tells the share done, at most every few seconds."""
    last = start = time.perf_counter()

    def tell(done: int, total: int) -> None:
      nonlocal last
      now = time.perf_counter()
      if now - last < every and not (done == total and last > start):
        return
      last, elapsed, share = now, now - start, done / max(total, 1)
      left = elapsed * (1 - share) / share if share > 0.05 else None
      if self.format == "json":
        self._emit("progress", what=what, share=round(share, 4), seconds=round(elapsed, 2))
      elif self.format == "text":
        text = f"{what}: {share:.0%} in {seconds_in_words(elapsed)}"
        text += f", {seconds_in_words(left)} left" if left is not None and done < total else ""
        self._bar_open = sys.stderr.isatty()
        start_of_line, end = ("\r\033[K", "") if self._bar_open else ("", "\n")
        print(start_of_line + text, end=end, file=sys.stderr, flush=True)

    return tell

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
