"""Flow matching: noise levels, model timesteps and initial noise.

A noisy sample is x = (1 - sigma) * clean + sigma * noise, sigma from 1 (noise) to 0 (clean), and the model predicts the
velocity noise - clean. `shift` > 1 moves the steps of a schedule towards the noisy end.

The schedules repeat those of Diffusers bit for bit, since the models were published with them: UniPCMultistepScheduler
with prediction_type="flow_prediction", use_flow_sigmas=True and flow_shift, and FlowMatchEulerDiscreteScheduler.

Dimensions: N inference steps.
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

NUM_TRAIN_TIMESTEPS = 1000
MAX_SEED = 2**63 - 1


def shift_sigmas(sigmas, shift: float):
  """Moves noise levels in [0, 1] towards 1 if shift > 1, towards 0 if shift < 1; 0 and 1 stay. For numpy and jax arrays.

  Source: Esser et al., Scaling Rectified Flow Transformers (arXiv 2403.03206), where shift is sqrt(m / n).
  """
  return shift * sigmas / (1 + (shift - 1) * sigmas)


def unipc_schedule(num_steps: int, shift: float) -> tuple[np.ndarray, np.ndarray]:
  """Noise levels and timesteps for UniPC.

  Args:
    num_steps: N, 1 … 1000.
    shift: > 0.
  Returns:
    sigmas [N + 1] float32, the last one 0, and timesteps [N] float32, whole numbers in 0 … 999 (the reference truncates).
  Raises:
    ValueError: arguments out of range, or a shift so large that two levels are equal in float32.
  """
  _check(num_steps, shift)
  sigmas = shift_sigmas(np.linspace(1, 1 / NUM_TRAIN_TIMESTEPS, num_steps + 1)[:-1], shift)
  sigmas[0] -= 1e-6  # pure noise has log(signal) = -inf, which UniPC's exponential integrator cannot start from
  timesteps = np.trunc(sigmas * NUM_TRAIN_TIMESTEPS).astype(np.float32)
  sigmas = np.append(sigmas, 0.0).astype(np.float32)
  if not (np.diff(sigmas) < 0).all():
    raise ValueError(
      f"flow_shift={shift} with num_inference_steps={num_steps} gives noise levels that are equal in float32; "
      "use a smaller flow_shift (published models use 1 to 12), fewer steps, or solver=euler"
    )
  return sigmas, timesteps


def euler_schedule(num_steps: int, shift: float) -> tuple[np.ndarray, np.ndarray]:
  """Noise levels and timesteps for Euler; as `unipc_schedule`, but timesteps are 1000 * sigma, not truncated."""
  _check(num_steps, shift)
  # The reference shifts twice: the training levels in float32, whose ends span the steps, and then the steps in float64.
  ends = shift_sigmas(np.array([NUM_TRAIN_TIMESTEPS, 1], np.float32) / np.float32(NUM_TRAIN_TIMESTEPS), shift)
  first, last = (float(end) * NUM_TRAIN_TIMESTEPS for end in ends)
  sigmas = shift_sigmas(np.linspace(first, last, num_steps) / NUM_TRAIN_TIMESTEPS, shift).astype(np.float32)
  return np.append(sigmas, np.float32(0)), sigmas * np.float32(NUM_TRAIN_TIMESTEPS)


def noise(seed: int, shape: Sequence[int]) -> jax.Array:
  """Standard normal float32 noise of one video; the same for a seed and shape on any device, whatever the mesh and batch.

  Args:
    seed: 0 … 2**63 - 1; every one gives another noise.
    shape: of one video, without a batch axis: [F, H, W, C].
  Raises:
    ValueError: a seed out of range.
  """
  if not isinstance(seed, numbers.Integral) or not 0 <= seed <= MAX_SEED:
    raise ValueError(f"seed={seed!r} must be a whole number from 0 to 2**63 - 1 = {MAX_SEED}")
  # jax.random.key(seed) would keep 32 bits only; below 2**32 the key is the same one.
  words = np.array([int(seed) >> 32, int(seed) & 0xFFFFFFFF], np.uint32)
  with jax.default_device(_host()), jax.threefry_partitionable(True):
    return jax.random.normal(jax.random.wrap_key_data(words, impl="threefry2x32"), tuple(shape), jnp.float32)


def _host() -> jax.Device | None:
  """A CPU device, since accelerators round the normal distribution differently; None if JAX_PLATFORMS leaves it out."""
  try:
    return jax.local_devices(backend="cpu")[0]
  except RuntimeError:
    return None


def _check(num_steps: int, shift: float) -> None:
  if not isinstance(num_steps, numbers.Integral) or not 1 <= num_steps <= NUM_TRAIN_TIMESTEPS:
    raise ValueError(f"num_inference_steps={num_steps!r} must be a whole number from 1 to {NUM_TRAIN_TIMESTEPS}")
  if not (np.isfinite(shift) and shift > 0):
    raise ValueError(f"flow_shift={shift!r} must be a positive number; 1 leaves the noise levels evenly spaced")
