"""Any attention on a mesh: samples and heads split, and tokens exchanged for heads (Ulysses).

Outside attention a device holds its tokens of every head; attention wants every token of some heads. So: one all-to-all
that carries q, k and v together, the inner attention on whole sequences of whole heads, one all-to-all back
(DeepSpeed-Ulysses, arXiv 2309.14509). Sparse attention routes and permutes after the exchange: a device then holds whole
heads, so routing needs no collective and the permutation stays inside the device.

With nothing on the token axes the inner attention simply runs on its own samples and heads. It runs in a `shard_map`
either way, because a kernel cannot be split by the compiler.

Dimensions: B batch, S tokens, T keys, N heads, D head dim; lower case for a device's share; P ways the tokens are split.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from MaxText.parallel.mesh import divisors, key, listed
from MaxText.parallel.sharding import BATCH, HEADS, TOKENS, Placement

if TYPE_CHECKING:
  from MaxText.attention import Attention, Grid

# Dimensions of tokens and heads in [B, S, N, D], and in the stacked [q, k, v].
TOKENS_DIM, HEADS_DIM = 1, 2
OUT, ROUTES = "out", "routes"


def axes_of(part: None | str | tuple[str, ...]) -> tuple[str, ...]:
  """Mesh axes of one entry of a PartitionSpec."""
  return () if part is None else (part,) if isinstance(part, str) else tuple(part)


def sizes_of(axes: tuple[str, ...], placement: Placement) -> str:
  """'context=4 × tensor=2'."""
  return " × ".join(f"{axis}={placement.mesh.shape[axis]}" for axis in axes)


@dataclasses.dataclass(frozen=True)
class Ulysses:
  """The inner attention, run on every device of a mesh on its share of samples and heads.

  Itself an attention: (q_BSND, k_BTND, v_BTND, grid) -> out_BSND on global arrays inside jit. grid None means
  cross-attention: queries stay split by tokens, keys are on every device, nothing is exchanged.

  Attributes:
    inner: any attention; with `with_routes` if the sparse path is to be used.
    placement: mesh and rules; 'batch', 'tokens' and 'heads' say how q is split.
  """

  inner: Attention
  placement: Placement

  def describe(self) -> str:
    return f"{self.inner.describe()}, on each of {self.placement.mesh.size} devices"

  def __call__(self, q_BSND, k_BTND, v_BTND, grid: Grid | None):
    if grid is None:
      return self._cross(q_BSND, k_BTND, v_BTND)
    return self._exchanged(lambda q, k, v: self.inner(q, k, v, grid), (OUT,), q_BSND, k_BTND, v_BTND)[0]

  def with_routes(self, q_BSND, k_BSND, v_BSND, grid: Grid):
    """Returns out_BSND and the routes temporal_BN, which every device decided for its own heads."""
    if self.inner.layout == "pre_exchange":
      return self._permuted_before(q_BSND, k_BSND, v_BSND, grid)
    return self._exchanged(lambda q, k, v: self.inner.with_routes(q, k, v, grid), (OUT, ROUTES), q_BSND, k_BSND, v_BSND)

  def _permuted_before(self, q_BSND, k_BSND, v_BSND, grid: Grid):
    """svg_layout=pre_exchange: tokens change their order while they lie across devices.

    For comparison: it costs an exchange for the routes, and the collectives that the permutation needs.
    """
    inner, arrays = self.inner, (q_BSND, k_BSND, v_BSND)
    (temporal_BN,) = self._exchanged(lambda q, k, v: inner.route(q, k, v, grid), (ROUTES,), *arrays)
    laid_out = (*inner.lay_out(*arrays, grid, temporal_BN), temporal_BN)
    (out,) = self._exchanged(lambda q, k, v, routes: inner.attend_laid_out(q, k, v, grid, routes), (OUT,), *laid_out)
    return inner.restore(out, grid, temporal_BN), temporal_BN

  def _split(self, shape: tuple[int, ...]) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Mesh axes that split samples, tokens and heads of q; every token and head axis must divide."""
    B, S, N, _ = shape
    batch = axes_of((*self.placement.spec((BATCH,), (B,)), None)[0])
    tokens = tuple(a for a in self.placement.mesh_axes(TOKENS) if a not in batch)
    heads = tuple(a for a in self.placement.mesh_axes(HEADS) if a not in (*batch, *tokens))
    check_heads(N, self._ways(tokens), self._ways(heads))
    if S % self._ways(tokens):
      raise ValueError(f"{S} tokens cannot be split over {sizes_of(tokens, self.placement)}")
    return batch, tokens, heads

  def _ways(self, axes: tuple[str, ...]) -> int:
    return math.prod(self.placement.mesh.shape[a] for a in axes)

  def _shard_map(self, function, in_specs, out_specs):
    # Kernels and loops inside do not track which axes a value varies over, so that check is off.
    return jax.shard_map(function, mesh=self.placement.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

  def _exchanged(self, attend, results: tuple[str, ...], q_BSND, k_BSND, v_BSND, *flags_BN):
    """`attend(q, k, v, *flags)` on whole sequences of a device's own heads; `results` says what it returns."""
    batch, tokens, heads = self._split(q_BSND.shape)
    specs = {OUT: PartitionSpec(batch, tokens, heads), ROUTES: PartitionSpec(batch, (*heads, *tokens))}

    def heads_for_tokens(q, k, v):
      if not tokens:
        return q, k, v
      with jax.named_scope("ulysses_in"):
        return jax.lax.all_to_all(jnp.stack([q, k, v]), tokens, 1 + HEADS_DIM, 1 + TOKENS_DIM, tiled=True)

    def tokens_for_heads(out):
      if not tokens:
        return out
      with jax.named_scope("ulysses_out"):
        return jax.lax.all_to_all(out, tokens, TOKENS_DIM, HEADS_DIM, tiled=True)

    def local(q, k, v, *flags):
      values = attend(*heads_for_tokens(q, k, v), *flags)
      values = values if isinstance(values, tuple) else (values,)
      return tuple(tokens_for_heads(x) if result == OUT else x for result, x in zip(results, values, strict=True))

    in_specs = (specs[OUT],) * 3 + (specs[ROUTES],) * len(flags_BN)
    return self._shard_map(local, in_specs, tuple(specs[result] for result in results))(q_BSND, k_BSND, v_BSND, *flags_BN)

  def _cross(self, q_BSND, k_BTND, v_BTND):
    batch, tokens, heads = self._split(q_BSND.shape)
    queries, keys = PartitionSpec(batch, tokens, heads), PartitionSpec(batch, None, heads)
    attend = self._shard_map(lambda q, k, v: self.inner(q, k, v, None), (queries, keys, keys), queries)
    return attend(q_BSND, k_BTND, v_BTND)


def check_heads(num_heads: int, token_ways: int, head_ways: int = 1) -> None:
  """Refuses heads that do not divide among the devices of attention, and names the nearest sizes that do.

  Raises:
    ValueError: num_heads is no multiple of token_ways (context axis) × head_ways (tensor axis).
  """
  if num_heads % (token_ways * head_ways) == 0:
    return
  if num_heads % head_ways:
    name, value, fits, detail, also = key("ici", "tensor"), head_ways, divisors(num_heads), "", ""
  else:
    name, value, fits = key("ici", "context"), token_ways, divisors(num_heads // head_ways)
    detail = f" / tensor {head_ways}" if head_ways > 1 else ""
    kept = max(d for d in divisors(value) if d in fits)
    also = f" (context {kept} × data {value // kept} keeps as many devices busy)"
  nearest = sorted(sorted(fits, key=lambda d: abs(math.log(d / value)))[:3])
  raise ValueError(f"{name}={value} does not divide num_heads={num_heads}{detail}: attention needs whole heads on every "
                   f"device; nearest: {name}={listed(nearest)}{also}")


def check_parallel(*, strategy: str, num_heads: int, num_frames: int, height: int, width: int, placement: Placement,
                   frame_step: int = 4, pixel_step: int = 16) -> None:
  """Refuses, before anything is loaded or compiled, what attention could not split over the mesh.

  Args:
    strategy: context_parallel_strategy.
    num_heads: heads of the transformer.
    num_frames, height, width: the video.
    frame_step, pixel_step: pixels of a token, in time and in space; the first frame is a token's worth by itself.
    placement: mesh and rules.
  Raises:
    ValueError: a split context axis without Ulysses; heads or tokens that do not divide, with the nearest choices.
  """
  token_axes = placement.mesh_axes(TOKENS)
  ways = math.prod(placement.mesh.shape[a] for a in token_axes)
  if ways > 1 and strategy != "ulysses":
    raise ValueError(f"context_parallel_strategy={strategy} with tokens split over {sizes_of(token_axes, placement)}: "
                     f"attention needs all tokens of a head on one device; set context_parallel_strategy=ulysses, or "
                     f"ici_context_parallelism=1")
  heads = math.prod(placement.mesh.shape[a] for a in placement.mesh_axes(HEADS))
  check_heads(num_heads, ways, heads)

  def tokens(values: dict[str, int]) -> int:
    frames = 1 + (values["num_frames"] - 1) // frame_step
    return frames * (values["height"] // pixel_step) * (values["width"] // pixel_step)

  video = {"num_frames": num_frames, "height": height, "width": width}
  if tokens(video) % ways == 0:
    return
  choices = []
  for name, step in (("num_frames", frame_step), ("height", pixel_step), ("width", pixel_step)):
    fits = [v for k in range(1, ways + 1) for v in (video[name] - k * step, video[name] + k * step)
            if v >= 1 and (name == "num_frames" or v >= step) and tokens({**video, name: v}) % ways == 0]
    if fits:
      choices.append(f"{name}={listed(sorted(fits[:2]))}")
  smaller = [d for d in divisors(ways) if tokens(video) % d == 0]
  choices.append(f"ici_context_parallelism={listed(smaller)}")
  raise ValueError(f"{tokens(video)} tokens (num_frames={num_frames}, height={height}, width={width}) cannot be split "
                   f"over {sizes_of(token_axes, placement)}; nearest: {listed(choices)}")


def on_mesh(attention: Any, placement: Placement) -> Any:
  """The attention as the models should call it: wrapped on a mesh, itself on one device."""
  return attention if attention is None or placement.mesh.size == 1 else Ulysses(attention, placement)
