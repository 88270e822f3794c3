"""Inserting ids, kernel by kernel: what each is given, and what it has to write."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from tests.ascend.insert_rows_batches import BATCHES, FULL, Batch, made
from tests.ascend.kernel_case import Call, KernelCase, Place

_PROGRAMS = 5


def _int32(values: Any) -> Tensor:
    return torch.as_tensor(values, dtype=torch.int32)


def _int64(values: Any) -> Tensor:
    return torch.as_tensor(values, dtype=torch.int64)


def _per_program(batch: Batch) -> int:
    return (-(-batch.ids.numel() // _PROGRAMS) + 7) // 8 * 8


def _find(batch: Batch) -> tuple[dict[str, Any], dict[str, Tensor]]:
    absent = torch.zeros(_PROGRAMS, len(batch.tables), dtype=torch.int32)
    for position in batch.absent:
        absent[position // _per_program(batch), batch.table_of[position]] += 1
    before = {"rows_ptr": torch.full_like(batch.ids, -7), "absent_ptr": torch.zeros_like(absent)}
    return before, {"rows_ptr": batch.found, "absent_ptr": absent}


def _collect(batch: Batch) -> tuple[dict[str, Any], dict[str, Tensor]]:
    places = torch.arange(_PROGRAMS) * _per_program(batch)
    before = {"rows_ptr": batch.found, "firsts_ptr": torch.searchsorted(_int64(batch.absent), places).to(torch.int32)}
    digits = [
        [value % 2**22 for value in batch.hashes],
        [value // 2**22 % 2**21 for value in batch.hashes],
        [value // 2**43 for value in batch.hashes],
        batch.of_absent(batch.table_of),
    ]
    wanted = {"positions_ptr": batch.absent, "digits_ptr": digits, "buckets_ptr": batch.buckets}
    after = {name: _int32(values) for name, values in wanted.items()}
    return before | {name: torch.full_like(values, -7) for name, values in after.items()}, after


def _lists(batch: Batch) -> dict[str, Tensor]:
    """What the kernels after the first sort read."""
    return {
        "positions_ptr": _int32(batch.absent),
        "tables_ptr": _int32(batch.of_absent(batch.table_of)),
        "buckets_ptr": _int32(batch.buckets),
        "new_buckets_ptr": _int32(batch.new_buckets),
        "by_hash_ptr": _int64(batch.by_hash),
        "by_bucket_ptr": _int64(batch.by_bucket),
        "answers_ptr": _int64(batch.answers),
    }


def _first(batch: Batch) -> tuple[dict[str, Any], dict[str, Tensor]]:
    lists = _lists(batch)
    wanted = {"new_buckets_ptr": lists["new_buckets_ptr"]}
    return lists | {"new_buckets_ptr": torch.full_like(wanted["new_buckets_ptr"], -7)}, wanted


def _plan(batch: Batch) -> tuple[dict[str, Any], dict[str, Tensor]]:
    lists = _lists(batch)
    wanted = {"answers_ptr": lists["answers_ptr"]}
    return lists | {"answers_ptr": torch.full_like(wanted["answers_ptr"], -1)}, wanted


def _take(batch: Batch) -> tuple[dict[str, Any], dict[str, Tensor]]:
    indexes, after = batch.indexes, batch.after[0]
    starts = list(accumulate([0 if each is None else each.rows for each in batch.tables], initial=0))
    states = [
        int(indexes.row_states[starts[table] + answer]) if answer >= 0 else 0
        for table, answer in zip(batch.of_absent(batch.table_of), batch.answers, strict=True)
    ]
    wanted = {
        "row_ids_ptr": after.row_ids,
        "row_states_ptr": after.row_states.view(torch.int8),
        "bucket_taken_ptr": after.bucket_taken,
        "next_free_ptr": after.next_free,
        "states_before_ptr": torch.tensor(states, dtype=torch.int8),
    }
    return _lists(batch) | {"states_before_ptr": torch.zeros(len(states), dtype=torch.int8)}, wanted


def _places(batch: Batch) -> tuple[dict[str, Any], dict[str, Tensor]]:
    (after, rows), (slots, left), ends = batch.after, batch.wrapped, batch.ends_of_absent
    given, shares = torch.zeros_like(ends), torch.zeros_like(ends)
    answer_of: dict[tuple[int, int], int] = {}
    for position, answer, bucket in zip(batch.absent, batch.answers, batch.new_buckets, strict=True):
        table = batch.table_of[position]
        first = answer_of.setdefault((table, int(batch.ids[position])), answer)
        given[table] += answer >= 0 and bucket < batch.num_buckets
        shares[table] += first < -1
    unset = dict.fromkeys(("left_ptr", "inserted_ptr", "shared_ptr"), torch.full_like(ends, -7))
    begins = torch.cat([torch.zeros(1, dtype=torch.int64), ends[:-1]])
    before = {"begins_ptr": begins, "ends_ptr": ends, "rows_ptr": batch.found, "again": 0}
    wanted = {"slots_ptr": slots, "left_ptr": left, "inserted_ptr": given, "shared_ptr": shares}
    return _lists(batch) | before | unset, wanted | {"side_rows_ptr": after.side_rows, "rows_ptr": rows}


def _places_again(batch: Batch) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Only the ids that are left."""
    before, wanted = _places(batch)
    before |= {name: wanted[name] for name in ("slots_ptr", "side_rows_ptr", "rows_ptr")}
    before |= {"begins_ptr": wanted["left_ptr"], "again": 1}
    after = {"slots_ptr": batch.after[0].slot_groups, "left_ptr": batch.ends_of_absent}
    return before, {name: wanted[name] for name in ("side_rows_ptr", "rows_ptr")} | after


_IN_ORDER = {
    "find_in_groups": "ids table_ends slots side_rows facts rows absent num_ids num_tables ids_per_program",
    "collect_absent": "ids table_ends facts rows firsts positions digits buckets num_ids num_absent ids_per_program",
    "first_sightings": "ids positions tables buckets by_hash new_buckets num_absent num_buckets absent_per_program",
    "plan_rows": "ids positions tables new_buckets by_bucket facts side_rows row_ids next_free answers "
    "num_absent num_buckets absent_per_program",
    "take_rows": "ids positions tables new_buckets by_bucket answers facts row_ids row_states bucket_taken next_free "
    "states_before num_absent num_buckets absent_per_program",
    "place_ids": "ids positions new_buckets by_hash answers facts begins ends slots side_rows rows left inserted "
    "shared num_tables num_buckets again",
}
_INT32 = {"absent", "firsts", "positions", "digits", "buckets", "tables", "new_buckets"}
_INT8 = {"row_states", "states_before"}


def _call(place: Place, label: str, names: list[str], values: Callable[[Batch], Any]) -> Call:
    batch = made(label)
    indexes = batch.indexes
    known = {
        "ids_ptr": batch.ids, "table_ends_ptr": batch.ends, "facts_ptr": indexes.facts, "row_ids_ptr": indexes.row_ids,
        "slots_ptr": indexes.slot_groups, "side_rows_ptr": indexes.side_rows, "next_free_ptr": indexes.next_free,
        "row_states_ptr": indexes.row_states.view(torch.int8), "bucket_taken_ptr": indexes.bucket_taken,
        "num_ids": batch.ids.numel(), "num_tables": len(batch.tables), "num_absent": len(batch.absent),
        "num_buckets": batch.num_buckets, "ids_per_program": _per_program(batch),
        "absent_per_program": -(-len(batch.absent) // _PROGRAMS),
    }  # fmt: skip
    before, after = values(batch)
    given = [(known | before)[name] for name in names]
    return Call([place(each) if isinstance(each, Tensor) else each for each in given], after)


_VALUES: dict[str, Callable[[Batch], Any]] = {
    "find_in_groups": _find,
    "collect_absent": _collect,
    "first_sightings": _first,
    "plan_rows": _plan,
    "take_rows": _take,
    "place_ids": _places,
}
_NOT_OF_FULL_TABLES = ("take_rows", "place_ids")


def _type_of(parameter: str) -> str:
    if parameter.startswith(("num_", "again")) or parameter.endswith("per_program"):
        return "i32"
    return "*i32" if parameter in _INT32 else "*i8" if parameter in _INT8 else "*i64"


def cases() -> list[KernelCase]:
    """Each kernel has one compiled form."""
    forms = []
    for name, values in _VALUES.items():
        types = {parameter: _type_of(parameter) for parameter in _IN_ORDER[name].split()}
        signature = {each if kind == "i32" else f"{each}_ptr": kind for each, kind in types.items()}
        labels = [each for each in BATCHES if each != FULL or name not in _NOT_OF_FULL_TABLES]
        of_call = partial(_call, names=list(signature))
        calls = {label: partial(of_call, label=label, values=values) for label in labels}
        if name == "place_ids":
            calls |= {f"{label}, again": partial(of_call, label=label, values=_places_again) for label in labels}
        kernel = f"recfx.kernels.index.insert_rows_triton:recfx_{name}"
        forms.append(KernelCase(name, kernel, signature, {}, calls, programs=_PROGRAMS))
    return forms
