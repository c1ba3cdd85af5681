"""Cycles of a compiled kernel: bundles of each part x how often the launched step list runs it / the chip's clock."""

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

from MaxText.attention.aot_estimate.case import CHIPS, KernelCase
from MaxText.attention.aot_estimate.parts import EstimateError, executions


@dataclasses.dataclass(frozen=True)
class Estimate:
  """Time of one launch as the compiler's schedule has it. `label` belongs beside every number taken from here."""

  milliseconds: float
  hbm_milliseconds: float
  mxu_busy: float | None
  steps: int
  idle_steps: int
  cycles_of_parts: dict[str, float]
  compile_seconds: float
  label: str = "AOT estimate"


def compile_parts(case: KernelCase, folder: pathlib.Path | None = None, timeout_s: float = 3600) -> dict:
  """Compiles the case in a child process; {"seconds", "parts", "temp_bytes"}.

  Args:
    folder: where compiled cases are kept, and found again as long as the kernels' source and libtpu are the same.

  Raises:
    EstimateError: libtpu is missing, refuses the kernel, or its schedule does not match.
  """
  request = dataclasses.asdict(case)
  if (found := stored_parts(case, folder)) is not None:
    return found
  with tempfile.TemporaryDirectory(prefix="aot_estimate_") as dump:
    compiled = _child("compile", [json.dumps(request), dump], timeout_s)
  if folder is not None:
    folder.mkdir(parents=True, exist_ok=True)
    path = _path(case, folder)
    partial = path.with_suffix(".partial")  # a run that is killed leaves no half file
    partial.write_text(json.dumps({"case": request, "source": source_digest()} | compiled))
    partial.rename(path)
  return compiled


def stored_parts(case: KernelCase, folder: pathlib.Path | None) -> dict | None:
  """What an earlier run compiled for the case and left in the folder, None when there is nothing that still holds."""
  if folder is None or not _path(case, folder).is_file():
    return None
  stored = json.loads(_path(case, folder).read_text())
  return stored if stored["source"] == source_digest() else None


def _path(case: KernelCase, folder: pathlib.Path) -> pathlib.Path:
  request = json.dumps(dataclasses.asdict(case), sort_keys=True)
  grid = "x".join(map(str, case.grid))
  digest = hashlib.sha256(request.encode()).hexdigest()[:8]
  return folder / f"{case.chip}_{grid}_{case.kernel}_{case.block_q}x{case.block_kv}_{digest}.json"


@functools.lru_cache(maxsize=1)
def source_digest() -> str:
  """Identifies what compiled parts depend on beside the case: the sources of kernels and plans, and libtpu."""
  package = pathlib.Path(__file__).resolve().parents[1]
  files = [*(package / "kernels").glob("*.py"), package / "svg/masks.py", package / "svg/tiles.py",
           *(package / "aot_estimate" / f for f in ("schedule.py", "parts.py", "compile.py"))]
  text = b"".join(f.read_bytes() for f in sorted(files) if f.name != "tuned.py")
  try:
    text += importlib.metadata.version("libtpu").encode()
  except importlib.metadata.PackageNotFoundError:
    pass
  return hashlib.sha256(text).hexdigest()[:16]


def work_cycles(case: KernelCase, name: str, num_sampled_queries: int = 64, timeout_s: float = 3600) -> int:
  """Cycles of a work beside the kernel (beside.WORKS), compiled in a child process.

  Raises:
    EstimateError: it does not compile, or holds operations without an estimate.
  """
  with tempfile.TemporaryDirectory(prefix="aot_estimate_") as dump:
    request = dataclasses.asdict(case) | {"work": name, "num_sampled_queries": num_sampled_queries}
    return _child("beside", [json.dumps(request), dump], timeout_s)


def _child(module: str, arguments: list[str], timeout_s: float):
  """Runs a module of this package in a process of its own, and reads the JSON of its last line."""
  environment = os.environ | {
      "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
      "TPU_STDERR_LOG_LEVEL": "3", "TF_CPP_MIN_LOG_LEVEL": "3",
  }  # fmt: skip
  command = [sys.executable, "-m", f"MaxText.attention.aot_estimate.{module}", *arguments]
  root = pathlib.Path(__file__).resolve().parents[3]
  child = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=root, timeout=timeout_s)
  if child.returncode:
    raise EstimateError(_readable(child.stderr))
  return json.loads(child.stdout.strip().splitlines()[-1])


def _readable(stderr: str) -> str:
  """One line that says why a compilation failed, without the exception's class and status code."""
  lines = [line.strip() for line in stderr.splitlines() if line.strip()]
  telling = [line for line in lines if "Error" in line or "EXHAUSTED" in line]
  words = re.sub(r"^([\w.]+(Error|Exception)|[A-Z_]{6,}): ", "", (telling or lines or ["no message"])[-1])
  words = re.sub(r"^[A-Z_]{6,}: ", "", words)
  if "No module named 'libtpu'" in stderr:
    words = "libtpu is not installed, and nothing else compiles for a TPU (pip install libtpu)"
  return words[:300]


def evaluate(case: KernelCase, compiled: dict, patterns: list[int] | None = None, redone: float = 0.0) -> Estimate:
  """Turns compiled parts into time for heads that follow `patterns` (default: all pattern 0)."""
  plan, chip = case.plan(), CHIPS[case.chip]
  patterns = [0] * case.heads if patterns is None else patterns
  runs = executions(plan, patterns, case.tiling(), redone)
  cycles: dict[str, float] = {}
  matmuls = 0.0
  for part in compiled["parts"]:
    cycles[part["part"]] = cycles.get(part["part"], 0.0) + part["bundles"] * runs[part["part"]]
    matmuls += part["matmul"] * runs[part["part"]]
  total = sum(cycles.values())
  counts = [plan.counts(p) for p in patterns]
  active = sum(c["active"] for c in counts)
  moved = active * 2 * case.block_kv * 128 * 2 + 2 * case.heads * case.num_tokens * 128 * 2
  hbm = moved / chip.hbm_bytes_per_s
  return Estimate(
      milliseconds=max(total / chip.clock_hz, hbm) * 1e3,
      hbm_milliseconds=hbm * 1e3,
      mxu_busy=None if chip.mxu_cycles is None else matmuls * chip.mxu_cycles / total,
      steps=sum(c["steps"] for c in counts),
      idle_steps=sum(c["steps"] - c["active"] for c in counts),
      cycles_of_parts=cycles,
      compile_seconds=compiled["seconds"],
  )


def estimate(case: KernelCase, patterns: list[int] | None = None, redone: float = 0.0) -> Estimate:
  """Compiles and evaluates one case."""
  return evaluate(case, compile_parts(case), patterns, redone)
