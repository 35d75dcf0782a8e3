"""The peer of hybrid rounds on tiny pairs, without a GPU."""

import json

import pytest
import typer
from peer_transformers import hugging_face_config, main
from real_shapes import PAIRS


@pytest.mark.parametrize(("pair", "nodes"), [("tiny-hybrid", 1), ("tiny-moe", 8)])
def test_a_pass_is_timed(pair, nodes, tmp_path):
    out = tmp_path / "out.jsonl"
    main(out, pair=pair, layers=4, nodes=nodes, rows=32)
    (line,) = [json.loads(text) for text in out.read_text().splitlines()]
    assert 0 < line["ms_min"] <= line["ms_median"] and line["graph"] is False
    wanted = {"pair": pair, "target_layers": 4, "nodes": nodes, "rows": 32, "slots": 1}
    assert wanted.items() <= line.items()


def test_the_peer_has_our_sizes():
    target = PAIRS["qwen3.6-27b"][0]
    config = hugging_face_config(target)
    attends = [i for i, kind in enumerate(config.layer_types) if kind == "full_attention"]
    assert tuple(attends) == target.hybrid.attention_layers
    assert config.rope_parameters["partial_rotary_factor"] * config.head_dim == 64
    moe = hugging_face_config(PAIRS["qwen3.6-35b-a3b"][0])
    assert (moe.num_experts, moe.num_experts_per_tok, moe.moe_intermediate_size) == (256, 8, 512)


@pytest.mark.parametrize(("pair", "message"), [("qwen3-8b", "hybrid"), ("qwen9", "must be one of")])
def test_other_pairs_are_refused(pair, message, tmp_path):
    with pytest.raises(typer.BadParameter, match=message):
        main(tmp_path / "out.jsonl", pair=pair)
