"""The report as text: golden for a small one, readable and fast for large ones."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from torch import nn
from torchrec import EmbeddingBagCollection
from torchrec.modules.embedding_configs import PoolingType

from recfx import HashConfig, convert
from recfx.diagnostics import Diagnostic
from recfx.inspect import Report, wording
from recfx.inspect.explain import explain
from recfx.inspect.index_columns import INDEX_COLUMNS
from recfx.inspect.text import WIDTH
from tests.inspect.models import OwnForward, Wrapped, collection, config, towers

GOLDEN = """\
4 collections: 2 converted, 1 kept, 1 refused. NOT OK
recfx 1, torch 2, torchrec 3
verification: not run: verify=False

Collections
collection | class                  | status               | found        | where      | tables |    size
-----------+------------------------+----------------------+--------------+------------+--------+--------
user       | EmbeddingBagCollection | converted            | traced       | model.py:7 |      2 | 6.2 KiB
= item     |                        |                      |              |            |        |
own        | OwnForward             | refused              | traced       | model.py:7 |      1 | 3.1 KiB
           |                        | own_forward          |              |            |        |
unused     | EmbeddingBagCollection | converted            | never called | model.py:7 |      1 | 3.1 KiB
sequence   | EmbeddingCollection    | kept                 | traced       | model.py:7 |      1 |   160 B
           |                        | embedding_collection |              |            |        |

Reasons
  error: own_forward: own
      OwnForward has its own forward, which a conversion would drop.
      What to do: move the extra work out of forward, or keep it with on_unsupported='keep'.
  warning: weights_not_used: user.embedding_bags.t1
      dense_rows=0 gives out every row anew: a new id starts from initial weights, not from what the row held.
      What to do: nothing if it was never trained; to keep its rows, leave out dense_rows and set rows= higher.
  warning: never_called: unused
      calling the model with the sample never reaches this collection, in train or eval mode.
      What to do: check the sample, or call the collection; what is converted does not depend on it.
  info: embedding_collection: sequence
      EmbeddingCollection is not pooled; it works as before.

user: converted, 2 tables, 6.2 KiB on cpu
table | features | rows | dim | pooling | type    |    size | hashing            | kernel | optimizer
------+----------+------+-----+---------+---------+---------+--------------------+--------+------------
t0    | f0       |  100 |   8 | SUM     | float32 | 3.1 KiB | adopted            | cpu    | weight.grad
t1    | f1       |  100 |   8 | SUM     | float32 | 3.1 KiB | index: 2 ids, 2.0% | cpu    | weight.grad
  indexes, with what they have counted so far
table | batches | ids seen | inserted | evicted | shared | unseen | waiting | worst bucket | probe | bytes/row
------+---------+----------+----------+---------+--------+--------+---------+--------------+-------+----------
t1    |       2 |        4 |        2 |       0 |      0 |      0 |         |      0: 2.0% |     1 |      51.0
  sizes, in B (batch size) and L_f (mean number of ids of feature f per sample)
node                 | shape             | bytes             | kernel | made by
---------------------+-------------------+-------------------+--------+------------------
user_select_features | [B*(L_f0 + L_f1)] | 8*B*(L_f0 + L_f1) |        | expand_collection
user_hash_lookup     | [B, 16]           | 64*B              | cpu    | fuse_hash_lookup
user_keyed_tensor    | [B, 16]           | 64*B              |        | batch_lookups

own: refused, 1 table, 3.1 KiB on cpu
table | features | rows | dim | pooling | type    |    size | hashing | kernel | optimizer
------+----------+------+-----+---------+---------+---------+---------+--------+----------
t0    | f0       |  100 |   8 | SUM     | float32 | 3.1 KiB |         |        |

unused: converted, 1 table, 3.1 KiB on cpu
table | features | rows | dim | pooling | type    |    size | hashing | kernel | optimizer
------+----------+------+-----+---------+---------+---------+---------+--------+------------
t0    | f0       |  100 |   8 | SUM     | float32 | 3.1 KiB | adopted | cpu    | weight.grad
  sizes, in B (batch size) and L_f (mean number of ids of feature f per sample)
node                   | shape    | bytes    | kernel | made by
-----------------------+----------+----------+--------+------------------
unused_select_features | [B*L_f0] | 8*B*L_f0 |        | expand_collection
unused_lookup          | [B, 8]   | 32*B     | cpu    | expand_collection
unused_keyed_tensor    | [B, 8]   | 32*B     |        | expand_collection

sequence: kept, 1 table, 160 B on cpu
table | features | rows | dim | pooling | type    |  size | hashing | kernel | optimizer
------+----------+------+-----+---------+---------+-------+---------+--------+----------
s     | f0       |   10 |   4 |         | float32 | 160 B |         |        |
"""


def small_report() -> Report:
    model, sample = towers()
    converted = convert(model, sample, hashing={"t1": HashConfig(dense_rows=0)}, on_unsupported="keep", verify=False)
    converted(*sample)
    report = explain(converted)
    placed = tuple(replace(found, file="model.py", line=7) for found in report.collections)
    return replace(report, recfx_version="1", torch_version="2", torchrec_version="3", collections=placed)


def test_golden_text() -> None:
    assert str(small_report()) + "\n" == GOLDEN


def test_width_and_characters() -> None:
    text = str(small_report())
    assert max(len(line) for line in text.splitlines()) <= WIDTH <= 120
    assert text.isascii()  # also in a log that knows nothing else
    assert "\x1b" not in text


def test_file_is_shown_from_the_package_on() -> None:
    (found,) = explain(Wrapped(collection())).collections
    assert "tests/inspect/models.py:" in str(explain(Wrapped(collection())))
    assert found.file.startswith("/")
    assert "\ntorchrec/modules" not in str(explain(collection()))
    assert "site-packages" not in str(explain(collection()))


def test_a_place_is_broken_after_folders_alone() -> None:
    """So that the last line can be clicked on, or searched for, as it stands."""
    path = "/a/long/way/to_a_package/of_some_company/recommendations/ranking/sparse_architecture.py"
    report = explain(Wrapped(collection()))
    one = replace(report.collections[0], file=path, line=1234, paths=("a_long_name." * 8 + "end",))
    text = str(replace(report, collections=(one,)))
    assert "sparse_architecture.py:1234" in text
    assert max(len(line) for line in text.splitlines()) <= 120
    found = [line.split("|")[4].strip() for line in text.splitlines() if line.count("|") == 6]
    assert "".join(found[1:]) == f"{path}:1234"
    assert all(line.endswith("/") for line in found[1:] if line and not line.endswith("1234"))


def test_markup_in_names_is_text() -> None:
    lines = str(explain(nn.ModuleDict({"[red]:cat:": collection(1)}))).splitlines()
    assert len([line for line in lines if line.startswith("[red]:cat:")]) == 2  # in the table, and above its own


@pytest.fixture(scope="module")
def large() -> Report:
    tables = [
        config(number, rows=100 + number, pooling=PoolingType.MEAN if number % 2 else PoolingType.SUM)
        for number in range(1000)
    ]
    model = convert(EmbeddingBagCollection(tables=tables), hashing=HashConfig(dense_rows=0), inplace=True)
    return explain(model)


def test_a_thousand_tables_are_summarised(large: Report) -> None:
    started = time.process_time()
    text = str(large)
    assert time.process_time() - started < 1.0
    lines = text.splitlines()
    assert len(lines) < 60
    names = [line.split("|")[0].strip() for line in lines if line.count("|") == 9]
    assert names == [
        "table",
        "t0",
        "t2",
        "t4",
        "... 497 more",
        "t1",
        "t3",
        "t5",
        "... 497 more",
    ]
    assert "106 to 1,098" in text  # rows of those left out
    assert "embedding_bags.t2 and 997 more" in text  # one reason for all
    assert "8*B*(L_f0 + ... 998 more ... +" in text


def test_a_thousand_tables_take_no_time_to_explain() -> None:
    model = EmbeddingBagCollection(tables=[config(number) for number in range(1000)])
    converted = convert(model)
    started = time.process_time()
    report = explain(converted)
    middle = time.process_time()
    report.to_json()
    report.to_html()
    assert middle - started < 2.0
    assert time.process_time() - middle < 5.0


def test_many_collections_are_summarised() -> None:
    model = nn.ModuleList([collection(1) for _ in range(60)] + [collection(1, OwnForward)])
    text = str(explain(model))
    assert text.splitlines()[0] == "61 collections: 60 convertible, 1 refused. NOT OK"
    assert "... 57 more like these" in text
    assert "error: own_forward: 60" in text
    assert "... and 57 more collections, 57 tables" in text
    assert "\n60: refused, 1 table" in text  # the odd one out is shown
    assert len(text.splitlines()) < 90


def test_the_rules_and_counts_of_an_index(large: Report) -> None:
    rules = HashConfig(dense_rows=0, on_full="evict", evict="lfu", admit_after=3, unseen="share")
    model = convert(Wrapped(collection(1)), hashing=rules)
    page = explain(model).to_html()
    assert "index: 0 ids, 0.0%, evict lfu, admit after 3, unseen share" in page
    for name in (*INDEX_COLUMNS, "usable", "room", "batches until full", "suggested rows"):
        assert f"<th>{name}</th>" in page
    assert "<td>100.0%</td><td>100</td><td></td><td></td>" in page
    names = [line.split("|")[0].strip() for line in str(large).splitlines() if line.count("|") == 10]
    assert names == ["table", "t0", "t1", "t2", "... 997 more"]


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (99_999, "99,999"),
        (100_000, "100k"),
        (999_499, "999k"),
        (999_500, "1M"),
        (1_234_567, "1.23M"),
        (12_345_678, "12.3M"),
        (123_456_789_012, "123G"),
        (5 * 10**15, "5000T"),
    ],
)
def test_counts_stay_short(number: int, text: str) -> None:
    assert wording.count(number) == text


def test_many_different_messages_are_cut_after_a_few() -> None:
    reasons = tuple(Diagnostic("unseen_answers", f"table{number}", f"{number} of 9 ids.") for number in range(5))
    text = str(replace(explain(collection(1)), reasons=reasons))
    assert text.count("of 9 ids.") == 3
    assert "info: unseen_answers: ... and 2 more" in text
