"""Records the loss curves of the recipe's stages, and compares a repetition with them.

  python end_to_end/demo/losses.py record FOLDER/runs     writes losses.json beside this file
  python end_to_end/demo/losses.py compare FOLDER/runs    every stage that was run again, as far as it got

A curve is the mean loss of every WINDOW steps. Seeds are fixed, so that a repetition on the same kind of machine starts
with the same numbers; later roundings grow, and other processors round differently, so means are compared, within
TOLERANCE. Exit status 1: some mean differs by more.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import sys
from collections.abc import Sequence

RECORD = pathlib.Path(__file__).with_name("losses.json")
WINDOW = 20  # steps
TOLERANCE = 0.15  # of a mean; neighbouring means of a recorded curve differ by as much


def curve(metrics: pathlib.Path) -> list[float]:
  """Mean losses of whole windows of a run's metrics.jsonl; of a step that was done again, the last."""
  losses = {}
  for line in metrics.read_text().splitlines():
    values = json.loads(line)
    if "loss" in values:
      losses[values["step"]] = values["loss"]
  steps = sorted(losses)
  if steps != list(range(1, len(steps) + 1)):
    raise ValueError(f"{metrics} does not hold every step from 1 on")
  windows = range(0, len(steps) - WINDOW + 1, WINDOW)
  return [round(statistics.fmean(losses[step] for step in steps[i : i + WINDOW]), 5) for i in windows]


def compare(found: Sequence[float], recorded: Sequence[float]) -> float:
  """The largest difference of two curves' means as a share of the recorded one, over the windows that both have."""
  return max(abs(a / b - 1) for a, b in zip(found, recorded, strict=False))


def main(argv: Sequence[str] | None = None) -> int:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("action", choices=("record", "compare"))
  parser.add_argument("runs", type=pathlib.Path, help="folder with a run of each stage")
  arguments = parser.parse_args(argv)
  curves = {path.parent.name: curve(path) for path in sorted(arguments.runs.glob("*/metrics.jsonl"))}
  curves = {name: means for name, means in curves.items() if means}
  if not curves:
    parser.error(f"{arguments.runs}: holds no run of at least {WINDOW} steps (RUN/metrics.jsonl)")
  if arguments.action == "record":
    lines = [f'  {json.dumps(name)}: {json.dumps(means)}' for name, means in curves.items()]
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return 0
  recorded, worst = json.loads(RECORD.read_text()), 0.0
  for name, means in curves.items():
    if name not in recorded:
      parser.error(f"{RECORD} has no stage {name}; it has {', '.join(recorded)}")
    difference = compare(means, recorded[name])
    worst = max(worst, difference)
    steps = min(len(means), len(recorded[name])) * WINDOW
    print(f"{name}: {steps:,} steps, means of {WINDOW} differ by {difference:.2%} at most")
  return int(worst > TOLERANCE)


if __name__ == "__main__":
  sys.exit(main())
