"""LLM: what a user passes in and gets back, on tiny checkpoints and on the embedded pair."""

import io

import numpy as np
import pytest
import tiny
from rich.console import Console

from ddtree_jax import LLM, SamplingParams, explain


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("tiny")
    tiny.write_hf_target(root / "target", np.random.default_rng(0))
    tiny.write_hf_draft(root / "draft", np.random.default_rng(1))
    return str(root / "target"), str(root / "draft")


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DDTREE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def untokenized(folders):
    """No tokenizer: token ids only."""
    return LLM(*folders, tree_budget=8, max_slots=2, max_length=96, progress=False)


@pytest.fixture(scope="module")
def llm():
    """The embedded pair."""
    return LLM(tree_budget=15, max_slots=2, max_length=256, progress=False)


@pytest.fixture(scope="module")
def traced():
    return LLM(tree_budget=15, max_slots=1, max_length=256, progress=False, trace=True)


def test_token_prompts_without_a_tokenizer(untokenized):
    prompts = [[3, 4, 5], np.array([9] * 10), (1, 2)]
    outputs = untokenized.generate(prompts, SamplingParams(max_tokens=20, ignore_eos=True))
    assert [o.prompt_token_ids for o in outputs] == [(3, 4, 5), (9,) * 10, (1, 2)]
    assert all(o.text is None and len(o.token_ids) == 20 for o in outputs)
    assert all(o.finish_reason == "length" for o in outputs)
    single = untokenized.generate([9] * 10, SamplingParams(max_tokens=20, ignore_eos=True))
    assert single == outputs[1:2]


def test_an_output_token_equal_to_the_mask_id_is_kept(folders, tmp_path):
    """The mask id is an input of the drafter; in an output it is a token like any other."""
    target, _ = folders
    plain = LLM(target, method="autoregressive", max_slots=1, max_length=96, progress=False)
    wanted = plain.generate([3, 4, 5], SamplingParams(max_tokens=12, ignore_eos=True))[0]
    draft = tiny.write_hf_draft(
        tmp_path / "draft", np.random.default_rng(1), mask_token_id=wanted.token_ids[4]
    )
    llm = LLM(target, str(draft), tree_budget=8, max_slots=1, max_length=96, progress=False)
    output = llm.generate([3, 4, 5], SamplingParams(max_tokens=12, ignore_eos=True))[0]
    assert output.token_ids == wanted.token_ids


def test_settings_for_each_prompt(llm):
    prompts = ["def add(a, b):\n", "import os\n", "class A:\n"]
    params = [
        SamplingParams(max_tokens=5),
        SamplingParams(max_tokens=24, temperature=1.0, top_p=0.9, seed=3),
        SamplingParams(max_tokens=17, temperature=0.5, top_k=20, seed=4),
    ]
    together = llm.generate(prompts, params)
    alone = [llm.generate(p, one)[0] for p, one in zip(prompts, params, strict=True)]
    assert [o.token_ids for o in together] == [o.token_ids for o in alone]
    assert [o.prompt for o in together] == prompts


def test_stream_joins_to_the_output(llm):
    params = SamplingParams(max_tokens=40)
    events = list(llm.stream("def fib(n):", params))
    output = events[-1].output
    assert output == llm.generate("def fib(n):", params)[0]
    assert "".join(event.text for event in events) == output.text
    assert sum((event.token_ids for event in events), ()) == output.token_ids
    assert len(events) > 2


def test_stats_count_rounds_before_any_cut(llm):
    long = llm.generate("def fib(n):", SamplingParams(max_tokens=60))[0].stats
    assert long.rounds == len(long.accepted_lengths)
    assert long.mean_accepted_length == np.mean(long.accepted_lengths)
    short = llm.generate("def fib(n):", SamplingParams(max_tokens=3))[0]
    size = short.stats.rounds
    assert short.stats.accepted_lengths == long.accepted_lengths[:size]
    assert len(short.token_ids) == 3 and short.finish_reason == "length"


def test_a_stop_string_ends_text_tokens_and_counts(llm):
    whole = llm.generate("def fib(n):", SamplingParams(max_tokens=60))[0]
    # A string from the middle, so that it spans tokens and perhaps rounds.
    middle = len(whole.text) // 2
    stop = whole.text[middle : middle + 7]
    cut = llm.generate("def fib(n):", SamplingParams(max_tokens=60, stop=[stop]))[0]
    assert cut.finish_reason == "stop"
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    assert stop in llm.decode(cut.token_ids)
    assert stop not in llm.decode(cut.token_ids[:-1])
    assert cut.stats.accepted_lengths == whole.stats.accepted_lengths[: cut.stats.rounds]
    committed = 1 + sum(cut.stats.accepted_lengths)
    assert committed - cut.stats.accepted_lengths[-1] < len(cut.token_ids) <= committed


def test_an_abandoned_stream_leaves_nothing_behind(llm):
    params = SamplingParams(max_tokens=30)
    expected = llm.generate(["a = 1\n", "b = 2\n"], params)
    for _ in llm.stream(["def f():\n", "x", "y", "z"], SamplingParams(max_tokens=100)):
        break
    assert llm.generate(["a = 1\n", "b = 2\n"], params) == expected


def test_streams_side_by_side_share_the_slots(llm):
    params = SamplingParams(max_tokens=30)
    expected = llm.generate(["a = 1\n", "b = 2\n", "c = 3\n"], params)
    first = llm.stream(["a = 1\n", "b = 2\n"], params)
    found = [next(first)]
    between = llm.generate("c = 3\n", params)  # needs a slot that the stream holds
    found += list(first)
    outputs = {event.index: event.output for event in found if event.output is not None}
    assert [outputs[0], outputs[1], *between] == expected


def test_seeds_of_requests_without_one(llm):
    fresh = LLM(tree_budget=15, max_slots=2, max_length=256, seed=5, progress=False)
    drawn = fresh.generate(["x = ", "x = "], SamplingParams(max_tokens=12, temperature=1.0))
    assert drawn[0].token_ids != drawn[1].token_ids
    named = [SamplingParams(max_tokens=12, temperature=1.0, seed=seed) for seed in (5, 6)]
    assert llm.generate(["x = ", "x = "], named) == drawn


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"methd": "ddtree"}, "did you mean `method`"),
        ({"method": "tree"}, "`method`"),
        ({"dtype": "float16"}, "`dtype`"),
        ({"tree_budget": -1}, "`tree_budget`"),
        ({"max_slots": 0}, "`max_slots`"),
        ({"kernels": "cuda"}, "`kernels`"),
        ({"max_length": 10**6}, "`max_length`"),
        ({"target": "no/such/folder", "draft": "x"}, "no/such/folder"),
    ],
)
def test_arguments_that_cannot_work_are_refused(arguments, said):
    with pytest.raises(ValueError, match=said):
        LLM(progress=False, **arguments)


def test_a_drafter_of_another_target_is_refused(folders):
    with pytest.raises(ValueError, match="hidden size 64 != 384"):
        LLM(draft=folders[1], progress=False)
    with pytest.raises(ValueError, match="`draft`"):
        LLM(target=folders[0], max_length=96, progress=False)


def test_prompts_that_cannot_be_served_are_refused(untokenized, llm):
    short = SamplingParams(max_tokens=5)
    for prompts, params, said in (
        ("text", short, "no tokenizer"),
        ([[3], []], short, "empty prompt"),
        ([[3, 500]], short, "token id 500"),
        ([3.5], short, "sequences of token ids"),
        ([[3], [4]], [short], "`sampling_params`"),
        ([[3]], [{"max_tokens": 3}], "SamplingParams"),
        ([3] * 95, short, "`max_length`"),
        ([3], SamplingParams(max_tokens=5, stop="x"), "`stop`"),
    ):
        with pytest.raises(ValueError, match=said):
            untokenized.generate(prompts, params)
    with pytest.raises(ValueError, match="chat template"):
        llm.chat([{"role": "user", "content": "hello"}])


def test_trace_tells_each_round(llm, traced):
    params = SamplingParams(max_tokens=30)
    plain = llm.generate("def fib(n):", params)[0]
    assert plain.trace is None
    output = traced.generate("def fib(n):", params)[0]
    assert output.token_ids == plain.token_ids
    # Rounds after the last one needed may run in a dispatch of several, never in a traced one.
    assert len(output.trace) == output.stats.rounds
    tokens = [output.token_ids[0]]
    for entry, accepted in zip(output.trace, output.stats.accepted_lengths, strict=True):
        assert entry.token[0] == tokens[-1]
        assert len(entry.path) == accepted
        assert (entry.parent[1:] < np.arange(1, len(entry.token))).all()
        assert (np.diff(entry.log_prob[list(entry.path)]) <= 1e-6).all()
        tokens += [int(entry.token[node]) for node in entry.path[1:]] + [entry.bonus]
        for node, after in zip(entry.path, (*entry.path[1:], None), strict=True):
            chosen = entry.bonus if after is None else entry.token[after]
            assert entry.wanted[node] == chosen
    assert tuple(tokens[: len(output.token_ids)]) == output.token_ids


def test_a_round_is_shown_as_text_and_json(traced):
    output = traced.generate("def fib(n):", SamplingParams(max_tokens=30))[0]
    entry = output.trace[0]
    shown = explain.describe(entry, traced.decode)
    assert [node["accepted"] for node in shown["nodes"]] == [
        number in entry.path for number in range(16)
    ]
    assert shown["wanted"] == traced.decode([entry.bonus])
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(explain.render(entry, traced.decode, "a title"))
    text = console.export_text()
    assert "a title" in text and f"target wanted {shown['wanted']!r}" in text
    assert text.count("\n") == len(entry.token) + 2


def test_chat_goes_through_the_template(llm, monkeypatch):
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
        "{% if not enable_thinking %}<plain>{% endif %}"
    )
    monkeypatch.setattr(llm.tokenizer, "chat_template", template, raising=False)
    messages = [{"role": "user", "content": "hi"}]
    assert llm.decode(llm.chat_prompt(messages)) == "<user>hi\n<assistant><plain>"
    assert llm.decode(llm.chat_prompt(messages, True)) == "<user>hi\n<assistant>"
    answer = llm.chat(messages, SamplingParams(max_tokens=4))
    assert len(answer.token_ids) == 4
