"""Figures and tables of made-up results whose numbers are known."""

import json
import struct
from pathlib import Path

import plot
import pytest
import table
import tree_picture
import typer
from cells import Grid
from records import Results
from typer.testing import CliRunner

# method, budget -> accepted lengths and seconds of both prompts; each has 30 tokens.
MEASURED = {
    ("autoregressive", 0): (([1] * 30, 3.0), ([1] * 30, 3.0)),
    ("dflash", None): (([3] * 10, 1.5), ([1, 5] * 5, 0.5)),
    ("ddtree", 15): (([5] * 6, 1.0), ([6] * 5, 0.5)),
    ("ddtree", 63): (([6] * 5, 0.8), ([10] * 3, 0.4)),
    ("ddtree", 255): (([10] * 3, 2.0), ([10] * 3, 1.0)),
}


def lines_of(**settings) -> list[dict]:
    grid = Grid(pair="folder/Qwen3-8B,draft", budget=(15, 63, 255), **settings)
    return [
        {
            "cell": cell.key,
            "settings": cell.settings,
            "prompt": index,
            "prompt_sha256": "",
            "tokens": 30,
            "rounds": len(accepted),
            "accepted_lengths": accepted,
            "seconds": seconds / cell.slots,
        }
        for cell in grid.cells("gpu")
        for index, (accepted, seconds) in enumerate(MEASURED[cell.method, cell.tree_budget])
    ]


def write(path: Path, lines: list[dict]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def app(main) -> typer.Typer:
    app = typer.Typer()
    app.command()(main)
    return app


def test_tau_pools_rounds_and_speedup_pools_time():
    results = Results(lines_of())
    (context,) = results.contexts()
    (chain,) = results.find(context, "chain")
    # 60 tokens in 20 rounds; 60 tokens in 2 s against 60 in 6 s.
    assert chain.tau == 3.0 and results.speedup(chain) == pytest.approx(3.0)
    assert chain.accepted == {3: 10, 1: 5, 5: 5}
    best = results.best_tree(context)
    # 60 tokens in 8 rounds and 1.2 s.
    assert best.settings["tree_budget"] == 63 and best.tau == 7.5
    assert results.speedup(best) == pytest.approx(5.0)


def test_speedup_is_over_the_prompts_that_both_cells_have():
    lines = lines_of()
    results = Results(
        line for line in lines if (line["settings"]["tree_budget"], line["prompt"]) != (0, 1)
    )
    (context,) = results.contexts()
    assert results.speedup(results.find(context, "chain")[0]) == pytest.approx(3.0 / 1.5)
    alone = Results(line for line in lines if line["settings"]["method"] == "ddtree")
    assert alone.speedup(alone.best_tree(context)) is None


MARKDOWN = """\
**Temperature 0**

| model | prompts | n | AR, tokens/s | chain (DFlash) | tree (DDTree) |
| --- | --- | ---: | ---: | ---: | ---: |
| Qwen3-8B | humaneval | 2 | 10.0 | 3.00× / 3.00 | 5.00× / 7.50 [63] |

**Temperature 1**

| model | prompts | n | AR, tokens/s | chain (DFlash) | tree (DDTree) |
| --- | --- | ---: | ---: | ---: | ---: |
| Qwen3-8B | humaneval | 2 | 10.0 | – | 2.00× / 10.00 [255] |
"""


def test_markdown_table_has_the_numbers(tmp_path):
    lines = lines_of(temperature=(0, 1))
    kept = [
        line
        for line in lines
        if line["settings"]["temperature"] == 0 or line["settings"]["tree_budget"] in (0, 255)
    ]
    files = [write(tmp_path / "a.jsonl", kept[::2]), write(tmp_path / "b.jsonl", kept[1::2])]
    shown = CliRunner().invoke(app(table.main), [str(path) for path in files])
    assert shown.exit_code == 0 and shown.stdout == MARKDOWN


def test_latex_table_is_booktabs(tmp_path):
    path = write(tmp_path / "a.jsonl", lines_of(temperature=(0, 1), slots=(1, 2)))
    text = CliRunner().invoke(app(table.main), [str(path), "--format", "latex"]).stdout
    assert text.count("\\midrule") == 2 and text.count("\\toprule") == 1
    row = r"Qwen3-8B & humaneval & 2 & 2 & 20.0 & 3.00$\times$ / 3.00 & 5.00$\times$ / 7.50 [63] \\"
    assert row in text and "\\multicolumn{7}{l}{\\emph{Temperature 1}}" in text
    assert table._row(["a_b", "50%"]) == r"a\_b & 50\% \\"


def test_results_without_lines_are_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text("")
    shown = CliRunner().invoke(app(table.main), [str(tmp_path / "a.jsonl")])
    assert shown.exit_code == 2


def test_all_figures_are_drawn(tmp_path):
    lines = lines_of(temperature=(0, 1), slots=(1, 8), method=("ddtree", "ddtree:spine"))
    for line in lines:
        if line["settings"]["method"] != "autoregressive":
            line["stage_ms"] = {"draft": 1.0, "verify": 6.0, "commit": 0.2}
    path = write(tmp_path / "a.jsonl", lines)
    shown = CliRunner().invoke(app(plot.main), [str(path), "--out", str(tmp_path / "out")])
    assert shown.exit_code == 0, shown.output
    stems = {path.stem for path in (tmp_path / "out").iterdir()}
    by_slots = {
        f"{k}_Qwen3-8B_humaneval_slots-{n}"
        for k in ("budget", "acceptance", "stages")
        for n in (1, 8)
    }
    assert stems == by_slots | {"slots_Qwen3-8B_humaneval"}
    for stem in stems:
        data = (tmp_path / "out" / f"{stem}.png").read_bytes()
        width, height = struct.unpack(">II", data[16:24])
        assert width == 680 and height > 250 and len(data) > 5000  # 3.4 in at 200 dpi
        assert "</svg>" in (tmp_path / "out" / f"{stem}.svg").read_text()


def test_figures_without_their_data_are_left_out():
    names = [name for name, _ in plot.all_figures(Results(lines_of(temperature=(0, 1))))]
    assert names == ["budget Qwen3-8B humaneval", "acceptance Qwen3-8B humaneval"]
    only = [line for line in lines_of() if line["settings"]["method"] == "autoregressive"]
    assert list(plot.all_figures(Results(only))) == []


def test_budget_figure_draws_the_numbers():
    results = Results(lines_of())
    top, bottom = plot.budget_figure(results, results.contexts()).axes
    assert top.lines[0].get_ydata() == pytest.approx([4.0, 5.0, 2.0])
    assert bottom.lines[0].get_ydata() == pytest.approx([60 / 11, 7.5, 10.0])
    assert top.lines[1].get_ydata() == pytest.approx([3.0, 3.0])  # the chain, dashed
    assert top.lines[1].get_linestyle() == "--"


def node(token, parent, depth, log_prob, accepted=False):
    keys = ("token", "parent", "depth", "log_prob", "accepted")
    return dict(zip(keys, (token, parent, depth, log_prob, accepted), strict=True))


TREE = {
    "nodes": [
        node("def", -1, 0, 0.0, True),
        node(" a", 0, 1, -0.1, True),
        node(" $b", 0, 1, -2.0),
        node("\n", 1, 2, -0.5),
        node("(", 1, 2, -0.9, True),
    ],
    "wanted": " self",
}


def test_the_tree_of_a_round_is_drawn(tmp_path):
    path = tmp_path / "round.json"
    path.write_text(json.dumps(TREE))
    out = tmp_path / "out"
    shown = CliRunner().invoke(app(plot.main), ["--tree", str(path), "--out", str(out)])
    assert shown.exit_code == 0, shown.output
    assert (out / "tree_round.png").stat().st_size > 5000
    assert (out / "tree_round.svg").stat().st_size > 5000
    texts = [text.get_text() for text in tree_picture.tree_figure(TREE).axes[0].texts]
    assert {"def", "␣a", "␣$b", "\\n", "(", "␣self"} <= set(texts)
    # Depth first, the likelier child before the other.
    assert tree_picture._rows(TREE["nodes"]) == [0, 1, 3, 4, 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nodes": []}, "must hold"),
        ({"wanted": 3}, "must hold"),
        ({"nodes": [node("a", -1, 0, 0.0), node("b", 1, 1, 0.0)]}, "node 1 needs"),
        ({"nodes": [{"token": "a"}]}, "node 0 needs"),
    ],
)
def test_a_malformed_tree_is_refused(tmp_path, change, message):
    path = tmp_path / "round.json"
    path.write_text(json.dumps(TREE | change))
    with pytest.raises(ValueError, match=message):
        tree_picture.read_tree(path)


def test_neither_results_nor_tree_is_refused():
    assert CliRunner().invoke(app(plot.main), []).exit_code == 2
