"""All operations, by name."""

from pallas_kernels.cases import Op
from pallas_kernels.grouped_matmul.shapes import OP as GROUPED_MATMUL
from pallas_kernels.head_logprob.shapes import OP as HEAD_LOGPROB
from pallas_kernels.indexer_scores.shapes import OP as INDEXER_SCORES
from pallas_kernels.layer_norm.shapes import OP as LAYER_NORM
from pallas_kernels.ordered_sum.shapes import OP as ORDERED_SUM
from pallas_kernels.pinned_matmul.shapes import OP as PINNED_MATMUL
from pallas_kernels.rms_norm.shapes import OP as RMS_NORM
from pallas_kernels.sparse_attention.shapes import OP as SPARSE_ATTENTION
from pallas_kernels.top_k_select.shapes import OP as TOP_K_SELECT
from pallas_kernels.xor_delta.shapes import OP as XOR_DELTA

OPS: dict[str, Op] = {
    op.name: op
    for op in (
        PINNED_MATMUL,
        GROUPED_MATMUL,
        RMS_NORM,
        LAYER_NORM,
        INDEXER_SCORES,
        TOP_K_SELECT,
        SPARSE_ATTENTION,
        HEAD_LOGPROB,
        ORDERED_SUM,
        XOR_DELTA,
    )
}
