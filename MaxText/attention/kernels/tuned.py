"""Tile sizes for each chip and sequence length, from configs/tpu/<chip>.yml, fitted to sequences that are not listed.

Legend: S query tokens, T key tokens.
"""

import dataclasses
import functools
import pathlib

import jax
import yaml

from MaxText.attention.kernels.block_sparse import KernelTiling

FOLDER = pathlib.Path(__file__).resolve().parents[3] / "configs" / "tpu"
DEVICE_KINDS = {"TPU v6 lite": "v6e", "TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v5p": "v5p", "TPU7x": "tpu7x"}
DEFAULT_CHIP = "v6e"
KERNELS = ("dense", "naive", "exact", "aligned")


@dataclasses.dataclass(frozen=True)
class Tiles:
  """Tile sizes in tokens, and how the kernel walks through a tile (see KernelTiling and plan_steps)."""

  block_q: int
  block_kv: int
  masked_chunk: int
  tiling: KernelTiling


def this_chip() -> str:
  """The chip of the default device, DEFAULT_CHIP where that is no TPU (compiling for a topology, tests)."""
  return DEVICE_KINDS.get(jax.devices()[0].device_kind, DEFAULT_CHIP)


@functools.lru_cache(maxsize=8)
def read_chip(chip: str) -> dict:
  """The chip's file.

  Raises:
    ValueError: no such file.
  """
  path = FOLDER / f"{chip}.yml"
  if not path.is_file():
    known = ", ".join(sorted(p.stem for p in FOLDER.glob("*.yml")))
    raise ValueError(f"no tuned tiles for chip {chip!r}: {path} is missing; known are {known}")
  return yaml.safe_load(path.read_text())


def tuned_tiles(chip: str, kernel: str, num_queries: int, num_keys: int, block_q: int = 0, block_kv: int = 0) -> Tiles:
  """Tiles for one launch: what the caller asks for, else the chip's entry for the nearest sequence length.

  A tuned block_kv that does not divide the keys gives way to a near divisor if there is one, so that no key is padded.
  Sizes never exceed the sequence, rounded up to what the hardware can address.
  """
  settings = read_chip(chip)
  table = settings["tiles"][kernel]
  entry = table[min(table, key=lambda tokens: abs(tokens - num_keys))]
  tuned_kv = entry["block_kv"] if num_keys in table else _near_divisor(num_keys, entry["block_kv"])
  block_q, block_kv = (asked or tuned for asked, tuned in ((block_q, entry["block_q"]), (block_kv, tuned_kv)))
  chunk = entry["chunk"] if block_kv == entry["block_kv"] else _even_chunk(block_kv, entry["chunk"])
  block_q, block_kv = (min(b, -(-n // m) * m) for b, n, m in ((block_q, num_queries, 128), (block_kv, num_keys, 16)))
  return Tiles(block_q, block_kv, settings["masked_chunk"], KernelTiling(
      chunk=min(chunk, block_kv),
      unroll=settings["unroll"],
      reference_in_mxu=settings["reference_in_mxu"],
      vmem_limit_bytes=settings["vmem_limit_mib"] * 2**20,
  ))  # fmt: skip


def _near_divisor(length: int, wanted: int) -> int:
  """The divisor of `length`, a multiple of 16, nearest to `wanted` within half and one and a half; else `wanted`."""
  near = [n for n in range(16, wanted * 3 // 2 + 1, 16) if length % n == 0 and 2 * n >= wanted]
  return min(near, key=lambda n: abs(n - wanted), default=wanted)


def _even_chunk(block_kv: int, most: int) -> int:
  """Keys of one pass over a tile that nobody tuned: near-equal passes of at most `most` keys, in 256s where it can be."""
  chunk = -(-block_kv // -(-block_kv // most))
  return next((c for c in (-(-chunk // m) * m for m in (256, 16)) if c <= most), most)
