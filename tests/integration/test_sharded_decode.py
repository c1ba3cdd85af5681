"""decode on a mesh of eight fake devices gives what it gives on one: latents and routes, dense and sparse."""

import json
import pathlib

import jax
import numpy as np
import pytest

from MaxText import decode
from MaxText.diffusion import pipeline
from MaxText.parallel import mesh
from MaxText.video_io import read_video

# Eight heads and 3 × 4 × 4 tokens, so that a context axis of 8 divides both; step 0 is dense, the others are sparse.
ARGUMENTS = [
  "tests/tiny.yml", "log_format=quiet", "init_random_weights=true", "override_model_config=true", "num_heads=8",
  "head_dim=16", "prompt=a ball", "height=64", "width=64", "num_frames=9", "num_inference_steps=3", "attention=svg",
  "svg_kernel=exact",  "svg_band_width=10", "svg_start_step=1", "svg_start_layer=0", "save_latents=true"]
MESHES = [{"context": 2}, {"context": 4}, {"context": 8}, {"data": 2, "context": 4}, {"fsdp": 8},
          {"context": 4, "tensor": 2}]
DEFAULT_MESH = {"fsdp": 8}
ULYSSES = "context_parallel_strategy=ulysses"
ALL_CONTEXT = ["ici_fsdp_parallelism=1", "ici_context_parallelism=-1"]


def run(folder, name, *arguments, status=0):
  given = {argument.partition("=")[0]: argument for argument in [*ARGUMENTS, *arguments]}
  assert decode.main([*given.values(), f"base_output_directory={folder}", f"run_name={name}"]) == status
  return folder / name


@pytest.fixture(autouse=True)
def quick_compilation(monkeypatch):
  monkeypatch.setattr(pipeline, "compiler_options", lambda platform: {"xla_backend_optimization_level": 0})


@pytest.fixture
def no_vae(request, monkeypatch):
  """Only the default mesh decodes its latents: that runs on one device whatever the mesh, and takes half the time."""
  if request.node.callspec.params["axes"] != DEFAULT_MESH:
    black = np.zeros((1, 9, 64, 64, 3), np.float32)
    monkeypatch.setattr(pipeline.VideoPipeline, "frames", lambda self, latents: iter([black]))


def keep_frames(patch, folder):
  """Keeps what decode compresses: an mp4 turns the last bits of a pixel into several levels here and there."""
  frames = pipeline.VideoPipeline.frames

  def kept(self, latents):
    made = list(frames(self, latents))
    np.save(folder / "frames.npy", np.concatenate(made, axis=1))
    return iter(made)

  patch.setattr(pipeline.VideoPipeline, "frames", kept)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
  folder = tmp_path_factory.mktemp("alone")
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(mesh, "devices", lambda: jax.devices()[:1])
    keep_frames(patch, folder)
    return run(folder, "alone")


def sharded_fsdp(axes):
  return axes.get("fsdp", 8 // np.prod(list(axes.values())))


def ids(axes):
  return " ".join(f"{axis}{size}" for axis, size in axes.items())


@pytest.mark.devices(8)
@pytest.mark.parametrize("axes", MESHES, ids=ids)
def test_latents_and_routes_do_not_depend_on_the_mesh(tmp_path, alone, no_vae, monkeypatch, axes):
  keep_frames(monkeypatch, tmp_path)
  keys = [] if axes == DEFAULT_MESH else [f"{mesh.key('ici', axis)}={size}" for axis, size in axes.items()]
  if "context" in axes:
    keys.append(ULYSSES)
  sharded = run(tmp_path, "sharded", *keys)
  expected = np.load(alone / "latents.npy")
  np.testing.assert_allclose(np.load(sharded / "latents.npy"), expected, rtol=1e-5, atol=1e-5)
  record, expected = (json.loads((folder / "run.json").read_text()) for folder in (sharded, alone))
  assert record["devices"]["count"] == 8
  routing = expected["batches"][0]["attention"]["routing"]
  assert record["batches"][0]["attention"]["routing"] == routing
  counts = np.array([step["temporal_by_layer"] for step in routing])
  assert 0 < counts.sum() < 16 * counts.size, "the test needs heads of both kinds"
  if axes == DEFAULT_MESH:
    # Of 2 from -1 to 1: an eighth of one of the mp4's 256 levels.
    np.testing.assert_allclose(np.load(tmp_path / "frames.npy"), np.load(alone.parent / "frames.npy"), atol=1e-3)
    assert read_video(sharded / "video.mp4").shape == (9, 64, 64, 3)
  repeats = [warning for warning in record["warnings"] if "cannot be split over fsdp" in warning]
  assert bool(repeats) == (sharded_fsdp(axes) > 2)


@pytest.mark.devices(8)
@pytest.mark.parametrize("axes", [{"data": 2, "context": 4}], ids=ids)
def test_a_video_is_the_same_in_a_batch_of_three_on_a_mesh(tmp_path, alone, no_vae, axes):
  keys = [f"{mesh.key('ici', axis)}={size}" for axis, size in axes.items()]
  batch = run(tmp_path, "batch", ULYSSES, *keys, "num_videos_per_prompt=3", "batch_size=3")
  expected = np.load(alone / "latents.npy")
  np.testing.assert_allclose(np.load(batch / "000.latents.npy"), expected, rtol=1e-5, atol=1e-5)
  assert np.abs(np.load(batch / "001.latents.npy") - expected).max() > 0.1


@pytest.mark.devices(8)
def test_weights_and_text_encoder_loaded_in_shards_equal_the_reference(tmp_path):
  """A weights folder on the default mesh: every component is read straight into its shards."""
  golden = pathlib.Path("tests/golden/pipelines/one_expert")
  values = json.loads((golden / "args.json").read_text())
  assert decode.main([
    "tests/tiny.yml", "log_format=quiet", "attention=dot_product", "save_latents=true", "run_name=golden",
    f"base_output_directory={tmp_path}", f"load_parameters_path={golden / 'pipe'}",
    f"initial_noise_path={golden / 'noise.npy'}", *(f"{k}={v}" for k, v in values.items() if v is not None)]) == 0
  latents, expected = np.load(tmp_path / "golden" / "latents.npy"), np.load(golden / "latents.npy")
  assert np.linalg.norm(latents - expected) <= 1e-4 * np.linalg.norm(expected)
  assert json.loads((tmp_path / "golden" / "run.json").read_text())["devices"]["mesh"]["fsdp"] == 8


@pytest.mark.devices(8)
@pytest.mark.parametrize("arguments, words", [
  ([ULYSSES, "ici_context_parallelism=3"], ["ici_context_parallelism=3", "num_heads=8", "1, 2, 4, 8"]),
  (["ici_data_parallelism=3"], ["ici_data_parallelism=3", "8 devices", "2, 4 or 8"]),
  (ALL_CONTEXT, ["context=8", ULYSSES]),
  ([ULYSSES, *ALL_CONTEXT, "num_heads=12"], ["ici_context_parallelism=8", "num_heads=12"]),
  ([ULYSSES, *ALL_CONTEXT, "width=80", "height=80"], ["75 tokens", "context=8", "height=128"]),
  (["ici_fsdp_parallelism=1", "ici_tensor_parallelism=-1", "num_heads=12"], ["ici_tensor_parallelism=8", "num_heads=12"]),
])
def test_meshes_that_do_not_fit_are_refused(tmp_path, capsys, arguments, words):
  run(tmp_path, "refused", *arguments, status=2)
  error = capsys.readouterr().err
  for word in words:
    assert word in error, error
  assert "Traceback" not in error
