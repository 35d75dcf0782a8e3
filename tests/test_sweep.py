"""Sweeps: cells, prompt sets, and files that survive a kill."""

import json
import os
import signal
import subprocess
import sys
import time
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace

import prompts as prompt_sets
import pytest
import records
import sweep
from cells import Grid
from prompts import load_prompts

SCRIPTS = Path(__file__).parent.parent / "scripts"

TEXTS = ["def add(a, b):\n", "import os\n\n\ndef size(path):\n"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """The embedded pair is converted once, into a place of this module's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DDTREE_CACHE", str(tmp_path_factory.mktemp("converted")))
        yield


@pytest.fixture
def prompt_file(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS))
    return path


@lru_cache
def _loaded(items: tuple):
    return sweep.LLM(**dict(items), progress=False)


def load_once(**arguments):
    return _loaded(tuple(arguments.items()))


def pairs(lines: list[dict]) -> list[tuple]:
    return [(line["cell"], line["prompt"]) for line in lines]


def cells_of(prompt_file: Path, **settings):
    grid = Grid(prompts=str(prompt_file), max_tokens=8, max_length=128, **settings)
    return grid.cells("cpu"), {"mine.jsonl": load_prompts(str(prompt_file))}


def test_a_torn_file_is_repaired_and_completed(cache, prompt_file, tmp_path):
    out = tmp_path / "out.jsonl"
    cells, sets = cells_of(prompt_file, method="dflash")
    assert [cell.method for cell in cells] == ["autoregressive", "dflash"]
    assert sweep.sweep(cells, sets, out, load=load_once) == 4
    whole = records.read_lines(out)
    assert len(set(pairs(whole))) == 4
    for line in whole:
        assert line["tokens"] == 8 and sum(line["accepted_lengths"]) >= 7
        assert line["rounds"] == len(line["accepted_lengths"]) and line["round_ms"] > 0
        assert 0 < line["first_token_seconds"] < line["seconds"]
        assert {"device", "jax", "python", "ddtree_jax", "commit"} <= set(line)
        assert "stage_ms" not in line and "cell_seconds" not in line
    # Both methods continue a prompt by the same tokens.
    assert len({line["token_sha256"] for line in whole}) == 2

    text = out.read_bytes()
    out.write_bytes(text[:-100])  # killed in the middle of the last line
    assert sweep.sweep(cells[::-1], sets, out, load=load_once) == 1  # in whatever order
    again = records.read_lines(out)
    assert pairs(again) == pairs(whole)
    assert out.read_bytes().startswith(b"\n".join(text.split(b"\n")[:3]))

    def refuse(**arguments):
        raise AssertionError("a finished sweep loads no model")

    assert sweep.sweep(cells, sets, out, load=refuse) == 0


def test_slots_share_the_time_of_their_pass(cache, prompt_file, tmp_path):
    cells, sets = cells_of(prompt_file, method="autoregressive", slots=2, baseline=False)
    sweep.sweep(cells, sets, tmp_path / "out.jsonl", load=load_once)
    lines = records.read_lines(tmp_path / "out.jsonl")
    assert len(lines) == 2
    for line in lines:
        assert line["cell_prompts"] == 2 and "round_ms" not in line
        assert line["cell_tokens"] == sum(line["tokens"] for line in lines)
    total = sum(line["seconds"] for line in lines)
    assert total == pytest.approx(lines[0]["cell_seconds"], abs=1e-5)


WRITER = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from records import append
for n in range(10**6):
    line = {"cell": "c", "settings": {}, "prompt": n, "tokens": 1, "seconds": 1.0}
    append(Path(sys.argv[2]), [line | {"accepted_lengths": [1] * 50}])
"""


def test_a_killed_writer_loses_at_most_its_last_line(tmp_path):
    out = tmp_path / "out.jsonl"
    process = subprocess.Popen([sys.executable, "-c", WRITER, SCRIPTS, out])
    deadline = time.monotonic() + 30
    while not (out.exists() and out.read_bytes().count(b"\n") > 20):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    lines = records.repair(out)
    assert [line["prompt"] for line in lines] == list(range(len(lines))) and len(lines) > 20
    records.append(out, [lines[0] | {"prompt": -1}])
    assert records.read_lines(out)[-1]["prompt"] == -1


def test_a_line_of_another_kind_is_named(tmp_path):
    out = tmp_path / "out.jsonl"
    out.write_text('{"method": "ddtree"}\n')
    with pytest.raises(ValueError, match=r"out.jsonl:1 is no line of sweep.py"):
        records.repair(out)


TOML = """
pair = ["embedded", "org/target,org/draft"]
method = ["ddtree", "ddtree:spine", "ddtree:static"]
budget = [15, 63]
temperature = [0, 1.0]
prompts = ["humaneval", "gsm8k"]
slots = 4
tree_choices = [[0], [0, 0], [1]]
max_tokens = 32
limit = 3
"""
FLAGS = {
    "pair": ["embedded", "org/target,org/draft"],
    "method": ["ddtree", "ddtree:spine", "ddtree:static"],
    "budget": [15, 63],
    "temperature": [0.0, 1.0],
    "prompts": ["humaneval", "gsm8k"],
    "slots": [4],
    "tree_choices": "[(1,), (0,), (0, 0)]",
    "max_tokens": 32,
    "limit": 3,
    "dtype": None,
}


def test_toml_and_flags_give_the_same_cells(tmp_path):
    path = tmp_path / "grid.toml"
    path.write_text(TOML)
    cells = Grid.of(path).cells("cpu")
    assert [cell.key for cell in cells] == [cell.key for cell in Grid.of(**FLAGS).cells("cpu")]
    # autoregressive, chain, 2 budgets by 2 shapes, static; by 2 pairs, 2 sets, 2 temperatures.
    assert len(cells) == 7 * 8 and len({cell.key for cell in cells}) == 56
    assert len({json.dumps(cell.llm_arguments) for cell in cells}) == 14
    assert Grid.of(path, max_tokens=64).max_tokens == 64
    path.write_text("budgets = [3]\n")
    with pytest.raises(ValueError, match="`budgets` .* is no setting"):
        Grid.of(path)


def test_cells_are_canonical():
    def keys(**settings):
        return {cell.key for cell in Grid(**settings).cells("cpu")}

    assert keys(method="dflash", budget=(7, 15)) == keys(method="dflash")
    assert keys(method="ddtree", budget=0) == keys(method="autoregressive")
    assert keys(temperature=1) == keys(temperature=1.0) != keys(temperature=0)
    alone = Grid(pair="org/target", method="autoregressive").cells("cpu")
    assert [cell.llm_arguments["draft"] for cell in alone] == [None]
    spine = Grid(method="ddtree:spine", budget=31, baseline=False).cells("cpu")[0]
    assert spine.llm_arguments["spine"] and spine.llm_arguments["tree_budget"] == 31
    linear = Grid(method="ddtree:linear", baseline=False).cells("cpu")[0]
    assert linear.llm_arguments["acceptance"] == "linear"
    mtp = Grid(pair="org/target", method="mtp", mtp_tokens=(2, 3), baseline=False).cells("cpu")
    assert [cell.llm_arguments["mtp_tokens"] for cell in mtp] == [2, 3]
    assert mtp[0].llm_arguments["draft"] is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "tree"}, "`method` must be one of"),
        ({"budget": -1}, "`budget` must be an integer of at least 0, got -1"),
        ({"slots": True}, "`slots` must be an integer of at least 1"),
        ({"temperature": "hot"}, "`temperature` must be 0"),
        ({"method": "ddtree:static"}, "`tree_choices` must be given exactly"),
        ({"method": "ddtree:static", "tree_choices": "[(0,"}, "`tree_choices` must be rank paths"),
        ({"prompts": ("a/x.jsonl", "b/x.jsonl")}, "`prompts` must be different names"),
        ({"prompts": ()}, "`prompts` must be at least one value"),
        ({"limit": 0}, "`limit` must be"),
        ({"method": "mtp"}, "`pair` must be targets with an MTP block"),
        ({"pair": "org/target", "method": "mtp", "mtp_tokens": 0}, "`mtp_tokens` must be"),
    ],
)
def test_impossible_grids_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Grid(**settings)


def test_jsonl_prompts(tmp_path):
    path = tmp_path / "turns.jsonl"
    path.write_text('{"turns": ["first", "second"]}\n\n{"prompt": "third"}\n{"prompt": "4"}\n')
    assert [prompt.plain for prompt in load_prompts(str(path))] == ["first", "third", "4"]
    spread = load_prompts(str(path), 1) + load_prompts(str(path), 9)[2:]
    assert [prompt.index for prompt in spread] == [0, 2]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "x"', "not JSON"),
        ('{"text": "x"}', "expected an object with a non-empty string `prompt`"),
        ('{"turns": []}', "a list `turns`"),
        ('{"prompt": 3}', "non-empty string"),
        ('["x"]', "expected an object"),
    ],
)
def test_a_malformed_prompt_line_is_named(tmp_path, line, message):
    path = tmp_path / "bad.jsonl"
    path.write_text(f'{{"prompt": "fine"}}\n{line}\n')
    with pytest.raises(ValueError, match=rf"bad.jsonl:2: .*{message}"):
        load_prompts(str(path))


def test_unknown_and_missing_sets_say_what_to_do(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="`prompts` must be one of humaneval, gsm8k"):
        load_prompts("humanevil")
    with pytest.raises(ValueError, match="does not exist"):
        load_prompts(str(tmp_path / "no.jsonl"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="'gsm8k' .* pip install datasets"):
        load_prompts("gsm8k")

    def offline(*args, **kwargs):
        raise ConnectionError("no route")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=offline))
    with pytest.raises(ValueError, match="'alpaca' could not be loaded .*no route.* Offline"):
        load_prompts("alpaca")


ROWS = {
    "gsm8k": {"question": " Q "},
    "math500": {"problem": "Q"},
    "aime24": {"problem": "Q"},
    "aime25": {"problem": "Q"},
    "mbpp": {"prompt": "Q"},
    "livecodebench": {"question_content": "Q", "starter_code": "class S:"},
    "swe-bench-lite": {"problem_statement": "Q"},
    "mt-bench": {"prompt": ["Q", "again"]},
    "alpaca": {"instruction": "Q", "input": "more"},
}


@pytest.mark.parametrize("name", prompt_sets.SOURCES)
def test_hub_sets_are_worded_by_their_kind(monkeypatch, name):
    rows = SimpleNamespace(load_dataset=lambda *where, **settings: [ROWS[name]])
    monkeypatch.setitem(sys.modules, "datasets", rows)
    (prompt,) = load_prompts(name)
    if name in ("gsm8k", "math500", "aime24", "aime25"):
        assert prompt.ask.startswith("Q\n") and prompt.ask.endswith("\\boxed{}.")
    elif name in ("mbpp", "livecodebench"):
        assert "```python\nQ" in prompt.ask and prompt.ask.endswith("\n```")
    else:
        assert prompt.ask == {"alpaca": "Q\n\nmore"}.get(name, "Q")
    assert prompt.ask == prompt.plain


def test_chat_models_are_asked_and_others_continue():
    prompt = prompt_sets.Prompt(0, "ask", "plain")
    base = SimpleNamespace(tokenizer=SimpleNamespace(chat_template=None))
    assert sweep.questions(base, [prompt]) == (["plain"], False)
    chat = SimpleNamespace(
        tokenizer=SimpleNamespace(chat_template="x"), chat_prompt=lambda m: m[0]["content"]
    )
    assert sweep.questions(chat, [prompt]) == (["ask"], True)
