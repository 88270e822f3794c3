"""What was, or would be, done to a model: the conversion report."""

from recfx.inspect.report import Report
from recfx.inspect.report_data import REPORT_VERSION, CollectionReport, NodeReport, Verification
from recfx.inspect.table_report import HashingReport, ShardingReport, ShardReport, TableReport

__all__ = [
    "REPORT_VERSION",
    "CollectionReport",
    "HashingReport",
    "NodeReport",
    "Report",
    "ShardReport",
    "ShardingReport",
    "TableReport",
    "Verification",
]


def __dir__() -> list[str]:
    return __all__
