"""Loading: every number in its place, in any type and sharding, and without a second copy on the host."""

import dataclasses
import json
import pathlib
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

from MaxText.checkpoints import loading, names, tensor_files
from MaxText.checkpoints.folder import load, load_leaves, open_folder
from MaxText.models.umt5 import Umt5Encoder
from MaxText.models.vae import WanVae
from MaxText.models.wan import WanTransformer

ROOT = pathlib.Path(__file__).parents[2]
PIPE = ROOT / "tests" / "golden" / "pipelines" / "two_experts" / "pipe"
MODULES = {"transformer": WanTransformer, "transformer_2": WanTransformer, "vae": WanVae, "text_encoder": Umt5Encoder}


@pytest.fixture(scope="module")
def folder():
  return open_folder(str(PIPE))


@pytest.fixture(scope="module")
def truth():
  return {part: {name: array for file in (PIPE / part).glob("*.safetensors") for name, array in load_file(file).items()}
          for part in MODULES}


def abstract_state(folder, component, weight_dtype=jnp.float32):
  make = MODULES[component]
  model = nnx.eval_shape(lambda: make(folder.architecture(component), dtype=jnp.float32, weight_dtype=weight_dtype,
                                      rngs=nnx.Rngs(0)))
  return nnx.state(model)


def targets_of(folder, component, dtype=jnp.float32, sharding=None):
  shapes = names.leaf_shapes(names.tensors(component, folder.architecture(component)))
  place = sharding or (lambda shape: None)
  return {path: jax.ShapeDtypeStruct(shape, dtype, sharding=place(shape)) for path, shape in shapes.items()}


def assert_equal(folder, component, leaves, truth, dtype=np.float32):
  for row in names.tensors(component, folder.architecture(component)):
    ours = np.asarray(leaves[row.path] if row.layer is None else leaves[row.path][row.layer])
    expected = truth[row.name].astype(dtype)
    assert ours.dtype == expected.dtype and np.array_equal(row.to_theirs(ours), expected), row.name


@pytest.mark.parametrize("component", MODULES)
def test_states_of_our_modules_are_filled(component, folder, truth):
  abstract = abstract_state(folder, component, jnp.bfloat16)
  state = load(folder, component, abstract)
  assert jax.tree.structure(state) == jax.tree.structure(abstract)
  wanted = {".".join(map(str, path)): v.get_value().dtype for path, v in nnx.to_flat_state(abstract)}
  leaves = {".".join(map(str, path)): v.get_value() for path, v in nnx.to_flat_state(state)}
  assert {np.dtype(dtype) for dtype in wanted.values()} == {np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)}
  for row in names.tensors(component, folder.architecture(component)):
    ours = leaves[row.path] if row.layer is None else leaves[row.path][row.layer]
    assert ours.dtype == wanted[row.path]
    expected = truth[component][row.name].astype(ours.dtype)
    assert np.array_equal(row.to_theirs(np.asarray(ours)), expected), row.name


def spread(mesh):
  """Shards the last dimension that eight devices divide, and the one before it over two if it can be."""

  def sharding(shape):
    spec = [None] * len(shape)
    for dim in reversed(range(1 if len(shape) > 1 else 0, len(shape))):
      for axis in ("x", "y"):
        if axis not in spec and spec[dim] is None and shape[dim] % mesh.shape[axis] == 0:
          spec[dim] = axis
    return NamedSharding(mesh, PartitionSpec(*spec))

  return sharding


@pytest.mark.parametrize("component", ["transformer", "vae", "text_encoder"])
def test_every_leaf_goes_to_its_shards(component, folder, truth):
  mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
  targets = targets_of(folder, component, sharding=spread(mesh))
  assert sum(not target.sharding.is_fully_replicated for target in targets.values()) > len(targets) / 2
  leaves = load_leaves(folder, component, targets)
  assert all(leaves[path].sharding == target.sharding for path, target in targets.items())
  assert_equal(folder, component, leaves, truth[component])


def test_a_part_of_a_component(folder, truth):
  targets = {path: target for path, target in targets_of(folder, "vae").items() if path.startswith("decoder.")}
  leaves = load_leaves(folder, "vae", targets)
  assert leaves.keys() == targets.keys()
  name = "decoder.up_blocks.0.resnets.0.conv1"
  assert np.array_equal(leaves[f"{name}.kernel"], truth["vae"][f"{name}.weight"].transpose(2, 3, 4, 1, 0))


def test_progress_counts_the_bytes_of_the_files(folder):
  calls = []
  load(folder, "text_encoder", abstract_state(folder, "text_encoder"), lambda done, total: calls.append((done, total)))
  total = sum(stored.nbytes for stored in folder.stored["text_encoder"].values())
  assert [done for done, _ in calls] == sorted({done for done, _ in calls}) and calls[-1] == (total, total)


def test_the_original_release(tmp_path):
  """The text encoder and the VAE from .pth files, the transformer from safetensors under its original names."""
  golden = ROOT / "tests" / "golden"
  diffusers = open_folder(str(golden / "pipelines" / "one_frame" / "pipe"))
  tensors = load_file(next(iter(diffusers.stored["transformer"].values())).file)
  save_file({row.original: tensors[row.name] for row in diffusers.stored["transformer"]},
            tmp_path / "diffusion_pytorch_model.safetensors")
  wan = diffusers.wan
  (tmp_path / "config.json").write_text(json.dumps({
    "_class_name": "WanModel", "model_type": "t2v", "dim": wan.width, "num_heads": wan.num_heads, "in_dim": 16,
    "out_dim": 16, "freq_dim": wan.freq_dim, "ffn_dim": wan.ffn_dim, "num_layers": wan.num_layers, "eps": 1e-6,
    "text_dim": wan.text_dim}))
  for file in ("Wan2.1_VAE.pth", "models_t5_umt5-xxl-enc-bf16.pth"):
    shutil.copy(golden / "original" / file, tmp_path / file)
  shutil.copytree(golden / "pipelines" / "one_frame" / "pipe" / "tokenizer", tmp_path / "google" / "umt5-xxl")
  original = open_folder(str(tmp_path))
  assert (original.wan, original.vae, original.umt5) == (diffusers.wan, diffusers.vae, diffusers.umt5)
  for component in original.components:
    theirs = load_leaves(diffusers, component, targets_of(diffusers, component))
    ours = load_leaves(original, component, targets_of(original, component))
    for path, array in theirs.items():
      rounded = array.astype(jnp.bfloat16) if component == "text_encoder" else array
      assert np.array_equal(np.asarray(ours[path]), np.asarray(rounded, np.float32)), path


def test_what_the_folder_does_not_have(folder):
  with pytest.raises(ValueError, match="has no image_encoder; it has text_encoder, transformer"):
    load(folder, "image_encoder", abstract_state(folder, "vae"))
  wider = dataclasses.replace(folder, wan=dataclasses.replace(folder.wan, ffn_dim=folder.wan.ffn_dim + 1))
  with pytest.raises(ValueError, match="blocks.ffn.up.kernel") as error:
    load(folder, "transformer", abstract_state(wider, "transformer"))
  assert "the transformer to load differs from" in str(error.value)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.float64])
def test_reading_a_box(dtype, tmp_path, monkeypatch):
  monkeypatch.setattr(tensor_files, "BLOCK_BYTES", 100)  # a few rows at a time
  array = np.random.default_rng(0).standard_normal((37, 3, 5)).astype(dtype)
  save_file({"a": np.zeros(3, np.float32), "x": array, "scalar": np.array(2.5, np.float32)}, tmp_path / "x.safetensors")
  stored, _ = tensor_files.read_header(str(tmp_path / "x.safetensors"))
  for index in ((slice(None),) * 3, (slice(4, 30), slice(None), slice(None)), (slice(3, 36), slice(1, 3), slice(2, 3)),
                (slice(5, 5), slice(None), slice(None))):
    for to in (None, np.float32, ml_dtypes.bfloat16):
      assert np.array_equal(tensor_files.read(stored["x"], index, to), array[index].astype(to or dtype))
  assert tensor_files.read(stored["scalar"])[()] == 2.5


def test_a_file_that_shrinks_while_it_is_read(tmp_path):
  path = tmp_path / "x.safetensors"
  save_file({"x": np.ones((8, 8), np.float32)}, path)
  stored, _ = tensor_files.read_header(str(path))
  path.write_bytes(path.read_bytes()[:-10])
  with pytest.raises(ValueError, match="ends inside tensor x"):
    tensor_files.read(stored["x"])


def test_written_files_are_read_by_the_safetensors_library(tmp_path):
  arrays = {"b": np.arange(6, dtype=ml_dtypes.bfloat16).reshape(2, 3).T, "a": np.array(1.5, np.float32),
            "c": np.zeros((0, 4))}
  path = str(tmp_path / "x.safetensors")
  tensor_files.write_safetensors(path, [(n, a.dtype, a.shape) for n, a in arrays.items()], arrays.get, {"format": "pt"})
  read = load_file(path)
  assert all(read[name].dtype == array.dtype and np.array_equal(read[name], array) for name, array in arrays.items())
  assert tensor_files.read_header(path)[1] == {"format": "pt"}


_MEASURE = """
import resource, sys
import jax, jax.numpy as jnp, numpy as np
from MaxText.checkpoints import loading, names, tensor_files
path, layers, width = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
loading.IN_FLIGHT_BYTES = 32 << 20
rows = tuple(names.Tensor("x", i, f"x.{i}", "", (width, width), (1, 0), (width, width)) for i in range(layers))
stored, _ = tensor_files.read_header(path)
target = {"x": jax.ShapeDtypeStruct((layers, width, width), jnp.bfloat16)}
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
jax.block_until_ready(jnp.zeros((4, 4)) @ jnp.ones((4, 4)))  # compiler and threads
before = peak()
leaves = loading.read_into(rows, {row: stored[row.name] for row in rows}, target)
jax.block_until_ready(leaves)
print(peak() - before)
"""


def test_memory_is_the_placed_arrays_and_little_more(tmp_path):
  layers, width = 24, 2048
  file = str(tmp_path / "x.safetensors")
  rng = np.random.default_rng(0)
  entries = [(f"x.{i}", np.dtype(np.float32), (width, width)) for i in range(layers)]
  tensor_files.write_safetensors(file, entries, lambda name: rng.standard_normal((width, width), np.float32))
  out = subprocess.run([sys.executable, "-c", _MEASURE, file, str(layers), str(width)], check=True, cwd=ROOT, text=True,
                       capture_output=True)
  placed = layers * width * width * 2
  # Reading the file whole, or mapping it, would add twice the placed arrays on top.
  assert int(out.stdout) < placed + (140 << 20)
  assert loading.IN_FLIGHT_BYTES <= 1 << 30
