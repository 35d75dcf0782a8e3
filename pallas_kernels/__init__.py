"""Kernels of the decoding round: each op is a public function with a plain jnp definition and a
Pallas GPU kernel beside it. The package knows no model: it sees arrays only."""

from pallas_kernels.add_norm import add_norm as add_norm
from pallas_kernels.choose_experts import choose_experts as choose_experts
from pallas_kernels.gated_matmul import gated_matmul as gated_matmul
from pallas_kernels.gdn_heads import gated_norm as gated_norm
from pallas_kernels.gdn_heads import gdn_heads as gdn_heads
from pallas_kernels.gdn_step import gdn_step as gdn_step
from pallas_kernels.gdn_tree import gdn_chunk as gdn_chunk
from pallas_kernels.gdn_tree import gdn_commit as gdn_commit
from pallas_kernels.gdn_tree import gdn_tree as gdn_tree
from pallas_kernels.grouped_matmul import grouped_down as grouped_down
from pallas_kernels.grouped_matmul import grouped_gate_up as grouped_gate_up
from pallas_kernels.normed_matmul import normed_matmul as normed_matmul
from pallas_kernels.rotate_heads import rotate_heads as rotate_heads
from pallas_kernels.routed_gate_up import routed_gate_up as routed_gate_up
from pallas_kernels.skinny_matmul import skinny_matmul as skinny_matmul
from pallas_kernels.sort_by_expert import sort_by_expert as sort_by_expert
from pallas_kernels.topk_logsumexp import topk_logsumexp as topk_logsumexp
from pallas_kernels.tree_accept import tree_accept as tree_accept
from pallas_kernels.tree_attention import tree_attention as tree_attention
from pallas_kernels.tree_build import tree_build as tree_build
