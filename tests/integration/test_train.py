"""train as a user types it: lines and files, resuming bit for bit, stopping, damage, and decode on what was trained."""

import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from MaxText import convert_checkpoint, decode, encode_dataset, pyconfig, train
from MaxText.checkpoints.folder import open_folder
from MaxText.config_types import ConfigError
from MaxText.diffusion.pipeline import VideoPipeline
from MaxText.input_pipeline import synthetic
from MaxText.training import metrics
from MaxText.video_io import read_video, write_video

PIPE = pathlib.Path(__file__).parent.parent / "golden" / "pipelines" / "one_expert" / "pipe"
SIZE = ["height=32", "width=32", "num_frames=5"]
LINE = re.compile(r"^completed step: (\d+), seconds: \d+\.\d+, TFLOP/s/device: \d+\.\d+, loss: \d+\.\d+$", re.M)


@pytest.fixture(scope="module", autouse=True)
def quick_compilation(tmp_path_factory):
  """Programs are compiled without optimisation, and once for all tests of this file."""
  cache = tmp_path_factory.mktemp("cache")
  os.environ["M_JAX_CACHE_DIR"] = str(cache)
  jax.config.update("jax_disable_most_optimizations", True)
  yield
  jax.config.update("jax_disable_most_optimizations", False)
  del os.environ["M_JAX_CACHE_DIR"]


def arguments_of(folder, name, *arguments):
  defaults = ["configs/train_video.yml", f"load_parameters_path={PIPE}", "global_batch_size=4", "log_format=text", *SIZE]
  given = {argument.partition("=")[0]: argument for argument in [*defaults, *arguments]}
  return [*given.values(), f"base_output_directory={folder}", f"run_name={name}"]


def run(folder, name, *arguments, status=0):
  assert train.main(arguments_of(folder, name, *arguments)) == status
  return folder / name


def started(folder, name, *arguments):
  """The command in a process of its own."""
  environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
  return subprocess.Popen([sys.executable, "-m", "MaxText.train", *arguments_of(folder, name, *arguments)],
                          cwd=PIPE.parents[4], env=environment)


def lines(run_folder):
  return [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]


def losses(run_folder):
  return {line["step"]: line["loss"] for line in lines(run_folder) if "loss" in line}


def arrays(checkpoint, items=("transformer", "transformer_ema", "optimizer")):
  """Every number of a checkpoint: weights, average, optimizer."""
  import orbax.checkpoint as ocp

  found = {}
  for item in items:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
      tree = checkpointer.restore((checkpoint / item).absolute())
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    found |= {f"{item}{jax.tree_util.keystr(path)}": np.asarray(x) for path, x in leaves}
  return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  """Four steps without a stop."""
  with pytest.MonkeyPatch.context() as patch:
    from MaxText.parallel import mesh

    patch.setattr(mesh, "devices", lambda: jax.devices()[:1])
    return run(tmp_path_factory.mktemp("whole"), "whole", "steps=4", "checkpoint_period=2", "ema_decay=0.5")


EMA = "ema_decay=0.5"


def test_resumed_equals_uninterrupted(tmp_path, whole, capsys):
  run(tmp_path, "run", "steps=2", EMA)
  resumed = run(tmp_path, "run", "steps=4", EMA)
  out = capsys.readouterr().out
  assert [int(n) for n in LINE.findall(out)] == [1, 2, 3, 4] and f"checkpoint {resumed}/checkpoints/2" in out
  assert losses(resumed) == losses(whole) and list(losses(whole)) == [1, 2, 3, 4]
  begun, continued = (json.loads((resumed / f"config{name}.json").read_text()) for name in ("", "_from_step_000000002"))
  assert (begun["steps"], continued["steps"]) == tuple({"value": n, "source": "command line"} for n in (2, 4))
  assert "changed since the last start: steps was 2, is 4\n" in out and not list(whole.glob("config_*.json"))
  mine, theirs = arrays(resumed / "checkpoints" / "4"), arrays(whole / "checkpoints" / "4")
  assert mine.keys() == theirs.keys() and len(mine) > 100
  for name, value in theirs.items():
    np.testing.assert_array_equal(mine[name], value, err_msg=name)
  iterators = [(folder / "checkpoints/4/iterator/process_0-of-1.json").read_text() for folder in (resumed, whole)]
  assert iterators[0] == iterators[1]
  other = run(tmp_path, "other", "steps=4", EMA, "load_parameters_path=null", "model_name=", *architecture(),
              f"load_full_state_path={whole / 'checkpoints' / '2'}")
  assert losses(other) == {step: loss for step, loss in losses(whole).items() if step > 2}


def architecture():
  """The folder's architecture as keys, for a run that is given no folder."""
  from MaxText import pyconfig

  config = pyconfig.initialize(["configs/train_video.yml", f"load_parameters_path={PIPE}", *SIZE], "train", {})
  from MaxText.config_types import ARCHITECTURE, as_yaml

  return [f"{key}={as_yaml(getattr(config, key))}" for key in sorted(ARCHITECTURE)] + [f"flow_shift={config.flow_shift}"]


@pytest.mark.devices(4)
def test_resume_on_another_number_of_devices(tmp_path, whole):
  shutil.copytree(whole / "checkpoints" / "2", tmp_path / "run" / "checkpoints" / "2")
  resumed = run(tmp_path, "run", "steps=4", EMA)
  assert losses(resumed) == pytest.approx({s: x for s, x in losses(whole).items() if s > 2}, rel=1e-4)


def test_sigterm_saves_and_exits_0(tmp_path, whole, monkeypatch):
  line = metrics.step_line

  def stop_at_3(step, *values):
    if step == 3:
      signal.raise_signal(signal.SIGTERM)
    return line(step, *values)

  monkeypatch.setattr(metrics, "step_line", stop_at_3)
  stopped = run(tmp_path, "run", "steps=100", "checkpoint_period=0", EMA)
  assert os.listdir(stopped / "checkpoints") == ["3"]
  assert losses(stopped) == {step: loss for step, loss in losses(whole).items() if step <= 3}


def test_an_unfinished_checkpoint_is_passed_over(tmp_path, whole):
  shutil.copytree(whole, tmp_path / "run")
  newest = tmp_path / "run" / "checkpoints" / "4"
  newest.rename(newest.with_name("4.orbax-checkpoint-tmp"))  # the name a checkpoint has while it is written
  resumed = run(tmp_path, "run", "steps=4", EMA)
  assert losses(resumed) == losses(whole)
  assert sorted(os.listdir(resumed / "checkpoints")) == ["2", "4"]


@pytest.mark.slow
def test_kill_during_a_checkpoint(tmp_path, whole):
  process = started(tmp_path, "run", EMA, "steps=500", "checkpoint_period=1")
  checkpoints = tmp_path / "run" / "checkpoints"

  def whole_ones():
    return sorted(int(path.name) for path in checkpoints.glob("*") if path.name.isdecimal())

  end = time.monotonic() + 300
  while not (whole_ones()[1:] and list(checkpoints.glob("*tmp*"))):
    assert process.poll() is None and time.monotonic() < end
    time.sleep(0.002)
  process.kill()
  process.wait()
  last = whole_ones()[-1]
  resumed = run(tmp_path, "run", f"steps={last + 1}", EMA)
  assert list(losses(resumed)) == list(range(1, last + 2)) and not list(checkpoints.glob("*tmp*"))
  both = losses(resumed).keys() & losses(whole).keys()
  assert {s: losses(resumed)[s] for s in both} == pytest.approx({s: losses(whole)[s] for s in both}, rel=1e-5)


def test_a_damaged_checkpoint_is_refused_and_an_older_one_taken_when_asked(tmp_path, whole, capsys):
  shutil.copytree(whole, tmp_path / "run")
  newest = tmp_path / "run" / "checkpoints" / "4"
  for file in (newest / "transformer" / "d").iterdir():
    os.truncate(file, file.stat().st_size // 2)
  run(tmp_path, "run", "steps=6", EMA, status=2)
  error = capsys.readouterr().err
  assert "4/transformer is damaged" in error and "checkpoint_step=2" in error and "Traceback" not in error
  run(tmp_path, "run", "steps=4", EMA, "checkpoint_step=3", status=2)
  assert "checkpoint_step=3" in capsys.readouterr().err
  resumed = run(tmp_path, "run", "steps=4", EMA, "checkpoint_step=2")
  assert losses(resumed) == losses(whole)
  assert sorted(os.listdir(resumed / "checkpoints")) == ["2", "4", "set_aside_4"]


def test_nan_names_the_step(tmp_path, monkeypatch, capsys):
  sample = synthetic.sample

  def broken(seed, split, number, *shape):
    made = dict(sample(seed, split, number, *shape))
    return made if number < 4 else {**made, "latents": np.full_like(made["latents"], np.nan)}

  monkeypatch.setattr(synthetic, "sample", broken)
  stopped = run(tmp_path, "run", "steps=4", EMA, "checkpoint_period=1", "write_metrics=false", status=1)
  error = capsys.readouterr().err
  assert "step 2" in error and "nan" in error and "Traceback" not in error
  assert sorted(os.listdir(stopped)) == ["checkpoints", "config.json"] and os.listdir(stopped / "checkpoints") == ["1"]


def latents_of(folder, *arguments):
  name = f"video{len(list(folder.iterdir()))}"
  assert decode.main([
    "tests/tiny.yml", *arguments, f"base_output_directory={folder}", f"run_name={name}", "log_format=quiet", *SIZE,
    "num_inference_steps=2", "guidance_scale=1", "prompt=a ball", "save_latents=true"]) == 0
  return np.load(folder / name / "latents.npy")


def test_decode_reads_a_checkpoint_and_convert_exports_it(tmp_path, whole, capsys):
  checkpoint = whole / "checkpoints" / "4"
  direct = latents_of(tmp_path, f"load_parameters_path={checkpoint}")
  assert np.abs(direct - latents_of(tmp_path, f"load_parameters_path={PIPE}")).max() > 1e-6, "training changed nothing"
  exported = tmp_path / "exported"
  assert convert_checkpoint.main([
    "tests/tiny.yml", f"load_parameters_path={checkpoint}", "convert_to=diffusers", f"converted_path={exported}",
    "log_format=quiet"]) == 0
  assert open_folder(str(exported)).format == "diffusers"
  np.testing.assert_array_equal(latents_of(tmp_path, f"load_parameters_path={exported}"), direct)
  assert decode.main(["tests/tiny.yml", f"load_parameters_path={whole}", "prompt=x"]) == 2
  assert str(checkpoint) in capsys.readouterr().err


def test_the_vae_is_trained_by_reconstruction(tmp_path, capsys):
  made = run(tmp_path, "run", "steps=3", "train_target=vae", "learning_rate=0.003", "eval_interval=3", EMA)
  found = lines(made)
  assert found[2]["loss"] < found[0]["loss"] and found[2]["psnr"] > found[0]["psnr"] and found[0]["kl"] > 0
  assert "by noise level" not in capsys.readouterr().out and found[-1]["eval_loss"] > 0
  again = run(tmp_path, "again", "steps=2", "train_target=vae", "learning_rate=0.003", EMA)
  run(tmp_path, "again", "steps=3", "train_target=vae", "learning_rate=0.003", EMA)
  assert losses(again)[3] == losses(made)[3]
  folders = [open_folder(str(place / "checkpoints" / "3")) for place in (made, again)]
  assert folders[0].vae == folders[1].vae and folders[0].trained == ("vae",)
  assert folders[0].vae.latents_mean != folders[0].base.vae.latents_mean  # the new latents' own statistics
  # decode reads the checkpoint, and another run starts from it: a chain of two folders.
  checkpoint = f"load_parameters_path={made / 'checkpoints' / '3'}"
  latents_of(tmp_path, checkpoint)
  second = run(tmp_path, "second", "steps=1", checkpoint)
  exported = tmp_path / "exported"
  assert convert_checkpoint.main([
    "tests/tiny.yml", f"load_parameters_path={second / 'checkpoints' / '1'}", "convert_to=diffusers",
    f"converted_path={exported}", "converted_dtype=bfloat16", "log_format=quiet"]) == 0
  assert open_folder(str(exported)).vae == folders[0].vae
  run(tmp_path, "made", "steps=1", "train_target=vae", checkpoint, "load_full_state_path=x", status=2)
  run(tmp_path, "run", "steps=4", "train_target=dit", status=2)
  assert "holds vae, this run trains transformer" in capsys.readouterr().err


def test_a_frozen_encoder_and_its_latents_stay(tmp_path):
  frozen = ["train_target=vae", "vae_freeze_encoder=true", "learning_rate=0.003", "adam_weight_decay=0.5"]
  made = run(tmp_path, "run", "steps=2", "checkpoint_period=1", *frozen)
  first, second = (arrays(made / "checkpoints" / step, ["vae"]) for step in "12")
  changed = {name.split("'")[1].split(".")[0] for name in first if (first[name] != second[name]).any()}
  assert changed == {"decoder", "post_quant_conv"}
  folder = open_folder(str(made / "checkpoints" / "2"))
  assert folder.vae == folder.base.vae and lines(made)[1]["loss"] < lines(made)[0]["loss"]


def test_the_text_encoder_is_trained_with_the_transformer(tmp_path, whole):
  made = run(tmp_path, "run", "steps=2", "train_target=text", "learning_rate=0.01")
  checkpoint = made / "checkpoints" / "2"
  assert open_folder(str(checkpoint)).trained == ("transformer", "text_encoder")
  text = {}
  for name, path in (("before", PIPE), ("after", checkpoint)):
    config = pyconfig.initialize(
      ["tests/tiny.yml", f"load_parameters_path={path}", "prompt=a ball", "guidance_scale=1", *SIZE], "decode")
    text[name] = VideoPipeline(config).encode_prompts(["a ball"])["a ball"]
  assert np.abs(text["before"] - text["after"]).max() > 1e-3


def test_lora_is_read_by_decode(tmp_path, capsys):
  trained = run(tmp_path, "run", "steps=2", "lora_rank=2", "lora_alpha=4", "learning_rate=0.01")
  base = latents_of(tmp_path, f"load_parameters_path={PIPE}")
  merged = latents_of(tmp_path, f"load_parameters_path={PIPE}", f"lora_path={trained / 'lora.safetensors'}")
  assert np.abs(merged - base).max() > 1e-4
  size = sum(file.stat().st_size for file in (trained / "checkpoints" / "2" / "transformer").rglob("*") if file.is_file())
  assert size < 10**6, "a LoRA checkpoint holds adapters alone"
  assert decode.main(["tests/tiny.yml", f"load_parameters_path={trained / 'checkpoints' / '2'}", "prompt=x"]) == 2
  assert "lora_path" in capsys.readouterr().err


def test_profile_and_evaluation_are_written_when_asked(tmp_path):
  # In a process of its own: another test may have loaded libtpu into this one, and its profiler is not for this JAX.
  asked = ["profiler=xplane", "profiler_steps=1", "eval_interval=2", "checkpoint_period=0"]
  assert started(tmp_path, "run", "steps=3", EMA, *asked).wait(300) == 0
  made = tmp_path / "run"
  assert len(list((made / "profile").rglob("*.xplane.pb"))) == 1
  evaluations = [line for line in lines(made) if "eval_loss" in line]
  assert [line["step"] for line in evaluations] == [2, 3] and len(evaluations[0]["eval_loss_by_noise_level"]) == 4


def test_a_trace_is_refused_where_it_would_end_the_process(monkeypatch):
  config = pyconfig.initialize(["configs/train_video.yml", "model_name=wan-test", "profiler=xplane"], "train")
  monkeypatch.setattr(train.importlib.metadata, "requires", lambda name: ["numpy", 'libtpu==0.0.42.*; extra == "tpu"'])
  monkeypatch.setattr(train.importlib.metadata, "version", lambda name: "0.0.52")
  train.check_profiler(config, "cpu")
  with pytest.raises(ConfigError, match=r"libtpu==0.0.52 is installed.*pip install 'libtpu==0.0.42.\*'"):
    train.check_profiler(config, "tpu")
  monkeypatch.setattr(train.importlib.metadata, "version", lambda name: "0.0.42.1")
  train.check_profiler(config, "tpu")


@pytest.fixture
def decoded_videos(monkeypatch):
  """Every video that is made, [1, T, H, W, 3], before compression, which turns a rounding into several levels."""
  decoded, made = VideoPipeline.frames, []

  def kept(pipeline, latents):
    made.append(np.concatenate([np.asarray(frames) for frames in decoded(pipeline, latents)], axis=1))
    return iter([made[-1]])

  monkeypatch.setattr(VideoPipeline, "frames", kept)
  return made


def test_tensorboard_and_sample_videos_are_written_when_asked(tmp_path, decoded_videos):
  sampling = ["prompt=a ball", "num_inference_steps=2", "guidance_scale=2", "seed=3"]
  made = run(tmp_path, "run", "steps=3", EMA, "write_tensorboard=true", "sample_interval=2", "eval_interval=3", *sampling)
  assert sorted(os.listdir(made / "samples")) == ["step_000002.mp4", "step_000003.mp4"]
  assert decode.main([
    "tests/tiny.yml", f"load_parameters_path={made / 'checkpoints' / '3'}", "log_format=quiet", *SIZE, *sampling,
    "dtype=float32", f"base_output_directory={tmp_path}", "run_name=video"]) == 0
  assert read_video(made / "samples" / "step_000003.mp4").shape == (5, 32, 32, 3)
  second, third, decoded = decoded_videos
  assert np.abs(third - decoded).max() < 1e-3 and np.abs(third - second).max() > 0  # an eighth of a level
  told = tensorboard_scalars(made / "tensorboard")
  assert {step: told["loss", step] for step in (1, 2, 3)} == pytest.approx(losses(made))
  evaluation = next(line for line in lines(made) if "eval_loss" in line)["eval_loss_by_noise_level"]
  assert [told[f"eval_loss_by_noise_level/{i}", 3] for i in range(4)] == pytest.approx(evaluation)


def test_sample_videos_read_the_text_encoder_that_is_trained(tmp_path, monkeypatch, decoded_videos):
  sampling = ["prompt=a ball", "num_inference_steps=2", "guidance_scale=2", "seed=3"]
  encode, texts = VideoPipeline.encode_prompts, []
  def seen(pipeline, prompts, encoder=None):
    embedded = encode(pipeline, prompts, encoder)
    texts.append(embedded["a ball"])
    return embedded

  monkeypatch.setattr(VideoPipeline, "encode_prompts", seen)
  made = run(tmp_path, "run", "steps=2", EMA, "train_target=text", "learning_rate=0.01", "sample_interval=2", *sampling)
  assert os.listdir(made / "samples") == ["step_000002.mp4"]
  for name, path in (("after", made / "checkpoints" / "2"), ("before", PIPE)):
    assert decode.main([
      "tests/tiny.yml", f"load_parameters_path={path}", "log_format=quiet", *SIZE, *sampling, "dtype=float32",
      f"base_output_directory={tmp_path}", f"run_name={name}"]) == 0
  sampled, after, before = texts
  assert np.abs(sampled - after).max() < 1e-4 < 1e-3 < np.abs(sampled - before).max()
  sampled, after, before = decoded_videos
  assert np.abs(sampled - after).max() < 1e-3 < 3e-2 < np.abs(sampled - before).max()  # an eighth of a level, 4 levels


def tensorboard_scalars(folder):
  """(name, step) → value of the event files: records of a length, its checksum, an Event, its checksum."""
  from tensorboardX.proto.event_pb2 import Event

  found = {}
  for path in folder.iterdir():
    content, place = path.read_bytes(), 0
    while place < len(content):
      length = int.from_bytes(content[place:place + 8], "little")
      event = Event.FromString(content[place + 12:place + 12 + length])
      found |= {(value.tag, event.step): value.simple_value for value in event.summary.value}
      place += length + 16
  return found


def test_both_experts_are_trained_and_sampled_from(tmp_path):
  """The run of the second expert starts from the checkpoint of the first, and decode takes both from there."""
  pipe = PIPE.parent.parent / "two_experts" / "pipe"
  high = run(tmp_path, "high", "steps=1", f"load_parameters_path={pipe}", "train_expert=high_noise", "learning_rate=0.01")
  high = high / "checkpoints" / "1"
  low = run(tmp_path, "low", "steps=1", f"load_parameters_path={high}", "train_expert=low_noise", "learning_rate=0.01")
  low = low / "checkpoints" / "1"
  assert (high / "transformer").is_dir() and (low / "transformer_2").is_dir() and not (low / "transformer").exists()
  neither, one, both = (latents_of(tmp_path, f"load_parameters_path={path}") for path in (pipe, high, low))
  assert np.abs(one - neither).max() > 1e-3 and np.abs(both - one).max() > 1e-3


@pytest.fixture(scope="module")
def videos(tmp_path_factory):
  """Three videos of moving squares with captions, and a file that is none."""
  root, random = tmp_path_factory.mktemp("videos"), np.random.default_rng(0)
  for n in range(3):
    tiles = random.integers(0, 255, (12, 2, 2, 3), np.uint8)
    write_video(root / f"{n}.mp4", tiles.repeat(16, axis=1).repeat(16, axis=2), 32, 32, 16)
    (root / f"{n}.txt").write_text(f"a ball {'rolls ' * n}")
  (root / "bad.mp4").touch()
  (root / "bad.txt").write_text("nothing")
  return root


def test_raw_videos_train_as_their_shards_do(tmp_path, videos, capsys):
  shards, clips = tmp_path / "shards", [f"video_directory={videos}", "clips_per_video=2"]
  assert encode_dataset.main([
    "configs/train_video.yml", f"load_parameters_path={PIPE}", *SIZE, *clips, f"dataset_path={shards}",
    "log_format=quiet"]) == 0
  common = ["global_batch_size=2", "text_dropout=0.5", "checkpoint_period=2"]
  encoded = run(tmp_path, "encoded", "steps=4", "dataset_type=latents", f"dataset_path={shards}", *common)
  on_the_fly = run(tmp_path, "video", "steps=4", "dataset_type=video", *clips, *common)
  assert "bad.mp4" in capsys.readouterr().out
  assert losses(on_the_fly) == pytest.approx(losses(encoded), rel=1e-4) and len(losses(encoded)) == 4
  before = losses(on_the_fly)
  shutil.rmtree(on_the_fly / "checkpoints" / "4")
  assert losses(run(tmp_path, "video", "steps=4", "dataset_type=video", *clips, *common)) == before


@pytest.mark.devices(4)
def test_a_batch_that_does_not_divide_is_refused(tmp_path, capsys):
  run(tmp_path, "run", "global_batch_size=6", "gradient_accumulation_steps=2", status=2)
  error = capsys.readouterr().err
  assert "global_batch_size=6" in error and "4 devices" in error and "8" in error
