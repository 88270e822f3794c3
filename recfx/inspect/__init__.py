"""What was, or would be, done to a model: the conversion report."""

from recfx.inspect.collection_report import CollectionReport, NodeReport, PassReport
from recfx.inspect.report import Report
from recfx.inspect.report_data import REPORT_VERSION, Verification
from recfx.inspect.sharding_report import ShardingReport, ShardReport
from recfx.inspect.step_diff import diff_steps
from recfx.inspect.table_report import HashingReport, TableReport

__all__ = [
    "REPORT_VERSION",
    "CollectionReport",
    "HashingReport",
    "NodeReport",
    "PassReport",
    "Report",
    "ShardReport",
    "ShardingReport",
    "TableReport",
    "Verification",
    "diff_steps",
]
