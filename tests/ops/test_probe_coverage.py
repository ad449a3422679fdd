"""The probes of ops take every branch of the code that computes pixels."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("coverage", reason="measures branches by coverage.py")

LIMITS = {
    *("_parts", "_segments", "_cut_png"),  # refuse files of thousands of parts
    "why_unblended",  # values that cannot be resized
    *("decode", "_channels_last", "resize"),  # arrays and tensors as they are
    *("_require_bits", "_require_one_page"),  # refuse what nobody stated
    # what not every machine reads
    *("_formats", "_load_heif", "_truncated", "_decode_tiff", "_as_stored"),
    *(
        "picture_facts",
        "_facts",
        "_most",
        "frame_of",
        "Frame.decoded",
        "_stored_size",
        "is_turned",
        "is_lossy_webp",
    ),  # look at pixels, and make none
    *("_has_other_page", "_is_whole", "_in_srgb", "_values", "_wide_grey_alpha"),  # damaged files
}
"""Functions with branches that no probe takes."""

COMPUTE = """
from precache.recipe.recipe import Recipe
from precache_workers.ops.behaviour import computed, steps_of

DECODE = {"op": "decode"}
for ops in (
    *([{"op": "decode", "mode": mode}] for mode in ("RGB", "RGBA", "L", "P", "unchanged")),
    *([{"op": "decode", "bits": bits}] for bits in (8, 12)),
    [{"op": "decode", "icc": "srgb"}],
    [{"op": "decode", "orientation": "stored"}],
    [{"op": "decode", "truncated": "fill"}],
    [{"op": "decode", "scaled": True}, {"op": "resize", "size": 64}],
    [DECODE, {"op": "resize", "size": [40, 30]}],
    [DECODE, {"op": "resize", "size": 64}, {"op": "center_crop", "size": 20}],
    [DECODE, {"op": "resize", "size": 64, "interpolation": "nearest"},
     {"op": "center_crop", "size": 20}],
    [DECODE, {"op": "resize", "size": [40, 30], "interpolation": "bicubic"}],
    [{"op": "decode", "mode": "L"}, {"op": "resize", "size": [40, 3]}],
    [{"op": "resize", "size": 40}, {"op": "center_crop", "size": 32}],
    [DECODE, {"op": "center_crop", "size": 20}],
    [DECODE, {"op": "random_resized_crop", "size": 20}],
    [DECODE, {"op": "horizontal_flip"}],
    [DECODE, {"op": "to_dtype", "dtype": "float32"}],
    [DECODE, {"op": "to_dtype", "dtype": "float32", "scale": True}],
):
    recipe = Recipe.from_dict({"fields": {"x": {"ops": ops}}})
    for step in steps_of(recipe.fields["x"]):
        computed(step)
"""


@pytest.mark.heavy
def test_probes_take_every_branch_but_those_of_limits(tmp_path: Path) -> None:
    (tmp_path / "compute.py").write_text(COMPUTE)
    coverage = [sys.executable, "-m", "coverage"]
    measured = "*/recipe/resampling.py,*/ops/decoding.py,*/ops/segments.py"
    run = [*coverage, "run", "--branch", f"--include={measured}", "compute.py"]
    subprocess.run(run, cwd=tmp_path, check=True, timeout=300)
    subprocess.run([*coverage, "json", "-q"], cwd=tmp_path, check=True, timeout=60)
    files = json.loads((tmp_path / "coverage.json").read_text())["files"]
    assert len(files) == 3
    missed = {
        function: found["missing_branches"] + found["missing_lines"]
        for file in files.values()
        for function, found in file["functions"].items()
        if found["missing_branches"] + found["missing_lines"]
    }
    assert missed.keys() <= LIMITS, missed
