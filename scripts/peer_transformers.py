"""One pass of a hybrid target in transformers, as one CUDA graph: a peer for ours.

    python scripts/peer_transformers.py out.jsonl --pair qwen3.6-27b
    python scripts/peer_transformers.py out.jsonl --pair tiny-hybrid --rows 64      # without a GPU

Random bfloat16 weights at the shapes of `bench_round.py`, its static cache behind `rows` tokens,
one slot. One node is autoregressive decoding; more are a chain, which is all that a pass of
transformers can verify. Gated DeltaNet runs by flash-linear-attention where that is installed, else
by transformers' plain operations; `fla` in a line tells. Times are CUDA events around back-to-back
replays; where a graph cannot be captured, around the pass as Python launches it, and `graph` is
false.
"""

import inspect
import sys
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Annotated

import jax
import torch
import transformers
import typer
from peer_torch import timed
from real_shapes import PAIRS, cut_layers
from records import append, context

from ddtree_jax.config import TargetConfig

WARM_UPS, REPEATS = 16, 30  # `timed` runs fewer than that before it measures


def hugging_face_config(target: TargetConfig) -> transformers.PreTrainedConfig:
    """transformers' settings of a hybrid target.

    Raises:
      ValueError: the target has no recurrent layers.
    """
    hybrid, moe = target.hybrid, target.moe
    if hybrid is None:
        raise ValueError(
            "`--pair` must name a hybrid target such as qwen3.6-27b; peer_torch.py has the others"
        )
    attends = set(hybrid.attention_layers)
    settings = {
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "num_hidden_layers": target.num_layers,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "rms_norm_eps": target.rms_norm_eps,
        "max_position_embeddings": target.max_positions,
        "tie_word_embeddings": target.tie_embeddings,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": target.rope.theta,
            "partial_rotary_factor": hybrid.rotary_dim / target.head_dim,
        },
        "linear_num_key_heads": hybrid.num_key_heads,
        "linear_num_value_heads": hybrid.num_value_heads,
        "linear_key_head_dim": hybrid.key_dim,
        "linear_value_head_dim": hybrid.value_dim,
        "linear_conv_kernel_dim": hybrid.conv_width,
        "layer_types": [
            "full_attention" if layer in attends else "linear_attention"
            for layer in range(target.num_layers)
        ],
    }
    if moe is None:
        return transformers.Qwen3_5TextConfig(
            **settings, intermediate_size=target.intermediate_size
        )
    return transformers.Qwen3_5MoeTextConfig(
        **settings,
        num_experts=moe.num_experts,
        num_experts_per_tok=moe.chosen_count,
        moe_intermediate_size=moe.expert_size,
        shared_expert_intermediate_size=moe.shared_size,
    )


class Pass:
    """A model behind `rows` tokens of its cache; a call is one pass over `nodes` further ones."""

    def __init__(self, target: TargetConfig, rows: int, nodes: int, device: str):
        config = hugging_face_config(target)
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        with torch.device(device):
            self.model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
            self.cache = transformers.StaticCache(config, rows + nodes * (WARM_UPS + REPEATS))
            token = torch.randint(0, target.vocab_size, (1, rows + nodes))
            self.token, prompt = token[:, :nodes], token[:, nodes:]
        # 5.17 has it by its old name.
        known = inspect.signature(self.model.forward).parameters
        self.options = {"cache" if "cache" in known else "past_key_values": self.cache}
        self.model(input_ids=prompt, use_cache=True, logits_to_keep=1, **self.options)

    def __call__(self) -> torch.Tensor:
        """The choice after each node."""
        self.logits = self.model(input_ids=self.token, use_cache=True, **self.options).logits
        return self.logits.argmax(-1)


def milliseconds(work: Pass, device: str) -> tuple[list[float], bool]:
    """Of each run, and whether they are replays of a graph."""
    if device == "cpu":
        return timed(work, REPEATS, device), False
    try:
        return timed(work, REPEATS, device), True
    except RuntimeError as error:  # something in the pass waits for the host
        print(f"no graph: {str(error)[:300]}", file=sys.stderr)
    torch.cuda.synchronize()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(REPEATS // 3)]
    for event in events:
        work()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in zip(events, events[1:], strict=False)], False


@torch.inference_mode()
def main(
    out: Annotated[Path, typer.Argument(help="JSONL file; lines are added.")],
    pair: Annotated[str, typer.Option(help="As of bench_round.py; hybrid ones.")] = "qwen3.6-27b",
    layers: Annotated[int | None, typer.Option(help="Fewer layers, for a look.")] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Of the chain; 1 decodes.")] = 1,
    rows: Annotated[int, typer.Option(min=1, help="Cached rows.")] = 2048,
) -> None:
    if pair not in PAIRS:
        raise typer.BadParameter(f"`--pair` must be one of {tuple(PAIRS)}, got {pair!r}")
    jax.config.update("jax_platforms", "cpu")  # it must not take the GPU's memory
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    target = cut_layers(PAIRS[pair], layers)[0]
    try:
        work = Pass(target, rows, nodes, device)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    times, graph = milliseconds(work, device)
    if not bool(torch.isfinite(work.logits).all()):
        raise RuntimeError("a pass gave values that are not finite")
    line = {
        "bench": "peer_transformers",
        "pair": pair,
        "target_layers": target.num_layers,
        "slots": 1,
        "nodes": nodes,
        "rows": rows,
        "ms_min": round(min(times), 4),
        "ms_median": round(median(times), 4),
        "graph": graph,
        "fla": find_spec("fla") is not None,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        **{name: value for name, value in context().items() if name in ("python", "commit")},
    }
    append(out, [line])
    print(line)


if __name__ == "__main__":
    typer.run(main)
