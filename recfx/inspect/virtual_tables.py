"""What becomes of TorchRec's virtual tables, whose eviction policies recfx does not follow, policy by policy."""

from __future__ import annotations

from recfx.errors import Diagnostic, Severity
from recfx.inspect.facts import TableFacts
from recfx.versions.differences import (
    CountBasedEvictionPolicy,
    CountTimestampMixedEvictionPolicy,
    FeatureL2NormBasedEvictionPolicy,
    FeatureScoreBasedEvictionPolicy,
    NoEvictionPolicy,
    TimestampBasedEvictionPolicy,
)

_TTL = "HashConfig.raw_ids(on_full='evict', evict='ttl', ttl_batches=<the batches of {minutes} minutes>{more})"
_LFU = "HashConfig.raw_ids(on_full='evict', evict='lfu'{more})"
_IN_TIME = "ids expire after so many batches, not minutes, as each training batch begins, and never in eval mode"
_BY_COUNT = (
    "an id loses its row when another id needs it, the one with the fewest sightings first; sightings do not decay, "
    "and no threshold applies to ids that have a row"
)


def virtual_table_not_followed(table: TableFacts) -> Diagnostic | None:
    """The config asks for a virtual table or has an eviction policy for one."""
    policy = getattr(table.config, "virtual_table_eviction_policy", None)
    if policy is None and not getattr(table.config, "use_virtual_table", False):
        return None
    settings, differs = _closest(policy)
    hashing = table.spec.hashing
    is_raw = hashing is not None and hashing.has_index
    instead = (
        "ids get rows by its HashConfig" if is_raw else f"it has {table.spec.num_embeddings:,} rows, and ids are rows"
    )
    message = f"{type(policy).__name__ if policy else 'use_virtual_table'} does nothing: {instead}. {differs}."
    severity = Severity.INFO if is_raw else Severity.WARNING
    advice = f"what comes closest is {settings}."
    return Diagnostic("virtual_table_not_followed", table.module_path, message, advice, severity)


def _closest(policy: object) -> tuple[str, str]:
    """The settings that come closest to a policy, and what differs with them."""
    by_time = TimestampBasedEvictionPolicy | FeatureScoreBasedEvictionPolicy
    if isinstance(policy, by_time) and policy.eviction_ttl_mins:
        return _TTL.format(minutes=policy.eviction_ttl_mins, more=""), f"With evict='ttl', {_IN_TIME}"
    if isinstance(policy, CountTimestampMixedEvictionPolicy) and policy.eviction_ttl_mins:
        more = _admission(policy.eviction_threshold)
        differs = f"With evict='ttl', {_IN_TIME}; the count decides only who gets a row (admit_after)"
        return _TTL.format(minutes=policy.eviction_ttl_mins, more=more), differs
    if isinstance(policy, CountBasedEvictionPolicy | CountTimestampMixedEvictionPolicy):
        return _LFU.format(more=_admission(policy.eviction_threshold)), f"With evict='lfu', {_BY_COUNT}"
    if isinstance(policy, FeatureScoreBasedEvictionPolicy):
        return _LFU.format(more=""), f"No policy of recfx reads feature scores. With evict='lfu', {_BY_COUNT}"
    if isinstance(policy, FeatureL2NormBasedEvictionPolicy):
        return _LFU.format(more=""), f"No policy of recfx reads the norm of rows. With evict='lfu', {_BY_COUNT}"
    known = policy is None or isinstance(policy, NoEvictionPolicy | TimestampBasedEvictionPolicy)
    differs = "Without an index, ids above its rows are errors" if known else "recfx does not know this policy"
    return "HashConfig.raw_ids(), with as many rows= as there will be ids", differs


def _admission(threshold: int) -> str:
    return f", admit_after={threshold}" if threshold > 1 else ""
