"""train_compile: the step of train, compiled for a TPU topology from shapes alone, and nothing runs."""

import pathlib
import re

import jax
import numpy as np
import pytest

from MaxText import pyconfig, train, train_compile
from MaxText.config_types import RunError
from MaxText.input_pipeline import make_iterator, records
from MaxText.parallel import mesh as mesh_lib
from MaxText.parallel import sharding, topology
from MaxText.training import batches, metrics, step
from MaxText.video_io import write_video

PIPE = pathlib.Path(__file__).parent.parent / "golden" / "pipelines" / "one_expert" / "pipe"
SMALL = ["configs/train_video.yml", "compile_topology=v6e:2x4", "height=32", "width=32", "num_frames=5"]
FOLDER = [f"load_parameters_path={PIPE}"]


@pytest.fixture(autouse=True)
def quick_compilation():
  """Programs for the CPU are compiled without optimisation."""
  jax.config.update("jax_disable_most_optimizations", True)
  yield
  jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def here(monkeypatch):
  """The devices here in a topology's place."""
  monkeypatch.setattr(topology, "topology_devices", lambda name: mesh_lib.devices())


@pytest.fixture(scope="module")
def data(tmp_path_factory):
  """A captioned video, and shards of clips of two sizes."""
  root, random = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
  for name in ("videos", "shards"):
    (root / name).mkdir()
  write_video(root / "videos" / "0.mp4", random.integers(0, 255, (12, 32, 32, 3), np.uint8), 32, 32, 16)
  (root / "videos" / "0.txt").write_text("a ball")
  text = random.standard_normal((7, 40), np.float32)
  buckets = []
  for height, width in ((32, 48), (48, 32)):
    shape, name = (2, height // 8, width // 8, 16), records.shard_name("train", f"{height}x{width}", 0, 1)
    writer = records.ShardWriter(root / "shards" / name)
    for _ in range(4):
      sample = {"latents": random.standard_normal(shape, np.float32), "text": text}
      writer.write(records.pack(sample, "float32", {"caption": "a ball"}))
    writer.finish([])
    buckets.append(records.Bucket(height, width, shape, {"train": ((name, 4),)}))
  records.replace_file(root / "shards" / records.EMPTY_TEXT, records.pack({"text": text[:1]}, "float32"))
  hashes = {"vae": "v", "text_encoder": "t"}
  records.Dataset(root / "shards", 5, 16.0, 40, "float32", hashes, tuple(buckets)).write()
  return {
    "video": ["dataset_type=video", f"video_directory={root / 'videos'}", *SMALL[2:]],
    "latents": ["dataset_type=latents", f"dataset_path={root / 'shards'}", "size_buckets=[[32,48],[48,32]]", SMALL[4]],
    "synthetic": SMALL[2:]}


def described(tree):
  return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.sharding), tree)


@pytest.mark.devices(2)
@pytest.mark.parametrize("target, source", [
  ("dit", "synthetic"), ("dit", "latents"), ("dit", "video"), ("text", "synthetic"), ("text", "latents"),
  ("text", "video"), ("vae", "synthetic"), ("vae", "video")])
def test_shapes_are_those_of_real_batches(data, target, source):
  """One for every size, with dtypes and shardings; of the empty prompt too."""
  config = pyconfig.initialize(
    ["configs/train_video.yml", *FOLDER, *data[source], f"train_target={target}", "global_batch_size=4",
     "ici_fsdp_parallelism=2"], "train", {})
  placement = sharding.Placement(mesh_lib.make_mesh(config), sharding.parse_rules(config.logical_axis_rules))
  expected = [described(batch) for batch in batches.abstract_batches(config, placement)]
  assert len(expected) == (2 if source == "latents" else 1)
  assert described(batches.empty_prompt(config, placement)) == described(batches.abstract_empty_prompt(config, placement))
  iterator, found = make_iterator(config, placement), []
  for _ in range(8):
    found += [batch for batch in [described(batches.global_batch(next(iterator), placement))] if batch not in found]
    if len(found) == len(expected):
      break
  assert sorted(found, key=str) == sorted(expected, key=str)


@pytest.mark.devices(4)
def test_what_is_compiled_is_what_train_runs(tmp_path, here, monkeypatch, capsys):
  """The same jitted step, and arguments of the same structure, shapes, dtypes and shardings."""
  seen, jit_train_step = [], step.jit_train_step

  class Seen:
    def __init__(self, *arguments):
      self.step, self.recipe = jit_train_step(*arguments), arguments[2]

    def see(self, arguments):
      seen.append((self.recipe.objective.levels, self.recipe.accumulation, described(arguments)))

    def __call__(self, *arguments):
      self.see(arguments)
      raise RunError("seen")

    def lower(self, *arguments):
      self.see(arguments)
      return self.step.lower(*arguments)

  monkeypatch.setattr(step, "jit_train_step", Seen)
  shared = [*SMALL[2:], "steps=1", "ici_fsdp_parallelism=2", "ici_context_parallelism=2", "ema_decay=0.9",
            "context_parallel_strategy=ulysses", "gradient_accumulation_steps=2", f"base_output_directory={tmp_path}"]
  assert train_compile.main([*SMALL[:2], *shared, "run_name=x", "checkpoint_period=2"]) == 0
  out = capsys.readouterr().out
  assert "nothing was run" in out and "compiler's account" in out and "Pallas kernels: none" in out
  assert "4 devices (cpu): fsdp 2 × context 2" in out and re.search(r"collectives: .*\d+ all-to-all", out)
  assert re.search(r"memory a device: peak \d+\.\d+ GiB", out) and re.search(r"TFLOP a device and step: \d", out)
  assert not list(tmp_path.iterdir())
  assert train.main([SMALL[0], *shared, "log_format=quiet", "jax_cache_dir=null"]) == 1
  assert len(seen) == 2 and seen[0] == seen[1]


def test_too_little_memory_is_said_and_exits_1(here, monkeypatch, capsys):
  monkeypatch.setitem(metrics.HBM_GIB, "cpu", 1e-6)
  arguments = [*SMALL[:4], "num_frames=1", "train_target=vae", "global_batch_size=1"]
  assert train_compile.main(arguments) == 1
  printed = capsys.readouterr()
  assert "does not fit: a device of cpu has 1e-06" in printed.out and "gradient_accumulation_steps" in printed.err

  class Full:
    def lower(self, *arguments):
      raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Used 40G of 31G hbm.\n\nLargest buffers:\n…")

  monkeypatch.setattr(step, "jit_train_step", lambda *arguments: Full())
  assert train_compile.main(arguments) == 1
  printed = capsys.readouterr()
  assert "Used 40G of 31G hbm" in printed.out and "does not fit a device's memory" in printed.err


@pytest.mark.parametrize("arguments, words", [
  ([SMALL[0], *SMALL[2:]], ["compile_topology is missing", "v6e:4x4"]),
  (["configs/train_video.yml", "compile_topology=v6e-8"], ["compile_topology=v6e-8", "v6e:2x4"]),
  (["configs/train_video.yml", "compile_topology=v9z:2x4"], ["compile_topology=v9z:2x4", "libtpu"]),
  ([*SMALL, "learning_rate=0"], ["learning_rate=0"]),
  ([*SMALL, "dry_run=true"], ["dry_run: train_compile does not read it"]),
  ([*SMALL, "attention=svg"], ["attention=svg", "gradient"]),
  ([*SMALL, "dataset_type=latents"], ["dataset_path is missing"])], ids=lambda v: v[-1])
def test_bad_input_is_refused(arguments, words, capsys):
  assert train_compile.main([*arguments, "log_format=quiet"]) == 2
  refused(words, capsys)


@pytest.mark.devices(8)
@pytest.mark.parametrize("arguments, words", [
  (["ici_fsdp_parallelism=3"], ["ici_fsdp_parallelism=3", "8 devices"]),
  (["global_batch_size=12"], ["global_batch_size=12", "8 or 16"]),
  (["context_parallel_strategy=ulysses", "ici_context_parallelism=8", "num_heads=3", "override_model_config=true"],
   ["ici_context_parallelism=8", "num_heads=3"])], ids=lambda v: v[-1])
def test_what_does_not_fit_the_mesh_is_refused(arguments, words, here, capsys):
  assert train_compile.main([*SMALL, *arguments, "log_format=quiet"]) == 2
  refused(words, capsys)


def refused(words, capsys):
  error = capsys.readouterr().err
  assert all(word in error for word in words) and error.count("error:") == 1 and "Traceback" not in error, error


def test_tiles_that_the_kernel_cannot_take_are_refused(capsys):
  pytest.importorskip("libtpu")
  assert train_compile.main([*SMALL, "flash_block_q=100", "log_format=quiet"]) == 2
  refused(["flash_block_q=100", "128"], capsys)


def test_train_names_this_command(capsys):
  assert train.main(SMALL) == 2
  refused(["compile_topology=v6e:2x4", "MaxText.train_compile"], capsys)


@pytest.mark.slow
def test_small_model_compiles_for_v6e_with_its_kernels(capsys):
  pytest.importorskip("libtpu")
  mesh = ["ici_data_parallelism=2", "ici_fsdp_parallelism=2", "ici_context_parallelism=2",
          "context_parallel_strategy=ulysses"]  # fmt: skip
  assert train_compile.main([*SMALL, *mesh, "dtype=bfloat16", "remat_policy=full"]) == 0
  out = capsys.readouterr().out
  assert "8 devices (TPU v6 lite): data 2 × fsdp 2 × context 2" in out
  kernels = next(line for line in out.splitlines() if line.startswith("Pallas kernels"))
  assert all(name in kernels for name in ("flash_attention", "flash_mha_bwd_dq", "flash_mha_bwd_dkv"))
  assert re.search(r"peak \d+\.\d+ GiB \(fits: a device of TPU v6 lite has 32\)", out) and "at the chip's 918" in out
