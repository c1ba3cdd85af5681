"""Solvers of the sampling equation: UniPC of order 2 (B2(h) = exp(h) - 1, predictor and corrector) and Euler.

What depends on the noise levels only is worked out beforehand on the host, in float64, into one short row of
coefficients a step. What is left is a linear combination of a few arrays, a pure function of (state, model output, row),
so that all steps share one compiled program:

    solver = make_solver("unipc", num_steps=50, shift=5.0)
    state = solver.init(noise)
    for i, timestep in enumerate(solver.timesteps):
      state = solver.step(state, model(state.sample, timestep), solver.row(i))
    latents = state.sample

Sources: Zhao et al., UniPC (arXiv 2302.04867), data prediction; results equal Diffusers' UniPCMultistepScheduler
(order 2, bh2, lower_order_final, final sigma 0) and FlowMatchEulerDiscreteScheduler.

Dimensions: N steps, K coefficients of a row.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from MaxText.diffusion import flow_matching


class EulerState(NamedTuple):
  """sample: float32 array of any shape, the model's next input."""

  sample: jax.Array


class Euler:
  """x += (next sigma - sigma) * velocity.

  Args:
    num_steps: N, 1 … 1000. shift: of the noise levels, > 0.
  Attributes:
    sigmas: float32 [N + 1]. timesteps: float32 [N], what the model is told. rows: float32 [N, K].
  """

  def __init__(self, num_steps: int, shift: float):
    self.sigmas, self.timesteps = flow_matching.euler_schedule(num_steps, shift)
    self.rows = np.diff(self.sigmas)[:, None]

  def row(self, index: int) -> np.ndarray:
    """Coefficients [K] float32 of step `index`."""
    return self.rows[index]

  @staticmethod
  def init(sample) -> EulerState:
    """State before the first step, from the initial noise."""
    return EulerState(jnp.asarray(sample, jnp.float32))

  @staticmethod
  def step(state: EulerState, model_output: jax.Array, row) -> EulerState:
    """State after one step; `model_output`: velocity at state.sample, same shape, any float dtype."""
    return EulerState(state.sample + row[0] * model_output.astype(jnp.float32))


class UnipcState(NamedTuple):
  """Arrays of one shape, float32; zeros where there is no history yet (their coefficients are zero, too).

  sample: predicted for this step, the model's next input. last_sample: corrected sample of the previous step.
  clean_1, clean_2: the clean samples that the model's outputs one and two steps ago meant.
  """

  sample: jax.Array
  last_sample: jax.Array
  clean_1: jax.Array
  clean_2: jax.Array


class Unipc:
  """UniPC of order 2; arguments and attributes as `Euler`. The first and the last step have order 1."""

  def __init__(self, num_steps: int, shift: float):
    self.sigmas, self.timesteps = flow_matching.unipc_schedule(num_steps, shift)
    self.rows = _unipc_rows(self.sigmas.astype(np.float64)).astype(np.float32)

  def row(self, index: int) -> np.ndarray:
    """Coefficients [K] float32 of step `index`."""
    return self.rows[index]

  @staticmethod
  def init(sample) -> UnipcState:
    """State before the first step, from the initial noise."""
    sample = jnp.asarray(sample, jnp.float32)
    return UnipcState(sample, *(jnp.zeros_like(sample) for _ in range(3)))  # separate buffers, each can be donated

  @staticmethod
  def step(state: UnipcState, model_output: jax.Array, row) -> UnipcState:
    """State after one step; `model_output`: velocity at state.sample, same shape, any float dtype."""
    sigma, keep, c_last, c_clean, c_clean_1, c_clean_2, p_sample, p_clean, p_clean_1 = row
    clean = state.sample - sigma * model_output.astype(jnp.float32)
    corrected = (
      keep * state.sample
      + c_last * state.last_sample
      + c_clean * clean
      + c_clean_1 * state.clean_1
      + c_clean_2 * state.clean_2
    )
    predicted = p_sample * corrected + p_clean * clean + p_clean_1 * state.clean_1
    return UnipcState(predicted, corrected, clean, state.clean_1)


def _unipc_rows(sigmas: np.ndarray) -> np.ndarray:
  """Coefficients [N, 9] float64 in the order in which `Unipc.step` unpacks them, from sigmas [N + 1] float64.

  With alpha = 1 - sigma, lambda = log(alpha / sigma), and h = lambda_t - lambda_s for a step from s to t, the exact
  solution for a constant clean sample m_s is sigma_t / sigma_s * x_s - alpha_t * B * m_s where B = exp(-h) - 1. The
  second order adds -alpha_t * B times weighted divided differences of m.
  """
  num_steps = len(sigmas) - 1
  alphas = 1.0 - sigmas
  lambdas = np.log(alphas) - np.log(sigmas, where=sigmas > 0, out=np.full_like(sigmas, -np.inf))
  orders = [min(2, i + 1, num_steps - i) for i in range(num_steps)]  # of the predictor that leaves step i
  rows = np.zeros((num_steps, 9))
  for i in range(num_steps):
    row = rows[i]
    row[0] = sigmas[i]

    if i == 0:
      row[1] = 1.0  # nothing to correct yet
    else:  # correct the step i - 1 → i now that the model has been asked at i
      h = lambdas[i] - lambdas[i - 1]
      gain = alphas[i] * -np.expm1(-h)
      row[2] = sigmas[i] / sigmas[i - 1]
      if orders[i - 1] == 1:
        weight, weight_2, ratio = 0.5, 0.0, 1.0
      else:
        ratio = (lambdas[i - 2] - lambdas[i - 1]) / h
        weight_2, weight = np.linalg.solve([[1.0, 1.0], [ratio, 1.0]], _corrector_moments(h))
      row[3] = gain * weight
      row[4] = gain * (1.0 - weight - weight_2 / ratio)
      row[5] = gain * weight_2 / ratio

    # predict the step i → i + 1; the last one, to sigma 0 (h infinite), returns the clean sample itself
    h = lambdas[i + 1] - lambdas[i]
    gain = alphas[i + 1] * -np.expm1(-h)
    row[6] = sigmas[i + 1] / sigmas[i]
    weight_1 = 0.0 if orders[i] == 1 else 0.5 * h / (lambdas[i - 1] - lambdas[i])
    row[7] = gain * (1.0 - weight_1)
    row[8] = gain * weight_1
  return rows


def _corrector_moments(h: float) -> np.ndarray:
  """The right-hand side of the corrector's two conditions for B = exp(-h) - 1: phi_2 / B and 2 phi_3 / B at -h."""
  b = np.expm1(-h)
  phi_2 = b / -h - 1.0
  phi_3 = phi_2 / -h - 0.5
  return np.array([phi_2 / b, 2.0 * phi_3 / b])


def make_solver(name: str, num_steps: int, shift: float) -> Unipc | Euler:
  """The solver called "unipc" or "euler".

  Raises:
    ValueError: an unknown name, or numbers out of range (see `flow_matching`).
  """
  solvers = {"unipc": Unipc, "euler": Euler}
  if name not in solvers:
    raise ValueError(f"solver={name!r} is not known; use one of {', '.join(solvers)}")
  return solvers[name](num_steps, shift)
