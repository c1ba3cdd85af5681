"""What an estimate is made of: one kernel on one shape with one choice of tiles, for one TPU topology."""

import dataclasses

from MaxText.attention.kernels.block_sparse import KernelTiling
from MaxText.attention.kernels.plans import cached_dense_plan, svg_plan
from MaxText.attention.kernels.steps import StepPlan
from MaxText.attention.svg.masks import HeadMask

MIB = 2**20
KERNELS = ("dense", "naive", "exact", "aligned")


@dataclasses.dataclass(frozen=True)
class Chip:
  """One TPU generation.

  Attributes:
    topology: the smallest one that libtpu compiles for here, with whole hosts.
    clock_hz: cycles a second; libtpu's schedule dumps say 1,750, 1,500 and 1,900 a microsecond for v6e, v5e and tpu7x,
      v5p's is the published 1.75 GHz.
    hbm_bytes_per_s: published HBM bandwidth of one core's share.
    vmem_bytes: vector memory of a core.
    mxu_cycles: MXU-cycles that one bfloat16 `vmatmul` occupies, over the MXUs of a core; None: not known, not reported.
    reference_in_mxu: whether a 256-deep contraction costs no more than a 128-deep one.
  """

  topology: str
  clock_hz: float
  hbm_bytes_per_s: float
  vmem_bytes: int
  mxu_cycles: float | None
  reference_in_mxu: bool


CHIPS = {
    "v6e": Chip("v6e:2x4", 1.75e9, 1640e9, 128 * MIB, 8 / 2, True),
    "v5e": Chip("v5e:2x4", 1.5e9, 820e9, 128 * MIB, None, False),
    "v5p": Chip("v5p:2x2x1", 1.75e9, 1230e9, 64 * MIB, None, False),
    "tpu7x": Chip("tpu7x:2x2x1", 1.9e9, 3700e9, 64 * MIB, None, True),
}


@dataclasses.dataclass(frozen=True)
class KernelCase:
  """One kernel launch. `half_width`, `sink_frames` and `sink` matter to the sparse kernels only."""

  chip: str
  kernel: str
  grid: tuple[int, int, int]
  heads: int
  block_q: int
  block_kv: int
  chunk: int = 1024
  masked_chunk: int = 512
  unroll: bool = True
  head_dim: int = 128
  half_width: int = 0
  sink_frames: int = 1
  sink: str = "frame"

  def __post_init__(self):
    if self.chip not in CHIPS:
      raise ValueError(f"chip {self.chip!r} is not one of {', '.join(CHIPS)}")
    if self.kernel not in KERNELS:
      raise ValueError(f"kernel {self.kernel!r} is not one of {', '.join(KERNELS)}")

  @property
  def num_tokens(self) -> int:
    return self.grid[0] * self.grid[1] * self.grid[2]

  def plan(self) -> StepPlan:
    S = self.num_tokens
    if self.kernel == "dense":
      return cached_dense_plan(S, S, self.block_q, self.block_kv, self.masked_chunk)
    mask = HeadMask(self.grid, self.half_width, False, self.sink_frames, self.sink)
    return svg_plan(mask, self.kernel, self.block_q, self.block_kv, self.masked_chunk)

  def tiling(self) -> KernelTiling:
    chip = CHIPS[self.chip]
    return KernelTiling(
        chunk=self.chunk,
        unroll=self.unroll,
        reference_in_mxu=chip.reference_in_mxu,
        vmem_limit_bytes=chip.vmem_bytes - 16 * MIB,
    )

  def vmem_bytes(self) -> int:
    """Vector memory that the kernel's own buffers take (double-buffered blocks, scratch, one chunk's logits)."""
    lanes, q, kv = 128, self.block_q, self.block_kv
    blocks = 2 * 2 * (2 * q * lanes + 2 * kv * lanes) + (0 if self.kernel in ("dense", "aligned") else 2 * 3 * 4 * q)
    scratch = 2 * 256 * q + 4 * (3 * 8 * q + 2 * lanes * q)
    logits = 4 * min(self.chunk, kv) * q
    return blocks + scratch + logits
