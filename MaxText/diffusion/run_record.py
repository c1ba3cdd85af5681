"""run.json of a decode run: what was made, how long each part took, what attention kept and how heads were routed.

Dimensions: L layers, H heads of all samples of a batch (guidance counts twice).
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import jax
import numpy as np

from MaxText.diffusion.report import flops_saved, mask_records
from MaxText.reporter import Reporter, peak_device_gib, peak_host_gib, seconds_in_words, versions, write_json
from MaxText.run_folder import RUN_JSON


def devices_record(mesh: jax.sharding.Mesh) -> dict[str, Any]:
  """Platform, kind and number of devices, the mesh and the number of hosts."""
  device = mesh.devices.flat[0]
  return {
    "platform": device.platform,
    "kind": device.device_kind,
    "count": mesh.size,
    "mesh": dict(mesh.shape),
    "processes": jax.process_count(),
  }


def attention_record(pipeline) -> dict[str, Any]:
  """Of the last denoising: what the masks keep, how the heads were routed, and the shares of pairs and tiles that ran.

  `kept_pair_fraction` and `executed_tile_fraction` are means over all steps, layers and heads, dense ones counting as 1.
  """
  masks = {entry["half_width"]: entry for entry in mask_records(pipeline)}
  routing, kept, executed, sparse_kept = [], [], [], []
  for step, temporal_LBN in zip(pipeline.steps, pipeline.routes, strict=True):
    kept_L, executed_L = np.ones(pipeline.config.num_layers), np.ones(pipeline.config.num_layers)
    if temporal_LBN is not None:
      layers, entry = slice(step.sparse.layer_start, step.sparse.layer_end), masks[step.sparse.half_width]
      temporal_lH = temporal_LBN[layers].reshape(len(temporal_LBN[layers]), -1)
      # An aligned kernel keeps every pair of the tiles it visits; the others mask what the rule leaves out.
      kept_name = "executed_fraction" if entry["kernel"] == "aligned" else "kept_fraction"
      for shares_L, name in ((kept_L, kept_name), (executed_L, "executed_tile_fraction")):
        shares_L[layers] = np.where(temporal_lH, entry[f"{name}_temporal"], entry[f"{name}_spatial"]).mean(axis=1)
      sparse_kept += kept_L[layers].tolist()
      routing.append(
        {
          "step": step.index,
          "first_layer": step.sparse.layer_start,
          "heads": temporal_lH.shape[1],
          "temporal_by_layer": temporal_lH.sum(axis=1).tolist(),
        }
      )
    kept.append(kept_L.mean())
    executed.append(executed_L.mean())
  temporal = sum(sum(entry["temporal_by_layer"]) for entry in routing)
  heads = sum(len(entry["temporal_by_layer"]) * entry["heads"] for entry in routing)
  return {
    "attention": pipeline.config.attention,
    "kept_pair_fraction": float(np.mean(kept)),
    "kept_pair_fraction_of_sparse_layers": float(np.mean(sparse_kept)) if sparse_kept else None,
    "executed_tile_fraction": float(np.mean(executed)),
    "flops_saved": None if pipeline.schedule is None else flops_saved(pipeline),
    "routing_counts": {"spatial": heads - temporal, "temporal": temporal},
    "masks": list(masks.values()),
    "routing": routing,
  }


def attention_in_words(record: dict[str, Any]) -> str:
  """One line about what one denoising attended to, or all of them: means of the shares, and the heads of all."""
  if record["kept_pair_fraction_of_sparse_layers"] is None:
    return f"attention: {record['attention']}, all query-key pairs kept"
  counts = record["routing_counts"]
  return (
    f"attention: {record['attention']} kept {record['kept_pair_fraction']:.1%} of all query-key pairs "
    f"({record['kept_pair_fraction_of_sparse_layers']:.1%} in sparse layers) and ran "
    f"{record['executed_tile_fraction']:.1%} of the tiles; heads routed: "
    f"{counts['spatial']:,} spatial, {counts['temporal']:,} temporal"
  )


def quality_in_words(quality: dict[str, Any]) -> str:
  """PSNR and SSIM with their noise floor, and the speed-up."""

  def figures(values):
    psnr = "equal" if values["psnr_rgb_db"] is None else f"PSNR {values['psnr_rgb_db']:.2f} dB"
    return psnr + ("" if values["ssim_rgb"] is None else f", SSIM {values['ssim_rgb']:.4f}")

  return (
    f"{figures(quality['sparse_against_dense'])} (noise floor, dense against dense with other tiles: "
    f"{figures(quality['noise_floor'])}); denoising {quality['dense_seconds']:.2f} → {quality['sparse_seconds']:.2f} s, "
    f"{quality['speedup']:.2f}×"
  )


class RunRecord:
  """run.json of a decode run: written when it starts, after each video, and when it ends.

  Args:
    config, pipeline, reporter: of the run. run: its folder. requests: the videos, in the order of their files.
  """

  def __init__(self, config, pipeline, reporter: Reporter, run, requests):
    self.config, self.pipeline, self.reporter, self.run = config, pipeline, reporter, run
    earlier = {video["file"]: video for video in run.earlier.get("videos", [])}
    self.videos = [
      {
        **earlier.get(run.video(i).name, {"file": run.video(i).name, "prompt": request.prompt, "seed": request.seed}),
        "status": "finished" if run.finished(i) else "missing",  # the file knows: run.json may be a video behind
      }
      for i, request in enumerate(requests)
    ]
    self.batches: list[dict[str, Any]] = []

  @contextlib.contextmanager
  def ending(self):
    """Within it an interruption or a failure is written down before it goes on."""
    try:
      yield
    except BaseException as error:
      with contextlib.suppress(OSError):  # a full disk must not hide the cause
        self.write("interrupted" if isinstance(error, KeyboardInterrupt) else "failed")
      raise

  def batch_done(self, indices) -> None:
    """Takes over the figures of the denoising that has just ended."""
    pipeline = self.pipeline
    timed = zip(pipeline.steps, pipeline.step_seconds, strict=True)
    steps = [{**step.as_record(), "seconds": round(seconds, 4)} for step, seconds in timed]
    self.batches.append(
      {"files": [self.run.video(i).name for i in indices], "steps": steps, "attention": attention_record(pipeline)}
    )

  def control_done(self, name: str) -> None:
    """Takes over the seconds of a dense control that has just ended."""
    self.batches[-1].setdefault("control_seconds", {})[name] = [round(s, 4) for s in self.pipeline.step_seconds]

  def quality(self, index: int, clips) -> None:
    """Figures of a sparse clip against its dense control, and of two dense runs that differ by rounding: the noise floor.

    clips: 'sparse', 'dense' and 'dense_again', uint8 [T, height, width, 3].
    """
    from MaxText.metrics import video_quality

    batch = self.batches[-1]
    sparse, dense = sum(step["seconds"] for step in batch["steps"]), sum(batch["control_seconds"]["dense"])
    self.videos[index]["quality"] = {
      "sparse_against_dense": video_quality.compare(clips["dense"], clips["sparse"]),
      "noise_floor": video_quality.compare(clips["dense"], clips["dense_again"]),
      "dense_file": self.run.video(index, "dense").name,
      "sparse_seconds": round(sparse, 4),
      "dense_seconds": round(dense, 4),
      "speedup": round(dense / sparse, 4),
    }

  def video_done(self, index: int) -> None:
    entry = self.videos[index]
    entry["status"] = "finished"
    if self.run.latents(index).exists():
      entry["latents"] = self.run.latents(index).name
    self.write("running")

  def write(self, status: str) -> None:
    pipeline = self.pipeline
    content = {
      "status": status,
      "random_weights": self.config.init_random_weights,
      "seconds": round(time.perf_counter() - self.reporter.start, 3),
      "compile_seconds": round(pipeline.compile_seconds, 3),
      "stages": self.reporter.stages,
      "peak_host_gib": round(peak_host_gib(), 3),
      "peak_device_gib": peak_device_gib(),
      "tokens": self.config.num_tokens,
      "token_grid": list(self.config.token_grid),
      "devices": devices_record(pipeline.placement.mesh),
      **self._of_all_batches(),
      "files": [video["file"] for video in self.videos if video["status"] == "finished"],
      "videos": self.videos,
      "batches": self._batches(),
      "warnings": self.reporter.warnings,
      "versions": versions(),
      "config": self.config.as_record(),
    }
    write_json(str(self.run.path / RUN_JSON), content)

  def _batches(self) -> list[dict[str, Any]]:
    """Of this and of earlier, interrupted invocations, without those whose videos were made anew."""
    made = {name for batch in self.batches for name in batch["files"]}
    return [*(b for b in self.run.earlier.get("batches", []) if not made & set(b["files"])), *self.batches]

  def _of_all_batches(self) -> dict[str, Any]:
    """What the batches' attention records say together."""
    records = [batch["attention"] for batch in self._batches()]
    if not records:
      return {}
    counts = {kind: sum(record["routing_counts"][kind] for record in records) for kind in ("spatial", "temporal")}
    names = ("kept_pair_fraction", "kept_pair_fraction_of_sparse_layers", "executed_tile_fraction")
    shares = {name: [record[name] for record in records] for name in names}
    means = {name: None if None in values else float(np.mean(values)) for name, values in shares.items()}
    return {**means, "routing_counts": counts}

  def summary(self) -> list[str]:
    """What a person wants to know at the end."""
    stages = ", ".join(f"{name} {seconds_in_words(stage['seconds'])}" for name, stage in self.reporter.stages.items())
    lines = [
      f"done in {seconds_in_words(time.perf_counter() - self.reporter.start)} ({stages}; of this compiling the steps "
      f"{seconds_in_words(self.pipeline.compile_seconds)}); peak host memory {peak_host_gib():.2f} GiB"
    ]
    device = peak_device_gib()
    if device is not None:
      lines[0] += f", peak device memory {device:.2f} GiB"
    if self.batches:
      lines.append(attention_in_words({"attention": self.config.attention, **self._of_all_batches()}))
    for video in self.videos:
      if "quality" in video:
        lines.append(f"{video['file']} against dense: {quality_in_words(video['quality'])}")
    if self.config.init_random_weights:
      lines.append("the weights are random (init_random_weights=true): the video shows noise")
    lines.append(f"output: {self.run.path}")
    return lines
