"""Cases of every sharding type: adopted, hashed in every way, and mixed at random."""

import random
from dataclasses import replace
from typing import Any

import recfx
from tests.sharding.cases import Case, Table, as_sequence, deduped

TYPES = {
    "data_parallel": ("data_parallel",),
    "table_wise": ("table_wise", 1),
    "column_wise": ("column_wise", 1, 0),
    "table_column_wise": ("table_column_wise", 1, 1),
    "row_wise": ("row_wise",),
    "table_row_wise": ("table_row_wise", 1),
    "grid_shard": ("grid_shard", 0, 1),
}


def one_type(kind: str, **options: object) -> Case:
    dim = 256 if kind == "grid_shard" else 8
    tables = (
        Table("a", 11, dim, ("f0",), "SUM", TYPES[kind]),
        Table("b", 5, dim, ("f1", "f0"), "SUM" if options.get("is_weighted") else "MEAN", TYPES[kind]),
    )
    return Case(tables, **options)  # type: ignore[arg-type]


CONFIGS = {
    "error": recfx.HashConfig(dense_rows=0, rows=64, buckets=5),
    "partly_dense": recfx.HashConfig(dense_rows=7, rows=64, buckets=5),
    "lru": recfx.HashConfig(dense_rows=0, rows=96, buckets=4, on_full="evict"),
    "lfu_admit": recfx.HashConfig(
        dense_rows=0, rows=96, buckets=3, on_full="evict", evict="lfu", admit_after=2, unseen="share"
    ),
    "share": recfx.HashConfig(dense_rows=0, rows=16, buckets=2, on_full="share", unseen="share"),
    "adopted": recfx.HashConfig(),
}


def hashed_case(kind: str, config: str, **options: Any) -> Case:
    dim = 256 if kind == "grid_shard" else 8
    pooling = "SUM" if options.get("is_weighted") else "MEAN"
    tables = (Table("a", 11, dim, ("f0",), "SUM", TYPES[kind]), Table("b", 13, dim, ("f1", "f0"), pooling, TYPES[kind]))
    raw_ids = {"adopted": 0, "lru": 300, "lfu_admit": 150, "share": 300}.get(config, 25)
    return Case(tables, hashing=CONFIGS[config], raw_ids=raw_ids, optimizer="adagrad", **options)


def random_case(number: int, world_size: int) -> Case:
    """One of the plans; the number decides."""
    draw = random.Random(number)
    is_weighted = number % 4 == 3
    kinds = ["data_parallel", "table_wise", "column_wise", "table_column_wise", "row_wise", "table_row_wise"]
    tables = []
    for position in range(draw.randint(3, 7)):
        kind = "grid_shard" if draw.random() < 0.15 else draw.choice(kinds)
        dim = 256 if kind == "grid_shard" else draw.choice([8, 16, 24])
        on: tuple[int, ...] = ()
        if kind == "table_wise":
            on = (draw.randrange(world_size),)
        elif kind in ("column_wise", "table_column_wise"):
            on = (draw.randrange(world_size), draw.randrange(world_size))
        elif kind == "table_row_wise":
            on = (draw.randrange(2),)
        elif kind == "grid_shard":
            on = (draw.randrange(2), draw.randrange(2))
        features = tuple(draw.sample([f"f{i}" for i in range(6)], draw.choice([1, 1, 2])))
        pooling = "SUM" if is_weighted else draw.choice(["SUM", "MEAN"])
        tables.append(Table(f"t{position}", draw.randint(1, 20), dim, features, pooling, (kind, *on)))
    return Case(
        tuple(tables),
        optimizer=draw.choice(["sgd", "adagrad"]),
        kernel=draw.choice(["fused", "fused", "dense"]),
        is_weighted=is_weighted,
        sizes=draw.choice([(3,), (4, 1), (2, 0, 3)]),
        local_size=2 if world_size == 4 else 0,
        seed=number,
    )


FOUR = (
    Table("rows", 11, 8, ("f0",), "SUM", ("row_wise",)),
    Table("whole", 13, 8, ("f1", "f0"), "MEAN", ("table_wise", 1)),
    Table("columns", 13, 8, ("f2",), "MEAN", ("column_wise", 1, 0)),
    Table("replicas", 5, 8, ("f2",), "SUM", ("data_parallel",)),
)
FOUR_LARGER = tuple(replace(table, rows=64) for table in FOUR)  # rows for an index

MIXED = (
    Table("a", 11, 8, ("f0",), "SUM", ("table_wise", 1)),
    Table("b", 5, 16, ("f1", "f0"), "MEAN", ("row_wise",)),
    Table("c", 7, 8, ("f2",), "MEAN", ("data_parallel",)),
    Table("d", 9, 16, ("f1",), "SUM", ("column_wise", 0, 1)),
)

WEIGHTED = tuple(replace(table, pooling="SUM") for table in MIXED)

STATIC = {
    "table_wise": one_type("table_wise"),
    "row_wise": one_type("row_wise"),
    "data_parallel": one_type("data_parallel"),
    "mixed": Case(MIXED, optimizer="adagrad"),
    "mixed_dense": Case(MIXED, kernel="dense"),
    "weighted": Case(WEIGHTED, is_weighted=True),
    "uneven": Case(MIXED, sizes=(4, 1)),
}

HASHED = {
    "hashed_table_wise": hashed_case("table_wise", "error", sizes=(3, 5)),
    "hashed_row_wise": hashed_case("row_wise", "share"),
    "hashed_data_parallel": hashed_case("data_parallel", "partly_dense", sizes=(3, 5)),
    "evicting": hashed_case("row_wise", "lru"),
    "admitting": hashed_case("table_wise", "lfu_admit"),
}

CASES = {**STATIC, **HASHED}

_EVICTING = Case(FOUR_LARGER, hashing=CONFIGS["lru"], raw_ids=300, optimizer="adagrad")

SEQUENCES = {
    "sequence": as_sequence(STATIC["mixed"]),
    "sequence_dense": as_sequence(STATIC["mixed_dense"]),
    "sequence_uneven": as_sequence(STATIC["uneven"]),
    "sequence_row_wise": as_sequence(hashed_case("row_wise", "error", sizes=(3, 5))),
    "sequence_data_parallel": as_sequence(HASHED["hashed_data_parallel"]),
    "sequence_sent_once": deduped(STATIC["mixed"]),
    "sequence_row_wise_sent_once": deduped(hashed_case("row_wise", "error", sizes=(3, 5))),
    "sequence_admitting": as_sequence(HASHED["admitting"]),
    "both": replace(as_sequence(STATIC["mixed"]), beside=STATIC["mixed"]),
    "both_evicting": replace(as_sequence(_EVICTING), beside=_EVICTING),
}
"""Cases of sequence tables; ``both``: and of pooled ones, for models of two collections."""
