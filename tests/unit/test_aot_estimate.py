"""Estimates from a schedule: parsing, matching regions to the kernel's parts, and counting executions."""

import dataclasses
import json

import pytest

from MaxText import benchmark_attention
from MaxText.attention.aot_estimate import estimate, layouts, search
from MaxText.attention.aot_estimate.case import CHIPS, KernelCase
from MaxText.attention.aot_estimate.estimate import EstimateError
from MaxText.attention.aot_estimate.schedule import read_schedule
from MaxText.attention.kernels import steps, tuned
from MaxText.attention.svg.masks import half_width

GRID_720P = (21, 45, 80)
CASE = KernelCase("v6e", "aligned", GRID_720P, 10, 3328, 3600, chunk=1200, half_width=half_width(0.35, 75_600))

MATMUL, EXP, RECIPROCAL = "%1 = vmatmul.bf16 %2", "%3 = vexp2.f32 %4", "%5 = vrcp.f32 %6"


def write_schedule(path, parts):
  """A dump in libtpu's format: a grid loop with one predicated region a part, parts being (bundles, ops in the first)."""
  lines, region = [], 10
  def bundle(text, note=""):
    return lines.append(f"{len(lines):5d}   : > {{ {text} }} /* {note} */")
  bundle("%0 = smov.u32 0")
  bundle("%0 = smov.u32 0", "Start region 1")
  starts_next = "x"
  for size, ops in parts:
    bundle(f"%9 = sbr.rel (%p1) target = $region{region}", starts_next)
    for _ in range(4):
      bundle("%0 = snop")
    bundle(";; ".join(ops))
    for _ in range(size - 1):
      bundle("%0 = vadd.f32 %1, %2")
    starts_next = f"Start region {region}"
    region += 1
  bundle("%9 = sbr.rel (%p2) target = $region1", starts_next)
  for _ in range(5):
    bundle("%0 = snop")
  # libtpu writes its notes inside the bundle's braces
  path.write_text("\n".join(line.replace(" } /*", " /*").replace("*/", "*/ }") for line in lines) + "\n")
  return read_schedule(path)


def dense_parts(extra=()):
  return [(30, [MATMUL]), (200, [MATMUL, MATMUL, EXP]), (90, [MATMUL, EXP]), *extra, (20, [RECIPROCAL])]


def test_parts_and_counts_of_a_schedule(tmp_path):
  plan, tiling = CASE.plan(), CASE.tiling()
  parts = estimate.kernel_parts(write_schedule(tmp_path / "a.txt", dense_parts()), plan, tiling)
  bundles = {}
  for part in parts:
    bundles[part["part"]] = bundles.get(part["part"], 0) + part["bundles"]
  assert {k: bundles[k] for k in ("start", "full", "again_chunks", "finish")} == {
      "start": 30, "full": 200, "again_chunks": 90, "finish": 20}  # fmt: skip
  compiled = {"seconds": 1.0, "parts": parts}
  result = estimate.evaluate(CASE, compiled)
  counts = plan.counts(0)
  expected = 10 * (counts["active"] * 200 + 23 * 50 + counts["steps"] * bundles["step"]) + bundles["launch"]
  assert sum(result.cycles_of_parts.values()) == expected
  assert result.label == "AOT estimate" and result.steps == 10 * plan.num_steps
  assert result.milliseconds == pytest.approx(max(expected / 1.75e6, result.hbm_milliseconds))
  redone = estimate.evaluate(CASE, compiled, redone=1.0)
  chunks = -(-3600 // plan.masked_chunk)
  assert redone.cycles_of_parts["again_chunks"] == 10 * counts["active"] * chunks * 90


@pytest.mark.parametrize("parts,message", [
    (dense_parts([(500, ["%0 = vadd.f32 %1"])]), "belongs to no part"),
    (dense_parts([(90, [MATMUL, EXP])]), "attention bodies"),
    (dense_parts()[1:], "expected"),
])
def test_a_schedule_that_does_not_fit_is_an_error(tmp_path, parts, message):
  with pytest.raises(EstimateError, match=message):
    estimate.kernel_parts(write_schedule(tmp_path / "a.txt", parts), CASE.plan(), CASE.tiling())


def test_an_unknown_dump_is_an_error(tmp_path):
  path = tmp_path / "a.txt"
  path.write_text("nothing like a schedule\n")
  with pytest.raises(ValueError, match="not a schedule"):
    read_schedule(path)


def test_counts_follow_the_patterns():
  exact = dataclasses.replace(CASE, kernel="exact")
  plan = exact.plan()
  mixed = estimate.executions(plan, [0, 1], exact.tiling())
  alone = [estimate.executions(plan, [p], exact.tiling()) for p in (0, 1)]
  for part in ("step", "full", "one_edge_chunks", "start"):
    assert mixed[part] == alone[0][part] + alone[1][part]
  assert alone[0]["full"] + alone[0]["one_edge"] + alone[0]["again"] == plan.counts(0)["active"]
  naive = dataclasses.replace(CASE, kernel="naive")
  runs = estimate.executions(naive.plan(), [0], naive.tiling())
  assert runs["full"] == 0 and runs["again_chunks"] == naive.plan().counts(0)["active"] * 8


def test_every_chip_has_tiles_that_fit_its_memory_for_every_kernel():
  for chip, facts in CHIPS.items():
    for tokens in (32_760, 75_600, 171_360, 302_400, 5_000, 100):
      for kernel in tuned.KERNELS:
        tiles = tuned.tuned_tiles(chip, kernel, tokens, tokens)
        steps.plan_steps([[[2] * -(-tokens // tiles.block_kv)] * -(-tokens // tiles.block_q)], tokens, tokens,
                         tiles.block_q, tiles.block_kv)
        case = KernelCase(chip, "dense", (1, 1, tokens), 1, tiles.block_q, tiles.block_kv, chunk=tiles.tiling.chunk)
        assert case.vmem_bytes() <= tiles.tiling.vmem_limit_bytes < facts.vmem_bytes
        assert steps.MAX_STEPS >= 10 * -(-tokens // tiles.block_q) * -(-tokens // tiles.block_kv)
        if kernel != "dense" and tokens > 50_000:  # whole key tiles make up a frame, so nothing is padded
          assert tokens // 21 % tiles.block_kv == 0
  assert tuned.tuned_tiles("v6e", "dense", 4096, 4096, block_q=256, block_kv=512).block_kv == 512
  with pytest.raises(ValueError, match="no tuned tiles for chip 'v9'"):
    tuned.tuned_tiles("v9", "dense", 4096, 4096)


def test_search_respects_vector_memory():
  for chip in ("v6e", "tpu7x"):
    case = KernelCase(chip, "dense", GRID_720P, 10, 1024, 3600)
    found = search.candidates(case)
    limit = CHIPS[chip].vmem_bytes - 16 * 2**20
    assert found and all(c.vmem_bytes() <= limit and 75_600 % c.block_kv == 0 for c in found)
    costs = [search.predicted_cycles(c) for c in found]
    assert costs == sorted(costs)


def test_benchmark_command_writes_table_and_json(tmp_path, monkeypatch, capsys):
  """The command from argv to JSON; compiling is replaced by a fixed schedule."""
  kinds = ("step", "start", "finish", "full", "one_edge", "one_edge_chunks", "again", "again_chunks", "launch")
  parts = [{"part": p, "bundles": 1000, "matmul": 100} for p in kinds]
  monkeypatch.setattr(estimate, "compile_parts", lambda case: {"seconds": 0.0, "parts": parts})
  monkeypatch.setattr(estimate, "layout_milliseconds", lambda case, layout: 7.0)
  status = benchmark_attention.main([
      "configs/video.yml", "model_name=wan2.1-t2v-14b", "compile_topology=v6e:2x4", "svg_density=0.35",
      "ici_context_parallelism=4", "context_parallel_strategy=ulysses", f"base_output_directory={tmp_path}", "run_name=b",
  ])  # fmt: skip
  assert status == 0
  out = capsys.readouterr().out
  assert "AOT estimate, v6e" in out and "B3 aligned" in out and "q tile 4864" in out
  report = json.loads((tmp_path / "b" / "benchmark_attention.json").read_text())
  assert report["shape"]["num_tokens"] == 75_600 and report["shape"]["heads"] == 10
  rows = {(r["name"], r["routes"]): r for r in report["rows"]}
  assert rows["B0 dense", "spatial"]["kept_pair_share"] == 1.0
  assert abs(rows["B2 exact", "spatial"]["kept_pair_share"] - 0.38873) < 1e-5
  assert rows["B1 naive", "spatial"]["masked_tile_share"] == 1.0
  assert report["layouts"]["head_local"].startswith("7.00 ms, AOT estimate")
  assert all(r["how"] == "AOT estimate, v6e" for r in report["rows"])


def test_layout_work_permutes_and_refuses_to_guess():
  """Both layouts give a temporal head the same rows; gathers have no estimate, which is said."""
  import jax.numpy as jnp
  import numpy as np

  case = dataclasses.replace(CASE, grid=(3, 2, 4), heads=1, half_width=5, head_dim=2)
  x = jnp.asarray(np.arange(24 * 2).reshape(24, 2), jnp.bfloat16)
  permute, _, _ = layouts.layout_work(case, "head_local")
  gather, args, times = layouts.layout_work(case, "in_kernel")
  whole = permute(*[x[None, :, None]] * 4, jnp.ones((1, 1), bool))
  one = gather(x, x, x, x, 1, *args[5:])
  assert times == 1
  for a, b in zip(whole, one, strict=True):
    np.testing.assert_array_equal(a[0, :, 0], b)
  assert layouts.estimated_cycles('%a = copy() "estimated_cycles":"7"\n%b "estimated_cycles":"5"') == 12
  with pytest.raises(ValueError, match="measure this on a TPU"):
    layouts.estimated_cycles("%g = bf16[8] gather(%a, %b)")


@pytest.mark.slow
@pytest.mark.parametrize("chip", sorted(CHIPS))
def test_aligned_kernel_compiles_for_each_chip_at_720p(chip):
  pytest.importorskip("libtpu")
  tiles = tuned.tuned_tiles(chip, "aligned", 75_600, 75_600)
  case = dataclasses.replace(CASE, chip=chip, block_q=tiles.block_q, block_kv=tiles.block_kv,
                             chunk=tiles.tiling.chunk, unroll=tiles.tiling.unroll)
  result = estimate.estimate(case)
  assert result.steps >= 10 and result.milliseconds > 0
  if chip == "v6e":
    assert result.milliseconds <= 20.5 and result.steps <= 2500
