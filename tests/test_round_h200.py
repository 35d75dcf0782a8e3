"""The whole round at Qwen3-8B shapes, compiled for an H200 without one.

What the CPU cannot show: that it lowers and fits, that no weight and no cache is copied, that
caches are updated in place, and that a round is one command buffer.
"""

import re

import pytest
from compiled_round import compile_round
from real_shapes import PAIRS


@pytest.fixture(scope="module")
def round_8b(tmp_path_factory):
    return compile_round(*PAIRS["qwen3-8b"], rows=2048, dump=tmp_path_factory.mktemp("xla"))


def test_state_is_updated_in_place(round_8b):
    memory = round_8b.program.memory_analysis()
    assert memory.alias_size_in_bytes >= round_8b.state_bytes
    # Logits of 64 rows in float32 are 39 MB; a copy of the caches would add 302 MB.
    assert memory.temp_size_in_bytes < 100e6


def test_no_weight_and_no_cache_is_copied(round_8b):
    # The largest array of activations that moves is the tapped features [1, 64, 5 * 4096].
    large = {shape: count for shape, count in round_8b.moved.items() if count > 64 * 5 * 4096}
    assert not large


def test_round_is_one_command_buffer(round_8b):
    assert round_8b.body == ["kCommandBuffer"]


def test_kernels_are_in_the_round(round_8b):
    text = round_8b.program.as_text()
    # 36 target layers, 5 drafter layers, two of the candidates, one build and one walk.
    assert len(re.findall(r"__gpu\$xla\.gpu\.triton", text)) >= 36 + 5 + 4
    assert " sort(" not in text and "__gpu$TopK" not in text
