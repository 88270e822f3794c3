"""The report as text: golden for a small one, readable and fast for large ones."""

from __future__ import annotations

import io
import re
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor
from torchrec.modules.embedding_configs import PoolingType

from recfx import ConversionError, HashConfig, convert
from recfx.errors import Diagnostic, Severity, few
from recfx.inspect import Report, wording
from recfx.inspect.explain import explain
from recfx.inspect.text import WIDTH
from recfx.printing.grid import Grid
from recfx.printing.lines import to_lines
from tests.builders.optimizers import attach
from tests.inspect.models import OwnForward, Wrapped, batch, collection, config, towers

GOLDEN = """\
4 collections: 3 converted, 1 refused. NOT OK
recfx 1, torch 2, torchrec 3
verification: not run: verify=False

error: own_forward: own (model.py:7)
    OwnForward has its own forward, which a conversion would drop.
    What to do: move the extra work out of forward, or keep it with on_unsupported='keep'.

warning: never_called: unused (model.py:7)
    calling the model with the sample never reaches this collection, in train or eval mode.
    What to do: check the sample, or call the collection; what is converted does not depend on it.

Indexes, the fullest first: none needs more rows
table | collection | ids held | full | worst bucket | fits | seen
------+------------+----------+------+--------------+------+-----
t1    | user       |        2 | 2.0% | 0: 2.0%      |   98 |    4

Collections
collection  | class                  | status               | found        | tables |    size | where
------------+------------------------+----------------------+--------------+--------+---------+-----------
user = item | EmbeddingBagCollection | converted            | traced       |      2 | 6.2 KiB | model.py:7
own         | OwnForward             | refused: own_forward | traced       |      1 | 3.1 KiB | model.py:7
unused      | EmbeddingBagCollection | converted            | never called |      1 | 3.1 KiB | model.py:7
sequence    | EmbeddingCollection    | converted            | traced       |      1 |   160 B | model.py:7
traced: a call of it was seen; walked: calls not traced

Tables: 5 tables, 12.7 KiB on cpu
table | collection | features | rows | dim | pooling | type    |    size | hashing | ids held | kernel | optimizer
------+------------+----------+------+-----+---------+---------+---------+---------+----------+--------+----------
t0    | user       | f0       |  100 |   8 | SUM     | float32 | 3.1 KiB | adopted |          | cpu    | your own
t1    | user       | f1       |  100 |   8 | SUM     | float32 | 3.1 KiB | index   | 2, 2.0%  | cpu    | your own
t0    | own        | f0       |  100 |   8 | SUM     | float32 | 3.1 KiB |         |          |        |
t0    | unused     | f0       |  100 |   8 | SUM     | float32 | 3.1 KiB | adopted |          | cpu    | your own
s     | sequence   | f0       |   10 |   4 | NONE    | float32 |   160 B | adopted |          | cpu    | your own
your own: backward writes a gradient as large as the table (weight.grad), for an optimizer that you step

Nodes of user
node                 | shape             | bytes             | kernel | made by
---------------------+-------------------+-------------------+--------+------------------
user_select_features | [B*(L_f0 + L_f1)] | 8*B*(L_f0 + L_f1) |        | expand_collection
user_hash_lookup     | [B, 16]           | 64*B              | cpu    | fuse_hash_lookup
user_keyed_tensor    | [B, 16]           | 64*B              |        | expand_collection

Nodes of unused
node                   | shape    | bytes    | kernel | made by
-----------------------+----------+----------+--------+------------------
unused_select_features | [B*L_f0] | 8*B*L_f0 |        | expand_collection
unused_lookup          | [B, 8]   | 32*B     | cpu    | expand_collection
unused_keyed_tensor    | [B, 8]   | 32*B     |        | expand_collection

Nodes of sequence
node                     | shape       | bytes     | kernel | made by
-------------------------+-------------+-----------+--------+------------------
sequence_select_features | [B*L_f0]    | 8*B*L_f0  |        | expand_collection
sequence_lookup          | [B*L_f0, 4] | 16*B*L_f0 | cpu    | expand_collection
sequence_jagged_dict     | [B*L_f0, 4] | 16*B*L_f0 |        | expand_collection
B: batch size; W: ranks; L_f: mean number of ids of feature f per sample

Notes
info: weights_not_used: user.embedding_bags.t1
    with raw_ids() (dense_rows=0), the table starts anew: each new id gets a row with initial weights, and these
    overwrite what the original had in that row.
    What to do: nothing, if the table was not trained before. If it was, and ids were row numbers, convert it without
    raw_ids(): those ids keep their rows, and HashConfig(rows=N) has room for others. To start anew, make an optimizer
    that is not in backward anew as well: it has state for the old ids of the rows.
"""


def small_report() -> Report:
    model, sample = towers()
    converted = convert(model, sample, hashing={"t1": HashConfig(dense_rows=0)}, on_unsupported="keep", verify=False)
    converted(*sample)
    report = explain(converted)
    placed = tuple(replace(described, file="model.py", line=7) for described in report.collections)
    return replace(report, recfx_version="1", torch_version="2", torchrec_version="3", collections=placed)


def test_golden_text() -> None:
    assert str(small_report()) + "\n" == GOLDEN


def test_width_and_characters() -> None:
    text = str(small_report())
    assert max(len(line) for line in text.splitlines()) <= WIDTH <= 120
    assert text.isascii()  # also in a log that knows nothing else
    assert "\x1b" not in text


def test_file_is_shown_from_the_package_on() -> None:
    (described,) = explain(Wrapped(collection())).collections
    assert "tests/inspect/models.py:" in str(explain(Wrapped(collection())))
    assert described.file.startswith("/")
    assert "\ntorchrec/modules" not in str(explain(collection()))
    assert "site-packages" not in str(explain(collection()))


def test_no_name_and_no_place_is_broken() -> None:
    """So that they can be clicked on, or searched for, as they stand; a long name has a line of its own in a table."""
    path = "/a/long/way/to_a_package/of_some_company/recommendations/ranking/sparse_architecture.py"
    report = explain(Wrapped(collection()))
    for name in ("a_long_name." * 8 + "end", "n" * 150):
        one = replace(report.collections[0], file=path, line=1234, paths=(name,))
        reasons = (Diagnostic("own_forward", name, "no-forward " * 20, "move-it. " * 20, Severity.ERROR),)
        lines = str(replace(report, collections=(one,), reasons=reasons)).splitlines()
        assert sum(name in line for line in lines) == 3  # reason, collection, nodes
        assert sum(f"{path}:1234" in line for line in lines) == 2  # reason, collection
        assert all(len(line) <= WIDTH or name in line or path in line or "-+-" in line for line in lines)
        assert not any(line.strip().startswith("forward") for line in lines)
        row = lines.index(name)
        assert lines[row + 1] == f"           | convertible | walked |      2 | 6.2 KiB | {path}:1234"
        assert not any(line.startswith("columns left out") for line in lines)  # where nobody can widen a terminal
        every = str(replace(report, collections=(one,), tables="all")).splitlines()
        assert sum(line.startswith(f"{name} | ") and line.endswith(f" | {path}:1234") for line in every) == 1


def test_a_terminal_gets_colours_and_its_own_width() -> None:
    def printed(width: int, **more: Any) -> str:
        output = io.StringIO()
        Console(file=output, width=width, **more).print(small_report())
        return output.getvalue()

    colours = printed(100, force_terminal=True, color_system="standard")
    assert "\x1b[1;31merror: own_forward\x1b[0m: own (model.py:7)\n" in colours
    assert "\x1b[33mwarning: never_called\x1b[0m: unused (model.py:7)\n" in colours
    assert not any(line.startswith(("|", "---+")) for line in printed(20).splitlines())  # rows are not broken
    for width in (60, 100, 140):
        plain = printed(width)
        assert "\x1b" not in plain
        assert max(map(len, plain.splitlines())) <= width
        assert ("EmbeddingBagCollection" in plain) is (width > 60)  # left out, but not cut off
        assert ("columns left out: class, found, where\n" in plain) is (width == 60)


def test_markup_in_names_is_text() -> None:
    name = "[red]:cat:"
    report = explain(nn.ModuleDict({name: collection(1, OwnForward)}))
    output = io.StringIO()
    Console(file=output, width=120).print(report)
    for text in (str(report), output.getvalue()):
        assert f"error: own_forward: {name} (" in text
        assert len([line for line in text.splitlines() if line.strip().startswith(name)]) == 1


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
    assert len(lines) < 40
    names = [line.split("|")[0].strip() for line in lines if line.count("|") == 8]
    assert names == ["table", "500 like t0", "500 like t1"]
    assert "100-1,098" in text
    assert "info: weights_not_used: all 1,000 tables: t0..999\n" in text  # one reason for all
    assert text.count("the table starts anew") == 1
    assert "8*B*(L_f0 + 999 more)" in text


def test_a_thousand_tables_one_by_one(large: Report) -> None:
    lines = str(replace(large, tables="all")).splitlines()
    names = [line.split("|")[0].strip() for line in lines if line.count("|") == 10]
    assert names == ["table", *(f"t{number}" for number in range(1000))]


def test_a_page_says_it_once(large: Report) -> None:
    """Before it shows all of the tables."""
    page = large.to_html()
    assert page.count("the table starts anew") == 1
    assert page.index("500 like t0") < page.index("<summary>(root): converted") < page.index("<td>t999</td>")
    assert len(page) < 2_000_000


@pytest.mark.parametrize(
    ("width", "lines"),
    [
        (None, ["name     | a  | wide                |  n", "---------+----+---------------------+---"]),
        (40, ["name     | a  | wide                |  n", "---------+----+---------------------+---"]),
        (39, ["name     | wide                |  n", "---------+---------------------+---"]),
        (34, ["name     | a  |  n", "---------+----+---"]),  # a wide column makes way for others
        (16, ["name     |  n", "---------+---"]),
        (12, ["name |  n", "-----+---"]),  # a long name has a line of its own
        (8, ["name", "----"]),
    ],
)
def test_columns_are_left_out_where_there_is_no_room(width: int | None, lines: list[str]) -> None:
    rows = (("long_one", "1", "x" * 19, "5"), ("b", "\u754c", "", "10"))
    shown = to_lines(Grid("", ("name", "a", "wide", "n"), rows, frozenset({"n"})), width, spare=["a", "wide"])
    assert shown[:2] == lines
    left_out = [name for name in ("a", "wide", "n") if f"| {name}" not in lines[0].replace("  ", " ")]
    assert " ".join(" ".join(shown).split()).partition("columns left out: ")[2] == ", ".join(left_out)
    assert {line.split(" | ")[0].strip() for line in shown} >= {"long_one", "b"}


def test_tables_is_checked() -> None:
    with pytest.raises(ConversionError) as raised:
        explain(collection(1), tables="each")
    assert raised.value.reason == "invalid_argument"


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
    assert "\n60: 0..59  | EmbeddingBagCollection | convertible          | walked |     60 | 187.5 KiB | " in text
    assert "error: own_forward: 60 (" in text
    assert "\nNodes of 0 (59 more collections with the same nodes)\n" in text
    assert "\n60         | OwnForward             | refused: own_forward | " in text  # the odd one out is shown
    assert len(text.splitlines()) < 40


def test_the_rules_and_counts_of_an_index() -> None:
    rules = HashConfig(dense_rows=0, on_full="evict", evict="lfu", admit_after=3, unseen="share")
    model = convert(Wrapped(collection(1)), hashing=rules)
    page = explain(model).to_html()
    assert "index: 0 ids, 0.0%, evict lfu, admit after 3, unseen share" in page
    expires = HashConfig(dense_rows=0, on_full="evict", evict="ttl", ttl_batches=3_000)
    expiring = explain(convert(Wrapped(collection(1)), hashing=expires)).to_html()
    assert "index: 0 ids, 0.0%, evict ttl after 3,000 batches" in expiring
    counted = ("batches", "ids seen", "inserted", "evicted", "shared", "unseen", "waiting", "worst bucket", "probe")
    for name in ("table", *counted, "bytes/row", "room", "batches until full"):
        is_known = name != "batches until full"  # no batch yet: no column for it
        assert bool(re.search(rf"<th [^>]*>{re.escape(name)}</th>", page)) is is_known


def filled(numbers: dict[int, int], tables: int = 20, **hashing: Any) -> Report:
    """The report of tables of 100 rows of which some, by number, hold so many ids."""
    model = Wrapped(collection(tables))
    attach(model, torch.optim.SGD)  # eviction needs a fused one
    converted = convert(model, hashing=HashConfig(dense_rows=0, buckets=1, **hashing), inplace=True)
    features = [f"f{number}" for number in range(tables)]
    for number, ids in numbers.items():
        for some in torch.arange(ids).split(100):  # a batch may have no more ids than rows
            lengths = torch.zeros(tables, dtype=torch.int64)
            lengths[number] = some.numel()
            converted(KeyedJaggedTensor(features, some, lengths=lengths)).sum().backward()
    return explain(converted)


def test_tables_that_fill_come_first() -> None:
    lines = str(filled({3: 90, 4: 10, 7: 85, 9: 5})).splitlines()
    assert lines[4].startswith("warning: index_nearly_full: 2 tables of inner: t3, t7")
    assert "info: weights_not_used: all 20 tables of inner: t0..19" in lines[5:]
    (nearly,) = [place for place, line in enumerate(lines) if line.startswith("warning: index_nearly_full")]
    assert lines[nearly] == "warning: index_nearly_full: 2 tables of inner: t3, t7"
    title = lines.index("Indexes, the fullest first: 2 tables are nearly full")
    assert title < lines.index("Collections")
    shown = [line.split("|")[0].strip() for line in lines[title + 3 :][:5]]
    assert shown == ["t3", "t7", "t4", "t9", "t0"]
    assert lines[title + 8] == '... and 15 more, none of them fuller (tables="all" lists each)'
    cells = dict(zip(*([cell.strip() for cell in lines[title + row].split("|")] for row in (1, 3)), strict=True))
    assert (cells["ids held"], cells["full"], cells["fits"]) == ("90", "90.0%", "10")


@pytest.mark.parametrize(
    ("on_full", "ids", "title"),
    [
        ("error", {0: 100, 1: 90, 2: 5}, "1 table is full, 1 table is nearly full"),
        ("error", {0: 90, 1: 5}, "1 table is nearly full"),
        ("share", {0: 90, 1: 500, 2: 5}, "1 table is nearly full, 1 table shares rows"),
        ("evict", {number: 101 + number * 30 for number in range(5)}, "5 tables evict ids"),
        ("evict", {0: 500, 1: 100}, "1 table evicts ids"),
    ],
)
def test_the_title_says_what_happens_in_how_many_tables(on_full: str, ids: dict[int, int], title: str) -> None:
    assert f"\nIndexes, the fullest first: {title}\n" in str(filled(ids, on_full=on_full))


def test_the_title_counts_ids_that_wait() -> None:
    report = str(filled({0: 500, 1: 5}, admit_after=3))
    assert "\nIndexes, the fullest first: 1 table forgets ids that wait\n" in report


def test_an_index_that_has_counted_nothing_is_not_listed() -> None:
    assert "Indexes" not in str(filled({}))
    assert "\nIndexes, the fullest first: none needs more rows\n" in str(filled({0: 5}, tables=2))


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
    assert text.count("of 9 ids.") == 1
    assert "info: unseen_answers: 5 modules: table0..4\n    table0: 0 of 9 ids.\n    ... and 4 more" in text
    every = str(replace(explain(collection(1), tables="all"), reasons=reasons))
    assert [f"table{number}: {number} of 9 ids." in every for number in range(6)] == [True] * 5 + [False]


def test_what_holds_for_tables_of_several_collections() -> None:
    model = nn.ModuleDict({f"tower{number}": collection(12) for number in range(5)})
    text = str(explain(convert(model, hashing=HashConfig(dense_rows=0))))
    assert (
        "info: weights_not_used: all 60 tables of 5 collections: tower0: t0..11; tower1: t0..11; tower2: t0..11; "
        "and 2 more\n    collections\n"
    ) in text
    assert "\n60 like t0" in text
    assert "| tower0..4" in text


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["t0"], "t0"),
        (["t0", "t1"], "t0, t1"),
        (["t0", "t1", "t2"], "t0..2"),
        (["t9", "t10", "t11", "u", "t12"], "t9..11, u, t12"),
        (["t0", "t2", "t4", "u", "v"], "t0, t2, t4 and 2 more"),
        (["t01", "t02", "t03"], "t01, t02, t03"),  # padded numbers
        (["t1", "t3", "t2"], "t1, t3, t2"),
        (["a1_b", "a2_b", "a3_b"], "a1_b, a2_b, a3_b"),
        (["", "1", "2", "3"], ", 1..3"),
        ([*(f"t{number}" for number in range(9)), "x", "y", "z"], "t0..8, x, y and 1 more"),
    ],
)
def test_many_names_in_a_few_words(names: list[str], text: str) -> None:
    assert few(names, 3) == text


def test_one_more_batch() -> None:
    model = convert(Wrapped(collection(1, rows=11)), hashing=HashConfig(dense_rows=0))
    for new in range(10):
        model(batch([new, new], features=1)).sum().backward()
    assert "| 1 batch " in str(explain(model))
    assert "1 batches" not in str(explain(model))
