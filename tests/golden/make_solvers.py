"""Makes tests/golden/solvers.npz: schedules and trajectories of the oracle's UniPC and Euler schedulers on a toy model.

Run with the oracle's Python: python tests/golden/make_solvers.py

Keys, for every solver (unipc, euler), number of steps N and shift, joined as SOLVER-N-SHIFT:
  …-timesteps [N] and …-sigmas [N + 1], as the scheduler holds them; …-samples [N, 6, 7], float32, after every step if N
  is one of TRAJECTORY_STEPS, else only after the last one [1, 6, 7].
"noise" [6, 7] is the sample that all start from, "mix" [7, 7] a constant of the toy model.
"""

import pathlib

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

TRAJECTORY_STEPS = (1, 2, 3, 5, 20, 40)
LONG_STEPS = (14, 15, 50, 100, 1000)
SHIFTS = (1.0, 3.0, 5.0, 12.0, 0.5)


def toy_model(sample: torch.Tensor, timestep: float, mix: torch.Tensor) -> torch.Tensor:
  """A velocity that depends on sample and time, smoothly but not linearly; tests/unit/test_solvers.py has the same."""
  time = timestep / 1000.0
  return torch.tanh(sample @ mix + 2.0 * time) * (1.5 - time) + 0.3 * sample - torch.cos(3.0 * sample + time)


def make_scheduler(solver: str, shift: float):
  if solver == "euler":
    return FlowMatchEulerDiscreteScheduler(shift=shift)
  return UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift)


def main() -> None:
  rng = np.random.default_rng(5)
  noise = rng.standard_normal((6, 7)).astype(np.float32)
  mix = (rng.standard_normal((7, 7)) / 7**0.5).astype(np.float32)
  arrays = {"noise": noise, "mix": mix}
  for solver in ("unipc", "euler"):
    for steps in TRAJECTORY_STEPS + LONG_STEPS:
      for shift in SHIFTS if steps in TRAJECTORY_STEPS else (1.0, 5.0):
        scheduler = make_scheduler(solver, shift)
        scheduler.set_timesteps(steps)
        scheduler.set_begin_index(0)  # as the pipeline does; truncated timesteps may repeat
        sample, samples = torch.from_numpy(noise), []
        for timestep in scheduler.timesteps:
          # Euler's timesteps are no whole numbers; rounding them to float32 here is what the model's embedding does, too.
          velocity = toy_model(sample, float(timestep), torch.from_numpy(mix))
          sample = scheduler.step(velocity, timestep, sample, return_dict=False)[0]
          samples.append(sample.numpy())
        key = f"{solver}-{steps}-{shift:g}"
        arrays[f"{key}-timesteps"] = scheduler.timesteps.numpy().astype(np.float32)
        arrays[f"{key}-sigmas"] = scheduler.sigmas.numpy()
        arrays[f"{key}-samples"] = np.stack(samples if steps in TRAJECTORY_STEPS else samples[-1:])
  np.savez_compressed(pathlib.Path(__file__).parent / "solvers.npz", **arrays)


if __name__ == "__main__":
  main()
