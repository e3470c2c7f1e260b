# SPDX-License-Identifier: Apache-2.0
"""The page about runs: self-contained, complete, and robust to what a killed or diverged run leaves behind."""

import json
import re

import numpy as np
import pytest

from dsv4_jax.cli import main
from dsv4_jax.report import charts as drawing
from dsv4_jax.report import read_run, write_report
from dsv4_jax.report.charts import human
from dsv4_jax.report.page import MISSING
from dsv4_jax.section import ConfigError

ALL = (
    *("loss", "train/mtp_loss", "train/balance_loss", "train/indexer_loss", "train/objective", "recall", "lr"),
    *("grad_norm", "tokens_per_s", "moe/load_max", "moe/load_dead", "moe/load_entropy", "moe/bias_max", "moe/clamped"),
    *("train/skipped", "train/spikes", "train/rollbacks", "train/lag", "perf/mfu"),
    *("optim/update_ratio/muon", "optim/update_ratio/adamw", "mystery"),
)


def step(number, metrics=ALL, **changes):
    return {"step": number, "tokens": 512 * number} | {name: 0.5 + 1 / number for name in metrics} | changes


def a_run(folder, rows, config=None, tail=""):
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + tail)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def with_events(run, *events, tail=""):
    rows = [dict(zip(("step", "event", "text"), event, strict=False)) for event in events]
    (run / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + tail)
    return run


def page(tmp_path, *runs):
    return write_report(runs, tmp_path / "page.html").read_text(encoding="utf-8")


def curves(text):
    """The chart's curves by `metric:run`, with the number of points that each has."""
    found = re.findall(r'<g id="([^"]*:[^"]*)">\s*<path d="([^"]*)"', text)
    return {name: len(re.findall("[ML]", path)) for name, path in found}


def corners(text, curve):
    """Every place that a curve has a corner in, as arrays of x and y on the picture, where y points down."""
    (path,) = re.findall(rf'<g id="{re.escape(curve)}">\s*<path d="([^"]*)"', text)
    return np.array(re.findall(r"[ML] (\S+) (\S+)", path), float).T


def charts(text):
    """The HTML of every chart by its title."""
    return {re.search("<b>(.*?)</b>", chart)[1]: chart for chart in re.findall("(?s)<figure>.*?</figure>", text)}


def cells(text):
    return [re.findall(r"<t[dh]>(.*?)</t[dh]>", row) for row in re.findall("<tr>.*?</tr>", text)]


def test_the_page_has_every_chart_and_needs_no_other_file(tmp_path):
    rows = [step(n, **({"eval/loss": 2.0 - n / 10} if n % 3 == 0 else {})) for n in range(1, 10)]
    text = page(tmp_path, a_run(tmp_path / "one", rows))
    found = curves(text)
    assert set(found) == {f"{name}:one" for name in (*ALL, "eval/loss")}
    assert found["loss:one"] == 9 and found["eval/loss:one"] == 3
    assert text.count("<svg") == len(ALL) and "<script" not in text and "<link" not in text and "@import" not in text
    outside = re.sub(r'xmlns(:xlink)?="[^"]*"', "", text)
    assert "http" not in outside and "url(http" not in outside and "src=" not in outside
    assert all(target.startswith("#") for target in re.findall(r'href="([^"]*)"', outside))
    assert cells(text)[1] == ["one", "9", "4.608k", "0.6111", "1.1", "1.1", "0.7", "0.6111", "0.6111"]
    for words in ("Update to weights, muon", "nats per token", "<h2>Other</h2>", "<b>mystery</b>", "<!-- tokens -->"):
        assert words in text
    assert len(charts(text[text.index("<h2>Other</h2>") :])) == 1  # the mystery alone
    for words in ("Differences in the configuration", "<h2>Events</h2>", "rolled back", 'class="bar'):
        assert words not in text


def test_runs_overlay_in_the_same_charts(tmp_path):
    runs = [
        a_run(tmp_path / name, [step(n) for n in range(1, 6)], {"optim": {"name": name}, "train": {"run_dir": name}})
        for name in ("first", "second", "third")
    ]
    text = page(tmp_path, *runs)
    assert text.count("<svg") == len(ALL)
    assert set(curves(text)) == {f"{name}:{run.name}" for name in ALL for run in runs}
    legends = re.findall("<figcaption>.*?</figcaption>", text)
    assert len(legends) == len(ALL)
    for run, colour in zip(runs, drawing.PALETTE, strict=False):  # one colour a run, in all charts
        entry = f'style="color:{colour}"></i>{run.name}</span>'
        assert all(entry in legend for legend in legends) and f"stroke: {colour}" in text
    assert ["optim.name", *(f"&quot;{run.name}&quot;" for run in runs)] in cells(text)
    assert "train.run_dir" not in text


def test_any_number_of_runs_have_their_own_colours(tmp_path):
    runs = [a_run(tmp_path / f"run{i}", [step(1, ["loss"])]) for i in range(12)]
    assert len(set(re.findall('style="color:(.*?)"', page(tmp_path, *runs)))) == 12


def test_runs_of_the_same_name_are_told_apart(tmp_path):
    runs = [a_run(tmp_path / part / "run", [step(1, ["loss"])]) for part in ("a", "b")]
    assert set(curves(page(tmp_path, *runs))) == {f"loss:{run}" for run in runs}


def test_runs_with_different_metrics_and_without_tokens(tmp_path):
    new = a_run(tmp_path / "new", [step(n) for n in range(1, 4)], {"model": {"dim": 8, "new": 1}})
    old = a_run(tmp_path / "old", [{"step": n, "loss": 1.0, "gone": 2} for n in range(1, 4)], {"model": {"dim": 8}})
    text = page(tmp_path, new, old)
    assert {"loss:new", "loss:old", "lr:new", "gone:old"} <= set(curves(text)) and "lr:old" not in curves(text)
    assert "<!-- step -->" in text and "<!-- tokens -->" not in text
    assert ["model.new", "1", MISSING] in cells(text) and "model.dim" not in text


def test_images_are_dashed_in_the_chart_of_the_text(tmp_path):
    rows = [step(n, ["moe/load_max"], **{"moe/load_max_image": 2.0 + n, "eval/loss_image": 2.0}) for n in range(1, 4)]
    text = page(tmp_path, a_run(tmp_path / "run", rows))
    assert text.count("<svg") == 2 and text.count('class="dashed"') == 1
    assert "run, image" in text and "run, held out, image" in text and "stroke-dasharray" in text


def test_the_indexer_and_a_random_choice_share_a_chart(tmp_path):
    rows = [step(n, [], **{"eval/recall": 0.9, "eval/recall_random": 0.2}) for n in range(1, 4)]
    text = page(tmp_path, a_run(tmp_path / "run", rows))
    assert set(curves(text)) == {"eval/recall:run", "eval/recall_random:run"} and text.count("<svg") == 1
    legend = re.findall("<span>.*?</span>", text)
    assert [re.sub("<.*?>", "", entry) for entry in legend] == ["run, held out", "run, held out, random choice"]
    assert 'class="solid dot"' in legend[0] and 'class="dashed dot"' in legend[1] and "stroke-dasharray" in text
    assert "Recall of the indexer" in text


def test_the_latest_of_repeated_steps_counts_and_later_ones_are_lost(tmp_path):
    rows = [step(n, loss=1.0) for n in (1, 2, 3, 4)] + [step(n, loss=2.0) for n in (2, 3)]
    rows += [step(n, loss=3.0) for n in (1, 2)]
    run = read_run(a_run(tmp_path / "run", rows))
    assert run.steps.tolist() == [1, 2] and run.series["loss"][1].tolist() == [3, 3]
    lost = [[values.tolist() for values in part["loss"]] for part in run.lost]
    assert lost == [[[1, 2, 3, 4], [1, 1, 1, 1]], [[1, 2, 3], [1, 2, 2]]]  # each from the step that it left


def rolled_back(folder, spike=0.5):
    """Steps 1 to 30, of which 21 to 30 are lost, and 21 to 40; a held-out loss at every tenth."""
    before = [step(n, ["loss", "lr"], loss=2.0 + (n == 29) * spike - n / 40) for n in range(1, 31)]
    after = [step(n, ["loss", "lr"], loss=2.0 - n / 40, late=1.0) for n in range(21, 41)]
    rows = [row | ({"eval/loss": 3.0} if row["step"] % 10 == 0 else {}) for row in (*before, *after)]
    for row in rows[20:30]:
        row["lr"] = None  # nothing that could be drawn
    return a_run(folder, rows)


def test_what_was_rolled_back_is_faint_in_the_charts_and_nowhere_else(tmp_path):
    text = page(tmp_path, rolled_back(tmp_path / "run"))
    assert cells(text)[1][:5] == ["run", "40", "20.48k", "1", "3"]
    found = curves(text)
    assert found["loss:run"] == 40 and found["lost loss:run"] == 11 and found["lost eval/loss:run"] == 2
    assert set(found) == {"loss:run", "eval/loss:run", "lost loss:run", "lost eval/loss:run", "lr:run", "late:run"}
    (group,) = re.findall(r'(?s)<g id="lost loss:run">.*?</g>', text)
    assert f"stroke: {drawing.PALETTE[0]}" in group and "stroke-dasharray" in group and "stroke-opacity: 0.7" in group
    entries = {title: chart.count("rolled back") for title, chart in charts(text).items()}
    assert entries == {"Next-token loss": 1, "Learning rate": 0, "late": 0}
    x, _ = corners(text, "loss:run")
    assert corners(text, "lost loss:run")[0] == pytest.approx(x[19:30])


def test_lost_parts_are_not_joined(tmp_path):
    rows = [step(n, ["loss"]) for n in (*range(1, 8), *range(5, 13), 11, 12)]
    text = page(tmp_path, a_run(tmp_path / "run", rows))
    (path,) = re.findall(r'<g id="lost loss:run">\s*<path d="([^"]*)"', text)
    assert re.findall("[ML]", path) == [*"MLLL", *"MLL"]  # from 4 to 7 and from 10 to 12
    assert corners(text, "lost loss:run") == pytest.approx(corners(text, "loss:run")[:, [3, 4, 5, 6, 9, 10, 11]])


def test_a_held_out_value_before_the_loss_is_not_lost(tmp_path):
    rows = [step(1, ["loss"], **{"eval/loss": 1.0}), step(2, ["loss"]), step(2, ["loss"])]
    assert set(curves(page(tmp_path, a_run(tmp_path / "run", rows)))) == {"loss:run", "eval/loss:run", "lost loss:run"}


@pytest.mark.parametrize("spike", [1e9, -1e9])
def test_a_lost_spike_does_not_flatten_the_curve(tmp_path, spike):
    height = lambda text: np.ptp(corners(text, "loss:run")[1])
    calm, spiky = (page(tmp_path, rolled_back(tmp_path / str(size) / "run", size)) for size in (0.0, spike))
    assert 0.6 * height(calm) < height(spiky) < 0.7 * height(calm)


def test_rollbacks_and_stages_are_marked_where_they_happened(tmp_path):
    rows = [step(n, ["loss", "lr"]) for n in (*range(1, 31), *range(21, 24))]  # the run did not get to 30 again
    events = [(5, "stage", "sparse"), (9, "stage"), (30, "spike", "loss 9"), (30, "rollback", "to 20")]
    run = with_events(a_run(tmp_path / "run", rows), *events)
    several = page(tmp_path, run, a_run(tmp_path / "old", [{"step": 1, "loss": 1.0}]))
    for text, colour in ((page(tmp_path, run), drawing.GREY), (several, drawing.PALETTE[0])):
        for chart, metric in (("Next-token loss", "loss"), ("Learning rate", "lr")):
            picture = charts(text)[chart]
            for kind, curve, points in (("stage", metric, [4, 8]), ("rollback", f"lost {metric}", [10])):
                assert picture.count(f"></i>{kind}</span>") == 1
                (group,) = re.findall(rf'(?s)<g id="{kind}:run">.*?</g>', picture)
                lines = np.array(re.findall(r"(?s)M (\S+) (\S+) \nL (\S+) (\S+)", group), float)
                assert group.count(f"stroke: {colour}") == len(points)
                assert (np.ptp(lines[:, 1::2], axis=1) > 100).all()  # from the bottom to the top
                assert lines[:, 0] == pytest.approx(corners(picture, f"{curve}:run")[0][points])
                assert lines[:, 2] == pytest.approx(lines[:, 0])
        assert "spike:" not in text and "></i>spike" not in text


def test_events_are_a_table_before_the_charts(tmp_path):
    run = with_events(
        a_run(tmp_path / "run", [step(1, ["loss"])]), (1234, "spike", "loss <7>"), (7,), tail='{"step": 3, "ev'
    )
    text = page(tmp_path, run)
    assert cells(text)[2:] == [
        ["step", "event", "what happened"],
        ["1,234", "spike", "loss &lt;7&gt;"],
        ["7", "", ""],
    ]
    assert text.index("<h2>Events</h2>") < text.index("<svg") and "left out" not in text
    text = page(
        tmp_path,
        run,
        a_run(tmp_path / "calm", [step(1, ["loss"])]),
        with_events(a_run(tmp_path / "none", [step(1, ["loss"])])),
    )
    assert [row for row in cells(text) if "spike" in row] == [["run", "1,234", "spike", "loss &lt;7&gt;"]]


def test_only_the_last_events_are_shown(tmp_path):
    runs = [
        with_events(a_run(tmp_path / name, [step(1, ["loss"])]), *((n, "odd", name) for n in range(count)))
        for name, count in (("few", 200), ("many", 201), ("most", 1300))
    ]
    shown = lambda text: [row[-3] for row in cells(text) if row[-2] == "odd"]
    assert len(shown(page(tmp_path, runs[0]))) == 200 and "left out" not in page(tmp_path, runs[0])
    assert shown(page(tmp_path, runs[1]))[::199] == ["1", "200"]
    assert "<p>1 earlier event is left out.</p>" in page(tmp_path, runs[1])
    text = page(tmp_path, *runs)
    assert len(shown(text)) == 600 and "<p>1,101 earlier events are left out.</p>" in text


def layers(folder, count):
    rows = [
        step(n, ["moe/load_max", "moe/load_max/mtp", *(f"moe/load_max/{i}" for i in range(count))]) for n in range(1, 4)
    ]
    return a_run(folder, rows)


def test_many_layers_are_a_chart_with_a_scale_of_colours(tmp_path):
    text = page(tmp_path, layers(tmp_path / "run", 43))
    pictures = charts(text)
    assert set(pictures) == {"Largest expert load", "Largest expert load by layer"}
    picture = pictures["Largest expert load by layer"]
    assert set(curves(picture)) == {f"moe/load_max/{name}:run" for name in (*range(43), "mtp")}
    scale = re.search(r"<span>layer 0<i[^>]*gradient\(90deg,(.*?)\)\"></i>layer 42</span>", picture)[1].split(",")
    assert picture.count("<span>") == 2 and "</i>mtp</span>" in picture
    drawn = [re.search(rf'(?s)id="moe/load_max/{i}:run">.*?stroke: (#\w+)', picture)[1] for i in range(43)]
    assert drawn == scale and len(set(drawn)) == 43


def test_few_layers_are_named_and_every_run_has_a_chart_of_them(tmp_path):
    runs = [layers(tmp_path / "a", 2), layers(tmp_path / "b", 3), a_run(tmp_path / "c", [step(1, ["moe/load_max"])])]
    pictures = charts(page(tmp_path, *runs))
    assert set(pictures) == {"Largest expert load", *(f"Largest expert load by layer, {name}" for name in "ab")}
    names = re.findall("</i>(.*?)</span>", pictures["Largest expert load by layer, b"])
    assert names == ["layer 0", "layer 1", "layer 2", "mtp"]
    assert all(name.endswith(":a") for name in curves(pictures["Largest expert load by layer, a"]))


@pytest.mark.parametrize("tail", ['{"step": 3, "lo', "{", '{"loss": 1}', "\0\0\0"])
def test_a_last_line_cut_short_is_left_out(tmp_path, tail):
    assert read_run(a_run(tmp_path / "run", [step(1), step(2)], tail=tail)).steps.tolist() == [1, 2]


def test_values_that_are_not_finite_are_gaps_that_the_legend_counts(tmp_path):
    bad = (np.nan, np.inf, -np.inf, None, "x")
    rows = [step(n + 1, ["lr"], loss=bad[n] if n < 5 else 1.0, grad_norm=np.nan, tokens_per_s=0.0) for n in range(9)]
    rows += [step(10, ["lr"], loss=np.nan, **{"optim/update_ratio/muon": 0.0})]  # nothing to draw on a logarithmic axis
    text = page(tmp_path, a_run(tmp_path / "run", rows))
    assert "run, 6 values not finite" in text and "run, 9 values not finite" in text
    assert curves(text)["loss:run"] == 4
    assert cells(text)[1][3] == "nan"


def test_one_step_is_a_point(tmp_path):
    text = page(tmp_path, a_run(tmp_path / "run", [step(1, **{"eval/loss": 1.0})]))
    assert text.count("<svg") == len(ALL) and text.count("<use") > len(ALL)


def test_names_are_escaped(tmp_path):
    name = "<script>alert('$x_1$ & \"y\"')<!--"
    run = a_run(tmp_path / name, [step(1, ["loss", "<script>1</script>"])], {"a": {"<script>": 1}})
    text = page(tmp_path, run, a_run(tmp_path / "_b", [step(1)], {"a": {"<script>": "<script>"}}))
    assert "<script" not in text and "&lt;script&gt;alert(" in text and "<!--\n" not in text and "_b</span>" in text


def test_what_cannot_be_read_ends_with_a_short_message(tmp_path, capsys):
    (tmp_path / "nothing").mkdir()
    bad = {
        "no metrics.jsonl": tmp_path / "nothing",
        "no step yet": a_run(tmp_path / "empty", []),
        "holds no step": a_run(tmp_path / "cut", [], tail='{"step": 1, '),
        "line 1": a_run(tmp_path / "middle", [], tail="oops\n" + json.dumps(step(2))),
        "events.jsonl, line 1": with_events(a_run(tmp_path / "events", [step(1)]), (None,), (1,)),
        "config.json is not": a_run(tmp_path / "list", [step(1)], [1]),
        "is a folder": a_run(tmp_path / "folder", [step(1)]),
    }
    (tmp_path / "folder" / "report.html").mkdir()
    for words, run in bad.items():
        with pytest.raises(SystemExit) as stopped:
            main(["report", str(run)])
        assert stopped.value.code == 2
        assert words in capsys.readouterr().err
    with pytest.raises(ConfigError):
        write_report([bad["no step yet"]], tmp_path / "new" / "page.html")
    assert not (tmp_path / "new").exists()


def test_the_command_says_what_it_wrote_and_what_it_lacks(tmp_path, capsys, monkeypatch):
    run = a_run(tmp_path / "run", [step(1, ["loss"])])
    main(["report", str(run)])
    assert capsys.readouterr().out == f"{run / 'report.html'}\n" and (run / "report.html").exists()
    main(["report", str(run), "--out", str(tmp_path / "new" / "page.html")])
    assert (tmp_path / "new" / "page.html").exists()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit) as stopped:
        main(["report", str(run)])
    assert stopped.value.code == 2 and "dsv4_jax[lab]" in capsys.readouterr().err


def test_a_long_lost_part_is_thinned(tmp_path):
    noise = np.random.default_rng(0).normal(1, 0.1, 6001)
    rows = [step(n, [], loss=noise[n]) for n in (*range(1, 6001), *range(3001, 3101))]
    text = page(tmp_path, a_run(tmp_path / "run", rows))
    assert 100 < curves(text)["lost loss:run"] <= drawing.BINS
    assert text.count("FillBetweenPolyCollection") == 2  # the ranges of what is kept and of what is lost


@pytest.mark.slow
def test_a_long_run_is_thinned(tmp_path):
    noise = np.random.default_rng(0).normal(1, 0.1, 100_000).round(5).tolist()
    rows = [{"step": n, "tokens": n * 512} | dict.fromkeys(ALL, noise[n - 1]) for n in range(1, 100_001)]
    rows[50_000]["loss"], rows[70_000]["loss"] = 9.0, np.nan
    run = a_run(tmp_path / "run", rows)
    text = page(tmp_path, run)
    assert len(text) < 2e6 and 100 < curves(text)["loss:run"] <= drawing.BINS
    x, mean, low, high = drawing._thinned(*read_run(run).series["loss"], width=500)
    assert len(x) == drawing.BINS and np.isfinite(mean).all() and high.max() == 9 and (low <= mean).all()


@pytest.mark.parametrize(
    ("x", "words"), [(1.2e6, "1.2M"), (0.0, "0"), (35_000, "35k"), (-2.5e9, "-2.5B"), (3e-4, "0.0003"), (999, "999")]
)
def test_human_numbers(x, words):
    assert human(x) == words


def test_metrics_of_an_older_version_are_in_the_charts_of_today(tmp_path):
    """Names had no groups then; a run that went on has lines of both kinds."""
    old = {"eval_loss": 2.0, "mtp_loss": 3.0, "load_max/0": 1.5, "load_max_image": 1.0, "update_ratio/muon": 0.1}
    old |= {"seconds/save": 1.0, "rollbacks": 1}
    new = {"eval/loss": 1.0, "train/mtp_loss": 2.0, "moe/load_max/0": 1.2, "moe/load_max_image": 1.1}
    new |= {"optim/update_ratio/muon": 0.2, "perf/seconds/save": 2.0, "train/rollbacks": 1}
    rows = [step(1, ["loss"], **old), step(2, ["loss"], **new)]
    found = curves(page(tmp_path, a_run(tmp_path / "run", rows)))
    assert found == {f"{name}:run": 2 for name in ("loss", *new)}
