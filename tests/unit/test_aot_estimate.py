"""Estimates from a schedule: parsing, matching regions to the kernel's parts, and counting executions."""

import dataclasses
import json

import pytest

from MaxText import benchmark_attention
from MaxText.attention.aot_estimate import __main__ as all_chips
from MaxText.attention.aot_estimate import beside, estimate, search
from MaxText.attention.aot_estimate import parts as parts_module
from MaxText.attention.aot_estimate.case import CHIPS, KernelCase
from MaxText.attention.aot_estimate.parts import EstimateError
from MaxText.attention.aot_estimate.schedule import read_schedule
from MaxText.attention.kernels import steps, tuned
from MaxText.attention.svg import tiles
from MaxText.attention.svg.masks import HeadMask, half_width

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
  parts = parts_module.kernel_parts(write_schedule(tmp_path / "a.txt", dense_parts()), plan, tiling)
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
    parts_module.kernel_parts(write_schedule(tmp_path / "a.txt", parts), CASE.plan(), CASE.tiling())


def test_an_unknown_dump_is_an_error(tmp_path):
  path = tmp_path / "a.txt"
  path.write_text("nothing like a schedule\n")
  with pytest.raises(ValueError, match="not a schedule"):
    read_schedule(path)


def test_counts_follow_the_patterns():
  exact = dataclasses.replace(CASE, kernel="exact")
  plan = exact.plan()
  mixed = parts_module.executions(plan, [0, 1], exact.tiling())
  alone = [parts_module.executions(plan, [p], exact.tiling()) for p in (0, 1)]
  for part in ("step", "full", "one_edge_chunks", "start"):
    assert mixed[part] == alone[0][part] + alone[1][part]
  assert alone[0]["full"] + alone[0]["one_edge"] + alone[0]["again"] == plan.counts(0)["active"]
  naive = dataclasses.replace(CASE, kernel="naive")
  runs = parts_module.executions(naive.plan(), [0], naive.tiling())
  assert runs["full"] == 0 and runs["again_chunks"] == naive.plan().counts(0)["active"] * 8


def test_every_chip_has_tiles_that_fit_its_memory_for_every_kernel():
  for chip, facts in CHIPS.items():
    for tokens in (32_760, 75_600, 171_360, 302_400, 5_000, 100):
      for kernel in tuned.KERNELS:
        chosen = tuned.tuned_tiles(chip, kernel, tokens, tokens)
        steps.plan_steps([[[2] * -(-tokens // chosen.block_kv)] * -(-tokens // chosen.block_q)], tokens, tokens,
                         chosen.block_q, chosen.block_kv)
        case = KernelCase(chip, "dense", (1, 1, tokens), 1, chosen.block_q, chosen.block_kv, chunk=chosen.tiling.chunk)
        assert case.vmem_bytes() <= chosen.tiling.vmem_limit_bytes < facts.vmem_bytes
        assert steps.MAX_STEPS >= 10 * -(-tokens // chosen.block_q) * -(-tokens // chosen.block_kv)
        if kernel != "dense" and tokens > 50_000:  # whole key tiles make up a frame, so nothing is padded
          assert tokens // 21 % chosen.block_kv == 0
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


KINDS = ("step", "start", "finish", "full", "one_edge", "one_edge_chunks", "again", "again_chunks", "launch")
COMPILED = {"seconds": 0.0, "parts": [{"part": p, "bundles": 1000, "matmul": 100} for p in KINDS], "temp_bytes": 0}
BENCHMARK = ["configs/video.yml", "model_name=wan2.1-t2v-14b", "compile_topology=v6e:2x4", "height=720", "width=1280",
             "ici_context_parallelism=4", "context_parallel_strategy=ulysses"]  # fmt: skip


def test_benchmark_command_writes_table_and_json(tmp_path, monkeypatch, capsys):
  """The command from argv to JSON; compiling is replaced by a fixed schedule."""
  monkeypatch.setattr(estimate, "compile_parts", lambda case, folder: COMPILED)
  monkeypatch.setattr(estimate, "work_cycles", lambda case, name, samples: 671_048)
  assert benchmark_attention.main([*BENCHMARK, f"base_output_directory={tmp_path}", "run_name=b"]) == 0
  out = capsys.readouterr().out
  assert "v6e at 1.75 GHz, AOT estimate, not measured" in out and "density 0.35 by default" in out
  assert "compiling B3 aligned, 3328 x 3600 for v6e … 0 s" in out and "B2, q tile 4864" in out
  report = json.loads((tmp_path / "b" / "benchmark_attention.json").read_text())
  assert report["shape"]["num_tokens"] == 75_600 and report["shape"]["heads"] == 10 and not report["failures"]
  rows = {(r["name"], r["routes"]): r for r in report["rows"]}
  assert rows["B0 dense", "spatial"]["kept_pair_share"] == 1.0
  assert abs(rows["B2 exact", "spatial"]["kept_pair_share"] - 0.38873) < 1e-5
  assert rows["B1 naive", "spatial"]["masked_area_share"] == 1.0
  assert all(r["how"] == "AOT estimate, v6e" for r in report["rows"] + report["beside"])
  beside_rows = {r["name"]: r for r in report["beside"]}
  assert beside_rows["routing"]["milliseconds"] == pytest.approx(671_048 / 1.75e6)
  assert beside_rows["routing"]["share_of_aligned"] == pytest.approx(
    beside_rows["routing"]["milliseconds"] / rows["B3 aligned", "spatial"]["milliseconds"])
  # Eight passes over an array are 1.55 GB, which take longer at HBM bandwidth than those cycles.
  assert beside_rows["layout"]["bytes_moved"] == 8 * 75_600 * 10 * 128 * 2
  assert beside_rows["layout"]["milliseconds"] == pytest.approx(8 * 75_600 * 10 * 128 * 2 / 1640e9 * 1e3)
  assert beside_rows["in_kernel"]["milliseconds"] is None and "no cycles for gathers" in beside_rows["in_kernel"]["note"]
  assert "1.6 GB" in report["layouts"]["pre_exchange"] and "0.581 GB" in report["layouts"]["pre_exchange"]


def test_the_published_table_from_keys(tmp_path, monkeypatch, capsys):
  """Tiles of 3,328 x 1,536 through the keys give the published masked shares, at all query tiles of the sweep."""
  monkeypatch.setattr(estimate, "compile_parts", lambda case, folder: COMPILED)
  monkeypatch.setattr(estimate, "work_cycles", lambda case, name, samples: 1)
  keys = ["svg_block_q=3328", "svg_block_kv=1536", "flash_block_q=3328", "flash_block_kv=1536"]
  assert benchmark_attention.main([*BENCHMARK, *keys, f"base_output_directory={tmp_path}", "run_name=b"]) == 0
  report = json.loads((tmp_path / "b" / "benchmark_attention.json").read_text())
  rows = {(r["name"], r["routes"]): r for r in report["rows"]}
  # Published: 27.55, 16.95 and 33.60 % masked, 2.22 % aligned. They mask the last query tile too, which needs none here.
  shares = {
    r["block_q"]: (r["masked_area_share"], r["visited_tile_share"]) for r in report["rows"] if r["kernel"] == "exact"}
  for block_q, published in ((1024, 0.169497), (3328, 0.275537), (4864, 0.336001)):
    mask = HeadMask(GRID_720P, CASE.half_width, False)
    ragged = tiles.boundary_share(tiles.exact_table(mask, block_q, 1536), 75_600, block_q, 1536)
    assert ragged == pytest.approx(published, abs=1e-6) and 0.9 * ragged < shares[block_q][0] < ragged
  assert shares[3328][1] == pytest.approx(509 / 1150)
  assert rows["B0 dense", "spatial"]["block_kv"] == rows["B2, q tile 1024", "spatial"]["block_kv"] == 1536
  assert rows["B3 aligned", "spatial"]["masked_area_share"] < 0.003


def test_a_case_that_fails_is_one_readable_line(tmp_path, monkeypatch, capsys):
  stderr = "Traceback\n  File x\njax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: Ran out of memory in vmem. 130M > 112M\n"

  def compile_parts(case, folder):
    if case.kernel == "naive":
      raise EstimateError(estimate._readable(stderr))
    return COMPILED

  monkeypatch.setattr(estimate, "compile_parts", compile_parts)
  monkeypatch.setattr(estimate, "work_cycles", lambda case, name, samples: 1)
  assert benchmark_attention.main([*BENCHMARK, f"base_output_directory={tmp_path}", "run_name=b"]) == 0
  report = json.loads((tmp_path / "b" / "benchmark_attention.json").read_text())
  assert report["failures"] == ["B1 naive, 3328 x 3600, spatial heads: Ran out of memory in vmem. 130M > 112M"]
  assert "failed: B1 naive" in capsys.readouterr().out


def test_compiled_cases_are_kept_and_found_again(tmp_path, monkeypatch):
  compiled = []
  monkeypatch.setattr(estimate, "_child", lambda module, arguments, timeout_s: compiled.append(module) or COMPILED)
  assert estimate.stored_parts(CASE, tmp_path) is None
  first = estimate.compile_parts(CASE, tmp_path)
  again = estimate.compile_parts(CASE, tmp_path)
  assert compiled == ["compile"] and again["parts"] == first["parts"]
  estimate.compile_parts(dataclasses.replace(CASE, half_width=CASE.half_width + 128), tmp_path)
  monkeypatch.setattr(estimate, "source_digest", lambda: "another kernel")
  estimate.compile_parts(CASE, tmp_path)
  assert len(compiled) == 3


def test_all_chips_prints_one_table_and_says_what_failed(tmp_path, monkeypatch, capsys):
  def compile_parts(case, folder):
    if case.kernel == "dense":
      raise EstimateError("no")
    return COMPILED

  monkeypatch.setattr(all_chips, "compile_parts", compile_parts)
  status = all_chips.main(["chips=v6e", "resolutions=720p", "kernels=dense,aligned", f"folder={tmp_path}"])
  out = capsys.readouterr().out
  assert status == 1 and "FAILED v6e 720p dense 6912 x 2800: no" in out
  assert [line.split()[3] for line in out.splitlines() if line.startswith("v6e")] == ["spatial", "temporal", "mixed"]
  assert all_chips.main(["chip=v6e"]) == 2 and all_chips.main(["chips=v9"]) == 2 and all_chips.main(["--help"]) == 0


def test_numbers_have_three_digits():
  assert [all_chips.three_digits(x) for x in (796.14, 1234.5, 49.94, 24.8, 0.3834, 7.0, 0.0)] == [
    "796", "1234", "49.9", "24.8", "0.383", "7.00", "0"]


def test_work_beside_the_kernel_permutes_alike():
  """All layouts give a temporal head the same rows."""
  import jax.numpy as jnp
  import numpy as np

  case = dataclasses.replace(CASE, grid=(3, 2, 4), heads=1, half_width=5, head_dim=2)
  x = jnp.asarray(np.arange(24 * 2).reshape(24, 2), jnp.bfloat16)
  whole = beside.work_of(case, "select").function(*[x[None]] * 4, jnp.ones(1, bool))
  work = beside.work_of(case, "in_kernel")
  one = work.function(x, x, x, x, 1, *work.args[5:])
  assert work.times == 1
  for a, b in zip(whole, one, strict=True):
    np.testing.assert_array_equal(a[0], b)
  assert beside.estimated_cycles('%a = copy() "estimated_cycles":"7"\n%b "estimated_cycles":"5"') == 12
  with pytest.raises(EstimateError, match="XLA's select does this work"):
    beside.work_of(dataclasses.replace(case, grid=(3, 3, 3)), "layout")


def test_cycles_of_work_count_every_body_at_every_step(tmp_path):
  """Routing: launches × grid steps × everything inside the grid's loop; a loop inside it is refused."""
  write_schedule(tmp_path / "1-svg_route.1-final_bundles.txt", [(30, [MATMUL, EXP]), (20, [RECIPROCAL])])
  root = read_schedule(tmp_path / "1-svg_route.1-final_bundles.txt")
  inside = sum(r.bundles for r in root.children[0].walk())
  outside = sum(r.bundles for r in root.walk()) - inside
  work = beside.work_of(CASE, "routing")
  assert work.kernels == {"svg_route": (1, 10 * 19)} and work.bytes_moved == 2 * 75_600 * 10 * 128 * 2
  assert beside.kernel_cycles(tmp_path, work.kernels) == 190 * inside + outside
  with pytest.raises(EstimateError, match="no schedule named 'svg_permute'"):
    beside.kernel_cycles(tmp_path, beside.work_of(CASE, "layout").kernels)


@pytest.mark.slow
def test_routing_compiles_and_costs_little():
  pytest.importorskip("libtpu")
  cycles = estimate.work_cycles(CASE, "routing")
  assert 0 < beside.milliseconds(CASE, beside.work_of(CASE, "routing"), cycles) < 0.03 * 20.0


@pytest.mark.slow
@pytest.mark.parametrize("chip", sorted(CHIPS))
def test_aligned_kernel_compiles_for_each_chip_at_720p(chip):
  pytest.importorskip("libtpu")
  chosen = tuned.tuned_tiles(chip, "aligned", 75_600, 75_600)
  case = dataclasses.replace(CASE, chip=chip, block_q=chosen.block_q, block_kv=chosen.block_kv,
                             chunk=chosen.tiling.chunk, unroll=chosen.tiling.unroll)
  result = estimate.estimate(case)
  assert result.steps >= 10 and result.milliseconds > 0
  if chip == "v6e":
    assert result.milliseconds <= 20.5 and result.steps <= 2500
