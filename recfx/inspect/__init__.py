"""What was, or would be, done to a model: the conversion report."""

from recfx.inspect.report import REPORT_VERSION, Report
from recfx.inspect.report_data import (
    CollectionReport,
    HashingReport,
    NodeReport,
    ShardingReport,
    ShardReport,
    TableReport,
    Verification,
)

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
