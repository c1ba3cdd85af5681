"""What the estimating commands say while they compile, and how they write numbers."""

import contextlib
import time
from collections.abc import Iterator

from MaxText.attention.aot_estimate.parts import EstimateError


@contextlib.contextmanager
def aloud(doing: str) -> Iterator[None]:
  """A line on screen: what is being done, then how many seconds it took, or after how many it failed and why."""
  print(f"{doing} … ", end="", flush=True)
  began = time.perf_counter()
  try:
    yield
  except EstimateError as error:
    print(f"failed after {time.perf_counter() - began:.0f} s: {error}", flush=True)
    raise
  print(f"{time.perf_counter() - began:.0f} s", flush=True)


def three_digits(x: float) -> str:
  """Three significant digits, never in exponent form: 796, 49.9, 0.373."""
  return f"{x:#.3g}".rstrip(".") if 0 < abs(x) < 1000 else f"{x:.0f}"
