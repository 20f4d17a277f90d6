"""The MiniMax-M3 lightning indexer for JAX: exact block scoring and top-k over a paged index-K cache."""

from m3_pallas.cache import IndexCache as IndexCache
from m3_pallas.cache import insert_index_cache as insert_index_cache
from m3_pallas.checks import check_values as check_values
from m3_pallas.decode import IndexDecodeResult as IndexDecodeResult
from m3_pallas.decode import minimax_m3_index_decode as minimax_m3_index_decode
from m3_pallas.implementations import EXPORT_DISABLED_CHECKS as EXPORT_DISABLED_CHECKS
from m3_pallas.policy import BalancedScore as BalancedScore
from m3_pallas.policy import DecodeLaunch as DecodeLaunch
from m3_pallas.policy import ScoreLaunch as ScoreLaunch
from m3_pallas.policy import Selection as Selection
from m3_pallas.policy import SplitScore as SplitScore
from m3_pallas.policy import TopkLaunch as TopkLaunch
from m3_pallas.prefill import minimax_m3_index_prefill as minimax_m3_index_prefill
from m3_pallas.prefill import minimax_m3_index_score as minimax_m3_index_score
from m3_pallas.prefill import minimax_m3_index_topk as minimax_m3_index_topk
from m3_pallas.rules import prefill_rows as prefill_rows
from m3_pallas.sparse_table import build_sparse_block_table_decode as build_sparse_block_table_decode
from m3_pallas.sparse_table import build_sparse_block_table_prefill as build_sparse_block_table_prefill

__version__ = "0.1.0"
