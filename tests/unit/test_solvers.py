"""Schedules, solvers and initial noise, against the oracle's trajectories (tests/golden/make_solvers.py)."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from MaxText.diffusion import flow_matching, solvers

GOLDEN = np.load(pathlib.Path(__file__).parents[1] / "golden" / "solvers.npz")
CASES = sorted({key.rsplit("-", 1)[0] for key in GOLDEN.files if "-" in key})


def toy_model(sample, timestep):
  """The velocity of tests/golden/make_solvers.py."""
  time = timestep / 1000.0
  return jnp.tanh(sample @ GOLDEN["mix"] + 2.0 * time) * (1.5 - time) + 0.3 * sample - jnp.cos(3.0 * sample + time)


@jax.jit
def euler_step(state, timestep, row):
  return solvers.Euler.step(state, toy_model(state.sample, timestep), row)


@jax.jit
def unipc_step(state, timestep, row):
  return solvers.Unipc.step(state, toy_model(state.sample, timestep), row)


def trajectory(name, num_steps, shift):
  solver = solvers.make_solver(name, num_steps, shift)
  step = {"unipc": unipc_step, "euler": euler_step}[name]
  state, samples = solver.init(GOLDEN["noise"]), []
  for i, timestep in enumerate(solver.timesteps):
    state = step(state, timestep, solver.row(i))
    samples.append(np.asarray(state.sample))
  return np.stack(samples)


def relative(a, b):
  return np.linalg.norm(np.asarray(a, np.float64) - b) / np.linalg.norm(b)


@pytest.mark.parametrize("case", CASES)
def test_schedule_equals_the_oracle(case):
  name, num_steps, shift = case.split("-")
  solver = solvers.make_solver(name, int(num_steps), float(shift))
  np.testing.assert_array_equal(solver.timesteps, GOLDEN[f"{case}-timesteps"])
  np.testing.assert_array_equal(solver.sigmas, GOLDEN[f"{case}-sigmas"])
  assert solver.timesteps.dtype == solver.sigmas.dtype == solver.row(0).dtype == np.float32
  assert len(solver.rows) == int(num_steps)


@pytest.mark.parametrize("case", CASES)
def test_trajectory_equals_the_oracle(case):
  name, num_steps, shift = case.split("-")
  expected = GOLDEN[f"{case}-samples"]
  samples = trajectory(name, int(num_steps), float(shift))[-len(expected) :]
  worst = max(relative(a, b) for a, b in zip(samples, expected, strict=True))
  assert worst < 1e-5  # measured on CPU: at most 6.4e-7 up to 100 steps, 2.1e-6 at 1000


def test_the_oracle_tells_solvers_and_shifts_apart():
  """The tolerance above would not hold for a neighbouring method: the test is able to fail."""
  assert relative(trajectory("euler", 20, 3.0)[-1], GOLDEN["unipc-20-3-samples"][-1]) > 1e-3
  assert relative(trajectory("unipc", 20, 3.1)[-1], GOLDEN["unipc-20-3-samples"][-1]) > 1e-4


def test_one_program_serves_all_steps_and_schedules():
  trajectory("unipc", 5, 3.0)
  programs = unipc_step._cache_size()
  trajectory("unipc", 40, 12.0)
  assert unipc_step._cache_size() == programs


@pytest.mark.parametrize("name", ["unipc", "euler"])
def test_a_perfect_model_lands_on_the_clean_sample(name):
  """Straight paths: with velocity = (x - clean) / sigma every solver must end exactly at `clean`."""
  solver = solvers.make_solver(name, 7, 5.0)
  clean = jnp.linspace(-2.0, 2.0, 12).reshape(3, 4)
  state = solver.init(flow_matching.noise(3, (3, 4)))
  for i in range(7):
    state = solver.step(state, (state.sample - clean) / solver.sigmas[i], solver.row(i))
  np.testing.assert_allclose(state.sample, clean, atol=2e-6)


def test_order_two_is_second_order():
  """Halving the steps' length about quarters the error against 1000 steps (3.6 on CPU); Euler about halves it."""
  exact = trajectory("unipc", 1000, 1.0)[-1]
  unipc = [relative(trajectory("unipc", n, 1.0)[-1], exact) for n in (20, 40)]
  euler = [relative(trajectory("euler", n, 1.0)[-1], exact) for n in (20, 40)]
  assert unipc[0] / unipc[1] > 3.0 and euler[0] / euler[1] < 2.5 and unipc[1] < euler[1] / 10


@pytest.mark.parametrize("name", ["unipc", "euler"])
def test_state_is_float32_and_can_be_donated(name):
  solver = solvers.make_solver(name, 3, 1.0)
  step = jax.jit(solver.step, donate_argnums=0)
  state = solver.init(np.ones((2, 3), np.float16))
  for i in range(3):
    state = step(state, jnp.ones((2, 3), jnp.bfloat16), solver.row(i))
  assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(state))
  assert np.isfinite(state.sample).all()


@pytest.mark.parametrize(
  "arguments, words",
  [
    (("heun", 5, 1.0), ["solver", "heun", "unipc, euler"]),
    (("unipc", 0, 1.0), ["num_inference_steps=0", "1 to 1000"]),
    (("euler", 1001, 1.0), ["num_inference_steps=1001"]),
    (("unipc", 2.5, 1.0), ["num_inference_steps=2.5"]),
    (("unipc", 5, 0.0), ["flow_shift=0.0", "positive"]),
    (("euler", 5, float("nan")), ["flow_shift=nan"]),
    (("unipc", 1000, 5000.0), ["flow_shift=5000.0", "smaller", "euler"]),
  ],
)
def test_refusals_name_key_and_value(arguments, words):
  with pytest.raises(ValueError) as error:
    solvers.make_solver(*arguments)
  assert all(word in str(error.value) for word in words)


def test_noise_is_the_same_in_every_session():
  """Seeds in papers and bug reports must keep their meaning: these numbers never change."""
  noise = flow_matching.noise(0, (2, 3, 4, 16))
  assert noise.dtype == jnp.float32
  np.testing.assert_allclose(noise[0, 0, 0, :3], [1.6226422, 2.0252647, -0.43359445], rtol=1e-5)
  np.testing.assert_array_equal(noise, jax.random.normal(jax.random.key(0), (2, 3, 4, 16)))


def test_noise_does_not_know_its_surroundings():
  alone = flow_matching.noise(7, (3, 4, 5))
  with jax.threefry_partitionable(False):
    np.testing.assert_array_equal(flow_matching.noise(7, (3, 4, 5)), alone)
  with jax.default_device(jax.devices()[3]):
    np.testing.assert_array_equal(flow_matching.noise(7, (3, 4, 5)), alone)
  np.testing.assert_array_equal(flow_matching.noise(np.int64(7), [3, 4, 5]), alone)


def test_every_seed_counts():
  seeds = [0, 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**62, 2**63 - 1]
  noises = [np.asarray(flow_matching.noise(seed, (8,))) for seed in seeds]
  assert len({noise.tobytes() for noise in noises}) == len(seeds)


def test_noise_is_standard_normal():
  noise = np.asarray(flow_matching.noise(2**63 - 1, (40, 50, 50)))
  assert abs(noise.mean()) < 0.01 and abs(noise.std() - 1.0) < 0.01
  assert abs(np.mean(np.abs(noise) < 1.0) - 0.6827) < 0.005


@pytest.mark.parametrize("seed", [-1, 2**63, 1.5, "0"])
def test_bad_seeds_are_refused(seed):
  with pytest.raises(ValueError, match="seed"):
    flow_matching.noise(seed, (2,))
