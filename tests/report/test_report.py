"""``report`` writes one HTML file of all that the caches hold, escaped, and says what to do next."""

from __future__ import annotations

import re
import sqlite3
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dmuon_tune.backends.probe import fingerprint
from dmuon_tune.cache import ChainKey, Store
from dmuon_tune.kernel_specs import kernel
from dmuon_tune.measure.build import tuning_key
from dmuon_tune.measurement import Measurement
from dmuon_tune.problem import Problem
from dmuon_tune.recipe import Recipe

from .conftest import GROUP, NASTY, Filled, Report, Tags, fill, fill_h200, fill_one, ok

CPU = ("--device", "cpu")


def row(page: str, first: str) -> list[str]:
    """The cells of the table row that begins with ``first``."""
    for found in re.findall(r"<tr>(.*?)</tr>", page):
        cells = [Tags(cell).text for cell in re.split(r"(?=<t[hd][ >])", found)[1:]]
        if cells and cells[0] == first:
            return cells
    raise AssertionError(f"no row {first!r}")


def test_winners_with_their_baselines_chains_and_failures(filled: Filled) -> None:
    page = filled.page
    gram = row(page, "gram 4x64x64x192 float32 row")
    assert gram[1:8] == ["gram.library", "20", "19.6–20.4", "20", "1.00×", "20", "1.00×"]
    assert gram[8:11] == ["157 GFLOP/s", "12.0", "current"]  # 4·64²·192 FLOPs in 20 µs, over 4·(64·192 + 64²)·4 bytes
    recipe = row(page, "4x64x192")
    assert recipe[1:3] == ["gram", "at once"] and recipe[6:8] == ["400", "390–410"]
    assert recipe[9:12] == ["timed chain", "gram.library, gemm_symmetric.library, apply.library", "1: 150; 2: 230"]
    assert row(page, "gram.tilelang") == ["gram.tilelang", "1", "1", "0"]  # ok, compile_error, wrong_result
    assert row(page, "all") == ["all", "7", "3", "1"]
    assert "ValueError: tile 1 too large" in page and "polar error 0.5 &gt; 0.1" in page
    assert "torch" in row(page, "torch")[0] and "580.1" in row(page, "driver")[1]


def test_a_winner_over_the_library_and_over_its_own_untuned_kernel(report: Report, own_cache: Path) -> None:
    device, problem = fingerprint("cpu"), Problem("gram", 2, 32, 32, 96, "float32", "float32")
    spec = kernel("gram.tilelang")
    untuned = spec.untuned(problem, device)
    if untuned is None or tuning_key_or_none(problem) is None:
        pytest.skip("TileLang is not installed: no second kernel is current here")
    fields = vars(untuned)
    other = next(vars(config) for config in spec.legal_space(problem, device) if config != untuned)
    with Store.open(own_cache) as store:
        store.record(tuning_key(kernel("gram.library"), problem, device), {"entry": "baddbmm"}, ok(60.0), {})
        store.record(tuning_key(spec, problem, device), fields, ok(30.0), {})
        store.record(tuning_key(spec, problem, device), other, ok(20.0), {})
    found = row(report(*CPU).page, "gram 2x32x32x96 float32 row")
    assert found[1:8] == ["gram.tilelang", "20", "19.6–20.4", "60", "3.00×", "30", "1.50×"]


def tuning_key_or_none(problem: Problem) -> object:
    try:
        return tuning_key(kernel("gram.tilelang"), problem, fingerprint("cpu"))
    except ModuleNotFoundError:
        return None


def test_another_devices_results_are_named_and_shown_when_asked(report: Report, own_cache: Path) -> None:
    fill_h200(own_cache)
    alone = report(*CPU)
    assert alone.code == 0 and "--all-devices reports on NVIDIA H200" in alone.err
    assert "Nothing is tuned for this device." in alone.page and "gemm_symmetric 1x2048" not in alone.page
    result = report("--all-devices")
    assert (result.code, result.err) == (0, "")
    winner = row(result.page, "gemm_symmetric 1x2048x2048x2048 float16 row +c")
    assert (winner[1], winner[2], winner[4], winner[5]) == ("gemm_symmetric.cutedsl", "18", "36", "2.00×")
    assert winner[10] == "stale, disturbed" and re.search(r"<td[^>]*>other (digest|toolchain): ", result.page)
    assert "1 winner is stale" in result.page and "1 winner was timed while" in result.page
    assert row(result.page, "16-bit tensor-core peak")[1] == "1,071 TFLOP/s"  # 4096 · 132 · 1.98 GHz
    assert row(result.page, "best float16 result")[1:] == [
        "477 TFLOP/s", "gemm_symmetric.cutedsl on gemm_symmetric 1x2048x2048x2048 float16 row +c"
    ]
    assert row(result.page, "clock held down by")[1] == "power cap"


def test_each_device_has_sections_of_its_own(report: Report, own_cache: Path) -> None:
    fill_one(own_cache)
    fill_h200(own_cache)
    tags = Tags(report("--all-devices").page)
    ids = [value for _, name, value in tags.attributes if name == "id"]
    assert len(ids) == len(set(ids)) and {"winners-1", "winners-2"} <= set(ids)
    links = {value for tag, name, value in tags.attributes if (tag, name) == ("a", "href")}
    assert {link.removeprefix("#") for link in links} <= set(ids)


def test_an_empty_cache_is_a_page_that_says_what_to_do(report: Report) -> None:
    result = report(*CPU)
    assert result.code == 0 and "nothing is tuned yet" in result.err
    assert "Nothing is tuned for this device." in result.page
    assert "dmuon-tune tune --preset qwen2.5-7b --device cpu" in result.page
    everywhere = report("--all-devices")
    assert everywhere.code == 0 and "The caches hold no result of any device." in everywhere.page


def test_whatever_stands_in_a_cache_is_text(report: Report, own_cache: Path, tmp_path: Path) -> None:
    fill_one(own_cache)
    device = fingerprint("cpu")
    problem = Problem(NASTY, 1, 8, 8, 8, "float32", "float32")
    with Store.open(own_cache) as store:
        known = tuning_key(kernel("gram.library"), replace(problem, op="gram"), device)
        key = replace(known, problem=problem, kernel=NASTY)
        store.record(key, {NASTY: NASTY}, ok(1.0), {"torch": NASTY, "driver": NASTY})
        for status in ("compile_error", "crashed"):
            store.record(key, {"status": status}, Measurement(status, log=f"{NASTY}\n{NASTY}"), {})
        store.put_recipe(device, Recipe(GROUP, NASTY, "float32", chunk=1))
    with sqlite3.connect(own_cache) as connection:
        connection.execute("UPDATE dmuon_devices SET name = ?", (NASTY,))
    connection.close()
    result = report(*CPU, "--png", "png")
    tags = Tags(result.page)
    assert result.code == 0 and " ".join(NASTY.replace("\x07", "").split()) in " ".join(tags.text.split())
    assert not {"script", "img", "iframe", "link", "object", "embed"} & set(tags.tags)
    assert not [name for _, name, _ in tags.attributes if name.startswith("on")]
    assert "\x07" not in result.page
    assert all(path.parent == tmp_path / "png" for path in (tmp_path / "png").iterdir())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "png", "report.html"]


def test_the_file_refers_to_nothing_outside_itself(filled: Filled) -> None:
    tags = Tags(filled.page)
    named = ("href", "src", "xlink:href", "srcset", "data")
    references = [value for _, name, value in tags.attributes if name in named]
    assert references and all(value.startswith("#") for value in references)
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", filled.page))
    assert "@import" not in filled.page and "default-src 'none'" in filled.page
    ids = [value for _, name, value in tags.attributes if name == "id"]
    assert len(ids) == len(set(ids))


def test_every_plot_says_in_words_what_it_shows(filled: Filled) -> None:
    tags = Tags(filled.page)
    drawings = [value for tag, name, value in tags.attributes if (tag, name) == ("div", "aria-label")]
    named = [label for label in drawings if re.match("Winners' speed-up|Roofline|Cost a matrix|gram|gemm|apply", label)]
    assert len(named) == tags.tags.count("svg") == 6
    assert any("1 configuration measured, 0 failed. Best by kernel: gram.library 20 µs." in label for label in named)


def test_each_plot_is_a_png_too(filled: Filled) -> None:
    images = [Path(path) for path in filled.printed["png"]]
    assert filled.printed["report"].endswith("page.html") and len(images) == 6
    assert {path.name for path in images} >= {"speedup-1.png", "roofline.png", "batch-cost.png"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in images)


def test_what_is_missing_failed_or_unfinished_has_a_command_that_mends_it(report: Report, own_cache: Path) -> None:
    fill(own_cache)
    device = fingerprint("cpu")
    problem = Problem("gram", 3, 16, 16, 48, "float32", "float32", "col")
    with Store.open(own_cache) as store:
        key = tuning_key(kernel("gram.library"), problem, device)
        store.record(key, {"entry": "baddbmm"}, Measurement("launch_error", log="RuntimeError: no"), {})
        (recipe,) = store.recipes(device)
        store.put_recipe(device, replace(recipe, batch_costs=((1, 150.0),)))
        store.put_recipe(device, replace(recipe, group=replace(GROUP, batch=5), p20_us=None, p80_us=None))
        store.record_chain(ChainKey(recipe, "other", device), ok(410.0, contended=True), {})
    text = Tags(report(*CPU, "--shapes", "2x24x40", "--cache", str(own_cache)).page).text
    where = f"--device cpu --cache {own_cache}"
    assert "1 problem where every configuration failed: gram 3x16x16x48 float32 col." in text
    assert f"dmuon-tune tune --shapes 3x48x16 --dtype float32 {where}" in text
    assert "6 problems of 2 groups not tuned" in text  # those of 2x24x40 and 3x48x16
    assert f"dmuon-tune tune --shapes 2x24x40,3x48x16 --dtype float32 {where}" in text
    assert "1 recipe without a timed chain: 5x64x192." in text
    assert "1 recipe not timed at every smaller batch: 4x64x192." in text
    assert "1 chain was timed while other processes or a moving clock disturbed it: 4x64x192." in text
    assert "dmuon-tune tune --shapes 4x64x192 --dtype float32 --device cpu --cache quiet.sqlite" in text
    with Store.open(own_cache) as store:
        other = replace(recipe, group=replace(GROUP, batch=3), batch_costs=((2, 230.0),))
        store.put_recipe(device, other)
    text = Tags(report(*CPU, "--cache", str(own_cache)).page).text
    assert "not timed at every smaller batch" not in text, "what one recipe of a shape lacks another has"


def test_a_cache_that_cannot_be_read_is_exit_code_4(report: Report, own_cache: Path, tmp_path: Path) -> None:
    own_cache.write_text("this is no database, but long enough to look like one" * 50)
    layers = report(*CPU)
    assert layers.code == 4 and row(layers.page, "user")[1] == "unreadable"
    (tmp_path / "report.html").unlink()
    named = report(*CPU, "--cache", str(own_cache))
    assert (named.code, named.page) == (4, "") and named.err.count("\n") == 1


def test_what_cannot_be_written_is_one_line_and_the_old_report_stays(
    report: Report, own_cache: Path, tmp_path: Path
) -> None:
    fill_one(own_cache)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("kept")
    for place in (("--out", "folder"), ("--png", "file"), ("--out", "file/report.html")):
        result = report(*CPU, *place)
        assert (result.code, result.out) == (2, "") and result.err.startswith("dmuon-tune: error: cannot write ")
        assert result.err.count("\n") == 1
    assert (tmp_path / "file").read_text() == "kept" and not (tmp_path / "report.html").exists()


def test_without_matplotlib_one_line_says_what_to_install(
    report: Report, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_one(own_cache)
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as where it is not installed
    result = report(*CPU)
    assert (result.code, result.out, result.page) == (1, "", "")
    assert result.err.count("\n") == 1 and "pip install 'dmuon-tune[report]'" in result.err


def test_a_users_matplotlib_settings_change_nothing(
    report: Report, filled: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    import matplotlib

    monkeypatch.setitem(matplotlib.rcParams, "text.color", "red")
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "path")
    made = re.compile("Made .* by")
    result = report(*filled.arguments)
    assert (result.code, result.out) == (0, "report.html\n")
    assert made.sub("", result.page) == made.sub("", filled.page)
    assert matplotlib.rcParams["text.color"] == "red"
