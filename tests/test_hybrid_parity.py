"""Qwen3-MoE, Qwen3.5 and Qwen3.5-MoE against transformers, through files and the converter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_hybrid
from hybrid import oracle_of, run_whole, target_of

TOLERANCE = 1e-4


@pytest.mark.parametrize("family", tiny_hybrid.FAMILIES)
def test_target_equals_transformers(family):
    torch = pytest.importorskip("torch")
    tokens = np.random.default_rng(3).integers(0, 200, (2, 37), dtype=np.int32)
    with torch.no_grad():
        result = oracle_of(family)(
            torch.tensor(tokens, dtype=torch.long), output_hidden_states=True
        )
    target = target_of(family)
    taps = tuple(range(target.config.num_layers - 1))
    rows = jax.jit(lambda tokens: run_whole(target, tokens, taps))(jnp.asarray(tokens))
    features = np.split(np.asarray(rows.features), len(taps), axis=-1)
    for index, mine in enumerate([*features, np.asarray(rows.hidden)]):
        hidden = result.hidden_states[index + 1].numpy()
        np.testing.assert_allclose(mine, hidden, atol=TOLERANCE, rtol=0)
    logits = np.asarray(target.logits(rows.hidden))
    np.testing.assert_allclose(logits, result.logits.numpy(), atol=TOLERANCE, rtol=0)
