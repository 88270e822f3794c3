"""What was, or would be, done to a model: the conversion report."""

from recfx.inspect.report import Report
from recfx.inspect.report_data import REPORT_VERSION, CollectionReport, NodeReport, PassReport, Verification
from recfx.inspect.step_diff import diff_steps
from recfx.inspect.table_report import HashingReport, ShardingReport, ShardReport, TableReport

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


def __dir__() -> list[str]:
    return __all__
